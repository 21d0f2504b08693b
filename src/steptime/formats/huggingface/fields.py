"""Typed access to one configuration: aliases, defaults of the family, a note of what was used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steptime.errors import FieldError, shorten, shown
from steptime.model.check import LIMITS

#: No quantity of a model file is above this; a larger number is a typing error.
LARGEST = max(LIMITS.values())


class Fields:
    """One JSON object being read.

    Every access marks the key as used, so that :meth:`unused` can name the rest. A key that is missing or null
    takes the default of the family and is noted in ``assumed``.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        *,
        where: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.where = where
        self.prefix = prefix
        self.assumed: dict[str, str] = {}
        self.chosen: set[str] = set()
        """Keys in ``assumed`` that could be taken otherwise, and are no default of the family."""
        self._raw = raw
        self._defaults = dict(defaults or {})
        self._aliases = dict(aliases or {})
        self._why: dict[str, str] = {}
        self._used: set[str] = set()

    def _find(self, key: str) -> tuple[str, Any]:
        """The name under which the file has that key, and its value (None where it has none)."""
        names = (key, *self._aliases.get(key, ()))
        self._used.update(names)
        for name in names:
            if self._raw.get(name) is not None:
                return name, self._raw[name]
        return names[0] if key in self._raw or len(names) == 1 else names[-1], None

    def _value(self, key: str, needed: bool) -> tuple[str, Any]:
        name, value = self._find(key)
        if value is not None:
            return name, value
        if key in self._defaults:
            value = self._defaults[key]
            if value is not None:
                self.assumed[self.prefix + name] = f"{value} ({self._why.get(key, 'default of the family')})"
            return name, value
        if needed:
            raise self.error(name, "is missing")
        return name, None

    def error(self, name: str, problem: str, hint: str | None = None) -> FieldError:
        """An error about one key of this file."""
        return FieldError(self.where, shorten(self.prefix + name), problem, hint=hint)

    def assume(self, name: str, value: str) -> None:
        """Note a choice that the file leaves open."""
        self.assumed[self.prefix + name] = value
        self.chosen.add(self.prefix + name)

    def default(self, key: str, value: Any, why: str) -> None:
        """Set the value that a missing key takes, and how it comes about."""
        self._defaults[key] = value
        self._why[key] = why

    def force(self, key: str, value: Any, why: str) -> None:
        """Set a value that follows from other keys, in place of the file's own."""
        names = (key, *self._aliases.get(key, ()))
        self._raw = {name: given for name, given in self._raw.items() if name not in names}
        self.default(key, value, why)

    def is_null(self, key: str) -> bool:
        """Whether the file has that key with the value null; does not mark it as used."""
        return not self.has(key) and any(name in self._raw for name in (key, *self._aliases.get(key, ())))

    def has(self, key: str) -> bool:
        """Whether the file has a value for that key; does not mark it as used."""
        return any(self._raw.get(name) is not None for name in (key, *self._aliases.get(key, ())))

    def optional(self, key: str, *, low: int = 1, high: int = LARGEST) -> int | None:
        """A whole number; None where the file says null, or where neither file nor family has one."""
        if self.is_null(key):
            self._find(key)
            return None
        name, value = self._value(key, needed=False)
        return None if value is None else self._whole(name, value, low, high)

    def count(self, key: str, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number that file or family must have."""
        name, value = self._value(key, needed=True)
        if value is None:
            raise self.error(name, "is null", hint="give a whole number")
        return self._whole(name, value, low, high)

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a whole number")
        if not low <= value <= high:
            raise self.error(name, f"is {shorten(str(value), 40)}", hint=f"allowed: {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        """A truth value; false where neither file nor family has one."""
        name, value = self._value(key, needed=False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text, or None."""
        name, value = self._value(key, needed=False)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a text")
        return value

    def number(self, key: str) -> float:
        """A finite number that is not negative; zero where neither file nor family has one."""
        name, value = self._value(key, needed=False)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a number")
        if not 0 <= value <= LARGEST or not math.isfinite(value):
            raise self.error(name, f"is {shorten(str(value), 40)}", hint=f"allowed: 0 to {LARGEST}")
        return float(value)

    def items(self, key: str, of: type, length: int | None = None) -> list[Any] | None:
        """A list whose entries have one type (and whose length is known), or None."""
        name, value = self._value(key, needed=False)
        if value is None:
            return None
        kind = {int: "whole numbers", str: "texts"}[of]
        if not isinstance(value, list) or not all(type(item) is of for item in value):
            raise self.error(name, f"is {shown(value, 40)}", hint=f"allowed: a list of {kind}")
        if length is not None and len(value) != length:
            raise self.error(name, f"has {len(value)} entries for {length} layers", hint="give one entry per layer")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None."""
        name, value = self._value(key, needed=False)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: an object")
        return value

    def unused(self) -> list[str]:
        """Keys of the file that nobody asked for."""
        return [key for key in self._raw if key not in self._used]
