"""Fake tensors that know the contents which inputs determine, and operators whose fake kernels know too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from steptime.captured.record.values import Values

aten = torch.ops.aten


class Fakes(FakeTensorMode):
    """Fake tensors that look up what an operator gave for such tensors before, where it has one new result.

    Of several, a look-up may forget that two share a storage.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.values = Values()
        self._inside = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and on the real ones beside them where their contents are known."""
        kwargs = kwargs or {}
        if self._inside:  # Of an operator that is made of others only the whole is followed.
            return self._run(func, types, args, kwargs)
        real = self.values.arguments(func, args, kwargs)
        self._inside = True
        try:
            output = self._run(func, types, args, kwargs)
        finally:
            self._inside = False
        self.values.follow(func, real, args, kwargs, output)
        return output

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = SHAPES.get(func)
        if rule is not None:
            with self:
                return rule(self.values, *args, **kwargs)
        schema = func._schema
        one = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
        self.cache_enabled = one and not schema.is_mutable
        try:
            return super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            found = self.values.arguments(func, args, kwargs)
            if found is None:
                raise
        self.values.read((args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            real = func(*found[0], **found[1])
        with self:
            return _pytree.tree_map_only(torch.Tensor, _like, real)


def _like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(real.shape), tuple(real.stride()), dtype=real.dtype)


def _grouped_mm(
    _: Values, a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """A grouped product in any element type: groups along the rows, along the columns, inside, or batched."""
    if a.dim() == 2 and b.dim() == 2:
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [a.shape[1], b.shape[1]] if b.dim() == 2 else [*a.shape[:-1], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype)


def _masked_select(_: Values, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As many elements as the mask has true ones."""
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


def _ctc_loss(
    values: Values, log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each sample, and for each step of it the states of the longest target: labels with blanks around."""
    longest = targets.shape[1] if targets.dim() == 2 else _largest(values, target_lengths)
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _largest(values: Values, lengths: Any) -> int:
    if not isinstance(lengths, torch.Tensor):
        return max(lengths)
    values.read(lengths)
    with _disable_current_modes():
        real = values.of(lengths)
        if real is None:
            raise DataDependentOutputException(aten._ctc_loss.Tensor)
        return int(real.max())


#: Operators whose fake kernels refuse what the real ones take -> the shape and element type of their result.
SHAPES: Mapping[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm, aten.masked_select.default: _masked_select,
    aten._ctc_loss.default: _ctc_loss, aten._ctc_loss.Tensor: _ctc_loss,
}  # fmt: skip

_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class _Reads(TorchFunctionMode):
    """Whole tensors that Python reads, which fake ones refuse or do one element at a time."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (_pytree.tree_map_only(FakeTensor, self._number, args[0]), *args[1:])
        if func in _READS and isinstance(args[0], FakeTensor):
            with _disable_current_modes():
                real = self._values.of(args[0])
                if real is not None:
                    self._values.read(args[0])
                    return func(real.clone(), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _number(self, tensor: torch.Tensor) -> Any:
        """The number in place of a tensor among what a new one is made of."""
        with _disable_current_modes():
            real = self._values.of(tensor) if not tensor.dim() else None
            if real is None:
                return tensor
            self._values.read(tensor)
            return real.item()


@contextmanager
def values_read(values: Values) -> Iterator[None]:
    """Let Python read the tensors whose contents are known."""
    with _Reads(values):
        yield
