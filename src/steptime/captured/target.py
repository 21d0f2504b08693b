"""A factory of the user's own code as the model of a job."""

from __future__ import annotations

from typing import Any

from steptime.api.models import CAPTURED_DTYPES
from steptime.captured.record.factory import Target
from steptime.captured.record.optional import require_torch
from steptime.captured.workload import BATCHES, captured_model, captured_steps
from steptime.model.captured import CapturedModel


def captured_target(target: str, dtype: str, seq: int | None) -> CapturedModel:
    """The module that a factory makes, as a workload.

    The factory is called for each of three batches where it takes one, and its module, inputs and loss are taken; else
    the leading dim of its inputs is the batch, unless something speaks against that.

    Args:
        target: ``pkg.module:factory`` or ``file.py:factory``.
        dtype: training recipe; the module is captured in the element type of its activations.
        seq: tokens of a sample, for a factory that takes them.

    Raises:
        UserError: PyTorch is missing, the factory fails, its module cannot be captured, or its batch is not known.
    """
    require_torch()
    from steptime.captured.record.factory import load_target
    from steptime.captured.record.variants import batch_parameter

    element = CAPTURED_DTYPES.get(dtype)
    more = {} if seq is None else {"seq": seq}
    takes = batch_parameter(target) is not None

    def made(batch: int) -> Any:
        sizes = {"batch": batch, **more} if takes else more
        return load_target(target, sizes=sizes, dtype=element, inputs=())

    first = made(BATCHES[0])
    if not takes:
        return _of_one_batch(target, first, element)

    def step(batch: int) -> tuple[Any, Any, Any]:
        one = first if batch == BATCHES[0] else made(batch)
        return one.module, one.inputs, one.loss

    return captured_steps(step, name=first.name, dtype=element)


def _of_one_batch(target: str, made: Target, element: str | None) -> CapturedModel:
    """The module of a factory that does not take a batch: its inputs are given others."""
    from steptime.captured.record.problems import CaptureError
    from steptime.captured.record.variants import TAKE_BATCH, leading_batch, resized

    given = leading_batch(target, made.module, made.inputs)
    try:
        return captured_model(
            made.module, lambda batch: resized(made.inputs, batch, given), name=made.name, dtype=element, loss=made.loss
        )
    except CaptureError as error:
        sizes = ", ".join(map(str, BATCHES))
        raise CaptureError(f"{error}\n  recorded with {sizes} samples; it makes {given}", hint=TAKE_BATCH) from None
