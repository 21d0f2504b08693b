"""Models as graphs to rewrite, recorded from a module or read from an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.captured.graph import Program
from steptime.captured.record import require_torch
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import Flow, Repeat, flow_of

if TYPE_CHECKING:
    from steptime.captured.onnx.step import OnnxModel
    from steptime.rewrite.recording import Watching


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model as a graph, with access to its weights."""

    flow: Flow
    program: Program
    """The recorded step with every call."""
    repeats: tuple[Repeat, ...]
    """Calls that the graph saves."""
    weights: Callable[[], Mapping[str, Any]] = field(repr=False)
    """Function that returns the weights by name, as PyTorch tensors or arrays."""
    module: Any = field(default=None, repr=False)
    """The module; None: an ONNX file."""
    inputs: Any = None
    """Inputs with which the module was recorded."""


def trace(
    module: Any,
    inputs: Any,
    *,
    training: bool = False,
    target: str = "cpu",
    name: str = "",
    watching: Watching | None = None,
    **options: Any,
) -> Traced:
    """Record a module with all its blocks as a graph.

    Args:
        module: any ``torch.nn.Module``.
        inputs: arguments of its forward function: positional ones, or keyword arguments as a mapping.
        training: record loss, backward pass and optimiser too; if False, the forward pass in evaluation mode.
        target: ``cpu`` or ``cuda``, whose operators are recorded.
        name: name in reports.
        watching: observer of the recording; None: a new one, which refuses branches that depend on data.
        options: ``optimizer``, ``loss`` and ``autocast`` of the capture.

    Raises:
        UserError: PyTorch is missing, or the module cannot be recorded.
    """
    require_torch()
    import torch

    from steptime.captured.record.step import StepOptions, as_module, record
    from steptime.rewrite.recording import Watching as Seen
    from steptime.rewrite.recording import recorder_class

    found = as_module(module)
    if not training:
        options = {}
    chosen = StepOptions(training=training, target=target, fold=False, name=name or type(found).__name__, **options)
    watching = watching or Seen()
    given: Any = (inputs,) if torch.is_tensor(inputs) else inputs
    program = record(found, given, chosen, seen=watching.seen, recorder=recorder_class(watching))
    flow, repeats = flow_of(
        program,
        watching.nodes,
        watching.outputs,
        training=training,
        numbers=watching.numbers,
        inputs=tuple(watching.inputs),
    )
    return Traced(
        flow=flow, program=program, repeats=repeats, weights=lambda: _weights(found), module=found, inputs=given
    )


def _weights(module: Any) -> Mapping[str, Any]:
    found = {name: value.detach() for name, value in module.named_parameters()}
    found |= {name: value.detach() for name, value in module.named_buffers()}
    if any(value.is_meta for value in found.values()):
        raise UserError("the weights of the module have no memory", hint="build it on the CPU")
    return found


def trace_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> tuple[Traced, OnnxModel]:
    """The forward pass of an ONNX file as a graph.

    Raises:
        InputFileError: the file is damaged, hostile, or its data are outside its folder.
        UserError: sizes are open and not given.
    """
    from steptime.captured.onnx import read_onnx

    model = read_onnx(path, dims=dims)
    program = model.program
    outputs = dict(zip(model.outputs, model.graph.outputs, strict=True))
    flow, repeats = flow_of(
        program,
        model.nodes,
        outputs,
        training=False,
        numbers=dict(model.constants),
        inputs=tuple(node.value() for node in model.graph.sources("input")),
    )
    return Traced(flow=flow, program=program, repeats=repeats, weights=lambda: model.weights(Path(path))), model


def check_numbers(flow: Flow) -> None:
    """Check that the contents of all sources of a graph are known.

    Raises:
        UserError: it reads a tensor that belongs neither to the module nor to its inputs.
    """
    for node in flow.order:
        name = str(node.attribute("name", ""))
        unknown = name.startswith("outside.") and name not in flow.numbers
        if node.op in ("input", "constant") and unknown:
            raise UserError(
                f"the module reads a tensor {shorten(name)!r} that is neither its own nor an input",
                hint="register it with register_buffer, or pass it to forward",
            )
