"""Forward-mode differentiation: a forward pass with the Jacobian-vector product of ``torch.func.jvp``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Program
from steptime.captured.ops import VIEWS
from steptime.captured.record.environment import capturing
from steptime.captured.record.fake import check_module
from steptime.captured.record.recorder import Paths, Recorder
from steptime.captured.record.results import fresh
from steptime.captured.record.step import as_module, named, recorded
from steptime.captured.record.values import signature, tensors_in
from steptime.errors import FieldError, UnknownNameError, first_few

_ASKED = parts.operators("is_same_size.default", "_has_same_storage_numel.default")
_ZERO = "steptime_zero"
"""Attribute that marks a tensor of zeros without memory."""


class _Pushed(Recorder):  # type: ignore[no-untyped-call]
    """Recorder that treats zero tangents as PyTorch does.

    Views of zeros, and products and sums with them, are not computed; any other operator gets one expanded zero
    (aten/src/ATen/ZeroTensorFallback.cpp). PyTorch itself finds the shapes of such results on the meta device.
    """

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = signature(func).name
        if func in _ASKED:
            return func(*args, **kwargs)
        if name == "_efficientzerotensor":
            return _zeros(torch.empty(*args, dtype=kwargs.get("dtype")))
        zero = [hasattr(one, _ZERO) for one in tensors_in((args, kwargs))]
        if any(zero) and (name in VIEWS or name == "mul" or (name == "div" and zero[0])):
            return _zeros(func(*args, **kwargs))
        if len(zero) == 2 and sum(zero) == 1 and (name == "add" or (name == "sub" and zero[1])):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            whole = super()._recorded(torch.ops.aten.expand.default, (args[zero.index(False)], shape), {})
            return super()._recorded(torch.ops.aten._to_copy.default, (whole,), {})
        if any(zero):
            args, kwargs = parts.pytree.tree_map_only(torch.Tensor, self._filled, (args, kwargs))
        return super()._recorded(func, args, kwargs)

    def _filled(self, given: torch.Tensor) -> Any:
        if not hasattr(given, _ZERO):
            return given
        one = super()._recorded(torch.ops.aten.zeros.default, ([],), {"dtype": given.dtype})
        return super()._recorded(torch.ops.aten.expand.default, (one, given.shape), {})


def _zeros(made: torch.Tensor) -> torch.Tensor:
    setattr(made, _ZERO, True)
    return made


def jvp(
    module: Any,
    inputs: Sequence[Any] | Mapping[str, Any],
    of: str | Sequence[str] = "inputs",
    *,
    training: bool = False,
    name: str = "",
) -> Program:
    """Implementation of :func:`steptime.jvp`."""
    plain = as_module(module)
    name = name or type(plain).__name__
    check_module(plain, name)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    with capturing(plain, given, name=name, training=training) as (arguments, replaced):
        leaves, shape = parts.pytree.tree_flatten(arguments)
        moving = _moving(plain, leaves, of)
        paths = Paths(plain)
        recorder = _Pushed(paths, replaced.mode)
        with parts.DisableTorchFunction():
            parameters = named(recorder, plain, arguments)
            tangents = {n: fresh(replaced.mode, one.shape, one.stride(), one.dtype) for n, one in moving.items()}
            numbers = {recorder.name(one, "input", f"tangent.{name}") for name, one in tangents.items()}

        def outputs(primals: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            given = parts.pytree.tree_unflatten([primals.get(f"input.{n}", one) for n, one in enumerate(leaves)], shape)
            args, words = ((), given) if isinstance(given, dict) else (given, {})
            weights = {n: one for n, one in primals.items() if not n.startswith("input.")}
            output = parts.pytree.tree_leaves(torch.func.functional_call(plain, weights, args, words))
            return [one for one in output if isinstance(one, torch.Tensor) and one.is_floating_point()]

        # Fused attention has no forward derivative; the first product makes PyTorch compile some of its own functions.
        with warnings.catch_warnings(), paths.watching(), recorder, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore", DeprecationWarning)
            kept = torch.func.jvp(outputs, (moving,), (tangents,))
        if not any(numbers.intersection(call.reads) for call in recorder.calls):
            raise FieldError("jvp", "of", f"is {of!r}, on which no output depends")
        made = recorded(recorder, f"{name} with tangents", plain, parameters, arguments)
        del kept  # the outputs have to live to the end of the recording
        return made


def _moving(module: torch.nn.Module, leaves: Sequence[Any], of: str | Sequence[str]) -> dict[str, torch.Tensor]:
    """Inputs and parameters that have a tangent, by name."""
    inputs = {f"input.{n}": one for n, one in enumerate(leaves) if isinstance(one, torch.Tensor)}
    groups: dict[str, dict[str, Any]] = {"inputs": inputs, "parameters": dict(module.named_parameters())}
    known = {n: one for group in groups.values() for n, one in group.items() if one.is_floating_point()}
    words = list(of) if isinstance(of, (list, tuple)) else [str(of)]
    if not isinstance(of, (str, list, tuple)) or not all(isinstance(word, str) for word in words):
        raise FieldError("jvp", "of", f"is {of!r}", hint="'inputs', 'parameters', or names of some of them")
    asked = list(groups[words[0]]) if words[:1] == [of] and of in groups else words
    for name in asked:
        if name not in known and name not in inputs:
            raise UnknownNameError("input or parameter", name, known, otherwise=f"names: {first_few(list(known), 8)}")
    found = {name: known[name] for name in asked if name in known}
    if not found:
        raise FieldError("jvp", "of", f"is {of!r}, on which no output depends")
    return found
