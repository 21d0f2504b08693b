"""Read a pickle that holds plain data, without Python's unpickler: nothing in the file can name or call code.

Dictionaries with text keys, lists, tuples, texts, numbers, booleans and None. Time and memory are bounded by the size
of the file: instructions are read one after the other, no nesting is followed, and a memo is a look-up.

Source: Python, `pickletools` (opcodes of protocols 0 to 5).
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Final

from steptime.errors import shorten

MAX_CONTAINERS: Final = 20_000_000
MAX_DIGITS: Final = 400
MAX_LONG_BYTES: Final = 64

_WORD: Final = struct.Struct("<I")
_SIGNED_WORD: Final = struct.Struct("<i")
_HALF: Final = struct.Struct("<H")
_NAMES: Final = {ord(op.code): op.name for op in pickletools.opcodes}


class PickleProblem(Exception):
    """Why the bytes are no plain pickle."""


class NamedGlobal(PickleProblem):
    """The pickle names a function or class: it would run code when loaded."""


def loads(data: bytes) -> object:
    """The value in a pickle.

    Raises:
        NamedGlobal: the pickle names a function or class; the message says which.
        PickleProblem: it is cut short, damaged, uses other instructions than plain data needs, or is too large.

    >>> import pickle
    >>> loads(pickle.dumps({"a": [1, 2.5, None, (True, "text")]}))
    {'a': [1, 2.5, None, (True, 'text')]}
    >>> loads(pickle.dumps(print))
    Traceback (most recent call last):
    steptime.captured.formats.plain_pickle.NamedGlobal: it names builtins.print, which plain data never does
    """
    return _Machine(data).run()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.containers = 0

    def run(self) -> object:
        """Run until the instruction STOP."""
        data, table = self.data, _TABLE
        if not data:
            raise PickleProblem("it is empty")
        try:
            while True:
                code = data[self.at]
                self.at += 1
                if code == _STOP:
                    return self.stack.pop()
                table[code](self)
        except (IndexError, KeyError, struct.error):
            raise PickleProblem(f"it is cut short or damaged at byte {min(self.at, len(data))}") from None
        except UnicodeDecodeError:
            raise PickleProblem(f"it is damaged at byte {self.at}: a text is not UTF-8") from None
        except MemoryError:
            raise PickleProblem("there is not enough memory to read it") from None

    def unknown(self) -> None:
        """Refuse an instruction that is not in the table."""
        code = self.data[self.at - 1]
        if code not in _NAMES or self.at <= 1:
            raise PickleProblem(f"it is not a pickle, or damaged at byte {self.at - 1}")
        where = f"{_NAMES[code]} (byte {self.at - 1})"
        raise PickleProblem(f"it uses the pickle instruction {where}, which plain data never does")

    # -- reading ------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if end > len(self.data):
            raise IndexError
        out = self.data[self.at : end]
        self.at = end
        return out

    def number(self, width: int) -> int:
        """An unsigned number, lowest byte first."""
        return int.from_bytes(self.take(width), "little")

    def line(self, limit: int = MAX_DIGITS, encoding: str = "latin-1") -> str:
        """Up to the next end of line."""
        end = self.data.find(b"\n", self.at, self.at + limit + 1)
        if end < 0:
            raise IndexError
        out = self.data[self.at : end].decode(encoding)
        self.at = end + 1
        return out

    def marked(self) -> list[object]:
        """What lies above the last mark, taken off."""
        mark = self.marks.pop()
        out = self.stack[mark:]
        del self.stack[mark:]
        return out

    def contain(self, value: object) -> None:
        """Put a container on the stack."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PickleProblem(f"it holds more than {MAX_CONTAINERS} dictionaries and lists")
        self.stack.append(value)

    # -- instructions that take more than a line ----------------------------------------------------------------------

    def decimal(self) -> None:
        """INT or LONG of protocol 0; 00 and 01 are booleans."""
        text = self.line()
        try:
            self.stack.append(text == "01" if text in ("00", "01") else int(text.removesuffix("L")))
        except ValueError:
            raise IndexError from None

    def real(self) -> None:
        """FLOAT of protocol 0."""
        try:
            self.stack.append(float(self.line()))
        except ValueError:
            raise IndexError from None

    def long(self, width: int) -> None:
        """A signed number of stated length."""
        count = self.number(width)
        if count > MAX_LONG_BYTES:
            raise PickleProblem(f"it holds a number of {count} bytes (byte {self.at})")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def text(self, width: int) -> None:
        """A text of stated length."""
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def append(self, values: list[object]) -> None:
        """Lengthen the list on top."""
        top = self.stack[-1]
        if type(top) is not list:
            raise IndexError
        top.extend(values)

    def set_items(self, values: list[object]) -> None:
        """Fill the dictionary on top."""
        top = self.stack[-1]
        if type(top) is not dict or len(values) % 2:
            raise IndexError
        top.update(zip(map(self.key, values[::2]), values[1::2], strict=True))

    def dictionary(self) -> None:
        """DICT: a dictionary of what is above the mark."""
        values = self.marked()
        self.contain({})
        self.set_items(values)

    def pair(self) -> list[object]:
        """The two values on top."""
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def several(self, count: int) -> None:
        """A tuple of the values on top."""
        if len(self.stack) < count:
            raise IndexError
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.contain(values)

    def key(self, value: object) -> str:
        """A key must be a text: hashing anything else could be made to take for ever."""
        if type(value) is not str:
            raise PickleProblem(f"a key before byte {self.at} is a {type(value).__name__}, not a text")
        return value

    # -- instructions that are most of a file, without detours ---------------------------------------------------------

    def get_1(self) -> None:
        """BINGET: a remembered value."""
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get_4(self) -> None:
        """LONG_BINGET: a remembered value."""
        self.stack.append(self.memo[_WORD.unpack_from(self.data, self.at)[0]])
        self.at += 4

    def memoize(self) -> None:
        """MEMOIZE: remember the value on top under the next number."""
        self.memo[len(self.memo)] = self.stack[-1]

    def integer_4(self) -> None:
        """BININT: four bytes, signed."""
        self.stack.append(_SIGNED_WORD.unpack_from(self.data, self.at)[0])
        self.at += 4

    def integer_2(self) -> None:
        """BININT2: two bytes."""
        self.stack.append(_HALF.unpack_from(self.data, self.at)[0])
        self.at += 2

    def integer_1(self) -> None:
        """BININT1: one byte."""
        self.stack.append(self.data[self.at])
        self.at += 1

    # -- memo and names -----------------------------------------------------------------------------------------------

    def index(self) -> int:
        """The number of a memo in protocol 0."""
        text = self.line()
        if not text.isascii() or not text.isdigit():
            raise IndexError
        return int(text)

    def put(self, index: int) -> None:
        """Remember the value on top."""
        self.memo[index] = self.stack[-1]

    def named(self) -> None:
        """GLOBAL and INST: a module and a name, on two lines."""
        module, name = self.line(), self.line()
        self.refuse(f"{module}.{name}")

    def named_on_stack(self) -> None:
        """STACK_GLOBAL: a module and a name, on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        self.refuse(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something")

    def refuse(self, name: str) -> None:
        """Say what it names."""
        raise NamedGlobal(f"it names {shorten(ascii(name)[1:-1])}, which plain data never does")


_STOP: Final = ord(".")
_KNOWN: Final[dict[int, Callable[[_Machine], object]]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("}"): lambda m: m.contain({}),
    ord("]"): lambda m: m.contain([]),
    ord(")"): lambda m: m.contain(()),
    ord("d"): _Machine.dictionary,
    ord("l"): lambda m: m.contain(m.marked()),
    ord("t"): lambda m: m.contain(tuple(m.marked())),
    0x85: lambda m: m.several(1),
    0x86: lambda m: m.several(2),
    0x87: lambda m: m.several(3),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.marked()),
    ord("s"): lambda m: m.set_items(m.pair()),
    ord("u"): lambda m: m.set_items(m.marked()),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("I"): _Machine.decimal,
    ord("L"): _Machine.decimal,
    ord("F"): _Machine.real,
    ord("J"): _Machine.integer_4,
    ord("K"): _Machine.integer_1,
    ord("M"): _Machine.integer_2,
    0x8A: lambda m: m.long(1),
    0x8B: lambda m: m.long(4),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("V"): lambda m: m.stack.append(m.line(len(m.data), "raw-unicode-escape")),
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    0x94: _Machine.memoize,
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    ord("p"): lambda m: m.put(m.index()),
    ord("h"): _Machine.get_1,
    ord("j"): _Machine.get_4,
    ord("g"): lambda m: m.stack.append(m.memo[m.index()]),
    ord("c"): _Machine.named,
    ord("i"): _Machine.named,
    0x93: _Machine.named_on_stack,
}
_TABLE: Final = [_KNOWN.get(code, _Machine.unknown) for code in range(256)]
