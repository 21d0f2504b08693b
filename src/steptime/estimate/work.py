"""Work of some rows for one micro-batch by kind, and its time under a framework.

Several evaluations can be stacked: the numbers of equal records become columns of one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from steptime.cost.collective import shown_beside_s
from steptime.cost.host import issue_wait_s, issued_s, router_wait_s
from steptime.cost.roofline import held_to_peak_s
from steptime.estimate.layer import BACKWARD, FORWARD, RECOMPUTE, PhaseTime, factor_of, kind_of, may_overlap
from steptime.num import Num, maximum, minimum, where
from steptime.plan.framework import IDEAL, Framework
from steptime.plan.plans import Plans
from steptime.plan.rows import WEIGHT_PRODUCTS, Row
from steptime.terms import at, call, note

RECORDED_WEIGHTS = "captured_weights_backward"
"""Operator of a recorded product that only makes the gradient of weights."""
INPUTS = "inputs"
"""Phase of the backward pass without the products that make gradients of weights."""
EXPERT_AXIS = "ep"
PASS_OF = {INPUTS: BACKWARD, RECOMPUTE: FORWARD}
PHASES = (FORWARD, BACKWARD, *PASS_OF)
"""Phases of a part's work: its passes, and parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """Work of some rows in one direction for one micro-batch, by kind, without the factors of a framework."""

    matrix_s: Num
    """Time of matrix products."""
    narrow_s: Num
    """Time of matrix products in formats narrower than 16 bits."""
    attention_s: Num
    """Time of products of the attention core."""
    vector_s: Num
    """Time of operators without products."""
    peak_s: Num
    """Time of all products at the peak of the matrix units."""
    operators: Num
    """Number of operators that the host issues."""
    routers: Num
    """Number of routers at which the host reads the sizes of the experts' products."""
    captured: Num
    """1 if router and preprocessing are one graph, else 0."""
    links_s: Mapping[str, Num]
    """Time of transfers that cannot overlap, by axis."""
    covered_s: Mapping[tuple[str, str], Num]
    """Time of transfers that may overlap with the work of their own row, by (phase/row, axis)."""
    beside_s: Mapping[tuple[str, str, bool], Num]
    """Time of the work with which they may overlap, by (phase/row, kind, True for a narrow format)."""
    busy_s: Mapping[tuple[str, bool], Num]
    """Time of all transfers, overlapped or not, by (axis, True if they leave the fast domain)."""


NUMBERS = tuple(
    each.name for each in fields(PhaseWork) if each.name not in ("links_s", "busy_s", "covered_s", "beside_s")
)
"""Fields that are numbers: work of the device, which is the same for all placements; the others are transfers."""


def weights_s(time: PhaseTime) -> Num:
    """Time of a row's product that makes the gradient of weights: the second of two products with equal FLOPs."""
    if time.row.operator == RECORDED_WEIGHTS and time.phase == BACKWARD:
        return time.own_s
    if time.phase != BACKWARD or not time.row.trained or time.row.operator not in WEIGHT_PRODUCTS:
        return 0.0
    if time.timed is None:
        return time.own_s / 2
    return time.timed.model.seconds(time.timed.shapes[-1]) * time.timed.times * time.times


def without_weights(time: PhaseTime) -> PhaseTime:
    """A row without its product that makes the gradient of weights, which the host issues separately."""
    of_weights_s, spent_s = weights_s(time), time.own_s
    if isinstance(of_weights_s, float) and not of_weights_s:
        return time
    left = 1.0 - of_weights_s / where(spent_s > 0, spent_s, 1.0)
    others = 0.0 if time.row.operator == RECORDED_WEIGHTS else 0.5
    return time._replace(compute_s=time.compute_s * left, exposed_memory_s=time.exposed_memory_s * left,
                         issued=others * time.issued, peak_s=others * time.peak_s)  # fmt: skip


