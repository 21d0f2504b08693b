"""Import of Hugging Face ``config.json`` files; the readers are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.registry import public

if TYPE_CHECKING:
    from steptime.formats.huggingface.reader import read_huggingface as read_huggingface

__all__ = ["read_huggingface"]
__getattr__, __dir__ = public(__name__, {"read_huggingface": "steptime.formats.huggingface.reader:read_huggingface"})
