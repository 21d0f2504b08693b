"""Read a PyTorch memory snapshot, measured or predicted: peaks and their contents; and compare two snapshots.

The format is that of `torch.cuda.memory._dump_snapshot`. The state at its end is exact; earlier states follow from the
recorded events backwards from the end, so a trace may begin late or lack its oldest events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steptime.captured.formats.memory_snapshot import UNKNOWN, memory_snapshot
from steptime.captured.formats.plain_pickle import PickleProblem, loads
from steptime.captured.graph.allocator import round_size
from steptime.captured.graph.placement import Placement
from steptime.errors import InputFileError, UserError, first_few, shorten
from steptime.store.files import read_bytes

MAX_BYTES: Final = 512 * 2**20
MAX_ENTRIES: Final = 20_000_000
"""Largest number of blocks and events; a file can refer to one list many times."""
NOT_RECORDED: Final = "(not recorded)"
_GAIN: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory in use at the peak that one place in the code allocated."""

    place: str
    """The innermost frame outside PyTorch itself: `file:line name`."""
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device of a snapshot.

    Requested = sizes of tensors; allocated = sizes of their blocks. At the end both are exact. Before the end, a block
    is assumed to be its request rounded to 512 B, since events have no more: the allocated peak is then a lower bound,
    short by the excess of blocks above 1 MiB (at most 1 MiB each).
    """

    device: int
    reserved_bytes: int
    """Reserved bytes at the end."""
    allocated_bytes: int
    requested_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak_requested_bytes: int
    events: int
    segments: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    """Category -> requested bytes at the peak, if the file has categories."""
    holders: tuple[Holder, ...] = ()
    """Holders at the peak, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A memory snapshot."""

    path: str
    devices: Mapping[int, DeviceMemory]

    def device(self, number: int | None = None) -> DeviceMemory:
        """One device; None: the one with the highest peak.

        Raises:
            UserError: the device is unknown, or the snapshot is empty.
        """
        if not self.devices:
            raise UserError(f"{self.path}: the snapshot is empty: no segments and no events")
        if number is None:
            return max(self.devices.values(), key=lambda device: device.peak_reserved_bytes)
        if number not in self.devices:
            known = first_few([str(one) for one in self.devices], 8)
            raise UserError(f"{self.path}: there is no device {number}", hint=f"it has {known}")
        return self.devices[number]


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot without loading code from it.

    Raises:
        InputFileError: the file cannot be read, is larger than 512 MiB, is no pickle, is cut short, names a function
            or class, or is no memory snapshot; the message has the reason.
    """
    where = str(path)
    data = read_bytes(path, MAX_BYTES, "a memory snapshot", hint="record fewer events (max_entries)")
    try:
        document = loads(data)
    except PickleProblem as error:
        raise _not_one(where, error) from None
    return parse_snapshot(document, where)


def parse_snapshot(document: object, where: str) -> Snapshot:
    """The snapshot in a document of plain data; ``where`` is the file that errors name.

    Raises:
        InputFileError: it is no memory snapshot; the message names the value.
    """
    try:
        return Snapshot(path=where, devices=_Reader(document).devices())
    except PickleProblem as error:
        raise _not_one(where, error) from None


def _not_one(where: str, error: PickleProblem) -> InputFileError:
    hint = "a snapshot is written by torch.cuda.memory._dump_snapshot"
    return InputFileError(where, f"not a memory snapshot: {error}", hint=hint)


@dataclass(frozen=True, slots=True)
class _Live:
    size: int
    place: str
    category: str


