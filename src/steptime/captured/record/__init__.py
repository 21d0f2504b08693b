"""Capture of real models as graphs. Modules need the extra ``torch``, ONNX files the extra ``onnx``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime.captured.graph import Program
from steptime.registry import require

__all__ = ["capture", "jvp", "require_torch"]


def require_torch() -> None:
    """Check that PyTorch is installed.

    Raises:
        UserError: PyTorch is not installed.
    """
    require("torch", "capturing a module")


def capture(module: Any, inputs: Sequence[Any] | Mapping[str, Any], **options: Any) -> Program:
    """Record one training step of a module; :class:`steptime.captured.record.step.StepOptions` describes the options.

    Args:
        module: a ``torch.nn.Module`` or a program of ``torch.export``; its weights are not read.
        inputs: positional arguments of its forward, or keyword arguments as a mapping; only shapes and types count.
        options: ``optimizer`` (``"adamw"``; None for none), ``loss`` (a function of the output, or ``"cross-entropy"``,
            ``"mse"``, ``"sum"``, ``"mean"``), ``autocast`` (``"bf16"``, ``"fp16"``), ``training`` (False: the forward
            pass alone), ``target`` (``"cpu"``, the default, or ``"cuda"``: whose operators are recorded), ``fold``,
            ``keep_output``, ``nonzero_share``, ``name``.

    Raises:
        UserError: PyTorch is not installed.
        CaptureError: the module raises, or its control flow or shapes depend on data.
    """
    require_torch()
    from steptime.captured.record import step

    return step.capture(module, inputs, **options)


def jvp(
    module: Any,
    inputs: Sequence[Any] | Mapping[str, Any],
    of: str | Sequence[str] = "inputs",
    *,
    training: bool = False,
    name: str = "",
) -> Program:
    r"""Record the forward pass of a module with its Jacobian-vector product, :math:`\dot y = J \dot x`.

    The operators are those that PyTorch runs for ``torch.func.jvp``: each is followed by its tangent, so tensors that
    no later operator reads are freed at once. The tangents :math:`\dot x` are further inputs, named ``tangent.NAME``.
    ``steptime.profile(program, device)`` gives the cost, as for any program.

    Args:
        module: a ``torch.nn.Module`` or a program of ``torch.export``; its weights are not read.
        inputs: positional arguments of its forward, or keyword arguments as a mapping; only shapes and types count.
        of: tensors with a tangent: ``"inputs"``, ``"parameters"``, or names of inputs (``input.0``) and parameters.
        training: run in training mode, with dropout; otherwise in evaluation mode.
        name: name in reports.

    Returns:
        A program whose outputs are those of the module, then their tangents.

    Raises:
        UserError: PyTorch is not installed, a name is unknown, or no output depends on the tensors.
        CaptureError: the module raises, or PyTorch has no forward derivative of an operator in it.
    """
    require_torch()
    from steptime.captured.record import tangents

    return tangents.jvp(module, inputs, of, training=training, name=name)
