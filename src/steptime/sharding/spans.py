r"""Stages of any run of units on one sub-mesh: seconds of a micro-batch and once in a step, memory, recomputation.

With $c$ the computation of a micro-batch, $r$ its traffic of activations, $w$ of weights, $d$ the reduction of
gradients and $o$ the optimiser, sums over the units of a stage, a micro-batch takes $t = r + \max(c, w)$ and a step
once

$$g = o + [d + w - c]_+ - [w - c]_+$$

where traffic of weights and gradients overlaps with computation, so that $t + g = r + \max(c, w + d) + o$ for a single
micro-batch; where a share of it does, that share of both; without overlap
$t = r + c + w$ and $g = o + d$. A stage of $f$ micro-batches in flight holds

$$B = B_{\text{held}} + \max_u B_{\text{working},u} + f\,(B_{\text{kept}} + B_{\text{entering}})$$

and if that is too much, the fewest blocks that do run again in the backward pass: of each only what enters the next
unit stays, and one of them at a time is there in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from steptime.estimate.communication import message_time_s, pair_of
from steptime.num import Array
from steptime.sharding.stages import SpanCosts
from steptime.sharding.units import BACKWARD, UnitCosts

Overlap = Literal["data", "all", "none"]
"""What overlaps with computation: traffic of weights and gradients, all traffic, or nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Every run of units as one stage, [first unit, unit after the last]; sums from an empty run on are 0."""

    costs: UnitCosts
    micro_batches: int
    limit_bytes: float
    recompute: bool
    """Whether blocks may run again."""
    share: float
    """Of traffic of weights and gradients, what may overlap."""
    computing_s: Array
    others_s: Array
    weights_s: Array
    gradients_s: Array
    update_s: Array
    again_s: Array
    """What one block that runs again adds."""
    message_s: Array
    """A message from the stage before."""
    far_message_s: Array
    """The same from another fast domain."""
    held_bytes: Array
    working_bytes: Array
    kept_bytes: Array
    """Of one micro-batch, with what enters."""
    saved_bytes: Array
    """What one block that runs again saves of each micro-batch."""
    rebuilt_bytes: Array
    blocks: Array
    """Blocks of the run."""

    def recomputed(self, in_flight: float) -> Array:
        """Fewest blocks that run again so that a stage fits; infinite: none do."""
        over = self.memory_bytes(in_flight, np.zeros(self.blocks.shape)) - self.limit_bytes
        room = np.where(self.saved_bytes > 0, in_flight * self.saved_bytes, inf)
        need = np.where(over > 0, np.ceil((over + self.rebuilt_bytes) / room - 1e-9), 0.0)
        need = np.where((over > 0) & ~np.isfinite(room), inf, need)
        found: Array = np.where(need > (self.blocks if self.recompute else 0), inf, need)
        return found

    def memory_bytes(self, in_flight: float, again: Array) -> Array:
        """Bytes of one device with a number of blocks that run again."""
        total: Array = (
            self.held_bytes
            + self.working_bytes
            + in_flight * (self.kept_bytes - again * self.saved_bytes)
            + np.where(again > 0, self.rebuilt_bytes, 0.0)
        )
        return total

    def micro_batch_s(self, again: Array, overlap: Overlap = "data") -> Array:
        """Forward and backward of a micro-batch."""
        c, r, w = self.computing_s + again * self.again_s, self.others_s, self.weights_s
        data = r + self.share * np.maximum(c, w) + (1 - self.share) * (c + w)
        ways: dict[Overlap, Array] = {"data": data, "all": np.maximum(c, r + w), "none": c + r + w}
        return ways[overlap]

    def once_s(self, overlap: Overlap = "data") -> Array:
        """Reduction of gradients, as far as it does not overlap, and the optimiser."""
        c, w, d = self.computing_s, self.weights_s, self.gradients_s
        if overlap == "none":
            return self.update_s + d
        shown = np.maximum(d + w - c, 0) - np.maximum(w - c, 0)
        exposed: Array = self.update_s + self.share * shown + (1 - self.share) * d
        return exposed

    def priced(self, in_flight: float, overlap: Overlap) -> SpanCosts:
        """Costs of stages with n = `in_flight` micro-batches in flight; a slow link holds up each micro-batch."""
        again = self.recomputed(in_flight)
        legal = np.isfinite(again) & _runs(len(self.blocks))
        again = np.where(legal, again, 0.0)
        t, g = self.micro_batch_s(again, overlap), self.once_s(overlap)
        busy = (self.micro_batches - 1) * np.maximum(t, self.message_s) + g
        return SpanCosts(np.where(legal, t + 2 * self.message_s, inf), np.where(legal, busy, inf))

    def passes_s(self, first: int, end: int, again: float, overlap: Overlap) -> tuple[float, float, float]:
        """Seconds of the forward pass, gradients of inputs and of weights; traffic of weights in equal shares."""
        parts = (self.costs.computing_s + self.costs.others_s)[:, first:end].sum(axis=1)
        parts[BACKWARD] += again * self.again_s[first, end]
        whole = float(self.micro_batch_s(np.full(self.blocks.shape, again), overlap)[first, end])
        forward, backward, weights = parts * (whole / (parts.sum() or 1.0))
        return float(forward), float(backward), float(weights)


def spans_of(
    costs: UnitCosts,
    *,
    micro_batches: int,
    limit_bytes: float,
    recompute: bool,
    branch: bool = False,
    share: float = 1.0,
) -> Spans:
    """Every stage that shardings give; messages come from another fast domain where two sub-meshes exceed one.

    Args:
        costs: of the units.
        micro_batches: of a step.
        limit_bytes: memory of a device for tensors.
        recompute: whether blocks may run again.
        branch: only what a run reads itself enters it; what passes to later units goes another way.
        share: of traffic of weights and gradients, what may overlap.
    """
    units, machine = costs.units, costs.plan.built.mesh.machine
    crosses = 2 * costs.devices > machine.fast_domain
    whole = np.array([each.size_bytes for each in units.flow.program.storages], float)
    shape = (units.count, units.count + 1)
    sent = units.read_bytes(whole) if branch else np.broadcast_to(units.boundary_bytes[:, None], shape)
    entering = costs.read_bytes if branch else costs.entering_bytes[:, None]
    near_s, far_s = (
        np.where(sent > 0, each, 0.0)
        for each in message_time_s(machine, sent / costs.devices, pair_of(machine, 0, 2 * costs.devices - 1))
    )
    shared_bytes, shared_s = _shared(costs, far=crosses)
    forward = costs.again_s
    saved = np.where(units.blocks, costs.kept_bytes - costs.passed_bytes, 0.0)
    return Spans(
        costs=costs,
        micro_batches=micro_batches,
        limit_bytes=limit_bytes,
        recompute=recompute,
        share=share,
        computing_s=_sums(costs.computing_s.sum(axis=0)),
        others_s=_sums(costs.others_s.sum(axis=0)),
        weights_s=_sums(costs.weights_s),
        gradients_s=_sums(costs.gradients_s) + shared_s,
        update_s=_sums(costs.update_s),
        again_s=_most(np.where(units.blocks, forward, 0.0)),
        message_s=far_s if crosses else near_s,
        far_message_s=far_s,
        held_bytes=_sums(costs.held_bytes) + shared_bytes,
        working_bytes=_most(costs.working_bytes),
        kept_bytes=_sums(costs.kept_bytes) + entering,
        saved_bytes=np.nan_to_num(-_most(np.where(units.blocks, -saved, -inf)), posinf=0.0, neginf=0.0),
        rebuilt_bytes=_most(saved),
        blocks=_sums(units.blocks.astype(float)),
    )


def _sums(values: Array) -> Array:
    """Sums of runs; nothing from an end before the start on."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(_runs(len(values)), total[None, :] - total[:-1, None], 0.0)


