"""Write a predicted step as a PyTorch memory snapshot, for the viewer at pytorch.org/memory_viz.

The keys are those of `torch.cuda.memory._snapshot()`. In place of Python frames it has modules: the innermost frame is
the operator, then come the modules around it, then the phase.

Source: PyTorch, `torch/csrc/cuda/memory_snapshot.cpp`, `torch/utils/viz/MemoryViz.js`, `torch/cuda/_memory_viz.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from steptime.captured.formats.timeline import Clock
from steptime.captured.graph import BEFORE, Program
from steptime.captured.graph.allocator import AllocatorSettings, Event, PlacedBlock, Segment
from steptime.captured.graph.placement import Placement, call_of_workspace, place
from steptime.num import round_up
from steptime.store.files import write_bytes

PROTOCOL: Final = 4
"""Highest pickle protocol that the unpickler of the viewer reads (2 to 4)."""
UNKNOWN: Final = "unknown"
"""Category of a block with unknown content."""

Frames = list[dict[str, Any]]


def write_memory_snapshot(
    program: Program,
    path: str | Path,
    *,
    settings: AllocatorSettings | None = None,
    steps: int = 2,
    seconds: Sequence[float] | None = None,
    placement: Placement | None = None,
    workspaces: Sequence[int] = (),
) -> Placement:
    """Write a snapshot and return the placement that it shows.

    Args:
        program: a recorded step.
        path: the file, by convention `*.pickle`.
        settings: settings of the allocator.
        steps: number of steps to run, see :func:`~steptime.captured.graph.placement.place`.
        seconds: predicted time of each call; None: every call takes 1 µs.
        placement: an existing placement; `settings` and `steps` are then ignored.
        workspaces: sizes in bytes of the cuBLAS workspaces, which are never freed.

    Raises:
        UserError: `seconds` is not one time for each call, or `steps` is out of range.
        InputFileError: the file cannot be written.
    """
    placed = placement if placement is not None else place(program, settings, steps=steps)
    document = memory_snapshot(placed, seconds=seconds, workspaces=workspaces)
    write_bytes(path, pickle.dumps(document, protocol=PROTOCOL))
    return placed


def memory_snapshot(
    placement: Placement, *, seconds: Sequence[float] | None = None, workspaces: Sequence[int] = ()
) -> dict[str, Any]:
    """The snapshot as a document of dictionaries, lists, texts and numbers; workspaces are segments of their own."""
    writer = _Writer(placement, Clock(placement.program, seconds))
    return {
        "segments": [*(writer.segment(segment) for segment in placement.segments), *_workspaces(placement, workspaces)],
        "device_traces": [[*(writer.event(event) for event in placement.events), writer.end()]],
        "allocator_settings": _settings(placement.settings),
    }


class _Writer:
    """Writer that makes each frame once, so that the file holds it once."""

    def __init__(self, placement: Placement, clock: Clock) -> None:
        self.placement = placement
        self.program = placement.program
        self.clock = clock
        self._frames: dict[int, Frames] = {}
        self._modules: dict[tuple[str, str], Frames] = {}

    def segment(self, segment: Segment) -> dict[str, Any]:
        used = [block for block in segment.blocks if block.allocated]
        size = sum(block.size_bytes for block in used)
        return {
            "device": 0, "address": segment.address, "total_size": segment.size_bytes, "allocated_size": size,
            "active_size": size, "requested_size": sum(block.requested_bytes for block in used), "stream": 0,
            "segment_type": "small" if segment.small else "large", "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable, "frames": [], "blocks": [self.block(b) for b in segment.blocks],
        }  # fmt: skip

    def block(self, block: PlacedBlock) -> dict[str, Any]:
        return {
            "address": block.address, "size": block.size_bytes, "requested_size": block.requested_bytes,
            "state": "active_allocated" if block.allocated else "inactive",
            "frames": self.frames(block.owner) if block.allocated else [],
        }  # fmt: skip

    def event(self, event: Event) -> dict[str, Any]:
        where = "device_free" if event.action == "oom" else "addr"
        late = event.action in ("free_requested", "free_completed")
        out: dict[str, Any] = {
            "action": event.action, where: event.address, "size": event.size_bytes, "stream": 0,
            "time_us": self.clock.microsecond(event.time, end=late), "frames": self.frames(event.owner),
        }  # fmt: skip
        if event.action in ("alloc", "free_requested", "free_completed"):
            out["category"] = self.category(event.owner)
        return out

    def end(self) -> dict[str, Any]:
        """The event that ends each real trace; the viewer of PyTorch up to 2.6 needs a category `unknown` somewhere."""
        used = sum(block.size_bytes for s in self.placement.segments for block in s.blocks if block.allocated)
        last = max((event.time for event in self.placement.events), default=BEFORE)
        return {
            "action": "snapshot", "addr": 0, "size": used, "stream": 0,
            "time_us": self.clock.microsecond(last, end=True), "frames": [], "category": UNKNOWN,
        }  # fmt: skip

    def category(self, owner: int) -> str:
        if call_of_workspace(owner) is not None:
            return "workspace"
        return self.program.storages[owner].category if owner >= 0 else UNKNOWN

    def frames(self, owner: int) -> Frames:
        found = self._frames.get(owner)
        if found is None:
            found = self._frames[owner] = self._make(owner)
        return found

    def _make(self, owner: int) -> Frames:
        scratch = call_of_workspace(owner)
        if owner < 0 and scratch is None:
            return []
        storage = None if scratch is not None else self.program.storages[owner]
        if storage is not None and storage.born == BEFORE:
            module, _, last = storage.name.rpartition(".")
            return [_frame(storage.name, 0, f"{storage.category} {last}"), *self._around(module, "before the step")]
        number = scratch if storage is None else storage.born
        assert number is not None
        call = self.program.calls[number]
        name = f"{call.node.op} (workspace)" if storage is None else call.node.op
        if storage is not None and storage.name:
            name += f" -> {storage.name}"
        return [_frame(call.module or self.program.name, number, name), *self._around(call.module, call.phase)]

    def _around(self, module: str, phase: str) -> Frames:
        """Frames of the module, the modules around it, and the phase."""
        found = self._modules.get((module, phase))
        if found is None:
            parts = module.split(".") if module else []
            paths = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
            found = [_frame(path, 0, self.program.modules.get(path, "module")) for path in paths]
            found.append(_frame(self.program.name, 0, phase))
            self._modules[module, phase] = found
        return found


def _workspaces(placement: Placement, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Segments of one block each, after all others."""
    address = max((segment.address + segment.size_bytes for segment in placement.segments), default=2**32)
    address = max([address, *(event.address + event.size_bytes for event in placement.events)])
    out = []
    for size in sizes:
        address = round_up(address, 2**21)
        frames = [_frame("cuBLAS", 0, "workspace")]
        block = {
            "address": address,
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }
        out.append({
            "device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
            "requested_size": size, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": [block],
        })  # fmt: skip
        address += size
    return out


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    limit = settings.max_split_size_bytes
    parts = [f"expandable_segments:{settings.expandable_segments}"]
    if limit is not None:
        parts.append(f"max_split_size_mb:{limit // 2**20}")
    if settings.roundup_power2_divisions > 1:
        parts.append(f"roundup_power2_divisions:{settings.roundup_power2_divisions}")
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(parts), "max_split_size": -1 if limit is None else limit,
        "expandable_segments": settings.expandable_segments, "predicted_by": "steptime",
    }  # fmt: skip
