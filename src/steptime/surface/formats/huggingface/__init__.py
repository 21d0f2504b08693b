"""Import of Hugging Face ``config.json`` files."""

from steptime.surface.formats.huggingface.reader import read_huggingface, supported_model_types

__all__ = ["read_huggingface", "supported_model_types"]
