"""Import of Hugging Face ``config.json`` files; what reads them is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.registry import loaded

if TYPE_CHECKING:
    from steptime.formats.huggingface.reader import read_huggingface as read_huggingface

__all__ = ["read_huggingface"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steptime.formats.huggingface' has no attribute {name!r}")
    return loaded(f"steptime.formats.huggingface.reader:{name}")
