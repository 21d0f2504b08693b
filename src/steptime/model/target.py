"""Names of factories: a torch module in the user's own code, as text."""

from __future__ import annotations

import re
from typing import Final

TARGET: Final = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_][\w.]*)")


def is_target(text: str) -> bool:
    """Whether a text is written as ``pkg.module:factory`` or ``file.py:factory``.

    >>> is_target("my_pkg.models:gpt"), is_target("./train.py:build"), is_target("llama3-8b"), is_target("model.onnx")
    (True, True, False, False)
    """
    return TARGET.fullmatch(text) is not None
