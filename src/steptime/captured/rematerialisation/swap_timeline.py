"""Seconds and bytes of a step that moves activations to the host: one place per segment, and a timeline of two links.

Each segment has a place for what its backward reads, its input $x_i$ and its saved activations $s_i$:

=================== ================================== ================= ================= =========================
place               stays on the device                goes to the host  runs again        bytes freed beside ``keep``
=================== ================================== ================= ================= =========================
``keep``            $x_i + s_i$                        nothing           no                0
``recompute``       $x_i$                              nothing           yes               $s_i$
``swap``            nothing                            $x_i + s_i$       no                $x_i + s_i$
``swap_input``      nothing                            $x_i$             yes               $x_i + s_i$
=================== ================================== ================= ================= =========================

The input of segment 0 belongs to the caller and stays. The rules of time:

* Compute is one queue: forward 0 ... N - 1, backward N - 1 ... 0, a segment that runs again just before its backward.
* Transfers out are one queue in forward order; one starts when its forward has ended, and frees its bytes when it ends.
* Transfers in are one queue in backward order, beside those out. One starts when its own transfer out has ended, and
  not before a backward from which on its bytes, and those fetched before it, fit beside every later peak.
* A forward or backward starts when its peak fits beside what lives, and a backward when its transfer in has ended.

Nothing else waits; ``stall_s`` is the sum of the waits. All transfers run at the full rate of their link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from steptime.captured.rematerialisation.chain import Chain, check_number, columns_of
from steptime.num import Array


class Place(StrEnum):
    """Where a segment's activations are between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"
    SWAP_INPUT = "swap_input"


