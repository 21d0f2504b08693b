"""Whether blocks that look equal do equal things: one forward pass of the whole module, watched at its blocks.

Recording four blocks cannot see what the others do (attention of another kind in every sixth, an exit after the tenth).
So the whole module and the shortened one are each run forward once, and at every block is noted: which, how many nodes
autograd made since the note before, every operator since then with its arguments and shapes, the shapes that go in or
out, and whether gradients, automatic mixed precision or hooks for saved tensors (recomputation) are on. Without the
blocks in between, the notes must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import _get_sequence_nr as sequence_number  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.workload.capture.environment import capturing
from steptime.workload.capture.fold import shortened
from steptime.workload.graph.segments import Run

Note = tuple[int, int, str, int, tuple[Any, ...]]
"""Number of the run, index of the block, ``in`` or ``out``, nodes made since the note before, what else is seen."""


class _Operators(TorchDispatchMode):
    """Every operator that ran, as a number: which, with which arguments and shapes, in which state of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []
        self.start = sequence_number()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        exact = func._schema.name == "aten::pow"
        given = [_argument(leaf, exact) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))]
        self.ran.append(hash((func, *given, *_flags(), sequence_number() - self.start)))
        return func(*args, **kwargs)

    def taken(self) -> tuple[int, ...]:
        """What ran since this was asked before."""
        ran, self.ran, self.start = tuple(self.ran), [], sequence_number()
        return ran


def _argument(leaf: Any, exact: bool) -> Any:
    """A factor or a rate only counts as zero or not: nothing that is recorded of a block follows from it."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return bool(leaf) if isinstance(leaf, float) and not exact else str(leaf)


def repeats(module: torch.nn.Module, inputs: Any, found: list[Run], *, name: str, training: bool) -> str | None:
    """Why leaving out the blocks between would not leave everything else as it is; None: it would."""
    problem = ""
    for meta in (True, False):
        try:
            with capturing(module, inputs, name=name, training=training, meta=meta) as (arguments, _):
                whole = _notes(module, arguments, found, training)
                with shortened(module, found):
                    short = _notes(module, arguments, found, training)
        except Exception as error:
            problem = f"a forward pass with fewer blocks fails ({type(error).__name__})"
            continue
        if not _interior_alike(whole, found):
            return "blocks of equal structure run different operators"
        same = _without_copies(whole, found) == short
        return None if same else "what runs outside the blocks changes with their number"
    return problem


def _notes(module: torch.nn.Module, arguments: Any, found: list[Run], training: bool) -> list[Note]:
    notes: list[Note] = []
    last, operators = [sequence_number()], _Operators()

    def note(run: int, block: int, way: str, tensors: Any) -> None:
        now = sequence_number()
        notes.append((run, block, way, now - last[0], (*_flags(), *_shapes(tensors), operators.taken())))
        last[0] = now

    with _watching(module, found, note), torch.set_grad_enabled(training), operators:
        output = module(**arguments) if isinstance(arguments, dict) else module(*arguments)
    note(-1, 0, "end", output)
    return notes


@contextmanager
def _watching(module: torch.nn.Module, found: list[Run], note: Any) -> Iterator[None]:
    handles = []
    for number, run in enumerate(found):
        for index, block in enumerate(module.get_submodule(run.container).children()):
            handles.append(
                block.register_forward_pre_hook(
                    lambda _m, args, kwargs, n=number, i=index: note(n, i, "in", (args, kwargs)), with_kwargs=True
                )
            )
            handles.append(block.register_forward_hook(
                lambda _m, _args, output, n=number, i=index: note(n, i, "out", output)))  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flags() -> tuple[bool, ...]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), hooks


def _shapes(tensors: Any) -> tuple[Any, ...]:
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in leaves if isinstance(t, torch.Tensor))


def _period(note: Note, run: Run) -> int | None:
    index = note[1] - run.first
    return index // run.period if 0 <= index < run.count else None


def _interior_alike(notes: list[Note], found: list[Run]) -> bool:
    for number, run in enumerate(found):
        seen: dict[int, list[tuple[Any, ...]]] = {}
        for each in notes:
            period = _period(each, run) if each[0] == number else None
            if period is not None:
                seen.setdefault(period, []).append(((each[1] - run.first) % run.period, *each[2:]))
        periods = run.count // run.period
        if len(seen) != periods or any(seen[period] != seen[1] for period in range(2, periods - 1)):
            return False
    return True


def _without_copies(notes: list[Note], found: list[Run]) -> list[Note]:
    """The notes as if only the recorded periods were there."""
    out = []
    for each in notes:
        if each[0] < 0:
            out.append(each)
            continue
        run = found[each[0]]
        period = _period(each, run)
        if period is not None and 2 <= period < 2 + run.missing:
            continue
        late = each[1] >= run.first + (2 + run.missing) * run.period
        out.append((each[0], each[1] - late * run.missing * run.period, *each[2:]))
    return out
