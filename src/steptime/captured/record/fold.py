"""Runs of equal blocks in a module: found by structure, shortened while the module is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from steptime.captured.graph.segments import KEPT, Run

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
            blocks = list(child._modules.values())
            run = _longest(path, _signatures([block for block in blocks if block is not None]))
            if run is not None and not _shares(module, blocks):
                found.append(run)
                inside.append(path)
    return found


def _shares(module: torch.nn.Module, blocks: Sequence[torch.nn.Module | None]) -> bool:
    """Whether blocks share weights with each other or with the rest, or one stands there twice."""
    if len(set(map(id, blocks))) != len(blocks):
        return True
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    return any(uses[id(weight)] > 1 for block in blocks if block is not None for weight in block.parameters())


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


def _signatures(blocks: Sequence[torch.nn.Module]) -> list[Any]:
    """What equal blocks share: structure, and settings but for the block's own numbers.

    A number that is another one in every block (its index, a scale or a rate made from it) says nothing about what the
    block does; what it does is compared when the blocks run.
    """
    settings = [dict(_settings(block)) for block in blocks]
    seen: dict[str, list[Any]] = {}
    for each in settings:
        for name, value in each.items():
            seen.setdefault(name, []).append(value)
    own = {name for name, values in seen.items()
           if len(values) > 1 and all(map(_is_number, values)) and len(set(values)) == len(values)}  # fmt: skip
    return [
        (_structure(block), tuple(sorted((name, setting(name.rpartition(".")[2], value))
                                         for name, value in each.items() if name not in own)))
        for block, each in zip(blocks, settings, strict=True)
    ]  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _settings(block: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a block and all below it, by path."""
    for path, child in block.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in child.__dict__.items() if name not in _PLUMBING)


def _structure(module: torch.nn.Module) -> Any:
    """Classes, shapes, hooks."""
    tensors = [
        (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    hooks = tuple(len(getattr(module, name)) for name in _HOOKS)
    children = tuple((name, _structure(child)) for name, child in module.named_children())
    return type(module), tuple(tensors), hooks, children


_PLUMBING = frozenset(torch.nn.Module().__dict__) - {"forward"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def setting(name: str, value: Any) -> str:
    """A setting as text; a rate of dropout or stochastic depth only counts as zero or not.

    Objects count by their class, functions by their code: what they do is compared when the blocks run.
    """
    if isinstance(value, float) and (name == "p" or "drop" in name):
        return str(bool(value))
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return str([type(value).__name__, *(setting(name, each) for each in value)])
    if isinstance(value, dict):
        return str([(str(key), setting(name, each)) for key, each in value.items()])
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return f"{type(value).__qualname__} {'' if code is None else id(code)} {getattr(value, '__qualname__', '')}"


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
