"""Interval arithmetic on the kernels of a trace: busy time, overlapped time, pauses and their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steptime.doctor.records import KernelTotal, LongGap, TraceTimes, Traffic
from steptime.doctor.trace import COMM, GROUPS, UNASSIGNED, Columns, Recording, axis_of, columns_of, group_of
from steptime.errors import InputFileError, counted

Floats = NDArray[np.float64]

#: A pause is long from this length (s), longer than any launch; in short steps from this share of the step, but not
#: below the last length (s).
_LONG_S: Final = 1e-3
_LONG_SHARE: Final = 0.01
_LEAST_LONG_S: Final = 2e-4
#: Least ratio of a long pause to the median pause between two kernels.
_STANDS_OUT: Final = 10.0
#: Number of longest pauses that are examined, and of places that are kept.
_MOST: Final = 200
_PLACES: Final = 8
#: Least part of a pause that an event of the host has to cover to be named as its cause.
_COVERS: Final = 0.5
#: Largest difference of positions (shares of the step) for pauses of one kind to be at one place.
_ONE_PLACE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Idle:
    """Intervals in which no kernel runs, inside the steps (s)."""

    start_s: Floats
    end_s: Floats
    late_s: Floats
    """Part of the interval before the launch of the next kernel; NaN: unknown."""
    before: NDArray[np.int64]
    """Kernel that ran last."""
    after: NDArray[np.int64]
    """Kernel that runs next."""


def idle_of(c: Columns, windows: Floats) -> Idle:
    """The pauses between kernels, clipped to the used steps."""
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
    """The pauses that are longer than any launch, by place, the most expensive first.

    Args:
        recording: the trace.
        c: its kernels.
        idle: all pauses.
        windows: start and end of the steps (s).
        steps: number of steps in the windows.
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
        found.append(
            LongGap(
                time_s=fmean(lengths[mine].tolist()),
                per_step=len(mine) / steps,
                before=before,
                after=after,
                between_steps=between,
                position=place,
                host=doing.most_common(1)[0][0],
                waits_for_host=late,
            )
        )
    return tuple(sorted(found, key=lambda gap: -gap.lost_s)[:_PLACES])


def _at(start: float, end: float, windows: Floats) -> float | None:
    """Start of a pause as a share of its step; None if it touches the border of a step."""
    slack = 1e-2 * (end - start)
    i = max(int(np.searchsorted(windows[:, 0], start, side="right")) - 1, 0)
    low, high = float(windows[i, 0]), float(windows[i, 1])
    if start - slack <= low or end + slack >= high:
        return None
    return (start - low) / (high - low)


def _one(positions: list[float]) -> float | None:
    """Common place of pauses; None: they are at several places."""
    if not positions or max(positions) - min(positions) > _ONE_PLACE:
        return None
    return float(median(positions))


class _Host:
    """Long events of the threads that launch kernels."""

    def __init__(self, recording: Recording, c: Columns) -> None:
        threads = np.frombuffer(recording.host_thread, dtype=np.int64)
        starts = np.frombuffer(recording.host_us, dtype=np.float64)
        lengths = np.frombuffer(recording.host_length_us, dtype=np.float64)
        mine = np.isin(threads, recording.launch_thread) if recording.launch_thread else threads == threads
        self._start = (starts[mine] - c.zero_us) * 1e-6
        self._end = self._start + lengths[mine] * 1e-6
        self._name = np.frombuffer(recording.host_name, dtype=np.int64)[mine]
        self._names = list(recording.host_names)

    def during(self, start: float, end: float) -> str:
        """Name of the shortest event that covers most of a pause; empty: none does."""
        covered = np.minimum(self._end, end) - np.maximum(self._start, start)
        fitting = np.flatnonzero(covered >= _COVERS * (end - start))
        if not len(fitting):
            return ""
        shortest = fitting[int(np.argmin((self._end - self._start)[fitting]))]
        return self._names[int(self._name[shortest])]


#: Axes in the order in which shared time is assigned.
_AXES: Final = ("tp", "cp", "ep", "pp", "dp", UNASSIGNED)
_TOP: Final = 12


