"""Spaces of plans: meshes, micro-batches and placements, each a block of columns; constraints such as ``pp<=16``.

A candidate is a mesh (degrees), a configuration of the mesh (micro-batch, panels, recomputation, ZeRO stage)
and a placement of the mesh on the fast domains. Memory does not depend on the placement, so the three are listed
separately and multiplied only for configurations that fit.

The corrected search space has every mesh of the devices, uneven shares, and partly filled fast domains.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from steptime.num import Array, ceil_div, divisors, places_in_runs
from steptime.plan.framework import Habits, piped_stage
from steptime.plan.job import Job, equal_but_for_ends, replica_sequences, virtual_stage
from steptime.plan.placements import ordered
from steptime.plan.plans import AXES, NAMES, RECOMPUTE_CODES, Plans, Rule, broken_rules, launch_order, rows_of
from steptime.plan.strategies import Strategy

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One column of a plan compared with a number."""

    column: str
    relation: str
    value: int

    def holds(self, plans: Plans) -> Any:
        """True for each plan that satisfies the constraint."""
        return OPERATORS[self.relation](getattr(plans, self.column), self.value)


#: Degrees whose product is the number of devices.
MESH_COLUMNS = ("tp", "tp2", "cp", "pp", "dp")


def kept(meshes: Plans, constraints: Sequence[Constraint]) -> Plans:
    """Meshes that satisfy the constraints on degrees."""
    admitted: Array = np.ones(rows_of(meshes), dtype=bool)
    for constraint in constraints:
        if constraint.column in MESH_COLUMNS:
            admitted &= constraint.holds(meshes)
    return meshes if admitted.all() else meshes.take(np.flatnonzero(admitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All candidates of a job under one strategy, as factors that are not yet multiplied."""

    configurations: Plans
    """Degrees and configuration, one row each; rows of a mesh are contiguous."""
    mesh_of: Array
    """Mesh of each configuration."""
    placements: Plans
    """Placement columns, one row each; rows of a mesh are contiguous."""
    placement_start: Array
    """First placement of each mesh."""
    placement_count: Array
    rejected: dict[str, int]
    """Reason -> number of meshes and configurations that it rules out."""
    rejected_rows: int
    """Number of meshes and configurations that were ruled out, each counted once for all its placements."""

    @property
    def multiplicity(self) -> Array:
        """Placements of each configuration."""
        counts: Array = self.placement_count[self.mesh_of]
        return counts

    @property
    def candidates(self) -> int:
        """Number of configurations times placements, plus the meshes and configurations that were ruled out."""
        return int(self.multiplicity.sum()) + self.rejected_rows


class Space(ABC):
    """Lists meshes, configurations and placements."""

    name: ClassVar[str]
    order: tuple[str, ...] | None = None
    """Order of the axes over a network, innermost first; None: all orders are tried."""

    @abstractmethod
    def fixed(self, values: Mapping[str, int]) -> Space:
        """The space with some columns at one value each."""

    @abstractmethod
    def meshes(self, job: Job, strategy: Strategy) -> Plans:
        """Degrees whose product is the number of devices."""

    @abstractmethod
    def configurations(self, job: Job, strategy: Strategy, meshes: Plans) -> tuple[Array, Plans]:
        """Index of the mesh of each configuration (ascending), and its columns."""

    @abstractmethod
    def placements(
        self, strategy: Strategy, meshes: Plans, gpus: int, fast_domain: int, *, nearer_is_faster: bool
    ) -> tuple[Array, Plans]:
        """Index of the mesh of each placement (ascending), and its columns.

        ``nearer_is_faster``: links inside a domain are no slower than links between domains, so that a placement that
        leaves room for more ranks inside is dominated and need not be listed.
        """

    def list(
        self,
        job: Job,
        strategy: Strategy,
        fast_domain: int,
        rules: Sequence[Rule],
        constraints: Sequence[Constraint] = (),
        *,
        nearer_is_faster: bool = True,
        farthest: int = 1,
    ) -> Listing:
        """All candidates that satisfy the constraints; those that break a rule are counted, not listed.

        ``farthest``: fast domains in the largest block of the network, within which the order of the axes matters.
        """
        on_plan = [c for c in constraints if not c.column.startswith("in_")]
        meshes = kept(self.meshes(job, strategy), on_plan)
        whole = rows_of(meshes)
        legal, rejected = _legal(job, meshes, whole, [rule for rule in rules if rule.of_mesh])
        rejected_here = whole - len(legal)
        meshes = meshes if len(legal) == whole else meshes.take(legal)
        mesh_of, configurations = self.configurations(job, strategy, meshes)
        chosen = np.flatnonzero(_admitted(configurations, len(mesh_of), on_plan))
        mesh_of, configurations = mesh_of[chosen], configurations.take(chosen)
        legal, more = _legal(job, configurations, len(mesh_of), rules)
        rejected |= {name: rejected.get(name, 0) + count for name, count in more.items()}
        rejected_here += len(mesh_of) - len(legal)
        if len(legal) < len(mesh_of):
            mesh_of, configurations = mesh_of[legal], configurations.take(legal)
        on_placement = [c for c in constraints if c.column.startswith("in_")]
        placed, placements = self.placements(strategy, meshes, job.gpus, fast_domain, nearer_is_faster=nearer_is_faster)
        if farthest > 1:
            axes = (*strategy.tensor_axes, "dp", "pp")
            placed, placements = ordered(placed, placements, meshes, axes, farthest, self.order)
        picked = np.flatnonzero(_admitted(placements, len(placed), on_placement))
        placed, placements = placed[picked], placements.take(picked)
        count = np.bincount(placed, minlength=rows_of(meshes))
        return Listing(
            configurations=configurations,
            mesh_of=mesh_of,
            placements=placements,
            placement_start=np.cumsum(count) - count,
            placement_count=count,
            rejected=rejected,
            rejected_rows=rejected_here,
        )


def _admitted(plans: Plans, rows: int, constraints: Sequence[Constraint]) -> Array:
    admitted = np.ones(rows, dtype=bool)
    for constraint in constraints:
        admitted &= constraint.holds(plans)
    return admitted


def _legal(job: Job, plans: Plans, rows: int, rules: Sequence[Rule]) -> tuple[Array, dict[str, int]]:
    """Rows that break no rule, and the number of rows that break each rule."""
    mask = np.broadcast_to(np.asarray(broken_rules(job, plans, tuple(rules))), (rows,))
    rejected = {name: int(((mask >> i) & 1).sum()) for i, name in enumerate(NAMES)} if mask.any() else {}
    return np.flatnonzero(mask == 0), {name: count for name, count in rejected.items() if count}


def factorisations(n: int, parts: int) -> Array:
    """All ordered ways to write ``n`` as a product of ``parts`` factors, one a row, lexicographic.

    >>> factorisations(4, 2).tolist()
    [[1, 4], [2, 2], [4, 1]]
    """
    return _factorisations(n, parts)


@lru_cache(maxsize=512)
def _factorisations(n: int, parts: int) -> Array:
    if parts == 1:
        return np.array([[n]])
    blocks = []
    for first in divisors(n):
        rest = _factorisations(n // first, parts - 1)
        blocks.append(np.hstack([np.full((len(rest), 1), first), rest]))
    return np.vstack(blocks)


def dividing(degrees: Array, ways: Array) -> Array:
    """True for each (mesh, way) in which each factor of the way divides the degree of its axis.

    Args:
        degrees: degrees, (axes, meshes).
        ways: factors, (ways, axes), as :func:`factorisations` lists them.
    """
    divides = np.ones((degrees.shape[1], len(ways)), dtype=bool)
    for degree, inside in zip(degrees, ways.T, strict=True):
        divides &= degree[:, None] % inside == 0
    return divides


def panel_counts(hidden: int, least: int) -> list[int]:
    """Panels of a SUMMA product worth trying on a grid whose longer side is ``least``.

    The smallest count is one panel per rank of the longer side; counts then double as long as panels divide the hidden
    dimension and are at least 512 wide.

    >>> panel_counts(25600, 1)
    [1, 2, 4, 8, 16, 32]
    """
    if hidden / least < 512:
        return [least]
    doublings = max(int(np.ceil(np.log2(max(hidden // least, 1)))), 1)
    tried = [least * 2**k for k in range(doublings)]
    return [panels for panels in tried if hidden % panels == 0 and hidden // panels >= 512]


def panels_worth_trying(hidden: int, least: int) -> list[int]:
    """Panels of `panel_counts`, or one per rank if none of them divides the hidden dimension.

    >>> panels_worth_trying(4096, 3)
    [3]
    """
    return panel_counts(hidden, least) or [least]


def expand(index: Array, options: dict[int, list[int]], key: Array) -> tuple[Array, Array]:
    """Repeats each entry of ``index`` once per option of its key; returns the positions and the options."""
    counts = np.zeros(len(index), dtype=np.intp)
    for value, choices in options.items():
        counts[key == value] = len(choices)
    position = np.repeat(np.arange(len(index)), counts)
    offset = places_in_runs(counts)
    chosen = np.zeros(len(position), dtype=np.int64)
    repeated = key[position]
    for value, choices in options.items():
        here = repeated == value
        chosen[here] = np.asarray(choices)[offset[here]]
    return position, chosen


TABLE = 4_000_000
"""Entries of the table of meshes against placements that are computed at once."""
IDLE_SHARE = 1 / 9
"""Largest share of the devices in the domains of a plan that may stay idle: 8 of the 72 of an NVL72 rack."""

_LONE = ("etp", "sp", "shard", "recompute_every")
"""Columns that are one number for all candidates unless a space varies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedSpace(Space):
    """All ordered factorisations of the number of devices; the rules leave out those that make no sense."""

    name: ClassVar[str] = "corrected"
    recompute: tuple[int, ...] = (RECOMPUTE_CODES["none"], RECOMPUTE_CODES["full"])
    """Codes of recomputation that are tried."""
    zero: tuple[int, ...] = (1, 3)
    """ZeRO stages that are tried without a pipeline; only one of them if no ranks share weights."""
    piped_zero: tuple[int, ...] = ()
    """ZeRO stages that are tried with a pipeline; empty: those of :attr:`zero` up to 1."""
    vpp: tuple[int, ...] = ()
    """Virtual stages that are tried; empty: all that cut a stage's layers evenly."""
    micro_batch: tuple[int, ...] = ()
    """Micro-batches that are tried; empty: divisors of the share and powers of two."""
    panels: tuple[int, ...] = ()
    """SUMMA panels that are tried; empty: see `panels_worth_trying`."""
    ep: tuple[int, ...] = ()
    """Expert ranks that are tried for models with experts; empty: all powers of two that divide the experts."""
    etp: tuple[int, ...] = (1,)
    """Tensor ranks of an expert that are tried."""
    sp: tuple[int, ...] = (1,)
    shard: tuple[int, ...] = (0,)
    recompute_every: tuple[int, ...] = (1,)
    launched: bool = False
    """True if each mesh has only the placement in which launchers number its ranks."""
    order: tuple[str, ...] | None = None
    """Order of the axes for launchers and over a network; None: that of launchers, and over a network all orders."""

    def fixed(self, values: Mapping[str, int]) -> CorrectedSpace:
        """The space with some columns at one value each."""
        known: dict[str, Any] = {name: (value,) for name, value in values.items() if name in self.__slots__}
        if "zero" in known:
            known["piped_zero"] = known["zero"]
        return replace(self, **known)

    def with_habits(self, habits: Habits) -> CorrectedSpace:
        """The space with the ZeRO stages of a framework; its default stage if it has none of the tried stages."""
        plain = tuple(stage for stage in self.zero if stage in habits.zero_stages) or (habits.zero,)
        return replace(self, zero=plain, piped_zero=tuple(sorted({piped_stage(stage, 2) for stage in plain})))

    def with_parts(self, parts: str) -> CorrectedSpace:
        """The space that also tries recomputation of ``parts``, before recomputation of whole layers."""
        code = sum(RECOMPUTE_CODES[name] for name in parts.split("+"))
        return replace(self, recompute=(*self.recompute[:1], code, *self.recompute[1:]))

    @property
    def _piped_zero(self) -> tuple[int, ...]:
        return self.piped_zero or tuple(stage for stage in self.zero if stage <= 1)

    def meshes(self, job: Job, strategy: Strategy) -> Plans:
        """Ordered factorisations of the number of devices over the strategy's axes, ``pp`` and ``dp``."""
        axes = (*strategy.tensor_axes, "pp", "dp")
        table = factorisations(job.gpus, len(axes))
        return Plans(**{axis: table[:, i] for i, axis in enumerate(axes)})

    def configurations(self, job: Job, strategy: Strategy, meshes: Plans) -> tuple[Array, Plans]:
        """Micro-batches (divisors of the share, powers of two), recomputation, ZeRO stage, SUMMA panels."""
        share = np.asarray(replica_sequences(job.global_batch, np.asarray(meshes.dp)))
        options = {int(s): self._micro_batches(int(s)) for s in np.unique(share, return_index=True)[0]}
        mesh_of, micro_batch = expand(np.arange(len(share)), options, share)
        extra: dict[str, Array] = {"micro_batch": micro_batch}
        for column, choices in self._choices(job, strategy, meshes).items():
            position, chosen = expand(mesh_of, dict(enumerate(choices[1])), choices[0][mesh_of])
            mesh_of, extra = mesh_of[position], {n: c[position] for n, c in extra.items()} | {column: chosen}
        lone = {name: getattr(self, name)[0] for name in _LONE}
        configurations = meshes.take(mesh_of).with_columns(lone | extra)
        return self._without_copies(job, strategy, mesh_of, configurations)

    def _without_copies(
        self, job: Job, strategy: Strategy, mesh_of: Array, configurations: Plans
    ) -> tuple[Array, Plans]:
        """Configurations without duplicates that differ only in a ZeRO stage that shards nothing.

        Without experts there are no such configurations; with them it depends on the ranks of the experts.
        """
        if job.model.experts is None or len({*self.zero, *self._piped_zero}) == 1:
            return mesh_of, configurations
        lone = nobody_shares(job, strategy, configurations)
        first = np.where(np.asarray(configurations.pp) > 1, (*self._piped_zero, *self.zero)[0], self.zero[0])
        chosen = np.flatnonzero(~(lone & (np.asarray(configurations.zero) != first)))
        kept = configurations.take(chosen)
        zero = np.where(lone[chosen], self._lone_zero, np.asarray(kept.zero))
        return mesh_of[chosen], kept.with_columns({"zero": zero})

    def _micro_batches(self, share: int) -> list[int]:
        return [m for m in self.micro_batch if m <= share] if self.micro_batch else micro_batch_choices(share)

    def _choices(self, job: Job, strategy: Strategy, meshes: Plans) -> dict[str, tuple[Array, list[list[int]]]]:
        """Column -> (kind of each mesh, choices of each kind)."""
        pp = np.asarray(meshes.pp)
        depths, depth = np.unique(pp, return_inverse=True)
        everywhere = np.zeros(len(pp), dtype=np.int64)
        out: dict[str, tuple[Array, list[list[int]]]] = {
            "recompute": (everywhere, [list(self.recompute)]),
            "zero": self._zero_choices(job, strategy, meshes),
            "vpp": (depth, [list(self.vpp) or virtual_stages(job.model.layers, int(p)) for p in depths]),
        }
        for name in _LONE:
            if len(getattr(self, name)) > 1:
                out[name] = (everywhere, [list(getattr(self, name))])
        if strategy.name == "2d":
            longer = np.maximum(np.asarray(meshes.tp), np.asarray(meshes.tp2))
            values, kind = np.unique(longer, return_inverse=True)
            tried = [list(self.panels) or panels_worth_trying(job.model.hidden, int(s)) for s in values]
            out["panels"] = (kind, tried)
        if job.model.experts is not None:
            out["ep"] = self._expert_choices(job, meshes)
        return out

    def _zero_choices(self, job: Job, strategy: Strategy, meshes: Plans) -> tuple[Array, list[list[int]]]:
        """ZeRO stages of meshes without a pipeline, with one, and of meshes whose ranks share no weights."""
        kind = np.where(np.asarray(meshes.pp) > 1, 1, 0)
        if job.model.experts is None:
            kind = np.where(nobody_shares(job, strategy, meshes), 2, kind)
        return kind, [list(self.zero), list(self._piped_zero), [self._lone_zero]]

    @property
    def _lone_zero(self) -> int:
        return (*self._piped_zero, *self.zero)[0]

    def _expert_choices(self, job: Job, meshes: Plans) -> tuple[Array, list[list[int]]]:
        """Expert ranks: powers of two that divide the experts and the ranks of a mesh without its stages."""
        experts = 1 if job.model.experts is None else job.model.experts.experts
        ranks, kind = np.unique(np.asarray(job.gpus // np.asarray(meshes.pp)), return_inverse=True)
        tried = list(self.ep) or [n for n in divisors(experts) if n & (n - 1) == 0]
        return kind, [[n for n in tried if r % n == 0] or [1] for r in ranks.tolist()]

    def placements(
        self, strategy: Strategy, meshes: Plans, gpus: int, fast_domain: int, *, nearer_is_faster: bool
    ) -> tuple[Array, Plans]:
        """Placements that fit into the domains, without dominated ones.

        If links inside a domain are no slower than links between domains, a ring with more ranks per domain is never
        slower: a placement that leaves room for more ranks of some axis is dominated.
        """
        axes = (*strategy.tensor_axes, "dp", "pp")
        if self.launched:
            degrees_of = {axis: np.asarray(getattr(meshes, axis)) for axis in axes}
            inside = launch_order(degrees_of, gpus, fast_domain, self.order or AXES)
            return np.arange(rows_of(meshes)), Plans(**{f"in_{axis}": ranks for axis, ranks in inside.items()})
        degrees = np.stack([np.asarray(getattr(meshes, axis)) for axis in axes])
        ways = partial_fillings(gpus, fast_domain, len(axes))
        ways = ways[_room(ways, gpus, fast_domain)]
        rows = max(TABLE // len(ways), 1)
        placed, way = [], []
        for start in range(0, degrees.shape[1], rows):
            here = _listed(degrees[:, start : start + rows], ways, gpus, fast_domain, nearer_is_faster)
            mesh, listed = np.nonzero(here)
            placed.append(mesh + start)
            way.append(listed)
        index, chosen = (np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64) for parts in (placed, way))
        return index, Plans(**{f"in_{a}": ways[chosen, i] for i, a in enumerate(axes)})


def _listed(degrees: Array, ways: Array, gpus: int, fast_domain: int, nearer_is_faster: bool) -> Array:
    """True for each mesh (row) and placement (column) that are listed together."""
    fits = dividing(degrees, ways)
    if not nearer_is_faster:
        return fits
    maximal = fits.copy()
    size = ways.prod(axis=1)
    for prime in _primes(gpus):
        for i, degree in enumerate(degrees):
            larger = ways.copy()
            larger[:, i] *= prime
            room = (size * prime <= fast_domain) & _room(larger, gpus, fast_domain)
            maximal &= ~(fits & room & (degree[:, None] % larger[:, i] == 0))
    return maximal


def _room(ways: Array, gpus: int, fast_domain: int) -> Array:
    """True for each placement whose blocks all fit into the domains that hold ``gpus`` devices.

    Devices that fill their domains exactly leave none idle: 2304 devices in 32 domains of 72 have no room for 36 blocks
    of 64. Other counts may leave one device in nine idle, as 2048 devices in 32 domains of 72 do.
    """
    size = ways.prod(axis=1)
    least = int(ceil_div(gpus, fast_domain))
    domains = least if gpus % fast_domain == 0 else max(least, int(gpus / (1 - IDLE_SHARE) // fast_domain))
    fits: Array = (fast_domain // np.maximum(size, 1)) * domains >= gpus // np.maximum(size, 1)
    return fits


def nobody_shares(job: Job, strategy: Strategy, plans: Plans) -> Array:
    """True if no two ranks hold the same weights, so that all ZeRO stages are the same plan."""
    alone: Array = np.asarray(strategy.gradient_ranks(plans)) == 1
    return alone if job.model.experts is None else np.logical_and(alone, np.asarray(plans.edp) == 1)


def virtual_stages(layers: int, stages: int) -> list[int]:
    """Virtual stages per rank that cut the layers of a full stage evenly; both ends of the model may lack layers.

    >>> virtual_stages(128, 32), virtual_stages(128, 1), virtual_stages(126, 16), virtual_stages(61, 16)
    ([1, 2, 4], [1], [1, 2, 4, 8], [1, 2])
    """
    if stages == 1:
        return [1]
    full, _ = virtual_stage(layers, stages, 1)
    return [v for v in divisors(int(full)) if v == 1 or equal_but_for_ends(*virtual_stage(layers, stages, v))]


def micro_batch_choices(share: int) -> list[int]:
    """Divisors of a replica's share, and the powers of two below it.

    >>> micro_batch_choices(6)
    [1, 2, 3, 4, 6]
    """
    powers = {1 << k for k in range(share.bit_length()) if 1 << k <= share}
    return sorted(powers | set(divisors(share)))


def partial_fillings(gpus: int, fast_domain: int, parts: int) -> Array:
    """All tuples of divisors of ``gpus`` whose product divides ``gpus`` and fits the domain.

    >>> partial_fillings(4, 2, 2).tolist()
    [[1, 1], [1, 2], [2, 1]]
    """
    sizes = [d for d in divisors(gpus) if d <= fast_domain]
    return np.vstack([factorisations(size, parts) for size in sizes])


def _primes(n: int) -> list[int]:
    return [d for d in divisors(n) if d > 1 and len(divisors(d)) == 2]