def _by_reach(busy: Mapping[tuple[str, bool | None], Num], plans: Plans) -> dict[tuple[str, bool], Num]:
    """Busy time of links by axis and True if they leave the fast domain; None in ``busy``: the axis decides."""
    found: dict[tuple[str, bool], Num] = {}
    for (axis, leaves), busy_s in busy.items():
        near = plans.is_near(axis) if leaves is None else not leaves
        if isinstance(near, np.ndarray):
            found[axis, False], found[axis, True] = np.where(near, busy_s, 0.0), np.where(near, 0.0, busy_s)
        else:
            found[axis, not near] = found.get((axis, not near), 0.0) + busy_s
    return found


def phase_work(works: Mapping[str, PhaseWork], phase: str) -> PhaseWork:
    """Work of a phase; a part of a pass without a record of its own has that of the whole pass."""
    return works[phase if phase in works else PASS_OF[phase]]


def work_of(
    times: Iterable[PhaseTime], plans: Plans, *, splits: bool = False, graphs: str = "none", reads_sizes: bool = True
) -> dict[str, PhaseWork]:
    """Work forward and backward; recomputation belongs to the backward pass.

    If full recomputation runs less than a forward pass again, there is a record of it. ``splits``: there is one of the
    backward pass without gradients of weights. ``graphs``: parts that are one graph, in the words of a job
    (:data:`steptime.plan.job.GRAPHS`), whose operators the host does not issue one by one. ``reads_sizes``: the host
    reads the sizes of the experts' products (:attr:`steptime.plan.job.Job.reads_sizes`).
    """
    parts = frozenset(graphs.split("+"))
    rows: dict[str, list[PhaseTime]] = {FORWARD: [], BACKWARD: []}
    for time in times:
        rows[time.direction].append(time)
    again = [time for time in rows[FORWARD] if time.row.runs_again]
    if len(again) < len(rows[FORWARD]):
        rows[RECOMPUTE] = again
    if splits:
        rows[INPUTS] = [without_weights(time) for time in rows[BACKWARD]]
    works = {phase: _summed(each, plans, parts) for phase, each in rows.items()}
    if not reads_sizes:
        works = {phase: replace(work, routers=0.0) for phase, work in works.items()}
    if "step" not in parts:
        return works
    return {phase: replace(work, operators=0.0) for phase, work in works.items()}


def graph_of(row: Row) -> str:
    """The part of a layer that may be one graph and has the row; empty: none.

    >>> from types import SimpleNamespace
    >>> [graph_of(SimpleNamespace(block="experts", name=name)) for name in ("router_top_k", "expert_in")]
    ['router', '']
    """
    if row.block == "attention":
        return "attention"
    return "router" if row.block == "experts" and row.name.startswith("router") else ""


