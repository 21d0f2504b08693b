"""Stand-ins for booleans and numbers that Python reads from tensors without contents only to check them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.record.values import FINITE, Values

CHECK = "a check of values passes"
NUMBER = "a number that is read is 1"

_READ = torch.ops.aten._local_scalar_dense.default
_BETWEEN = frozenset({"CALL", "PRECALL", "CALL_FUNCTION", "TO_BOOL", "NOP", "COPY"})
"""Instructions between the one that asks for a truth value (also ``all``, ``any``) and the jump that depends on it."""
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE"})


class _Code:
    """Control-flow graph of the instructions of a function."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(dis.get_instructions(code))
        self.index = {step.offset: number for number, step in enumerate(self.steps)}

    def next_jump(self, number: int) -> int | None:
        """The conditional jump that ends the straight-line code from an instruction; None if something else does."""
        for at in range(number, len(self.steps)):
            name = self.steps[at].opname
            if "JUMP" in name or name in _ENDS or name in ("RAISE_VARARGS", "FOR_ITER"):
                return at if "IF_TRUE" in name or "IF_FALSE" in name else None
        return None

    def targets(self, jump: int) -> dict[bool, int]:
        """Targets of a conditional jump for both truth values."""
        taken = "IF_TRUE" in self.steps[jump].opname
        return {taken: self.index[self.steps[jump].argval], not taken: jump + 1}

    def raises(self, number: int) -> bool:
        """True if every path from an instruction ends with an exception."""
        waiting, seen = [number], set()
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            step = self.steps[at]
            if step.opname == "RAISE_VARARGS":
                continue
            if step.opname in _ENDS or at + 1 == len(self.steps):
                return False
            if "JUMP" in step.opname or step.opname == "FOR_ITER":
                waiting.append(self.index[step.argval])
            if step.opname not in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"):
                waiting.append(at + 1)
        return True

    def passed(self, number: int) -> int | None:
        """Instruction after a check that begins at an instruction; None if no check begins there."""
        jump = self.next_jump(number)
        return None if jump is None else next((to for _, to, other in self._ways(jump) if self.raises(other)), None)

    def _ways(self, jump: int) -> Iterator[tuple[bool, int, int]]:
        """(truth value, target for it, target for the other one)."""
        to = self.targets(jump)
        for value in (True, False):
            yield value, to[value], to[not value]

    def passing(self, offset: int) -> bool | None:
        """The truth value at an instruction that avoids an exception; None if that is not clear."""
        at = self.index[offset]
        while self.steps[at].opname in _BETWEEN:
            at += 1
        if self.next_jump(at) != at:
            return None
        for good in (lambda to, other: self.raises(other), lambda to, other: self.passed(other) == to):
            found = [value for value, to, other in self._ways(at) if good(to, other)]
            if len(found) == 1:
                return found[0]
        return None


_code = lru_cache(maxsize=256)(_Code)


def _answer(frame: FrameType | None, values: Values) -> bool:
    """The truth value with which a frame continues without an exception.

    Raises:
        parts.DataDependentOutputException: both truth values continue, so the model depends on its data.
    """
    found = None if frame is None else _code(frame.f_code).passing(frame.f_lasti)
    if found is None:
        _refuse()
    values.take(CHECK)
    return found


def _refuse(*_: Any) -> NoReturn:
    raise parts.DataDependentOutputException(_READ)


class _Truth:
    """A truth value that is determined when it is used."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def __bool__(self) -> bool:
        return _answer(sys._getframe(1), self._values)


class _Number(float):
    """An unknown number: it supports arithmetic and comparisons in checks, and refuses everything else."""

    _values: Values

    @classmethod
    def of(cls, value: float, values: Values) -> _Number:
        """An unknown number with a placeholder value."""
        made = cls(value)
        made._values = values
        return made

    __bool__ = __int__ = __trunc__ = __round__ = __floor__ = __ceil__ = _refuse


def _computed(name: str) -> Callable[..., Any]:
    def method(self: _Number, *others: Any) -> Any:
        value = getattr(float, name)(self, *others)
        return _Number.of(value, self._values) if isinstance(value, float) else value

    return method


def _compared(self: _Number, other: object) -> Any:
    return _Truth(self._values) if isinstance(other, (int, float)) else NotImplemented


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "abs"):
    setattr(_Number, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Number, f"__{_name}__", _compared)
_Number.__hash__ = float.__hash__  # type: ignore[method-assign]

_TRUTHS = (torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.is_nonzero)


def unread(func: Any, args: Any, values: Values, frame: FrameType | None) -> Any:
    """Stand-in for an unknown value that is read from a tensor; ``NotImplemented`` if there is none.

    Args:
        func: the function that reads the value.
        args: arguments of the function.
        values: known contents, and assumptions.
        frame: the caller of the function.
    """
    if func is torch.Tensor.__bool__:
        return _answer(frame, values)
    if func is parts.assertion:
        return values.take(CHECK)
    if func is torch.Tensor.item and args[0].is_floating_point():
        values.take(NUMBER)
        return _Number.of(1.0, values)
    if func in _TRUTHS:
        if len(args) > 1 and _is_same(args[0], args[1]):
            values.take(FINITE)
            return True
        return _Truth(values)
    return NotImplemented


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are equal views of one storage."""
    layouts = [(id(t.untyped_storage()), t.storage_offset(), t.shape, t.stride()) for t in (one, other)]
    return layouts[0] == layouts[1]
