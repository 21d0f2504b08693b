"""Lower bounds of the step time of configurations over all placements, with which a search skips candidates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steptime.estimate.step import compose
from steptime.estimate.step_inputs import StepInputs
from steptime.estimate.work import Pass
from steptime.num import Array, Num
from steptime.plan.framework import Framework
from steptime.records import rows
from steptime.search.layers import LayerTable

ROUNDING = 1e-9
"""Share by which a bound is lowered, so that rounding does not raise it above a time that it bounds."""


def least_step_s(inputs: StepInputs, framework: Framework, table: LayerTable, shape: Array) -> Array:
    r"""Lower bound of the step time over all placements, by configuration.

    $$b(c) = (1 - \epsilon)\; T\!\left(c, \min_{p} f(s_c, p), 0\right) \le T(c, f(s_c, p), \ell(c, p))$$

    with $T$ the step of configuration $c$ (:func:`steptime.estimate.step.compose`), which falls in no time that it is
    composed of, $f(s, p)$ the passes of the layer's shape $s$ under placement $p$, each the least over all placements
    of the table, $\ell \ge 0$ what is sent over the data-parallel group and between stages, and $\epsilon$ =
    :data:`ROUNDING`. Source: own.

    Args:
        inputs: inputs of the steps of the configurations without communication.
        framework: training software.
        table: passes of every shape and placement.
        shape: shape of each configuration.
    """
    passes, at = least_passes(table, pairs=bool(np.any(np.asarray(inputs.paired) > 0)))
    least: Array = np.asarray(compose(inputs, rows(passes, at[shape]), framework).total_s) * (1 - ROUNDING)
    return np.broadcast_to(least, shape.shape)


def least_passes(table: LayerTable, *, pairs: bool) -> tuple[dict[str, Pass], Array]:
    """Shortest passes of every costed shape, and the index of each shape among them; -1: not costed.

    ``pairs``: leave out exchanges of experts, which may overlap with other passes.
    """
    shape_of, inner = np.nonzero(table.row >= 0)
    rows = table.row[shape_of, inner]
    starts = np.flatnonzero(np.diff(shape_of, prepend=-1))
    at = np.full(len(table.row), -1, dtype=np.int64)
    at[shape_of[starts]] = np.arange(len(starts))

    def over(ufunc: np.ufunc, value: Num) -> Num:
        return ufunc.reduceat(value[rows], starts) if isinstance(value, np.ndarray) else value

    return {part: _least(each, over, pairs=pairs) for part, each in table.passes.items()}, at


def _least(each: Pass, over: Callable[[np.ufunc, Num], Num], *, pairs: bool) -> Pass:
    """A pass with the shortest of each part, and the longest part for gradients of weights, as it fills the bubble."""
    sent_s, returned_s = (each.forward_exchange_s, each.backward_exchange_s) if pairs else (0.0, 0.0)
    forward_s = over(np.minimum, each.forward_s - sent_s)
    again_s = over(np.minimum, each.forward_s - sent_s - each.ended_s)
    return Pass(
        forward_s=forward_s,
        backward_s=over(np.minimum, each.backward_s - returned_s),
        weights_s=over(np.maximum, each.weights_s),
        ended_s=forward_s - again_s,
    )
