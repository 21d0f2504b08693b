"""Read a pickle that holds plain data: nothing in the file can name or call code.

Dictionaries with text keys, lists, tuples, texts, numbers, booleans and None. Python's own unpickler in its form in
Python reads it, with the instructions that plain data needs and no other: its memo is a dictionary and it follows no
nesting, so that time and memory are bounded by the size of the file. The form in C takes memory by the numbers in a
memo, and compares nested keys without end.

Source: Python, `pickletools` (opcodes of protocols 0 to 5).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from steptime.errors import shorten

MAX_CONTAINERS: Final = 20_000_000
MAX_LONG_BYTES: Final = 64

_NAMES: Final = {ord(op.code): op.name for op in pickletools.opcodes}
_READ: Final[dict[int, Callable[[Any], None]]] = pickle._Unpickler.dispatch


class PickleProblem(Exception):
    """The bytes are no plain pickle; the message has the reason."""


class NamedGlobal(PickleProblem):
    """The pickle names a function or class: it would run code when loaded."""


def loads(data: bytes) -> object:
    """The value in a pickle.

    Raises:
        NamedGlobal: the pickle names a function or class; the message says which.
        PickleProblem: it is cut short, damaged, uses other instructions than plain data needs, or is too large.

    >>> loads(pickle.dumps({"a": [1, 2.5, None, (True, "text")]}))
    {'a': [1, 2.5, None, (True, 'text')]}
    >>> loads(pickle.dumps(print))
    Traceback (most recent call last):
    steptime.captured.formats.plain_pickle.NamedGlobal: it names builtins.print, which plain data never does
    """
    if not data:
        raise PickleProblem("it is empty")
    file = io.BytesIO(data)
    try:
        return _Plain(file).load()
    except UnicodeDecodeError:
        raise PickleProblem(f"it is damaged at byte {file.tell()}: a text is not UTF-8") from None
    except MemoryError:
        raise PickleProblem("there is not enough memory to read it") from None
    except (LookupError, TypeError, ValueError, AttributeError, EOFError, struct.error, pickle.UnpicklingError):
        raise PickleProblem(f"it is cut short or damaged at byte {file.tell()}") from None


class _Plain(pickle._Unpickler):
    """Python's unpickler for plain data."""

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.file = file
        self.containers = 0

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every name."""
        raise NamedGlobal(f"it names {shorten(ascii(f'{module}.{name}')[1:-1])}, which plain data never does")

    def refuse(self, code: int) -> None:
        """Refuse an instruction that plain data never uses."""
        at = self.file.tell() - 1
        if code not in _NAMES or at == 0:
            raise PickleProblem(f"it is not a pickle, or damaged at byte {at}")
        raise PickleProblem(f"it uses the pickle instruction {_NAMES[code]} (byte {at}), which plain data never does")

    def contain(self, code: int) -> None:
        """Make a container."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PickleProblem(f"it holds more than {MAX_CONTAINERS} dictionaries and lists")
        if code == ord("d"):
            self.check_keys(self.stack[::2])
        _READ[code](self)

    def set_items(self, code: int) -> None:
        """Fill a dictionary with one pair, or with what follows the last mark."""
        target, keys = (self.stack[-3], self.stack[-2:-1]) if code == ord("s") else (self.metastack[-1][-1], self.stack)
        if type(target) is not dict:
            raise EOFError
        self.check_keys(keys if code == ord("s") else keys[::2])
        _READ[code](self)

    def check_keys(self, keys: list[Any]) -> None:
        """Refuse keys that are no texts, since hashing others can take forever."""
        for key in keys:
            if type(key) is not str:
                raise PickleProblem(f"a key before byte {self.file.tell()} is a {type(key).__name__}, not a text")

    def skip(self, count: int) -> None:
        """Skip some bytes."""
        self.read(count)

    def long(self, width: int) -> None:
        """Read a signed number after its length in bytes."""
        count = int.from_bytes(self.read(width), "little")
        if count > MAX_LONG_BYTES:
            raise PickleProblem(f"it holds a number of {count} bytes (byte {self.file.tell()})")
        self.append(pickle.decode_long(self.read(count)))


_Plain.dispatch = {
    **{code: partial(_Plain.refuse, code=code) for code in range(256)},
    **{code: _READ[code] for code in b"\x80(.NIFJKMLV\x88\x89GX\x8c\x8daeqrphjg\x94ci\x93"},
    **{code: partial(_Plain.contain, code=code) for code in b"}])ldt\x85\x86\x87"},
    **{code: partial(_Plain.set_items, code=code) for code in b"su"},
    0x8A: partial(_Plain.long, width=1),
    0x8B: partial(_Plain.long, width=4),
    0x95: partial(_Plain.skip, count=8),  # the length of a frame
}
