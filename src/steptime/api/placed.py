"""Placement of the ranks of a plan on devices: as given, in an order of axes, or the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steptime.api.request import text
from steptime.errors import PlanError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting
from steptime.options import SEARCHED
from steptime.plan.placements import numbered, order_of, ordered
from steptime.plan.plans import AXES, Plans, as_float, rows_of
from steptime.plan.space import CorrectedSpace, Space
from steptime.search.modes import MODES, Mode


def laid(space: Space, given: Any) -> Space:
    """A space with ranks placed in one order, or in any.

    Raises:
        UserError: the order is invalid, or the mode has placements of its own.
    """
    if not isinstance(space, CorrectedSpace):
        raise PlanError("--placement: published mode has placements of its own", hint="drop it, or --mode published")
    if text("placement", given) == SEARCHED:
        return replace(space, launched=False, order=None)
    return replace(space, launched=True, order=order_of(given))


def _placed_as_given(plans: Plans, placement: Mapping[str, int], domain: int, axes: Sequence[str]) -> Plans:
    """The plan with a given placement.

    Raises:
        PlanError: it does not divide the degrees, or a fast domain has fewer devices; the message has one that fits.
    """
    usual = plans.in_order(domain)
    fits = ",".join(f"{axis}={getattr(usual, f'in_{axis}')}" for axis in axes)
    hint = f"--placement {fits} is that of launchers on this cluster"
    for axis, inside in placement.items():
        degree = int(getattr(plans, axis))
        if degree % inside:
            raise PlanError(f"placement {axis} {inside} does not divide {axis} {degree}", hint=hint)
    placed = plans.with_columns({f"in_{axis}": n for axis, n in placement.items()})
    if placed.domain_ranks > domain:
        arithmetic = " x ".join(f"{axis} {n}" for axis, n in placement.items())
        problem = f"placement {arithmetic} = {placed.domain_ranks} is more than the {domain} devices of a fast domain"
        raise PlanError(problem, hint=hint)
    return placed


def placed_plan(
    setting: Setting, mode: Mode, strategy: str, plans: Plans, placement: Mapping[str, int] | None, order: str | None
) -> Plans:
    """The plan with the given placement; else in the order of launchers, or the fastest in published mode."""
    how = mode.method.strategy(strategy)
    domain = setting.machine.fast_domain
    axes = (*how.tensor_axes, "dp", "pp")
    along = AXES if order in (None, SEARCHED) else order_of(str(order))
    if placement is not None:
        return numbered(_placed_as_given(plans, placement, domain, axes), along)
    if mode.method.calibrated and order != SEARCHED:
        return numbered(plans.in_order(domain, along), along)
    one = Plans(**{axis: np.array([int(getattr(plans, axis))]) for axis in axes})
    spaces = [mode.space, MODES["corrected"].space]
    for space in spaces:
        placed_rows, options = space.placements(
            how, one, int(plans.ranks), domain, nearer_is_faster=setting.machine.nearer_is_faster
        )
        if len(placed_rows):
            break
    if setting.machine.farthest > 1:
        placed_rows, options = ordered(placed_rows, options, one, axes, setting.machine.farthest, None)
    rows = rows_of(options)
    names = [f"{kind}_{axis}" for axis in axes for kind in ("in", "at")]
    inside_columns = {name: np.broadcast_to(getattr(options, name), (rows,)) for name in names}
    block = plans.with_columns(inside_columns)
    times = evaluate(mode.method, how, setting.job, setting.machine, as_float(block)).step_time_s
    return block.row(int(np.argmin(np.broadcast_to(np.asarray(times), (rows,)))))
