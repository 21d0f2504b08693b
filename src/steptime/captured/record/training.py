"""Losses and optimisers, by name or from the module and its factory.

A given optimiser is copied for the fake parameters; its states exist before the step is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from steptime.captured import torch_parts as parts
from steptime.captured.record.fake import Replaced
from steptime.captured.record.results import fresh
from steptime.captured.record.values import Values
from steptime.errors import UnknownNameError, UserError

#: A function from the module's output to a scalar, or the name of one of `LOSSES`.
Loss = str | Callable[[Any], torch.Tensor]


def main_output(output: Any) -> torch.Tensor:
    """Tensor that is the input of a loss: the output, its ``logits``, or its first floating-point tensor."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    found = _floating_point(output)
    if not found:
        raise ValueError("the module returns no floating-point tensor to take a loss of")
    return found[0]


def _floating_point(output: Any) -> list[torch.Tensor]:
    return [t for t in parts.pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def given_loss(output: Any) -> Any:
    """The attribute or key ``loss`` of an output, or None."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def own_loss(output: Any) -> torch.Tensor:
    """The loss that a module returns (a scalar, ``.loss``, ``["loss"]``, last scalar), else the sum of its output."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else output.sum()
    given = given_loss(output)
    if isinstance(given, torch.Tensor):
        return given
    scalars = [t for t in _floating_point(output) if t.numel() == 1 and t.requires_grad]
    return scalars[-1] if scalars else main_output(output).sum()


def cross_entropy(output: Any) -> torch.Tensor:
    """Cross entropy of the last dim against one class a row, all rows counted.

    Raises:
        UserError: the output has no dim.
    """
    logits = main_output(output)
    if not logits.dim():
        raise UserError("cross-entropy is taken of logits, and the module returns one number",
                        hint="where that number is the loss: --loss own")  # fmt: skip
    rows = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.int64))


def mean_square(output: Any) -> torch.Tensor:
    """Mean squared error against a target of the same shape."""
    values = main_output(output)
    return functional.mse_loss(values, torch.empty_like(values))


LOSSES: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "own": own_loss, "cross-entropy": cross_entropy, "mse": mean_square,
    "sum": lambda output: main_output(output).sum(), "mean": lambda output: main_output(output).mean(),
}  # fmt: skip


Factory = Callable[[Any], torch.optim.Optimizer]
#: A name of `OPTIMIZERS`, an optimiser of the module's parameters, a function from parameters to one, or none.
Optimizers: TypeAlias = str | torch.optim.Optimizer | Factory | None

OPTIMIZERS: Mapping[str, Factory] = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam": lambda p: torch.optim.Adam(p, foreach=True),
    "adam-loop": lambda p: torch.optim.Adam(p, foreach=False, fused=False),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd-loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-momentum-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, foreach=True),
}

#: Optimiser -> its fused implementation.
FUSED: Mapping[str, Factory] = {
    "adamw": OPTIMIZERS["adamw-fused"], "adam": OPTIMIZERS["adam-fused"],
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}  # fmt: skip


def optimizer_of(given: Optimizers, module: torch.nn.Module, replaced: Replaced) -> torch.optim.Optimizer | None:
    """The optimiser of the fake parameters, with its states.

    Raises:
        UnknownNameError: the name is unknown.
    """
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    if given is None or given == "none" or not trained:
        return None
    if isinstance(given, torch.optim.Optimizer):
        groups = [{**group, "params": [replaced.copy(p) for p in group["params"]]} for group in given.param_groups]
        optimizer = type(given)(groups, **_settings(given))
    elif isinstance(given, str):
        if given not in OPTIMIZERS:
            raise UnknownNameError("optimiser", given, [*OPTIMIZERS, "none"])
        optimizer = OPTIMIZERS[given](trained)
    else:
        optimizer = given(trained)
    _start(optimizer, given if is_ours(given) else None, replaced)
    return optimizer


def is_ours(given: Optimizers) -> bool:
    """True if an optimiser is in a table of this module: its states follow from the weights alone."""
    return isinstance(given, str) or any(given is one for one in FUSED.values())


class _State(NamedTuple):
    """A state of an optimiser after a step; ``content`` has the numbers of its tensor if they are known."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    content: torch.Tensor | None


_STATES: dict[tuple[Any, ...], dict[str, Any]] = {}
"""(optimiser of a table, default type, shape, strides and type of a weight) -> states, which follow from these."""


def _start(optimizer: torch.optim.Optimizer, own: object, replaced: Replaced) -> None:
    """Initialise the states of an optimiser: from an earlier step if it is in a table (``own``), else by a step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    real = torch.get_default_dtype()
    with parts.DisableTorchFunction():
        keys = [(own, real, weight.shape, weight.stride(), weight.dtype) for weight in weights]
        if own is not None and all(key in _STATES for key in keys):
            for weight, key in zip(weights, keys, strict=True):
                optimizer.state[weight] = {name: _made(state, replaced) for name, state in _STATES[key].items()}
            return
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    try:
        with ScalarsRead():
            optimizer.step()
    except TypeError as error:
        hint = "an optimiser whose step needs a closure cannot be captured; take another, or none"
        raise UserError(f"{type(optimizer).__name__}: {error}", hint=hint) from None
    optimizer.zero_grad(set_to_none=True)
    if own is not None:
        for weight, key in zip(weights, keys, strict=True):
            _STATES[key] = {name: _noted(state, replaced.values) for name, state in optimizer.state[weight].items()}


def _noted(state: Any, values: Values) -> Any:
    if not isinstance(state, torch.Tensor):
        return state
    with parts.without_modes():
        content = values.of(state)
        return _State(tuple(state.shape), state.stride(), state.dtype, None if content is None else content.clone())


def _made(state: Any, replaced: Replaced) -> Any:
    if not isinstance(state, _State):
        return state
    made = fresh(replaced.mode, state.shape, state.stride, state.dtype)
    if state.content is not None:
        replaced.values.put(made, state.content)
    return made


def _settings(given: torch.optim.Optimizer) -> dict[str, Any]:
    """Defaults of an optimiser that its constructor takes; some classes add others themselves."""
    taken = inspect.signature(type(given).__init__).parameters
    return {name: value for name, value in given.defaults.items() if name in taken}


class ScalarsRead(parts.NotCompiled, parts.TorchDispatchMode):
    """Mode in which values that an optimiser reads from tensors (norms, step counts) are one: they change no shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return scalar_read(func, args)
        return func(*args, **(kwargs or {}))


def scalar_read(func: Any, args: Any) -> Any:
    """The value of a scalar tensor; one if it is unknown."""
    try:
        return func(*args)
    except parts.DataDependentOutputException:
        return 1.0