def union(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Disjoint intervals that cover the same points; ``starts`` ascend.

    >>> union(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    (array([0., 5.]), array([3., 6.]))
    """
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def covered(starts: Floats, ends: Floats, windows: Floats) -> float:
    """Length of disjoint intervals inside disjoint windows (rows of start and end)."""
    if not len(starts):
        return 0.0
    before = np.concatenate([[0.0], np.cumsum(ends - starts)])

    def until(t: Floats) -> Floats:
        i = np.searchsorted(starts, t, side="right")
        partial = np.minimum(t - starts[np.maximum(i - 1, 0)], (ends - starts)[np.maximum(i - 1, 0)])
        return np.where(i > 0, before[np.maximum(i - 1, 0)] + np.maximum(partial, 0.0), 0.0)

    return float((until(windows[:, 1]) - until(windows[:, 0])).sum())


def trace_times(recording: Recording, path: str, degrees: Mapping[str, int], steps: int | None = None) -> TraceTimes:
    """Times of the traced steps by group.

    Args:
        recording: the trace.
        path: its file, for messages.
        degrees: ranks of each axis as far as known; they assign collectives whose process group has no name.
        steps: number of steps in the trace, for traces without ``ProfilerStep`` annotations; None: one.

    Raises:
        InputFileError: no kernel has a duration.
    """
    c = columns_of(recording)
    if float((c.end_s - c.start_s).sum()) <= 0.0:
        raise InputFileError(path, "all its kernels have a duration of zero")
    windows, found, warnings = _windows(recording, c, steps)
    count = steps if steps and not found else len(windows)
    groups, traffic_of = _labels(recording, c, degrees)
    shares, busy = _partition(c, groups, windows)
    total_s = float((windows[:, 1] - windows[:, 0]).sum())
    idle_s = max(total_s - sum(shares.values()), 0.0)
    idle = idle_of(c, windows)
    launch_s = None if bool(np.all(np.isnan(c.launched_s))) else float(np.nansum(idle.late_s))
    longest_s = float(np.max(idle.end_s - idle.start_s, initial=0.0))
    inside = np.searchsorted(windows[:, 0], c.start_s, side="right") > 0
    inside &= c.start_s < windows[np.maximum(np.searchsorted(windows[:, 0], c.start_s, side="right") - 1, 0), 1]
    warnings += _notes(recording, c, traffic_of)
    return TraceTimes(
        path=path,
        step_s=total_s / count,
        step_times_s=tuple((windows[:, 1] - windows[:, 0]).tolist()),
        steps_found=found,
        groups={name: shares[name] / count for name in GROUPS},
        traffic=_traffic(recording, c, traffic_of, inside, shares, busy, count),
        idle_s=idle_s / count,
        launch_bound_s=None if launch_s is None else launch_s / count,
        longest_gap_s=longest_s,
        long_gaps=long_gaps(recording, c, idle, windows, count),
        kernels_per_step=float(inside.sum()) / count,
        top=_top(recording, c, groups, inside, count),
        synchronisations=_blocking(recording, c, windows, count),
        streams=len(np.unique(c.stream)),
        with_stack=recording.with_stack,
        warnings=tuple(warnings),
        **_header(recording.header),
    )


def _windows(recording: Recording, c: Columns, steps: int | None) -> tuple[Floats, int, list[str]]:
    """Start and end of the used steps, the number of annotations, and warnings."""
    warnings: list[str] = []
    marks = recording.device_steps or recording.host_steps
    spans = sorted(marks.values())
    if spans and not recording.device_steps:
        warnings.append("steps are annotated on the host only: device work is assigned to them by its time")
    if not spans:
        held = f"{counted(steps, 'step')}" if steps else "one step"
        warnings.append(f"no ProfilerStep annotations: the whole trace is taken as {held} (--steps N says how many)")
        return np.array([[c.start_s[0], c.end_s.max()]]), 0, warnings
    table = (np.array(spans) - c.zero_us) * 1e-6
    table[:-1, 1] = table[1:, 0]
    if recording.cut and len(table) > 1:
        table = table[:-1]
    if len(table) >= 3:
        table = table[1:]
    table = table[table[:, 1] > table[:, 0]]
    if not len(table) or not bool(np.any((c.start_s < table[-1, 1]) & (c.end_s > table[0, 0]))):
        warnings.append("no kernel runs inside the annotated steps: the whole trace is taken as one step")
        return np.array([[c.start_s[0], c.end_s.max()]]), 0, warnings
    return table, len(spans), warnings


def _labels(recording: Recording, c: Columns, degrees: Mapping[str, int]) -> tuple[NDArray[np.object_], dict[int, str]]:
    """Group of each kernel (``dp_comm`` and so on for traffic), and the axis of each kind of collective."""
    by_name = np.array([group_of(name) for name in recording.names], dtype=object)
    groups = by_name[c.name]
    axis = {i: axis_of(meta.group, meta.group_size, meta.kind, degrees) for meta, i in recording.collectives.items()}
    if axis:
        names = np.array([f"{axis[i]}_comm" for i in range(len(axis))], dtype=object)
        is_comm = c.collective >= 0
        groups[is_comm] = names[c.collective[is_comm]]
    groups[groups == COMM] = f"{UNASSIGNED}_comm"
    if recording.optimizer_us:
        spans = np.array(sorted(recording.optimizer_us), dtype=float)
        starts, ends = union((spans[:, 0] - c.zero_us) * 1e-6, (spans[:, 1] - c.zero_us) * 1e-6)
        at = np.searchsorted(starts, c.start_s, side="right") - 1
        during = (at >= 0) & (c.start_s < ends[np.maximum(at, 0)])
        groups[during & (groups == "memory_bound")] = "optimizer"
    return groups, axis


def _partition(c: Columns, groups: NDArray[np.object_], windows: Floats) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by group, each second assigned to the first group that is busy; and busy seconds of the traffic."""
    shares: dict[str, float] = {}
    busy: dict[str, float] = {}
    taken = np.zeros(len(groups), dtype=bool)
    before = 0.0
    for group in (*GROUPS, *(f"{axis}_comm" for axis in _AXES)):
        mine = groups == group
        taken |= mine
        after = covered(*union(c.start_s[taken], c.end_s[taken]), windows) if bool(np.any(mine)) else before
        shares[group] = max(after - before, 0.0)
        before = after
        if group.endswith("_comm"):
            busy[group] = covered(*union(c.start_s[mine], c.end_s[mine]), windows)
    return shares, busy


def _traffic(
    recording: Recording,
    c: Columns,
    axis: Mapping[int, str],
    inside: NDArray[np.bool_],
    shares: Mapping[str, float],
    busy: Mapping[str, float],
    count: int,
) -> tuple[Traffic, ...]:
    lengths = c.end_s - c.start_s
    waiting: dict[str, float] = {}
    kinds: dict[str, dict[str, float]] = {}
    for meta, i in recording.collectives.items():
        mine = lengths[inside & (c.collective == i)]
        if not len(mine):
            continue
        name = axis[i]
        if meta.elements and len(mine) > 1:
            waiting[name] = waiting.get(name, 0.0) + float((mine - mine.min()).sum())
        kinds.setdefault(name, {})
        kinds[name][meta.kind] = kinds[name].get(meta.kind, 0.0) + float(mine.sum()) / count
    return tuple(
        Traffic(
            axis=name,
            busy_s=busy[f"{name}_comm"] / count,
            exposed_s=shares[f"{name}_comm"] / count,
            waiting_s=waiting.get(name, 0.0) / count,
            collectives=kinds.get(name, {}),
        )
        for name in _AXES
        if busy[f"{name}_comm"] > 0
    )


def _top(
    recording: Recording, c: Columns, groups: NDArray[np.object_], inside: NDArray[np.bool_], count: int
) -> tuple[KernelTotal, ...]:
    lengths = np.where(inside, c.end_s - c.start_s, 0.0)
    seconds = np.bincount(c.name, weights=lengths, minlength=len(recording.names))
    calls = np.bincount(c.name, weights=inside, minlength=len(recording.names))
    names = list(recording.names)
    first = {int(n): i for n, i in zip(*np.unique(c.name, return_index=True), strict=True)}
    return tuple(
        KernelTotal(
            name=names[n],
            group=str(groups[first[n]]),
            calls_per_step=float(calls[n]) / count,
            time_s=float(seconds[n]) / count,
        )
        for n in np.argsort(-seconds)[:_TOP].tolist()
        if seconds[n] > 0
    )


def _blocking(recording: Recording, c: Columns, windows: Floats, count: int) -> dict[str, tuple[float, float]]:
    """Calls and seconds per step of blocking runtime calls inside the steps."""
    out = {}
    low, high = float(windows[0, 0]), float(windows[-1, 1])
    for name, calls in recording.blocking.items():
        table = np.array(calls, dtype=float) * 1e-6
        starts = table[:, 0] - c.zero_us * 1e-6
        mine = (starts >= low) & (starts < high)
        if bool(np.any(mine)):
            out[name] = (float(mine.sum()) / count, float(table[mine, 1].sum()) / count)
    return out


def _header(header: Mapping[str, Any]) -> dict[str, Any]:
    info, devices = header.get("distributedInfo"), header.get("deviceProperties")
    world = info.get("world_size") if isinstance(info, dict) else None
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    name, memory = first.get("name"), first.get("totalGlobalMem")
    return {
        "gpus": world if isinstance(world, int) and 1 <= world <= 10**7 else None,
        "device": name[:80] if isinstance(name, str) else None,
        "capacity_bytes": float(memory) if isinstance(memory, int) and 0 < memory < 10**15 else None,
    }


def _notes(recording: Recording, c: Columns, axis: Mapping[int, str]) -> list[str]:
    out = []
    if recording.cut:
        out.append(f"the trace is cut off after {recording.events} events: {recording.cut}")
    if recording.damaged:
        out.append(f"left out: {counted(recording.damaged, 'kernel')} without a usable time")
    if c.devices > 1:
        out.append(f"the trace has {c.devices} devices; the one with most kernel time is shown")
    guessed = {i for meta, i in recording.collectives.items() if axis[i] == "pp" and not (meta.said or meta.group)}
    if guessed & set(np.unique(c.collective).tolist()):
        out.append(
            "SendRecv kernels are taken for messages of a pipeline; the trace does not say who called them, and "
            "all-to-all traffic uses them too (--ep N or --pp 1 says so)"
        )
    if recording.with_stack:
        out.append("recorded with with_stack=True, which slows the host: launch gaps are smaller without it")
    return out


def spread(times: tuple[float, ...]) -> float:
    """Largest step over the median step, minus one."""
    return max(times) / median(times) - 1.0 if times and median(times) > 0 else 0.0
