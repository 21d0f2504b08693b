"""Time of each transfer on a machine's links: fitted collectives where there are some, else textbook rings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.cost.collective import point_to_point_s, rotated_s
from steptime.cost.collective_algorithms import Fabric, collective_s, least_s
from steptime.cost.network import mean_hop_ratio
from steptime.estimate.fabrics import FabricModel
from steptime.estimate.machine import Machine
from steptime.estimate.network import MESSAGE, Reach, consecutive
from steptime.estimate.operators import COLLECTIVES
from steptime.num import Num, minimum, per_distinct, where
from steptime.plan.job import Job
from steptime.plan.placements import members_of, stride_of
from steptime.plan.plans import FOLDED_AXES, Plans
from steptime.plan.rows import Transfer
from steptime.terms import note

RING_EXCHANGE = "ring_exchange"
ROOTED: Final[Mapping[str, str]] = {"gather": "all_gather", "scatter": "all_gather"}
"""Rooted collective -> ring collective whose time stands for it: the root moves as much as each rank of the ring."""
TEXTBOOK = "textbook formula on datasheet links with the efficiency and latency of the catalogue or file"


class Group(NamedTuple):
    """A group of ranks and its place among the fast domains."""

    ranks: Num
    inside: Num
    """Ranks of the group in each fast domain."""
    reach: Callable[[], Reach] | None = None
    """Makes the reach of its domains, for machines that tell their levels apart; None: domains next to each other."""

    def reach_of_it(self) -> Reach:
        """The reach of its domains."""
        return consecutive(self.ranks / self.inside) if self.reach is None else self.reach()


def group_of(plans: Plans, axes: Iterable[str]) -> Group:
    """The group of ranks over the product of some mesh axes.

    Expert axes divide the ranks of ``tp``, ``cp`` and ``dp``, so that their degree is at most the product of these.
    """
    ranks: Num = 1
    inside: Num = 1
    for axis in axes:
        degree: Num = getattr(plans, axis)
        if axis in FOLDED_AXES:
            degree = minimum(degree, plans.tp * plans.cp * plans.dp)
        ranks, inside = ranks * degree, inside * plans.inside(axis)
    named = tuple(axes)
    return Group(ranks, inside, lambda: reach_of(plans, named))


def reach_of(plans: Plans, axes: tuple[str, ...]) -> Reach:
    """Fast domains that the group of some axes spans."""
    nodes: Num = 1
    for axis in axes:
        degree: Num = getattr(plans, axis)
        if axis in FOLDED_AXES:
            degree = minimum(degree, plans.tp * plans.cp * plans.dp)
        nodes = nodes * degree / plans.inside(axis)
    return Reach(nodes, lambda block: members_of(plans, axes, block), stride_of(plans, axes))


class Route(NamedTuple):
    """Slowdown and longer hops of one collective of a group in the network beyond fast domains."""

    slowdown: Num = 1.0
    longer: Num = 1.0
    """Latency of a hop over the latency of a hop across the first tier."""
    tier: str = ""
    """Tier that slows it down, for a single plan; empty: none."""
    text: str = ""


def _route(machine: Machine, kind: str, group: Group) -> Route | None:
    """Route of a collective; None for a machine that does not tell its levels apart."""
    network = machine.network
    if network is None:
        return None
    reach = group.reach_of_it()
    slowdown, longer = network.slowdown(kind, reach), network.longer_hops(kind, reach)
    if isinstance(slowdown, np.ndarray) or isinstance(reach.nodes, np.ndarray):
        return Route(slowdown, longer)
    tier = network.binding(kind, reach)
    return Route(slowdown, longer, "" if tier is None else tier.name, network.told(kind, reach))


def _holds(machine: Machine, group: Group) -> Num:
    """True if a group lies within the levels that the machine joins, for each of an array of groups."""
    reach = group.reach_of_it()
    return reach.members(machine.joined) >= reach.nodes


def _ring(machine: Machine, size_bytes: Num, group: Group, senders: Num | None, route: Route | None) -> dict[str, Num]:
    """Arguments of a textbook ring."""
    inside = group.inside
    slow_Bps = machine.slow_link_Bps(inside if senders is None else senders)
    latency_s: Num = machine.slow_latency_s
    if route is not None:
        slow_Bps, latency_s = slow_Bps / route.slowdown, latency_s * route.longer
    return {
        "size_bytes": size_bytes, "ranks": group.ranks, "inside": inside,
        "fast_Bps": machine.fast_Bps, "slow_Bps": slow_Bps,
        "fast_latency_s": machine.fast_latency_s, "slow_latency_s": latency_s,
    }  # fmt: skip


def _shared(machine: Machine, model: FabricModel, inside: Num, route: Route | None = None) -> dict[str, Num]:
    """Arguments for shared NICs: all groups of an axis communicate at once, so each rank has only its own NICs."""
    shared = {"groups": model.fabric.domain / inside, "oversubscription": model.oversubscription}
    if route is None:
        return shared
    longer_s = machine.slow_latency_s * (route.longer - 1.0)
    return shared | {"oversubscription": model.oversubscription * route.slowdown, "longer_hop_s": longer_s}


def collective_over(
    kind: str, machine: Machine, size_bytes: Num, ranks: Num, inside: Num, senders: Num | None = None
) -> Num:
    """Time of a collective over ``ranks`` ranks, ``inside`` per fast domain, in domains next to each other.

    The arguments are those of :func:`collective_in`, with the ranks of the group and those in each domain.
    """
    return collective_in(kind, machine, size_bytes, Group(ranks, inside), senders)


def collective_in(kind: str, machine: Machine, size_bytes: Num, group: Group, senders: Num | None = None) -> Num:
    """Time of a collective in a group of ranks.

    Args:
        kind: name in :data:`~steptime.estimate.operators.COLLECTIVES`.
        machine: its links.
        size_bytes: whole tensor.
        group: its ranks, and where they lie.
        senders: ranks of a domain whose NICs carry what leaves it; None: all of them.
    """
    within = machine.nearer is not None and _holds(machine.nearer, group)
    if machine.nearer is None or not np.any(within):
        return _on_links(kind, machine, size_bytes, group, senders)
    near = collective_in(kind, machine.nearer, size_bytes, group, senders)
    if np.all(within):
        return near
    return where(within, near, _on_links(kind, machine, size_bytes, group, senders))


def _on_links(kind: str, machine: Machine, size_bytes: Num, group: Group, senders: Num | None) -> Num:
    """Time on the machine's own links, without a look at nearer machines; arguments as in :func:`collective_in`."""
    model, (ranks, inside, _), route = machine.fabric, group, _route(machine, kind, group)
    if model is None:
        return _textbook_s(kind, machine, _ring(machine, size_bytes, group, senders, route), route)
    tier = f"{route.tier}/" if route is not None and route.tier else ""
    if kind == RING_EXCHANGE:
        near_s, far_s = _message_s(machine, size_bytes, route)
        arguments = {"ranks": ranks, "inside": inside, "near_s": near_s, "far_s": far_s}
        seconds = rotated_s(**arguments)
        note(rotated_s, arguments, seconds, partial(_fitted_basis, model, ranks, inside, route), f"{tier}rotated_s")
        return seconds
    shared = _shared(machine, model, inside if senders is None else senders, route)
    given = {"size_bytes": size_bytes, "ranks": ranks, "inside": inside, **shared}
    seconds = _least_s(kind, fabric=model.fabric, **given)
    # The name of the fastest algorithm takes another walk through all of them, so that only a report asks for it.
    basis = partial(_chosen_basis, kind, model, given, route)
    note(collective_s, {"kind": kind, "fabric": model.fabric, **given}, seconds, basis, f"{kind}/{tier}collective_s")
    return seconds


