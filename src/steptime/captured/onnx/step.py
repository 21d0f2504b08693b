"""A step of a model from an ONNX file: forward, and for training the derived backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from steptime.captured.autodiff import gradients
from steptime.captured.graph.program import Program
from steptime.captured.graph.schedule import program_of
from steptime.captured.onnx.model import OnnxModel, read_onnx
from steptime.errors import InputFileError
from steptime.model.spec import FLOATS


def program_of_file(path: Path | str, *, dims: Mapping[str, int] | None = None, training: bool = True) -> Program:
    """The forward pass of an ONNX file, followed in training by the backward pass that follows from it.

    The file says nothing of a loss or an optimiser: gradients of ones flow into every floating-point output, as from
    the sum of them, and there is no optimiser phase. Layers are as the file has them; a file exported for inference
    normalises by its running statistics and drops nothing out.

    Args:
        path: the file.
        dims: sizes for what the file leaves open, by symbol.
        training: with the backward pass.

    Raises:
        InputFileError: the file cannot be read; with ``training``, it has no weights.
        UserError: sizes are missing; with ``training``, the gradient of an operator is not known.
    """
    return program_of_model(read_onnx(path, dims=dims), str(path), training=training)


def program_of_model(model: OnnxModel, path: str, *, training: bool) -> Program:
    """The same for a model that was read."""
    source = f"ONNX file {Path(path).name}" + (f", exported by {model.source}" if model.source else "")
    first = next((node.outputs[0].shape for node in model.graph.sources("input") if node.outputs[0].rank), ())
    batch = first[0] if first else None
    if not training:
        return program_of(model.graph, name=model.name, module=model.module, source=source, batch=batch)
    if not model.graph.sources("parameter"):
        hint = "give --inference, in Python training=False"
        raise InputFileError(path, "it has no weights, so there is nothing to train", hint=hint)
    if not any(value.type.dtype in FLOATS for value in model.graph.outputs):
        raise InputFileError(path, "none of its outputs is floating-point, so nothing flows back")
    derived = gradients(model.nodes, model.graph)
    return program_of(
        model.graph, name=model.name, source=source, batch=batch,
        module=lambda node: model.module(derived.origins.get(node, node)),
        backward=derived.backward, gradients=derived.wanted,
    )  # fmt: skip
