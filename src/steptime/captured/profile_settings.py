"""What was profiled: inputs, loss, optimiser and element types of a captured step, in words for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from steptime.captured.graph import BEFORE, Program, TensorType
from steptime.errors import UserError

if TYPE_CHECKING:
    from steptime.captured.onnx.model import Stored

NO_LOSS: Final = "sum of the output (give --loss)"
OWN_LOSS: Final = "the module's own"
OF_FACTORY: Final = "the factory's"
OF_ONNX: Final = "ones into every output (forward and derived backward, no optimiser)"
NOT_OF_ONNX: Final = (
    "batch", "seq", "input", "dtype", "autocast", "optimizer", "loss", "nonzero-share", "no-fold",
)  # fmt: skip
"""Options that an ONNX file leaves no choice for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a step was captured; None: not known, since the program was captured elsewhere."""

    inputs: tuple[str, ...]
    """Shapes and element types, written as for ``--input``."""
    training: bool
    kernels: str | None = None
    """Whose kernels: ``cuda`` or ``cpu``."""
    optimizer: str | None = None
    loss: str | None = None
    autocast: str | None = None
    stored: Mapping[str, Stored] | None = None
    """What an ONNX file stores as parameters, buffers and constants; None for other models."""
    notes: tuple[str, ...] = ()
    """Why the module behind an ONNX file may have other parameters."""


class NotedLoss:
    """The loss of a module that is given none, which notes whether the module returned one."""

    def __init__(self) -> None:
        self.text = OWN_LOSS

    def __call__(self, output: Any) -> Any:
        """The loss that the module returns, else the sum of its output."""
        from torch.utils import _pytree

        from steptime.captured.record.loss import given_loss, own_loss

        value = own_loss(output)
        own = value is given_loss(output) or any(value is leaf for leaf in _pytree.tree_leaves(output))
        self.text = OWN_LOSS if own else NO_LOSS
        return value


def check_onnx(given: Mapping[str, Any]) -> None:
    """Refuse options that an ONNX file would ignore; keys are names of options, None and False are not given.

    Raises:
        UserError: one is given; the message names it.

    >>> check_onnx({"batch": None, "no-fold": False})
    """
    names = [f"--{name}" for name in NOT_OF_ONNX if given.get(name) not in (None, False, (), [])]
    if names:
        hint = (
            "the file has its own shapes and element types (--dim NAME=N sets those that it leaves open); training is "
            "its forward and the derived backward, without a loss or an optimiser"
        )
        raise UserError(f"an ONNX file cannot be captured with {', '.join(names)}", hint=hint)


def tensor_text(type: TensorType, name: str = "") -> str:
    """A tensor as ``--input`` takes it.

    >>> tensor_text(TensorType((8, 1024), "int64"), "ids")
    'ids=8x1024:int64'
    """
    return f"{name}{'=' if name else ''}{'x'.join(map(str, type.shape)) or 'scalar'}:{type.dtype}"


def input_texts(program: Program) -> tuple[str, ...]:
    """Inputs of a program that some call reads, in the order of its storages; numbered ones have no name."""
    found: dict[str, TensorType] = {}
    for call in program.calls:
        for value in call.node.inputs:
            name = value.node.attribute("name")
            if value.node.op == "input" and isinstance(name, str) and not name.startswith("outside."):
                found[name] = value.type
    stored = [s.name for s in program.storages if s.category == "input" and s.born == BEFORE and s.name in found]
    return tuple(
        tensor_text(found[name], "" if name.startswith("input.") else name)
        for name in dict.fromkeys([*stored, *found])
    )  # fmt: skip


def texts_of_tensors(inputs: Any) -> tuple[str, ...]:
    """Tensors that a module is called with; those of a mapping are keyword arguments."""
    import torch
    from torch.utils import _pytree

    from steptime.captured.record.signature import dtype_name

    named = inputs.items() if isinstance(inputs, Mapping) else (("", given) for given in inputs)
    return tuple(
        tensor_text(TensorType(tuple(tensor.shape), dtype_name(tensor.dtype)), str(name))
        for name, given in named
        for tensor in _pytree.tree_leaves(given)
        if isinstance(tensor, torch.Tensor)
    )
