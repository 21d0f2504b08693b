"""Whether blocks that look equal do equal things: one forward pass of the whole module, watched at its blocks.

Recording four blocks cannot see what the others do (attention of another kind in every sixth, an exit after the tenth).
So the whole module and the shortened one are each run forward once, and at every block is noted: which, how many nodes
autograd made since the note before, what ran since then (:mod:`steptime.captured.record.watch`), the shapes that go in
or out, and whether gradients, automatic mixed precision or hooks for saved tensors (recomputation) are on. Without the
blocks in between, the notes must be the same. The backward pass follows from the forward pass but for functions of the
user's own, whose settings are noted, and hooks on gradients, which are noted where they are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import _get_sequence_nr as sequence_number  # type: ignore[attr-defined]

from steptime.captured.graph.segments import Run
from steptime.captured.record.environment import capturing
from steptime.captured.record.fold import shortened
from steptime.captured.record.watch import Watch, flags, own_functions

Note = tuple[int, int, str, int, tuple[Any, ...]]
"""Number of the run, index of the block, ``in`` or ``out``, nodes made since the note before, what else is seen."""


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
    starts = [sequence_number()]
    watch = Watch(found, [len(module.get_submodule(run.container)._modules) for run in found])

    def note(run: int, block: int, way: str, tensors: Any) -> None:
        now = sequence_number()
        notes.append((run, block, way, now - starts[-1], (*flags(), *_shapes(tensors), watch.taken())))
        starts.append(now)
        watch.here = (run, block, way)

    with _watching(module, found, note), torch.set_grad_enabled(training), watch.on():
        output = module(**arguments) if isinstance(arguments, dict) else module(*arguments)
        note(-1, 0, "end", output)
        functions = own_functions(output, starts)
    return [(*each[:-1], (each[-1], functions.get(number, ()))) for number, each in enumerate(notes)]


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


def _shapes(tensors: Any) -> tuple[Any, ...]:
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in leaves if isinstance(t, torch.Tensor))


def _period(note: Note, run: Run) -> int | None:
    index = note[1] - run.first
    return index // run.period if 0 <= index < run.count else None


def _interior_alike(notes: list[Note], found: list[Run]) -> bool:
    """Whether the periods from the third to the last but one are equal; the second is compared where it is recorded."""
    for number, run in enumerate(found):
        seen: dict[int, list[tuple[Any, ...]]] = {}
        for each in notes:
            period = _period(each, run) if each[0] == number else None
            if period is not None:
                seen.setdefault(period, []).append(((each[1] - run.first) % run.period, *each[2:]))
        periods = run.count // run.period
        if len(seen) != periods or any(seen[period] != seen[2] for period in range(3, periods - 1)):
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