class _Reader:
    """Reader that checks every value when it uses it."""

    def __init__(self, document: object) -> None:
        if isinstance(document, list):
            document = {"segments": document}
        if not isinstance(document, dict) or "segments" not in document:
            raise PickleProblem("it has no segments")
        self.document = document
        self.left = MAX_ENTRIES
        self.places: dict[int, str] = {}

    def devices(self) -> dict[int, DeviceMemory]:
        segments: dict[int, list[Mapping[str, Any]]] = {}
        for n, segment in enumerate(self.entries(self.document, "segments", "")):
            device = self.number(segment, "device", f"segments[{n}]", default=0)
            segments.setdefault(device, []).append(segment)
        traces = self.document.get("device_traces", [])
        if not isinstance(traces, list):
            raise PickleProblem("device_traces is not a list")
        found = sorted({*segments, *(n for n, trace in enumerate(traces) if trace)})
        return {n: self.device(n, segments.get(n, []), n < len(traces)) for n in found}

    def device(self, number: int, segments: list[Mapping[str, Any]], traced: bool) -> DeviceMemory:
        reserved = sum(self.number(s, "total_size", f"segment of device {number}") for s in segments)
        live = self.blocks(segments, number)
        allocated = sum(size for size, _ in live.values())
        requested = sum(what.size for _, what in live.values())
        traces = self.document.get("device_traces", [])
        events = list(self.entries(traces, number, "device_traces")) if traced else []
        curves = self.curves(events, number)
        at = max(range(len(events) + 1), key=lambda n: curves[n][1])
        final = curves[-1]
        tops = [max(curve[n] for curve in curves) - final[n] for n in range(3)]
        held = self.at(events, at, {address: what for address, (_, what) in live.items()})
        return DeviceMemory(
            device=number, reserved_bytes=reserved, allocated_bytes=allocated, requested_bytes=requested,
            peak_reserved_bytes=reserved + tops[0], peak_allocated_bytes=allocated + tops[1],
            peak_requested_bytes=requested + tops[2], events=len(events), segments=len(segments),
            by_category=_categories(held), holders=_holders(held),
        )  # fmt: skip

    def blocks(self, segments: list[Mapping[str, Any]], device: int) -> dict[int, tuple[int, _Live]]:
        """Address -> size and content of a block that is in use at the end."""
        out: dict[int, tuple[int, _Live]] = {}
        where = f"block of device {device}"
        for segment in segments:
            address = self.number(segment, "address", f"segment of device {device}", default=0)
            for block in self.entries(segment, "blocks", "segment"):
                size = self.number(block, "size", where)
                if str(block.get("state", ""))[:7] == "active_":
                    asked = self.number(block, "requested_size", where, default=size)
                    out[address] = (size, _Live(asked, self.place(block), UNKNOWN))
                address += size
        return out

    def curves(self, events: list[Mapping[str, Any]], device: int) -> list[tuple[int, int, int]]:
        """Reserved, allocated and requested bytes after each event, counted from the first one."""
        reserved = allocated = requested = 0
        out = [(0, 0, 0)]
        for n, event in enumerate(events):
            action = event.get("action")
            size = self.number(event, "size", f"event {n} of device {device}", default=0)
            if action == "alloc" or action == "free_completed":
                sign = 1 if action == "alloc" else -1
                allocated += sign * round_size(size)
                requested += sign * size
            elif isinstance(action, str):
                reserved += _GAIN.get(action, 0) * size
            out.append((reserved, allocated, requested))
        return out

    def at(self, events: list[Mapping[str, Any]], count: int, final: dict[int, _Live]) -> dict[int, _Live]:
        """Blocks after the first ``count`` events: later ones are undone, contents come from the last ``alloc``."""
        live = dict(final)
        for event in reversed(events[count:]):
            action = event.get("action")
            if action == "alloc":
                live.pop(self.number(event, "addr", "event"), None)
            elif action == "free_completed":
                live[self.number(event, "addr", "event")] = self.live(event)
        for event in events[:count]:
            if event.get("action") == "alloc":
                address = self.number(event, "addr", "event")
                if address in live:
                    live[address] = self.live(event)
        return live

    def live(self, event: Mapping[str, Any]) -> _Live:
        category = event.get("category")
        name = shorten(category) if isinstance(category, str) else UNKNOWN
        return _Live(self.number(event, "size", "event"), self.place(event), name)

    def place(self, entry: Mapping[str, Any]) -> str:
        """Text of the first frame outside PyTorch, else of the first frame."""
        frames = entry.get("frames")
        if not isinstance(frames, list) or not frames:
            return NOT_RECORDED
        known = self.places.get(id(frames))
        if known is None:
            texts = [frame for frame in frames[:256] if isinstance(frame, dict)]
            own = next((frame for frame in texts if not _of_torch(frame)), texts[0] if texts else None)
            known = self.places[id(frames)] = NOT_RECORDED if own is None else _frame(own)
        return known

    # -- checks -------------------------------------------------------------------------------------------------------

    def entries(self, holder: Any, key: str | int, where: str) -> Iterator[Mapping[str, Any]]:
        """Members of a list of dictionaries."""
        name = f"{where}.{key}" if where else str(key)
        found = holder.get(key, []) if isinstance(holder, dict) else holder[key]
        if not isinstance(found, list):
            raise PickleProblem(f"{name} is not a list")
        self.left -= len(found)
        if self.left < 0:
            raise PickleProblem(f"it has more than {MAX_ENTRIES} blocks and events")
        for n, entry in enumerate(found):
            if not isinstance(entry, dict):
                raise PickleProblem(f"{name}[{n}] is not a dictionary")
            yield entry

    def number(self, entry: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
        """A non-negative integer of at most 64 bits."""
        value = entry.get(key, default)
        if type(value) is not int or not 0 <= value < 2**64:
            given = repr(value) if isinstance(value, (int, float)) else type(value).__name__
            raise PickleProblem(f"{key} of {where} is {shorten(given, 40)}, not a whole number from 0 on")
        return value


def _of_torch(frame: Mapping[str, Any]) -> bool:
    name = str(frame.get("filename", ""))[:4096] if isinstance(frame.get("filename"), str) else ""
    return "/torch/" in name or name.startswith(("torch/", "??", "<")) or name.endswith((".cpp", ".h", ".cu", ".so"))


def _frame(frame: Mapping[str, Any]) -> str:
    def text(key: str) -> str:
        value = frame.get(key, "")
        return shorten(value, 160) if isinstance(value, str) else str(value) if type(value) is int else "?"

    return f"{text('filename')}:{text('line')} {text('name')}"


def _categories(held: Mapping[int, _Live]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for what in held.values():
        total[what.category] += what.size
    return dict(total.most_common())


def _holders(held: Mapping[int, _Live]) -> tuple[Holder, ...]:
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for what in held.values():
        size[what.place] += what.size
        count[what.place] += 1
    return tuple(Holder(place, total, count[place]) for place, total in size.most_common())


#: Category in snapshots of PyTorch's profiler -> category here.
_OURS = {"optimizer_state": "state", "autograd_detail": "temporary"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One size, predicted and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def relative(self) -> float | None:
        """(predicted - measured) / measured; None if the measured size is 0.

        >>> Difference("peak", 90, 100).relative
        -0.1
        """
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotComparison:
    """Sizes of a device, predicted and measured."""

    totals: tuple[Difference, ...]
    """Peak reserved, allocated and requested bytes, and bytes in use at the end; both sides by the same definitions."""
    by_category: tuple[Difference, ...]
    """Requested bytes at the peak by category; empty if the measured snapshot has no categories."""
    predicted: DeviceMemory
    measured: DeviceMemory


def compare_snapshot(
    placement: Placement, measured: DeviceMemory, *, workspaces: Sequence[int] = ()
) -> SnapshotComparison:
    """Compare a placement with one device of a measured snapshot.

    The prediction is written as a snapshot and read like the measured one, so that both have the same definitions.

    Args:
        placement: storages as the caching allocator places them.
        measured: one device of a snapshot.
        workspaces: sizes in bytes of cuBLAS's workspaces, which exist from the first product on.
    """
    document = memory_snapshot(placement, workspaces=workspaces)
    predicted = parse_snapshot(document, placement.program.name).device()
    totals = (
        Difference("peak reserved", predicted.peak_reserved_bytes, measured.peak_reserved_bytes),
        Difference("peak allocated", predicted.peak_allocated_bytes, measured.peak_allocated_bytes),
        Difference("peak requested", predicted.peak_requested_bytes, measured.peak_requested_bytes),
        Difference("in use at the end", predicted.requested_bytes, measured.requested_bytes),
    )
    return SnapshotComparison(
        totals=totals, by_category=_categories_of_both(predicted, measured), predicted=predicted, measured=measured
    )


def _categories_of_both(predicted: DeviceMemory, measured: DeviceMemory) -> tuple[Difference, ...]:
    known: dict[str, int] = {}
    for name, size in measured.by_category.items():
        ours = _OURS.get(name, name)
        known[ours] = known.get(ours, 0) + size
    if not set(known) - {UNKNOWN}:
        return ()
    names = dict.fromkeys([*predicted.by_category, *known])
    return tuple(Difference(name, predicted.by_category.get(name, 0), known.get(name, 0)) for name in names)
