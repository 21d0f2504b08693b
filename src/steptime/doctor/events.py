"""Streams the events of a Chrome trace: bounded memory, gzip, and traces that were cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from steptime.doctor.source import CHUNK, Text, open_bytes

#: Largest single value of a trace (one event, or one entry beside the events).
MAX_VALUE: Final = 64 * 2**20
_SPACE: Final = " \t\r\n,"


class BrokenJson(Exception):
    """The text is no JSON from here on, or ends inside a value."""


class _Cursor:
    """A position in a text that is read piece by piece."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decode = json.JSONDecoder().raw_decode
        self._buffer = ""
        self._at = 0

    def _fill(self) -> bool:
        """Read on; False at the end."""
        rest = self._buffer[self._at :]
        more = self._text.read(max(CHUNK, len(rest)))
        self._buffer, self._at = rest + more, 0
        return bool(more)

    def _early(self) -> BrokenJson:
        cut = self._text.cut
        return BrokenJson("the file ends early" + (f" ({cut})" if cut else ", or is no JSON from there on"))

    def peek(self) -> str:
        """The next character that is neither white space nor a comma; empty at the end."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._fill():
                return ""

    def skip(self, character: str) -> None:
        """Go past one expected character."""
        found = self.peek()
        if not found:
            raise self._early()
        if found != character:
            raise BrokenJson(f"{character!r} expected, not {found!r}")
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        if not self.peek():
            raise self._early()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except RecursionError:
                raise BrokenJson("a value is too deep") from None
            except ValueError:
                if len(self._buffer) - self._at > MAX_VALUE or not self._fill():
                    raise self._early() from None
                continue
            if end < len(self._buffer) or not isinstance(value, (int, float)):
                self._at = end
                return value
            if not self._fill():
                self._at = len(self._buffer)
                return value


def events_of(path: str) -> Iterator[tuple[str, Any]]:
    """Pairs of key and value of a trace; each event comes as ``("event", {...})``.

    The entries beside ``traceEvents`` come under their own keys, in the order of the file. A bare list of events is
    a trace too.

    Raises:
        InputFileError: the file cannot be opened.
        BrokenJson: the text stops being JSON; what came before is good.
    """
    with open_bytes(path) as file:
        cursor = _Cursor(Text(file))
        if cursor.peek() == "[":
            yield from _list(cursor)
            return
        cursor.skip("{")
        while cursor.peek() != "}":
            key = cursor.value()
            cursor.skip(":")
            if key == "traceEvents" and cursor.peek() == "[":
                yield from _list(cursor)
            else:
                yield str(key), cursor.value()


def _list(cursor: _Cursor) -> Iterator[tuple[str, Any]]:
    cursor.skip("[")
    while cursor.peek() != "]":
        yield "event", cursor.value()
    cursor.skip("]")