def collective_of(kind: str, plans: Plans, machine: Machine, axes: Iterable[str], size_bytes: Num) -> Num:
    """Time of a collective over the product of some mesh axes."""
    return collective_in(kind, machine, size_bytes, group_of(plans, axes))


def transfer_s(transfer: Transfer, plans: Plans, machine: Machine, parts: Num = 1) -> Num:
    """Time of a transfer of a row, or of one of ``parts`` equal parts of it."""
    size_bytes = transfer.size_bytes / parts
    if transfer.group is not None:
        return collective_in(transfer.collective, machine, size_bytes, transfer.group)
    return collective_of(transfer.collective, plans, machine, (transfer.axis,), size_bytes)


def _textbook_s(kind: str, machine: Machine, ring: Mapping[str, Num], route: Route | None) -> Num:
    """Time of a ring on the datasheet's links, or by its own curve for a group that was measured."""
    formula, groups = COLLECTIVES[kind], machine.groups
    size_bytes, ranks, inside = ring["size_bytes"], ring["ranks"], ring["inside"]
    seconds = formula(ring)
    if groups is not None:
        seconds = groups.seconds(kind, size_bytes, ranks, inside, seconds)
        own = None if isinstance(seconds, np.ndarray) else groups.find(kind, float(ranks), float(inside))
        if own is not None:
            curve, given = own.formula.function, own.formula.named(own.arguments(size_bytes))
            note(curve, given, seconds, own.text, f"{kind}/{curve.__name__}")
            return seconds
    tier = f"{route.tier}/" if route is not None and route.tier else ""
    name = f"{tier}{formula.function.__name__}"
    note(formula.function, ring, seconds, _with_network(TEXTBOOK, route), name)
    return seconds


