"""Cache of results of operators on fake tensors: shapes, strides and storages, by arguments.

A fake operator is slow, since PyTorch runs it in Python. Its results follow from the shapes, strides and element types
of its tensors and from its other arguments. Operators that read numbers or change the shape of a tensor, and custom
operators, are not cached.
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
"""Types of arguments that are part of a key unchanged, with their type: 1 and 1.0 give different element types."""
_REFUSED: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_SPACES: Final = ("aten", "steptime_cuda")
_LISTS: Final = (list, tuple, torch.Size)
CPU: Final = torch.device("cpu")
_INDEX: Final = torch.ops.aten.index.Tensor
_WHOLE: Final = frozenset({torch.bool, torch.int8, torch.uint8})
"""Element types of an index that is a mask, so that the size of the result depends on its values."""

NEW: Final = object()
"""Marks a call without cached results."""
Key: TypeAlias = tuple[Any, ...]


class _New(NamedTuple):
    """A new result, in its own storage or in that of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None
    """Number of the argument tensor whose storage it shares; None: its own storage."""


class _Given(NamedTuple):
    """A result that is an argument."""

    number: int


_Result: TypeAlias = _New | _Given | int | None
"""One result; integers are sizes among the results of fused attention."""


class _Entry(NamedTuple):
    """Results of an operator; ``kind`` is the type of their sequence, None for a single result."""

    results: tuple[_Result, ...]
    kind: type | None


class Results:
    """Cached entries, shared by all captures of a process."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._refused: dict[Signature, bool] = {}

    def key(self, mode: parts.FakeTensorMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Key | None:
        """Key that determines the results of a call; None if the call cannot be cached."""
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
        """Cached results of a call for the tensors among its arguments; ``NEW`` if there are none."""
        entry = self._entries.get(key)
        if entry is None:
            return NEW
        made = [_made(mode, one, tensors) for one in entry.results]
        return made[0] if entry.kind is None else entry.kind(made)

    def learn(
        self, key: Key, again: Key | None, mode: parts.FakeTensorMode, tensors: Sequence[Any], output: Any
    ) -> None:
        """Cache the results of a call if an equal call is certain to give the same.

        Args:
            key: key of the call.
            again: key after the call; it differs if the call has changed the shape of a tensor.
            mode: mode of the tensors.
            tensors: tensors among the arguments.
            output: results of the call.
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
    """True if results of an operator depend on more than shapes, or if it is a custom operator."""
    if not isinstance(func, type(_INDEX)) or func.namespace not in _SPACES or func in mode.lift_fns:
        return True
    composite = parts.has_kernel(func.name(), "CompositeImplicitAutograd")
    return (func is not _INDEX and not _REFUSED.isdisjoint(func.tags)) or (func.is_view and composite)


def _add(key: list[Any], given: Sequence[Any], mode: parts.FakeTensorMode) -> bool:
    """Append arguments to a key; False if one cannot be part of a key."""
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
    """True if a tensor is a fake strided one of a mode, without constant, complex type or inference mode."""
    if type(one) is not parts.FakeTensor or one.fake_mode is not mode or one.constant is not None:
        return False
    return one.layout is torch.strided and not one.dtype.is_complex and not one.is_inference()


def _result(given: Any, tensors: Sequence[Any]) -> _Result:
    """Cache entry of a result."""
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
    """True if no two tensors share a storage; otherwise the owner of the storage of a result is ambiguous."""
    return len(set(addresses)) == len(addresses)


def _is_apart(made: _Result) -> bool:
    return isinstance(made, _New) and made.of is None


def _is_like(made: Any, given: Any) -> bool:
    """True if a rebuilt result equals the original one."""
    return made is given or (
        made.untyped_storage().nbytes() == given.untyped_storage().nbytes()
        and made.storage_offset() == given.storage_offset()
        and made.requires_grad == given.requires_grad
        and parts.dispatch_keys(made) == parts.dispatch_keys(given)
    )


def _made(mode: parts.FakeTensorMode, one: _Result, tensors: Sequence[Any]) -> Any:
    """Rebuild a result, with the tensors among the arguments of a call."""
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
    """A new fake CPU tensor, without the dispatcher, since a capture makes one for every weight and state."""
    return _made(mode, _New(shape, stride, 0, dtype, CPU, None), ())


RESULTS: Final = Results()
