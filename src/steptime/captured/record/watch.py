"""What runs in a forward pass, in words that do not depend on how many blocks there are."""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.autograd import _get_sequence_nr as sequence_number  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.captured.graph.segments import KEPT, Run
from steptime.captured.record.fold import setting

Spot = tuple[int, int, str]
"""Number of the run, index of the block, ``in`` or ``out``: after which note of a block."""
START: Spot = (-1, 0, "in")
Origin = tuple[Spot, int]
"""Where a storage was first seen, and the how-manieth it was there: of those made there, as -1, -2 of those met."""


class _End(NamedTuple):
    """End of a storage that a run made."""

    place: Origin
    """Where it was made, its block counted within the period."""
    period: int
    name: int


class Watch(TorchDispatchMode):
    """Notes of every operator: which, its arguments, where its tensors come from, and which storages end.

    A tensor of another block is named by how many periods away that block is, one of the first period or from outside
    the run by its place: with the blocks in between left out, what they would have done keeps its name.
    """

    def __init__(self, found: Sequence[Run], blocks: Sequence[int]) -> None:
        super().__init__()
        self.found = found
        self.periods = [run.count // run.period if count >= run.first + run.count else KEPT
                        for run, count in zip(found, blocks, strict=True)]  # fmt: skip
        self.ran: list[Any] = []
        self.start = sequence_number()
        self.here = START
        self._origin: dict[int, Origin] = {}
        self._seen: Counter[tuple[Spot, bool]] = Counter()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch a forward pass; storages in cycles of references are not collected meanwhile, at any block's time."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            with ExitStack() as stack:
                for name in ("register_hook", "register_post_accumulate_grad_hook"):
                    noting = self._noting(getattr(torch.Tensor, name))
                    stack.enter_context(mock.patch.object(torch.Tensor, name, noting))
                stack.enter_context(self)
                yield
        finally:
            self._origin.clear()
            if collecting:
                gc.enable()

    def _noting(self, register: Any) -> Any:
        def noted(tensor: Any, hook: Any) -> Any:
            self.ran.append(hash((register.__name__, self._tensor(tensor), setting("hook", hook))))
            return register(tensor, hook)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        exact = func._schema.name == "aten::pow"
        given = [self._argument(leaf, exact) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))]
        self.ran.append(hash((func, *given, *flags(), sequence_number() - self.start)))
        output = func(*args, **kwargs)
        for leaf in (output,) if isinstance(output, torch.Tensor) else torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._known(leaf, made=True)
        return output

    def taken(self) -> tuple[Any, ...]:
        """What ran since this was asked before; where storages of all inner periods end, that counts once."""
        ends: dict[Origin, set[int]] = {}
        for each in self.ran:
            if isinstance(each, _End):
                ends.setdefault(each.place, set()).add(each.period)
        together = {place: seen for place, seen in ends.items()
                    if seen >= set(range(1, self.periods[place[0][0]] - 1))}  # fmt: skip
        kept = [each.name if isinstance(each, _End) else each for each in self.ran
                if not (isinstance(each, _End) and each.place in together)]  # fmt: skip
        all_ended = [(place, 0 in seen, self.periods[place[0][0]] - 1 in seen)
                     for place, seen in sorted(together.items())]  # fmt: skip
        self.ran, self.start = [], sequence_number()
        return (*kept, *all_ended)

    # -- where tensors come from --------------------------------------------------------------------------------------

    def _argument(self, leaf: Any, exact: bool) -> Any:
        """A factor or a rate only counts as zero or not: nothing that is recorded of a block follows from it."""
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        return bool(leaf) if isinstance(leaf, float) and not exact else str(leaf)

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, self._named(self._known(tensor))

    def _known(self, tensor: torch.Tensor, made: bool = False) -> Origin:
        """Where its storage was first seen: here, if it is new, as a result or as something that was there before."""
        storage = tensor.untyped_storage()
        origin = self._origin.get(storage._cdata)
        if origin is None:
            self._seen[self.here, made] += 1
            local = self._seen[self.here, made] * (1 if made else -1)
            origin = self._origin[storage._cdata] = (self.here, local)
            weakref.finalize(storage, self._ended, storage._cdata).atexit = False
        return origin

    def _ended(self, address: int) -> None:
        origin = self._origin.pop(address, None)
        if origin is None:
            return
        (run, block, way), local = origin
        period = self._period(run, block)
        name = hash(("end", self._named(origin)))
        self.ran.append(name if period is None else _End(((run, self._within(run, block), way), local), period, name))

    def _period(self, run: int, block: int) -> int | None:
        if run < 0:
            return None
        index = block - self.found[run].first
        return index // self.found[run].period if 0 <= index < self.periods[run] * self.found[run].period else None

    def _within(self, run: int, block: int) -> int:
        return (block - self.found[run].first) % self.found[run].period

    def _named(self, origin: Origin) -> tuple[Any, ...]:
        """A place by what does not change when the periods in between are left out."""
        (run, block, way), local = origin
        period = self._period(run, block)
        if period is not None:
            at = self._period(run, self.here[1]) if run == self.here[0] else None
            if at is not None and not (period == 0 and at > 1):
                return "away", at - period, self._within(run, block), way, local
        late = run >= 0 and block >= self.found[run].first + (self.periods[run] - 2) * self.found[run].period
        left_out = (self.periods[run] - KEPT) * self.found[run].period if late else 0
        between = period is not None and period > 1 and not late
        return "at", run, block - left_out, way, local, between


def flags() -> tuple[bool, ...]:
    """Gradients, automatic mixed precision, hooks for saved tensors (recomputation): whether each is on."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), hooks


def own_functions(output: Any, starts: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Functions of the user's own in the graph behind an output, with their settings, by the note after each.

    Args:
        output: what a forward pass returned.
        starts: number of autograd's next node when watching began and at every note.
    """
    found: dict[int, list[tuple[int, str]]] = {}
    leaves = torch.utils._pytree.tree_leaves(output)
    todo = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            number = node._sequence_nr()
            held = sorted((name, setting(name, value)) for name, value in vars(node).items() if name != "to_save")
            text = f"{type(node).__qualname__} {held} saves {len(node._raw_saved_tensors)}"
            found.setdefault(bisect_left(starts, number + 1) - 1, []).append((number, text))
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        todo.extend(fresh)
    return {number: tuple(text for _, text in sorted(each)) for number, each in found.items()}