def _with_network(basis: str, route: Route | None) -> str:
    """Basis of a time, with the tier of the network that slows the group down."""
    return f"{basis}; {route.text}" if route is not None and route.text else basis


_least_s = per_distinct()(least_s)
"""Time of the fastest algorithm."""


def _fitted_basis(model: FabricModel, ranks: Num, inside: Num, route: Route | None) -> str:
    """Phrase on the fitted fabrics that time a group."""
    return _with_network(_bases(model, inside=float(inside) > 1, between=float(ranks) > float(inside)), route)


def _chosen_basis(kind: str, model: FabricModel, given: Mapping[str, Num], route: Route | None) -> str:
    """Phrase on the fastest algorithm and protocol for the arguments of :func:`least_s`, with the fabrics."""
    algorithm, protocol = _chosen(kind, model.fabric, tuple((name, float(value)) for name, value in given.items()))
    fabrics = _fitted_basis(model, given["ranks"], given["inside"], route)
    return f"{algorithm}, protocol {protocol}: the fastest; {fabrics}"


@lru_cache(maxsize=1 << 14)
def _chosen(kind: str, fabric: Fabric, given: tuple[tuple[str, float], ...]) -> tuple[str, str]:
    _, algorithm, protocol = collective_s(kind, fabric=fabric, **dict(given))  # type: ignore[arg-type]
    return str(algorithm), str(protocol)


def _machine_over(machine: Machine, ranks: int, inside: int) -> Machine:
    """The innermost machine whose levels hold a group in domains next to each other."""
    while machine.nearer is not None and _holds(machine.nearer, Group(ranks, inside)):
        machine = machine.nearer
    return machine


def chosen_over_s(kind: str, machine: Machine, size_bytes: Num, ranks: int, inside: int) -> tuple[Num, Any, Any]:
    """Time of :func:`collective_over`, with the algorithm and protocol assumed of the communication library.

    Without a fitted fabric there is no protocol to choose: it is "". Sizes may be an array; names are then too.
    """
    machine = _machine_over(machine, ranks, inside)
    model = machine.fabric
    if model is not None:
        shared: Any = _shared(machine, model, inside, _route(machine, kind, Group(ranks, inside)))
        return collective_s(kind, size_bytes, ranks, inside, model.fabric, **shared)
    kind = ROOTED.get(kind, kind)
    names = ("direct" if kind == "all_to_all" else "ring", "")
    return collective_over(kind, machine, size_bytes, ranks, inside), *names