MOVED = (Place.SWAP, Place.SWAP_INPUT)
AGAIN = (Place.RECOMPUTE, Place.SWAP_INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bytes per second between device and host, each way at once.

    Raises :class:`~steptime.errors.FieldError` where a rate is not above 0.
    """

    out_Bps: float
    in_Bps: float

    def __post_init__(self) -> None:
        check_number("host link", "out_Bps", self.out_Bps, positive=True)
        check_number("host link", "in_Bps", self.in_Bps, positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """What one place per segment costs."""

    places: tuple[Place, ...]
    fits: bool
    """Whether every peak fits in the limit; the times mean nothing where it does not."""
    time_s: float
    stall_s: float
    """Time that compute waits for transfers or for memory: the exposed part of the transfers."""
    recomputed_s: float
    moved_bytes: float
    """Bytes that go out, and come back."""
    peak_bytes: float
    """Largest number of bytes at a start of a forward or backward, those on their way back counted in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainArrays:
    """What the timeline reads of a chain: per segment, at [again] where it depends on whether it runs again."""

    x: Array
    """Input, 0 for the first: what can leave the device."""
    saved: Array
    forward_s: Array
    backward_s: Array
    forward: tuple[Array, Array]
    """Peak of the forward beyond its input."""
    backward: tuple[Array, Array]
    """Peak of the backward, a second forward included, beyond its input."""
    start_bytes: float


def arrays_of(chain: Chain) -> ChainArrays:
    """The peaks of :func:`~steptime.captured.rematerialisation.simulate.simulate`, per segment."""
    n, one = len(chain), columns_of(chain)
    x, reads = one.x, one.backward_peak
    saves = x[1:] + one.saved + one.saving
    beside = np.append(one.d[1:n], x[n])
    inputs = x[:-1].copy()
    inputs[0] = 0.0
    return ChainArrays(
        x=inputs, saved=one.saved, forward_s=one.forward_s, backward_s=one.backward_s, start_bytes=float(x[0]),
        forward=(saves, x[1:] + one.forward), backward=(reads, np.maximum(reads, saves + beside)),
    )  # fmt: skip


def timeline(work: ChainArrays, places: Sequence[Place], link: HostLink, limit_bytes: float) -> Swapped:
    """Run the rules of this module on one place per segment."""
    moved = np.array([place in MOVED for place in places])
    again = np.array([place in AGAIN for place in places])
    own = work.x + np.where(again, 0.0, work.saved)
    leaves = np.where(moved, own, 0.0)
    stays = np.cumsum(own - leaves) - (own - leaves) + work.start_bytes + work.x
    run = _Run(leaves.tolist(), link, limit_bytes)
    forward = stays + np.where(again, work.forward[1], work.forward[0])
    backward = stays + np.where(again, work.backward[1], work.backward[0])
    run.forward(forward.tolist(), work.forward_s.tolist())
    recomputed = np.where(again, work.forward_s, 0.0)
    run.backward(backward.tolist(), (work.backward_s + recomputed).tolist())
    return Swapped(
        places=tuple(places), fits=run.fits, time_s=run.now, stall_s=max(run.stall_s, 0.0),
        recomputed_s=float(recomputed.sum()), moved_bytes=float(leaves.sum()), peak_bytes=run.peak,
    )  # fmt: skip


class _Run:
    """The clock, the two links, and the bytes of segments that are on the device and will leave or have come back."""

    def __init__(self, leaves: list[float], link: HostLink, limit_bytes: float) -> None:
        self.leaves, self.link, self.limit = leaves, link, limit_bytes * (1 + 1e-12)
        self.out_end = [0.0] * len(leaves)
        self.out_free = 0.0
        self.now = self.stall_s = self.peak = 0.0
        self.fits = True
        self.leaving: list[int] = []

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now:
            self.stall_s += time_s - self.now
            self.now = time_s

    def make_room(self, peak: float, below: int) -> None:
        """Wait for transfers out of segments before ``below`` until a peak fits beside the rest of them."""
        waiting = [k for k in self.leaving if self.out_end[k] > self.now and k < below]
        beside = sum(self.leaves[k] for k in waiting)
        for k in waiting:
            if peak + beside <= self.limit:
                break
            self.wait_until(self.out_end[k])
            beside -= self.leaves[k]
        self.fits = self.fits and peak + beside <= self.limit
        self.peak = max(self.peak, peak + beside)

    def forward(self, peaks: list[float], times: list[float]) -> None:
        for i, (peak, time_s) in enumerate(zip(peaks, times, strict=True)):
            self.make_room(peak, i)
            self.now += time_s
            if self.leaves[i]:
                self.out_free = max(self.now, self.out_free) + self.leaves[i] / self.link.out_Bps
                self.out_end[i] = self.out_free
                self.leaving.append(i)

    def backward(self, peaks: list[float], times: list[float]) -> None:
        ahead = self._first_backward(peaks)
        opened = [0.0] * len(peaks)
        in_free, queue, fetched = 0.0, list(self.leaving), 0.0
        for j in reversed(range(len(peaks))):
            opened[j] = self.now
            back = self.now
            while queue and ahead[queue[-1]] >= j:
                i = queue.pop()
                in_free = max(in_free, self.out_end[i], opened[ahead[i]]) + self.leaves[i] / self.link.in_Bps
                fetched += self.leaves[i]
                self.leaving.remove(i)
                self.out_end[i] = in_free  # from here on: when it is back
            if self.leaves[j]:
                back = self.out_end[j]
                fetched -= self.leaves[j]
            self.make_room(peaks[j] + fetched, j)
            self.wait_until(back)
            self.now += times[j]

    def _first_backward(self, peaks: list[float]) -> list[int]:
        """Of each segment that left, the earliest backward from which on it may be on its way back."""
        sums = np.concatenate([[0.0], np.cumsum(self.leaves)]).tolist()
        full = [peak + total for peak, total in zip(peaks, sums, strict=False)]
        ahead = list(range(len(peaks)))
        for i in self.leaving:
            while ahead[i] + 1 < len(peaks) and full[ahead[i] + 1] <= self.limit + sums[i]:
                ahead[i] += 1
        return ahead