def _most(values: Array) -> Array:
    """The largest of each run."""
    count = len(values)
    at = np.where(np.arange(count)[None, :] >= np.arange(count)[:, None], values[None, :], -inf)
    out = np.zeros((count, count + 1))
    out[:, 1:] = np.maximum.accumulate(at, axis=1)
    return np.where(_runs(count), out, 0.0)


def _runs(count: int) -> Array:
    """Which pairs of a first unit and a unit after the last are a run."""
    out: Array = np.arange(count + 1)[None, :] > np.arange(count)[:, None]
    return out


def _shared(costs: UnitCosts, *, far: bool) -> tuple[Array, Array]:
    """Copies of parameters that several units read, and the exchange of their gradients with the other stages."""
    units, machine = costs.units, costs.plan.built.mesh.machine
    held, seconds = (np.zeros((units.count, units.count + 1)) for _ in range(2))
    near_s, far_s = message_time_s(machine, costs.exchanged_bytes, pair_of(machine, 0, 2 * costs.devices - 1))
    each = zip(units.held[1], costs.shared_bytes, np.atleast_1d(far_s if far else near_s), strict=True)
    for shared, size, exchange_s in each:
        here = _sums(np.bincount(shared.units, minlength=units.count).astype(float))
        held += np.where(here > 0, size, 0.0)
        if shared.gradient >= 0:
            seconds += np.where((here > 0) & (here < len(shared.units)), exchange_s, 0.0)
    return held, seconds
