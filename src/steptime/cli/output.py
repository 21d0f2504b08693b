"""What a command writes: one JSON document, or a report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from steptime.estimate.result import SCHEMA_VERSION


def plain(value: Any) -> Any:
    """Records, tuples and NumPy numbers as plain data; what is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return plain(value.item()) if hasattr(value, "item") else str(value)


def print_json(document: Mapping[str, Any]) -> None:
    """Write the document, and nothing else, to standard output; ASCII, no NaN, no Infinity."""
    text = json.dumps(plain(document), indent=2, allow_nan=False)
    if sys.stdout is not None:
        sys.stdout.write(text + "\n")


def document(**content: Any) -> dict[str, Any]:
    """A JSON document with its version first."""
    return {"schema_version": SCHEMA_VERSION, **content}
