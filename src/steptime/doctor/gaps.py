"""Pauses of a device: many short ones, or a few long ones, where these are, and what the host did in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steptime.doctor.records import LongGap
from steptime.doctor.trace import Columns, Recording

Floats = NDArray[np.float64]

#: No launch takes so long (s); in short steps a pause is long from this share of the step, but not below the last.
_LONG_S: Final = 1e-3
_LONG_SHARE: Final = 0.01
_LEAST_LONG_S: Final = 2e-4
#: A long pause stands out from the usual one between two kernels by so much.
_STANDS_OUT: Final = 10.0
#: Longest pauses that are looked at one by one, and places that are kept.
_MOST: Final = 200
_PLACES: Final = 8
#: Part of a pause that an event of the host has to cover to be what the host did in it.
_COVERS: Final = 0.5
#: Pauses of one kind lie at one place if their positions differ by no more (shares of the step).
_ONE_PLACE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Idle:
    """Intervals in which no kernel runs, inside the steps (s)."""

    start_s: Floats
    end_s: Floats
    late_s: Floats
    """Part before the launch of the next kernel; NaN: unknown."""
    before: NDArray[np.int64]
    """Kernel that ran last."""
    after: NDArray[np.int64]
    """Kernel that runs next."""


def idle_of(c: Columns, windows: Floats) -> Idle:
    """The pauses between kernels, cut at the ends of the steps that are used."""
    reach = np.maximum.accumulate(c.end_s)
    after = np.flatnonzero(c.start_s[1:] > reach[:-1]) + 1
    last = np.maximum.accumulate(np.where(c.end_s >= reach, np.arange(len(reach)), 0))
    low = np.maximum(reach[after - 1], windows[0, 0])
    high = np.minimum(c.start_s[after], windows[-1, 1])
    kept = high > low
    low, high, after = low[kept], high[kept], after[kept]
    late = np.clip(np.minimum(c.launched_s[after], high) - low, 0.0, None)
    return Idle(start_s=low, end_s=high, late_s=late, before=last[after - 1], after=after)


def long_gaps(recording: Recording, c: Columns, idle: Idle, windows: Floats, steps: int) -> tuple[LongGap, ...]:
    """The pauses that no launch explains, by place, those that cost most first.

    Args:
        recording: the trace.
        c: its kernels.
        idle: all pauses.
        windows: start and end of the steps (s).
        steps: number of steps that they hold.
    """
    lengths = idle.end_s - idle.start_s
    inside = int(np.count_nonzero((c.start_s >= windows[0, 0]) & (c.start_s < windows[-1, 1])))
    usual = (
        float(np.median(np.concatenate([lengths, np.zeros(max(inside - len(lengths), 0))]))) if len(lengths) else 0.0
    )
    step_s = float((windows[:, 1] - windows[:, 0]).sum()) / steps
    least = max(_STANDS_OUT * usual, min(_LONG_S, max(_LONG_SHARE * step_s, _LEAST_LONG_S)))
    long = np.flatnonzero(lengths >= least)
    long = long[np.argsort(-lengths[long], kind="stable")][:_MOST]
    names = list(recording.names)
    borders = windows if len(windows) == steps else None
    places: dict[tuple[str, str, bool, bool | None], list[int]] = {}
    for i in long.tolist():
        between = borders is not None and _at(idle.start_s[i], idle.end_s[i], borders) is None
        late = None if np.isnan(idle.late_s[i]) else bool(idle.late_s[i] >= _COVERS * lengths[i])
        key = names[c.name[idle.before[i]]], names[c.name[idle.after[i]]], between, late
        places.setdefault(key, []).append(i)
    host = _Host(recording, c)
    found = []
    for (before, after, between, late), mine in places.items():
        at = [] if borders is None else [_at(idle.start_s[i], idle.end_s[i], borders) for i in mine]
        doing = Counter(host.during(float(idle.start_s[i]), float(idle.end_s[i])) for i in mine)
        place = _one([p for p in at if p is not None])
        found.append(LongGap(
            time_s=fmean(lengths[mine].tolist()), per_step=len(mine) / steps, before=before, after=after,
            between_steps=between, position=place, host=doing.most_common(1)[0][0], waits_for_host=late,
        ))  # fmt: skip
    return tuple(sorted(found, key=lambda gap: -gap.lost_s)[:_PLACES])


def _at(start: float, end: float, windows: Floats) -> float | None:
    """Where a pause begins, as a share of its step; None where it holds the border between two."""
    slack = 1e-2 * (end - start)
    i = max(int(np.searchsorted(windows[:, 0], start, side="right")) - 1, 0)
    low, high = float(windows[i, 0]), float(windows[i, 1])
    if start - slack <= low or end + slack >= high:
        return None
    return (start - low) / (high - low)


def _one(positions: list[float]) -> float | None:
    """The place of pauses that lie together."""
    if not positions or max(positions) - min(positions) > _ONE_PLACE:
        return None
    return float(median(positions))


class _Host:
    """What the threads that launch kernels did for long."""

    def __init__(self, recording: Recording, c: Columns) -> None:
        threads = np.frombuffer(recording.host_thread, dtype=np.int64)
        starts = np.frombuffer(recording.host_us, dtype=np.float64)
        lengths = np.frombuffer(recording.host_length_us, dtype=np.float64)
        mine = np.isin(threads, list(recording.launch_threads)) if recording.launch_threads else threads == threads
        self._start = (starts[mine] - c.zero_us) * 1e-6
        self._end = self._start + lengths[mine] * 1e-6
        self._name = np.frombuffer(recording.host_name, dtype=np.int64)[mine]
        self._names = list(recording.host_names)

    def during(self, start: float, end: float) -> str:
        """The shortest event that covers most of a pause; empty: none does."""
        covered = np.minimum(self._end, end) - np.maximum(self._start, start)
        fitting = np.flatnonzero(covered >= _COVERS * (end - start))
        if not len(fitting):
            return ""
        shortest = fitting[int(np.argmin((self._end - self._start)[fitting]))]
        return self._names[int(self._name[shortest])]
