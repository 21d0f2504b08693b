"""Spaces of plans: which meshes, which micro-batches, which placements; each a block of columns.

A candidate is a mesh (degrees), a configuration of that mesh (micro-batch, panels, recomputation, ZeRO stage)
and a placement of the mesh on the fast domains. Memory does not depend on the placement, so the three are listed
apart and multiplied only where a configuration fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from steptime.num import Array, divisors, places_in_runs
from steptime.plan.constraints import Constraint, kept
from steptime.plan.job import Job
from steptime.plan.legality import NAMES, Rule, broken_rules
from steptime.plan.method import Strategy
from steptime.plan.plans import Plans, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All candidates of a job under one strategy, not yet multiplied."""

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
    """Reason -> meshes and configurations that it rules out."""
    rejected_rows: int
    """Meshes and configurations that were ruled out, each counted once whatever its placements."""

    @property
    def multiplicity(self) -> Array:
        """Placements of each configuration."""
        counts: Array = self.placement_count[self.mesh_of]
        return counts

    @property
    def candidates(self) -> int:
        """Configurations times placements, and each mesh or configuration that was ruled out."""
        return int(self.multiplicity.sum()) + self.rejected_rows


class Space(ABC):
    """Lists meshes, configurations and placements."""

    name: ClassVar[str]

    @abstractmethod
    def fixed(self, values: Mapping[str, int]) -> Space:
        """The space in which some columns have one value each."""

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

        ``nearer_is_faster``: links inside a domain are no slower than links between domains, so that a placement which
        could have more ranks inside is dominated and need not be listed.
        """

    def list(
        self, job: Job, strategy: Strategy, fast_domain: int, rules: Sequence[Rule],
        constraints: Sequence[Constraint] = (), *, nearer_is_faster: bool = True,
    ) -> Listing:  # fmt: skip
        """All candidates that the constraints admit; those that break a rule are counted, not listed."""
        on_plan = [c for c in constraints if not c.column.startswith("in_")]
        on_placement = [c for c in constraints if c.column.startswith("in_")]
        meshes = kept(self.meshes(job, strategy), on_plan)
        whole = rows_of(meshes)
        legal, rejected = _legal(job, meshes, whole, rules)
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
        placed, placements = self.placements(strategy, meshes, job.gpus, fast_domain, nearer_is_faster=nearer_is_faster)
        picked = np.flatnonzero(_admitted(placements, len(placed), on_placement))
        placed, placements = placed[picked], placements.take(picked)
        count = np.bincount(placed, minlength=rows_of(meshes))
        return Listing(
            configurations=configurations, mesh_of=mesh_of, placements=placements,
            placement_start=np.cumsum(count) - count, placement_count=count,
            rejected=rejected, rejected_rows=rejected_here,
        )  # fmt: skip


def _admitted(plans: Plans, rows: int, constraints: Sequence[Constraint]) -> Array:
    admitted = np.ones(rows, dtype=bool)
    for constraint in constraints:
        admitted &= constraint.holds(plans)
    return admitted


def _legal(job: Job, plans: Plans, rows: int, rules: Sequence[Rule]) -> tuple[Array, dict[str, int]]:
    """Rows that break no rule, and how many break each."""
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
    """Whether each factor of a way divides the degree that it is of: (meshes, ways).

    Args:
        degrees: (axes, meshes).
        ways: (ways, axes), as :func:`factorisations` lists them.
    """
    divides = np.ones((degrees.shape[1], len(ways)), dtype=bool)
    for degree, inside in zip(degrees, ways.T, strict=True):
        divides &= degree[:, None] % inside == 0
    return divides


def panel_counts(hidden: int, least: int) -> list[int]:
    """Panels of a SUMMA product worth trying on a grid whose longer side is ``least``.

    The least is one panel per rank of the longer side; then doubling, as long as panels divide the hidden dimension
    and are at least 512 wide.

    >>> panel_counts(25600, 1)
    [1, 2, 4, 8, 16, 32]
    """
    if hidden / least < 512:
        return [least]
    doublings = max(int(np.ceil(np.log2(max(hidden // least, 1)))), 1)
    tried = [least * 2**k for k in range(doublings)]
    return [panels for panels in tried if hidden % panels == 0 and hidden // panels >= 512]


def panels_worth_trying(hidden: int, least: int) -> list[int]:
    """As `panel_counts`, but at least one panel per rank where none of those divides the hidden dimension.

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