def collective_basis(machine: Machine, kind: str, ranks: int, inside: int) -> str:
    """Basis of the time of a collective: fitted fabrics with their errors, a measured group, or a textbook formula."""
    machine = _machine_over(machine, ranks, inside)
    if machine.fabric is not None:
        return _bases(machine.fabric, inside=inside > 1, between=ranks > inside)
    own = machine.groups and machine.groups.find(ROOTED.get(kind, kind), ranks, inside)
    return own.text if own else TEXTBOOK


def pair_of(machine: Machine, first: int, second: int) -> Group:
    """Group of two devices, given by number, in different fast domains."""

    def members(block: float) -> float:
        size = block * machine.fast_domain
        return 2.0 if first // size == second // size else 1.0

    return Group(2, 1, lambda: Reach(2.0, members))


def message_time_s(machine: Machine, size_bytes: Num, group: Group | None = None) -> tuple[Num, Num]:
    """A message to a rank of the same fast domain, and to one in another: the next one of a group, the mean of them."""
    group = Group(2, 1) if group is None else group
    if machine.network is not None:
        network, reach = machine.network, group.reach_of_it()
        return _message_s(machine, size_bytes, Route(network.message(reach), network.longer_hops(MESSAGE, reach)))
    near_s, far_s = _message_s(machine, size_bytes, None)
    if machine.nearer is None:
        return near_s, far_s
    reach, inner_s = group.reach_of_it(), message_time_s(machine.nearer, size_bytes, group)[1]
    return near_s, inner_s + (far_s - inner_s) * mean_hop_ratio(reach.nodes, reach.members(machine.nearer.joined))


def _message_s(machine: Machine, size_bytes: Num, route: Route | None) -> tuple[Num, Num]:
    model = machine.fabric
    if model is None:
        slowdown, longer = (1.0, 1.0) if route is None else (route.slowdown, route.longer)
        near = point_to_point_s(size_bytes, machine.fast_Bps, machine.fast_latency_s)
        far = point_to_point_s(size_bytes, machine.lone_slow_Bps / slowdown, machine.slow_latency_s * longer)
        if machine.groups is None:
            return near, far
        groups = machine.groups
        return groups.seconds("p2p", size_bytes, 2, 2, near), groups.seconds("p2p", size_bytes, 2, 1, far)
    near = _least_s("p2p", fabric=model.fabric, size_bytes=size_bytes, ranks=2, inside=2)
    if model.between is None:
        return near, near
    shared = _shared(machine, model, 1.0, route)
    return near, _least_s("p2p", fabric=model.fabric, size_bytes=size_bytes, ranks=2, inside=1, **shared)


def boundary_times_s(job: Job, machine: Machine, plans: Plans, size_bytes: Num) -> tuple[Num, Num]:
    r"""A message between stages: to a rank of the same fast domain, and to one in another.

    $$t = t_1(S / n) + t_g(S, n), \qquad t_g(S, 1) = 0$$

    where $t_1$ is the time of a message of one rank, $S$ = `size_bytes` what a rank holds of the residual stream, $n$
    the tensor-parallel ranks that hold the same and each send a part of it (1 with sequence shards, or where the
    framework does not scatter messages), and $t_g$ the time in which they gather it again.

    Source: arXiv 2104.04473, section 4.1 (scatter and gather).
    """
    stages = group_of(plans, ("pp",))
    if not job.scattered_messages:
        return message_time_s(machine, size_bytes, stages)
    parts = where(plans.sp > 0, 1, plans.tp)
    gather_s = collective_over("all_gather", machine, size_bytes, parts, minimum(parts, plans.in_tp))
    near_s, far_s = message_time_s(machine, size_bytes / parts, stages)
    return near_s + gather_s, far_s + gather_s


def message_basis(machine: Machine, stages: Num, inside: Num) -> str:
    """Basis of the time of messages between stages."""
    if machine.fabric is None:
        return TEXTBOOK
    return _bases(machine.fabric, inside=float(inside) > 1, between=float(stages) > float(inside))


def _bases(model: FabricModel, *, inside: bool, between: bool) -> str:
    used = (*([model.inside] if inside else ()), *(model.bases()[1:] if between else ()))
    return "; ".join(basis.text for basis in used)
