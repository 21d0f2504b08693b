"""What operators gave for fake tensors before: shapes, strides and storages of their results, looked up by arguments.

A fake operator is slow, as PyTorch runs it in Python. What it gives follows from the shapes, strides and element types
of its tensors and from its other arguments, but for a few operators, which are not looked up: those that read numbers,
change the shape of a tensor, or are the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.record.values import Signature, signature

_PLAIN: Final = frozenset({
    int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
"""Types of arguments that are part of a key as they are, with their type: 1 and 1.0 give other element types."""
_REFUSED: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_SPACES: Final = ("aten", "steptime_cuda")
_LISTS: Final = (list, tuple, torch.Size)
CPU: Final = torch.device("cpu")
_INDEX: Final = torch.ops.aten.index.Tensor
_WHOLE: Final = frozenset({torch.bool, torch.int8, torch.uint8})
"""Element types of an index that selects as many elements as it has true ones."""

NEW: Final = object()
"""Stands for the results of a call that was not made before."""
Key: TypeAlias = tuple[Any, ...]


class _New(NamedTuple):
    """A result that is made: in a storage of its own, or in that of a tensor among the arguments."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None
    """Number of the tensor among the arguments whose storage it shares."""


class _Given(NamedTuple):
    """A result that is an argument."""

    number: int


_Result: TypeAlias = _New | _Given | int | None
"""Numbers stand among the results of fused attention: sizes."""


class _Entry(NamedTuple):
    """Results of an operator; ``kind`` is that of their sequence, None for a single one."""

    results: tuple[_Result, ...]
    kind: type | None


class Results:
    """Entries of all captures of a process."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._refused: dict[Signature, bool] = {}

    def key(self, mode: parts.FakeTensorMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Key | None:
        """What the results of a call follow from; None where that is not known."""
        one = signature(func)
        refused = self._refused.get(one)
        if refused is None:
            refused = self._refused[one] = _is_refused(mode, func)
        key: list[Any] = [one, torch.get_default_dtype(), *kwargs]
        if refused or not _add(key, args, mode) or (kwargs and not _add(key, list(kwargs.values()), mode)):
            return None
        if func is _INDEX and not _WHOLE.isdisjoint(key):
            return None
        return tuple(key)

    def known(self, key: Key, mode: parts.FakeTensorMode, tensors: Sequence[Any]) -> Any:
        """What a call that was made before gives for the tensors among its arguments; ``NEW``: it was not made."""
        entry = self._entries.get(key)
        if entry is None:
            return NEW
        made = [_made(mode, one, tensors) for one in entry.results]
        return made[0] if entry.kind is None else entry.kind(made)

    def learn(
        self, key: Key, again: Key | None, mode: parts.FakeTensorMode, tensors: Sequence[Any], output: Any
    ) -> None:
        """Note what a call gave, where a later one is sure to give the same.

        Args:
            key: of the call.
            again: the same after it; another one where it has changed a tensor's shape.
            mode: that of the tensors.
            tensors: those among its arguments.
            output: what it gave.
        """
        kind = next((one for one in (tuple, list) if isinstance(output, one)), None)
        given = output if kind is not None else (output,)
        free = (int, type(None)) if kind is not None else (type(None),)
        if key != again or not all(type(one) in free or _is_plain(one, mode) for one in given):
            return
        found = [_result(one, tensors) for one in given]
        fresh = [_address(one) for one, made in zip(given, found, strict=True) if _is_apart(made)]
        of_arguments = any(isinstance(made, (_Given, _New)) and not _is_apart(made) for made in found)
        if not _differ(fresh) or (of_arguments and not _differ([_address(one) for one in tensors])):
            return
        if all(map(_is_like, (_made(mode, one, tensors) for one in found), given)):
            self._entries[key] = _Entry(tuple(found), kind)


def _is_refused(mode: parts.FakeTensorMode, func: Any) -> bool:
    """Whether more than shapes decides what an operator gives, or it is not one of PyTorch's or ours."""
    if not isinstance(func, type(_INDEX)) or func.namespace not in _SPACES or func in mode.lift_fns:
        return True
    composite = parts.has_kernel(func.name(), "CompositeImplicitAutograd")
    return (func is not _INDEX and not _REFUSED.isdisjoint(func.tags)) or (func.is_view and composite)


def _add(key: list[Any], given: Sequence[Any], mode: parts.FakeTensorMode) -> bool:
    """Put arguments into a key; False where one cannot be part of one."""
    key.append(len(given))
    for one in given:
        kind = type(one)
        if kind is parts.FakeTensor:
            if not _is_plain(one, mode):
                return False
            key += (one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device)
            key += (one.requires_grad, one.untyped_storage().nbytes())
        elif kind in _PLAIN:
            key += (kind, one)
        elif kind not in _LISTS or not _add(key, one, mode):
            return False
    return True


def _is_plain(one: Any, mode: parts.FakeTensorMode) -> bool:
    """Whether a tensor is a fake one of a mode, without a value of its own and without what its layout leaves open."""
    if type(one) is not parts.FakeTensor or one.fake_mode is not mode or one.constant is not None:
        return False
    return one.layout is torch.strided and not one.dtype.is_complex and not one.is_inference()


def _result(given: Any, tensors: Sequence[Any]) -> _Result:
    """How a result is made again."""
    if given is None or type(given) is int:
        return given
    number = next((n for n, tensor in enumerate(tensors) if tensor is given), None)
    if number is not None:
        return _Given(number)
    of = next((n for n, tensor in enumerate(tensors) if _address(tensor) == _address(given)), None)
    return _New(given.shape, given.stride(), given.storage_offset(), given.dtype, given.fake_device, of)


def _address(tensor: Any) -> int:
    return id(tensor.untyped_storage())


def _differ(addresses: list[int]) -> bool:
    """Whether no two tensors share a storage; of two that do, nothing says whose storage a result has."""
    return len(set(addresses)) == len(addresses)


def _is_apart(made: _Result) -> bool:
    return isinstance(made, _New) and made.of is None


def _is_like(made: Any, given: Any) -> bool:
    """Whether what is made again is what was given."""
    return made is given or (
        made.untyped_storage().nbytes() == given.untyped_storage().nbytes()
        and made.storage_offset() == given.storage_offset()
        and made.requires_grad == given.requires_grad
        and parts.dispatch_keys(made) == parts.dispatch_keys(given)
    )


def _made(mode: parts.FakeTensorMode, one: _Result, tensors: Sequence[Any]) -> Any:
    """A result for the tensors among the arguments of a call."""
    if isinstance(one, _Given):
        return tensors[one.number]
    if not isinstance(one, _New):
        return one
    with parts.DisableTorchDispatch():
        made = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        if one.of is not None:
            made.set_(tensors[one.of].untyped_storage(), one.offset, one.shape, one.stride)
    return parts.fake(mode, made, one.device)


def fresh(mode: parts.FakeTensorMode, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A new fake tensor of the CPU, without asking the dispatcher: a capture makes one of every weight and state."""
    return _made(mode, _New(shape, stride, 0, dtype, CPU, None), ())


RESULTS: Final = Results()
