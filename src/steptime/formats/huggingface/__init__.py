"""Import of Hugging Face ``config.json`` files."""

from steptime.formats.huggingface.reader import read_huggingface

__all__ = ["read_huggingface"]
