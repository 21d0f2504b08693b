"""Runs of equal blocks in a module: found by structure, shortened while the module is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from steptime.workload.graph.segments import KEPT, Run

NUMBERED = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "block_id", "idx", "index"})
"""Attributes in which equal blocks may differ: their own number."""
LEAST_SAVED = 2
"""Periods that folding must save to be worth it."""


def runs(module: torch.nn.Module) -> list[Run]:
    """Runs of equal blocks in the lists and sequences of a module, outermost first and not nested."""
    found: list[Run] = []
    inside: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and type(child).forward in _PLAIN:
            run = _longest(path, [_signature(block) for block in child.children()])
            if run is not None:
                found.append(run)
                inside.append(path)
    return found


_PLAIN = (torch.nn.ModuleList.forward, torch.nn.Sequential.forward)


def _longest(path: str, signatures: list[Any]) -> Run | None:
    """The run with most blocks of the shortest period."""
    best: Run | None = None
    total = len(signatures)
    for period in range(1, total // (KEPT + LEAST_SAVED) + 1):
        start = 0
        while start + period < total:
            end = start + period
            while end < total and signatures[end] == signatures[end - period]:
                end += 1
            count = (end - start) // period * period
            if count >= (KEPT + LEAST_SAVED) * period and (best is None or count > best.count):
                best = Run(path, start, period, count)
            start = max(end - period + 1, start + 1)
    return best


def _signature(module: torch.nn.Module) -> Any:
    """What two blocks share when they are equal: classes, shapes, settings."""
    tensors = [
        (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    settings = tuple(sorted((name, _setting(value)) for name, value in module.__dict__.items() if _counts(name, value)))
    children = tuple((name, _signature(child)) for name, child in module.named_children())
    return type(module), tuple(tensors), settings, children


def _counts(name: str, value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, type(None))) and name not in NUMBERED and name[0] != "_"


def _setting(value: Any) -> str:
    """A setting as text; a rate (of dropout, of stochastic depth) only counts as zero or not."""
    return str(bool(value)) if isinstance(value, float) else repr(value)


@contextmanager
def shortened(module: torch.nn.Module, found: list[Run]) -> Iterator[None]:
    """Keep only a few blocks of each run; the module is whole again when it ends."""
    undo: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for run in found:
            container = module.get_submodule(run.container)
            held = dict(container._modules)
            blocks = list(held.values())
            kept = blocks[: run.first + KEPT * run.period] + blocks[run.first + run.count :]
            undo.append((container, held))
            container._modules.clear()
            container._modules.update({str(number): block for number, block in enumerate(kept)})
        yield
    finally:
        for container, held in undo:
            container._modules.clear()
            container._modules.update(held)
