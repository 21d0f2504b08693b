"""Order of the axes of a mesh over a network, which decides the neighbours of a rank beyond its fast domain.

Launchers number fast domains as they number ranks: along one axis after the other, innermost first. The axes inside
that of a group determine the distance of its members, and how many of them share a leaf switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

import numpy as np

from steptime.errors import FieldError, UnknownNameError, did_you_mean, shorten
from steptime.num import Array, Num, minimum
from steptime.options import LAUNCHED, SEARCHED
from steptime.plan.plans import AXES, FOLDED_AXES, Plans, rows_of


def order_of(text: str) -> tuple[str, ...]:
    """Axes from the innermost to the outermost, from text as Megatron-Core writes it; missing ones are outermost.

    Expert ranks lie within ``tp``, ``cp`` and ``dp``, so that ``ep`` has no place of its own.

    Raises:
        FieldError: an axis twice.
        UnknownNameError: an axis that does not exist.

    >>> order_of("tp-cp-ep-pp-dp"), order_of("dp")
    (('tp', 'cp', 'pp', 'dp', 'tp2'), ('dp', 'tp', 'tp2', 'cp', 'pp'))
    """
    if text == LAUNCHED:
        return AXES
    given = [part.strip().lower() for part in text.split("-")]
    for axis in given:
        if axis not in (*AXES, *FOLDED_AXES):
            hint = did_you_mean(axis, (*AXES, LAUNCHED, SEARCHED), "for example tp-cp-ep-dp-pp, or tp=4,dp=2")
            raise UnknownNameError("axis of an order", shorten(axis), AXES, otherwise=hint)
    own = [axis for axis in given if axis in AXES]
    if len(set(own)) < len(own):
        raise FieldError("", "placement", f"{shorten(text)!r} has an axis twice", hint="for example tp-cp-ep-dp-pp")
    return (*own, *(axis for axis in AXES if axis not in own))


def outer(plans: Plans, axis: str) -> Num:
    """Fast domains that a group along an axis spans."""
    degree: Num = getattr(plans, axis)
    return degree / plans.inside(axis)


def strides_of(outside: Mapping[str, Num], order: Sequence[str], farthest: Num) -> dict[str, Num]:
    """Columns ``at_AXIS``: fast domains from one member of a group to the next, ``farthest`` at most.

    An axis that lies in one domain has 1.

    Args:
        outside: axis -> fast domains along it.
        order: axes, innermost first.
        farthest: distance from which on members share no block of the network.

    >>> strides_of({"tp": 1, "dp": 4, "pp": 2}, ("tp", "pp", "dp"), 64)
    {'at_tp': 1, 'at_pp': 1, 'at_dp': 2}
    """
    out: dict[str, Num] = {}
    stride: Num = 1
    for axis in (axis for axis in order if axis in outside):
        alone = np.asarray(outside[axis]) <= 1
        here = minimum(stride, farthest)
        out[f"at_{axis}"] = np.where(alone, 1, here) if alone.ndim else (1 if alone else here)
        stride = stride * outside[axis]
    return out


def numbered(plans: Plans, order: Sequence[str] = AXES) -> Plans:
    """One plan with domains numbered along the axes in an order.

    >>> numbered(Plans(dp=8, pp=4, in_dp=2), order_of("tp-pp-dp")).at_dp
    4
    """
    outside = {axis: int(outer(plans, axis)) for axis in AXES}
    return plans.with_columns(strides_of(outside, order, int(plans.ranks)))


def order_text(plans: Plans, axes: Iterable[str]) -> str:
    """The order of the axes that the distances of one plan imply, innermost first.

    >>> order_text(numbered(Plans(dp=8, pp=4), order_of("tp-pp-dp")), ("tp", "dp", "pp"))
    'tp-pp-dp'
    """
    listed = [axis for axis in AXES if axis in set(axes)]
    spread = [axis for axis in listed if outer(plans, axis) > 1]
    nearest = iter(sorted(spread, key=lambda axis: int(getattr(plans, f"at_{axis}"))))
    return "-".join(next(nearest) if axis in spread else axis for axis in listed)


def ordered(
    index: Array, placements: Plans, meshes: Plans, axes: Sequence[str], farthest: int, order: Sequence[str] | None
) -> tuple[Array, Plans]:
    """Placements under one order of the axes, or under all orders that differ within the largest block of a network.

    Args:
        index: mesh of each placement, ascending.
        placements: columns ``in_AXIS``.
        meshes: degrees.
        axes: of the strategy.
        farthest: fast domains in the largest block that a network has.
        order: None: all.
    """
    rows = len(index)
    inside = {axis: np.broadcast_to(np.asarray(getattr(placements, f"in_{axis}")), (rows,)) for axis in axes}
    degrees = {axis: np.broadcast_to(np.asarray(getattr(meshes, axis)), (rows_of(meshes),))[index] for axis in axes}
    outside = {axis: degrees[axis] // inside[axis] for axis in axes}
    usual = [axis for axis in AXES if axis in axes]
    orders = [tuple(axis for axis in order if axis in axes)] if order is not None else list(permutations(usual))
    columns = [
        np.stack([np.broadcast_to(strides_of(outside, each, farthest)[f"at_{axis}"], (rows,)) for axis in axes])
        for each in orders
    ]
    place = np.tile(np.arange(rows), len(orders))
    table = np.vstack([place, np.concatenate(columns, axis=1)])
    _, first = np.unique(table, axis=1, return_index=True)
    chosen = np.sort(first)
    chosen = chosen[np.argsort(place[chosen], kind="stable")]
    at = {f"at_{axis}": table[1 + i, chosen] for i, axis in enumerate(axes)}
    of_rows = {f"in_{axis}": inside[axis][place[chosen]] for axis in axes}
    return index[place[chosen]], Plans(**of_rows, **at)


def members_of(plans: Plans, axes: Sequence[str], block: float) -> Num:
    r"""Members of a group along some axes, in different fast domains, that share a block of consecutive domains.

    $$m = \prod_a \min\left(o_a,\ \max\left(\frac{B}{k_a},\ 1\right)\right)$$

    for $o_a$ domains along axis $a$, $k_a$ apart, and $B$ = `block`; axes of experts are taken in turn from the ranks
    of `tp`, `cp` and `dp` together.

    Source: own; exact where distances and blocks divide each other.

    >>> plan = numbered(Plans(dp=8, pp=4))
    >>> members_of(plan, ("dp",), 4), members_of(plan, ("pp",), 4), members_of(plan, ("pp",), 16)
    (4.0, 1, 2.0)
    """
    total: Num = 1
    for axis in axes:
        total = total * (_folded(plans, axis, block) if axis in FOLDED_AXES else _along(plans, axis, block))
    return total


def _along(plans: Plans, axis: str, block: float) -> Num:
    return _within(block / getattr(plans, f"at_{axis}"), outer(plans, axis))


def _folded(plans: Plans, axis: str, block: float) -> Num:
    room = members_of(plans, ("tp", "cp", "dp"), block)
    for each in FOLDED_AXES:
        degree: Num = getattr(plans, each)
        across = degree / plans.inside(each)
        if each == axis:
            break
        room = room / across
    return _within(room, across)


def _within(room: Num, most: Num) -> Num:
    """``room``, at least one and at most ``most``."""
    if isinstance(room, np.ndarray) or isinstance(most, np.ndarray):
        return np.minimum(np.maximum(room, 1.0), most)
    return min(max(room, 1), most)


def stride_of(plans: Plans, axes: Sequence[str]) -> Num:
    """Fast domains from a member of a group to the nearest other one."""
    own = [axis for axis in axes if axis not in FOLDED_AXES] or ["tp", "cp", "dp"]
    nearest: Num = np.inf
    for axis in own:
        alone = outer(plans, axis) <= 1
        at: Num = getattr(plans, f"at_{axis}")
        there = np.where(alone, np.inf, at) if isinstance(alone, np.ndarray) else (np.inf if alone else at)
        nearest = minimum(nearest, there)
    return (
        np.where(np.isinf(nearest), 1.0, nearest)
        if isinstance(nearest, np.ndarray)
        else (1 if nearest == np.inf else nearest)
    )
