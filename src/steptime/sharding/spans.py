r"""Costs of every run of units as a stage on one sub-mesh: time per micro-batch and per step, memory, recomputation.

Let $c$ be the computation of a micro-batch, $r$ its traffic of activations, $w$ its traffic of weights, $d$ the
reduction of gradients and $o$ the optimiser, all in seconds and summed over the units of a stage. A micro-batch takes
$t = r + \max(c, w)$, and each step takes once

$$g = o + [d + w - c]_+ - [w - c]_+$$

if traffic of weights and gradients overlaps with computation, so that $t + g = r + \max(c, w + d) + o$ for a single
micro-batch. Without overlap $t = r + c + w$ and $g = o + d$; a partial overlap is the weighted mean of both. A stage
with $f$ micro-batches in flight holds

$$B = B_{\text{held}} + \max_u B_{\text{working},u} + f\,(B_{\text{kept}} + B_{\text{entering}})$$

If that is too much, the fewest sufficient blocks are recomputed in the backward pass: each keeps only what enters the
next unit, and one of them at a time is in memory in full.
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
"""Traffic that overlaps with computation: that of weights and gradients, all, or none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Every run of units as one stage, [first unit, unit after the last]; entries of empty runs are 0."""

    costs: UnitCosts
    micro_batches: int
    limit_bytes: float
    recompute: bool
    """Blocks may be recomputed."""
    share: float
    """Share of the traffic of weights and gradients that may overlap."""
    computing_s: Array
    others_s: Array
    weights_s: Array
    gradients_s: Array
    update_s: Array
    again_s: Array
    """Seconds that recomputation of one block adds."""
    message_s: Array
    """Seconds of a message from the stage before."""
    far_message_s: Array
    """Seconds of a message from the stage before in another fast domain."""
    held_bytes: Array
    working_bytes: Array
    kept_bytes: Array
    """Bytes kept for one micro-batch, with its entering activations."""
    saved_bytes: Array
    """Bytes of each micro-batch that recomputation of one block saves."""
    rebuilt_bytes: Array
    blocks: Array
    """Blocks of the run."""

    def recomputed(self, in_flight: float) -> Array:
        """Fewest recomputed blocks with which a stage fits; infinite: it does not fit."""
        over = self.memory_bytes(in_flight, np.zeros(self.blocks.shape)) - self.limit_bytes
        room = np.where(self.saved_bytes > 0, in_flight * self.saved_bytes, inf)
        need = np.where(over > 0, np.ceil((over + self.rebuilt_bytes) / room - 1e-9), 0.0)
        need = np.where((over > 0) & ~np.isfinite(room), inf, need)
        found: Array = np.where(need > (self.blocks if self.recompute else 0), inf, need)
        return found

    def memory_bytes(self, in_flight: float, again: Array) -> Array:
        """Bytes of one device with a number of recomputed blocks."""
        total: Array = (
            self.held_bytes
            + self.working_bytes
            + in_flight * (self.kept_bytes - again * self.saved_bytes)
            + np.where(again > 0, self.rebuilt_bytes, 0.0)
        )
        return total

    def micro_batch_s(self, again: Array, overlap: Overlap = "data") -> Array:
        """Seconds of the forward and backward passes of a micro-batch."""
        c, r, w = self.computing_s + again * self.again_s, self.others_s, self.weights_s
        data = r + self.share * np.maximum(c, w) + (1 - self.share) * (c + w)
        ways: dict[Overlap, Array] = {"data": data, "all": np.maximum(c, r + w), "none": c + r + w}
        return ways[overlap]

    def once_s(self, overlap: Overlap = "data") -> Array:
        """Seconds once in a step: exposed reduction of gradients, and the optimiser."""
        c, w, d = self.computing_s, self.weights_s, self.gradients_s
        if overlap == "none":
            return self.update_s + d
        exposed = np.maximum(d + w - c, 0) - np.maximum(w - c, 0)
        total: Array = self.update_s + self.share * exposed + (1 - self.share) * d
        return total

    def priced(self, in_flight: float, overlap: Overlap) -> SpanCosts:
        """Costs of stages with n = `in_flight` micro-batches in flight; a slow link delays each micro-batch."""
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
    """Costs of every run of units; messages cross fast domains if two sub-meshes exceed one domain.

    Args:
        costs: costs of the units.
        micro_batches: micro-batches of a step.
        limit_bytes: memory of a device for tensors.
        recompute: blocks may be recomputed.
        branch: only activations that a run itself reads enter it; those for later units take another way.
        share: share of the traffic of weights and gradients that may overlap.
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
    """Sum over each run; 0 for empty runs."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(_runs(len(values)), total[None, :] - total[:-1, None], 0.0)


def _most(values: Array) -> Array:
    """Maximum over each run; 0 for empty runs."""
    count = len(values)
    at = np.where(np.arange(count)[None, :] >= np.arange(count)[:, None], values[None, :], -inf)
    out = np.zeros((count, count + 1))
    out[:, 1:] = np.maximum.accumulate(at, axis=1)
    return np.where(_runs(count), out, 0.0)


def _runs(count: int) -> Array:
    """Mask of the pairs of first unit and end that are a run."""
    out: Array = np.arange(count + 1)[None, :] > np.arange(count)[:, None]
    return out


def _shared(costs: UnitCosts, *, far: bool) -> tuple[Array, Array]:
    """Bytes of parameters that several units read, and seconds to exchange their gradients with other stages."""
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
