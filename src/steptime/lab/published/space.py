"""The published search space, candidate for candidate (arXiv 2410.00273, execution.py of its repository)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime.lab.published.defects import Defects
from steptime.num import Array, divisors
from steptime.plan.job import Job, replica_sequences
from steptime.plan.plans import Plans
from steptime.plan.space import (
    CorrectedSpace,
    Space,
    dividing,
    expand,
    factorisations,
    micro_batch_choices,
    panel_counts,
)
from steptime.plan.strategies import Strategy

LEAST_WIDTH = 128
"""A shard of the hidden dimension, of 3 x hidden, or of the sequence is at least so wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpace(Space):
    """Degrees divide everything, and a fast domain is filled exactly, as far as the defects say so."""

    name: ClassVar[str] = "published"
    defects: Defects = Defects()  # noqa: RUF009 - frozen

    def fixed(self, values: Mapping[str, int]) -> PublishedSpace:
        """The space as published: constraints select from it."""
        return self

    def meshes(self, job: Job, strategy: Strategy) -> Plans:
        """Tensor grids, then pipelines that divide the layers, then replicas that divide the batch."""
        grids = self._grids(job, strategy)
        columns: list[tuple[int, int, int, int]] = []
        for tp, second in grids:
            rest = job.gpus // (tp * second)
            for pp in self._stages(rest, job.model.layers):
                dp = rest // pp
                if dp <= job.global_batch and (job.global_batch % dp == 0 or not self.defects.equal_shares):
                    columns.append((tp, second, pp, dp))
        table = np.array(columns, dtype=np.int64).reshape(-1, 4)
        second_axis = strategy.tensor_axes[-1]
        seconds = {second_axis: table[:, 1]} if second_axis != "tp" else {}
        return Plans(tp=table[:, 0], pp=table[:, 2], dp=table[:, 3], **seconds)

    def _stages(self, devices: int, layers: int) -> list[int]:
        if self.defects.equal_stages:
            return divisors(math.gcd(devices, layers))
        return [pp for pp in divisors(devices) if pp <= layers]

    def _grids(self, job: Job, strategy: Strategy) -> list[tuple[int, int]]:
        model, out = job.model, []
        for tp in divisors(job.gpus):
            if model.heads % tp or model.hidden % tp:
                continue
            if strategy.name == "1d":
                if 3 * model.hidden // tp >= LEAST_WIDTH:
                    out.append((tp, 1))
            elif model.hidden // tp >= LEAST_WIDTH:
                out += [(tp, tp2) for tp2 in divisors(job.gpus // tp) if self._second(job, strategy, tp2)]
        return out

    @staticmethod
    def _second(job: Job, strategy: Strategy, ranks: int) -> bool:
        whole = strategy.name != "2d" or job.model.hidden % ranks == 0
        return whole and job.seq_len // ranks >= LEAST_WIDTH

    def configurations(self, job: Job, strategy: Strategy, meshes: Plans) -> tuple[Array, Plans]:
        """Micro-batches that divide the share and spread over the sequence axis; SUMMA panels."""
        tp, second = np.asarray(meshes.tp), np.asarray(getattr(meshes, strategy.tensor_axes[-1]))
        spread = {"1d": tp, "context": tp * second, "2d": second}[strategy.name]
        share = replica_sequences(job.global_batch, np.asarray(meshes.dp))
        choices = divisors if self.defects.equal_shares else micro_batch_choices
        shares = {int(n): choices(int(n)) for n in np.unique(share)}
        sizes = np.array(sorted(set().union(*shares.values())), dtype=np.int64)
        listed = {n: np.isin(sizes, sizes_of_share) for n, sizes_of_share in shares.items()}
        fits = (sizes * job.seq_len) % spread[:, None] == 0
        for n, admitted in listed.items():
            fits[share == n] &= admitted
        mesh_of, size_of = np.nonzero(fits)
        micro_batch, panels = sizes[size_of], {}
        if strategy.name == "2d":
            longer = np.maximum(tp, second)
            options = {int(s): panel_counts(job.model.hidden, int(s)) for s in np.unique(longer)}
            position, chosen = expand(mesh_of, options, longer[mesh_of])
            mesh_of, micro_batch, panels = mesh_of[position], micro_batch[position], {"panels": chosen}
        return mesh_of, meshes.take(mesh_of).with_columns({"micro_batch": micro_batch, **panels})

    def placements(
        self, strategy: Strategy, meshes: Plans, gpus: int, fast_domain: int, *, nearer_is_faster: bool
    ) -> tuple[Array, Plans]:
        """Everything inside if it fits; else all ways to fill a domain exactly, or as far as possible."""
        if not self.defects.exact_filling:
            return CorrectedSpace().placements(strategy, meshes, gpus, fast_domain, nearer_is_faster=nearer_is_faster)
        axes = (*strategy.tensor_axes, "dp", "pp")
        degrees = np.stack([np.asarray(getattr(meshes, axis)) for axis in axes])
        if gpus <= fast_domain:
            return np.arange(degrees.shape[1]), Plans(**{f"in_{a}": d for a, d in zip(axes, degrees, strict=True)})
        ways = factorisations(fast_domain, len(axes))
        placed, way = np.nonzero(dividing(degrees, ways))
        return placed, Plans(**{f"in_{a}": ways[way, i] for i, a in enumerate(axes)})