def _summed(times: Iterable[PhaseTime], plans: Plans, graphs: frozenset[str]) -> PhaseWork:
    """Work of some rows in one direction; the host issues each part in ``graphs`` as one operator."""
    into: dict[str, Num] = {}
    links: dict[str, Num] = {}
    covered: dict[tuple[str, str], Num] = {}
    beside: dict[tuple[str, str, bool], Num] = {}
    busy: dict[tuple[str, bool | None], Num] = {}
    for time in times:
        kind = kind_of(time.row)
        into[kind] = into.get(kind, 0.0) + time.own_s
        if time.narrow:
            into["narrow"] = into.get("narrow", 0.0) + time.own_s
        into["peak"] = into.get("peak", 0.0) + time.peak_s
        graph = graph_of(time.row)
        if graph in graphs:
            name = f"graph of {graph}"
            into[name] = maximum(into.get(name, 0.0), minimum(time.issued, 1.0))
        else:
            into["operators"] = into.get("operators", 0.0) + time.issued
        if time.row.operator == "top_k":
            into["routers"] = into.get("routers", 0.0) + time.issued
        for each in time.transfers:
            axis, group = each.transfer.axis, each.transfer.group
            links[axis] = links.get(axis, 0.0) + (each.busy_s - each.covered_s)
            reach = axis, None if group is None else bool(group.inside < group.ranks)
            busy[reach] = busy.get(reach, 0.0) + each.busy_s
        if may_overlap(time.row, time.phase):
            name, own = f"{time.phase}/{time.row.name}", dict[tuple[str, str], Num]()
            for each in time.transfers:
                own[name, each.transfer.axis] = own.get((name, each.transfer.axis), 0.0) + each.covered_s
            beside[name, kind, time.narrow] = time.beside_s
            covered |= own
    operators = sum((into.pop(f"graph of {each}", 0.0) for each in graphs), start=into.get("operators", 0.0))
    return PhaseWork(
        matrix_s=into.get("matrix", 0.0), narrow_s=into.get("narrow", 0.0), attention_s=into.get("attention", 0.0),
        vector_s=into.get("vector", 0.0), peak_s=into.get("peak", 0.0), operators=operators,
        routers=into.get("routers", 0.0), captured=float({"router", "preprocess"} <= graphs),
        links_s=links, covered_s=covered, beside_s=beside, busy_s=_by_reach(busy, plans),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Time of some rows for one micro-batch."""

    forward_s: Num
    backward_s: Num
    weights_s: Num = 0.0
    """Part of the backward pass for gradients of weights; 0 if it is not split."""
    ended_s: Num = 0.0
    """Part of the forward pass that full recomputation does not run again."""
    forward_exchange_s: Num = 0.0
    """Share of the exchange of experts in the forward pass."""
    backward_exchange_s: Num = 0.0
    """Share of the exchange of experts in the backward pass."""
    forward_near_s: Num = 0.0
    """Time for which transfers of the forward pass keep links of the fast domain busy, overlapped or not."""
    forward_far_s: Num = 0.0
    backward_near_s: Num = 0.0
    backward_far_s: Num = 0.0
    ended_near_s: Num = 0.0
    ended_far_s: Num = 0.0

    def backward_with_s(self, recomputed: Num) -> Num:
        """Time of the backward pass if a share ``recomputed`` of the layers is recomputed in full."""
        return self.backward_s + recomputed * (self.forward_s - self.ended_s)

    @property
    def both_s(self) -> Num:
        """Time of forward and backward."""
        return self.forward_s + self.backward_s


def device_s(work: PhaseWork, framework: Framework) -> Num:
    """Time that the device and its links need for some work."""
    total = (work.matrix_s + work.narrow_s * (framework.narrow - 1.0)) * framework.matrix + (
        work.attention_s * framework.attention
    )
    total = total + call(held_to_peak_s, timed_s=total, peak_s=work.peak_s) + work.vector_s * framework.vector
    return _with_links_s(total, work, framework)


def exposed_links_s(work: PhaseWork, framework: Framework) -> Num:
    """Exposed time of the transfers of some work."""
    return _with_links_s(0.0, work, framework)


def _with_links_s(total: Num, work: PhaseWork, framework: Framework) -> Num:
    """``total`` plus the time of the exposed transfers of some work."""
    for axis, links_s in work.links_s.items():
        total = total + links_s * framework.links(axis)
    for name in dict.fromkeys(row for row, _, _ in work.beside_s):  # stacked jobs may have several kinds of one row
        covered_s = sum(each_s * framework.links(axis) for (row, axis), each_s in work.covered_s.items() if row == name)
        own_s = sum(
            each_s * factor_of(kind, narrow, framework)
            for (row, kind, narrow), each_s in work.beside_s.items()
            if row == name
        )
        total = total + shown_beside_s(covered_s, own_s)
    return total


def fitted_parameter(framework: Framework, name: str) -> str:
    """Basis of a number that was fitted to the runs of a framework; empty for the ideal one, which has no runs.

    >>> fitted_parameter(Framework(name="torchtitan"), "step_s")
    'step_s of framework torchtitan, fitted to runs (steptime frameworks torchtitan)'
    """
    if framework.name == IDEAL.name:
        return ""
    return f"{name} of framework {framework.name}, fitted to runs (steptime frameworks {framework.name})"


def paced_s(device_s: Num, work: PhaseWork, framework: Framework) -> Num:
    """Time of some work: ``device_s`` of the device and its links, or the host's time if that is longer."""
    issued = {"operators": work.operators, "host_s": framework.host_s, "sharpness": framework.issue_sharpness}
    paced = issued_s(device_s, **issued)
    wait_s = maximum(paced - device_s, 0.0)
    note(issue_wait_s, {"device_s": device_s, **issued}, wait_s, fitted_parameter(framework, "host_s"))
    return paced + call(
        router_wait_s, fitted_parameter(framework, "router_s"), routers=work.routers, wait_s=framework.router_s,
        captured=work.captured, captured_wait=framework.captured_wait,
    )  # fmt: skip


def _paced_and_exchange_s(work: PhaseWork, framework: Framework, path: str) -> tuple[Num, Num]:
    """Time of some work by :func:`paced_s`, and the share of the exchange of experts in it."""
    sent = work.links_s.get(EXPERT_AXIS, 0.0)
    with at(path):
        device = device_s(work, framework)
        whole = paced_s(device, work, framework)
    if isinstance(sent, float) and not sent:
        return whole, 0.0
    return whole, whole - paced_s(device - sent * framework.links(EXPERT_AXIS), work, framework)


def _links_s(work: PhaseWork, framework: Framework) -> tuple[Num, Num]:
    """Time for which transfers keep links busy, inside the fast domain and beyond it."""
    total: dict[bool, Num] = {False: 0.0, True: 0.0}
    for (axis, leaves), busy_s in work.busy_s.items():
        total[leaves] = total[leaves] + busy_s * framework.links(axis)
    return total[False], total[True]


def pass_of(work: Mapping[str, PhaseWork], framework: Framework, part: str = "") -> Pass:
    """Time of both directions; ``part``: part of the model, for the tape."""
    one, inputs, again = work[BACKWARD], work.get(INPUTS), work.get(RECOMPUTE)
    (forward, sent), (backward, returned) = (
        _paced_and_exchange_s(work[phase], framework, f"{part}/{phase}") for phase in (FORWARD, BACKWARD)
    )
    (near, far), (near_back, far_back) = (_links_s(each, framework) for each in (work[FORWARD], one))
    of_weights = 0.0 if inputs is None else backward - paced_s(device_s(inputs, framework), inputs, framework)
    whole = Pass(
        forward_s=forward, backward_s=backward, weights_s=of_weights,
        forward_exchange_s=sent, backward_exchange_s=returned,
        forward_near_s=near, forward_far_s=far, backward_near_s=near_back, backward_far_s=far_back,
    )  # fmt: skip
    if again is None:
        return whole
    near_again, far_again = _links_s(again, framework)
    with at(f"{part}/{RECOMPUTE}"):
        again_s = paced_s(device_s(again, framework), again, framework)
    return replace(whole, ended_s=forward - again_s, ended_near_s=near - near_again, ended_far_s=far - far_again)


T = TypeVar("T")


def stacked(items: Sequence[T], shape: tuple[int, ...] = (-1,)) -> T:
    """One record whose numbers are arrays over the items; a key that the mapping of an item lacks counts as zero.

    ``shape``: shape of the arrays.

    >>> stacked([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    {'a': array([1., 2.]), 'b': array([0., 3.])}
    """
    first: Any = items[0]
    if is_dataclass(first):
        columns = {f.name: stacked([getattr(item, f.name) for item in items], shape) for f in fields(first)}
        make: Any = type(first)
        return make(**columns)  # type: ignore[no-any-return]
    if isinstance(first, Mapping):
        maps: list[Any] = list(items)
        blank: dict[Any, Any] = {}
        for name in {name for each in maps for name in each}:
            blank[name] = _blank(next(each[name] for each in maps if name in each))
        out: Any = {name: stacked([each.get(name, blank[name]) for each in maps], shape) for name in sorted(blank)}
        return out  # type: ignore[no-any-return]
    column: Any = np.array(items, dtype=np.float64).reshape(shape)
    return column  # type: ignore[no-any-return]


def _blank(like: Any) -> Any:
    """A zero value of the same kind as another: 0.0, or an empty mapping."""
    if is_dataclass(like):
        make: Any = type(like)
        return make(**{f.name: _blank(getattr(like, f.name)) for f in fields(like)})
    return {} if isinstance(like, Mapping) else 0.0
