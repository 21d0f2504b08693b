"""Runs of equal blocks in a module: found by structure, checked for equal operators, shortened for the recording.

A recording of four blocks cannot see differences of the others (other attention in every sixth, an exit after the
tenth). So the whole module and the shortened one each run forward once. A note at every block has its number, the
number of autograd nodes since the last note, the operators since then (:class:`Watch`), the shapes that go in or out,
and flags for gradients, automatic mixed precision and hooks for saved tensors (recomputation). Without the blocks in
between, the notes must be equal. The backward pass follows from the forward pass, except for custom autograd functions,
whose settings are noted, and hooks on gradients, which are noted where they are set.
"""

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

from steptime.captured import torch_parts as parts
from steptime.captured.graph.segments import KEPT, Run
from steptime.captured.record.environment import Fakes, capturing
from steptime.captured.record.results import NEW
from steptime.captured.record.values import DEVICE, signature, tensors_in

LEFT_OUT = "steptime_left_out"
"""Attribute that marks a block as not recorded, for a checkpoint around several blocks that still refers to it."""
LEAST_SAVED = 2
"""Least number of periods that folding has to save."""


def runs(module: torch.nn.Module) -> list[Run]:
    """Runs of equal blocks in the lists and sequences of a module, outermost first and not nested."""
    found: list[Run] = []
    inside: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and type(child).forward in _PLAIN:
            blocks = list(parts.members_of(child).values())
            run = _longest(path, _signatures([block for block in blocks if block is not None]))
            if run is not None and not _shares(module, blocks):
                found.append(run)
                inside.append(path)
    return found


def _shares(module: torch.nn.Module, blocks: Sequence[torch.nn.Module | None]) -> bool:
    """True if blocks share weights with each other or with other modules, or a block occurs twice."""
    if len(set(map(id, blocks))) != len(blocks):
        return True
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    return any(uses[id(weight)] > 1 for block in blocks if block is not None for weight in block.parameters())


_PLAIN = (torch.nn.ModuleList.forward, torch.nn.Sequential.forward)


def _longest(path: str, signatures: list[Any]) -> Run | None:
    """The run with most blocks; among equals, the one with the shortest period."""
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
    """Structure and settings of each block, equal for equal blocks.

    A number that differs in every block (its index, or a scale or rate derived from it) is left out: it does not tell
    blocks apart, whose operators are compared when they run.
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
    """Attributes of a block and its submodules, by path."""
    for path, child in block.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in child.__dict__.items() if name not in _PLUMBING)


def _structure(module: torch.nn.Module) -> Any:
    """Classes, shapes and hooks of a module and its submodules."""
    tensors = [
        (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
        for table in parts.tables_of(module)
        for name, t in table.items()
    ]
    hooks = tuple(map(len, parts.hooks_of(module)))
    children = tuple((name, _structure(child)) for name, child in module.named_children())
    return type(module), tuple(tensors), hooks, children


_PLUMBING = frozenset(torch.nn.Module().__dict__) - {"forward"}


def setting(name: str, value: Any) -> str:
    """A setting as text; for rates of dropout or stochastic depth, only if they are zero.

    Objects count by their class, functions by their code; their operators are compared when the blocks run.
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
    """Keep a few blocks of each run, and mark the others; the module is restored at the end."""
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for run in found:
            members = parts.members_of(module.get_submodule(run.container))
            held = dict(members)
            blocks = list(held.values())
            kept = blocks[: run.first + KEPT * run.period] + blocks[run.first + run.count :]
            undo.append((members, held))
            members.clear()
            members.update({str(number): block for number, block in enumerate(kept)})
            for block in blocks[run.first + KEPT * run.period : run.first + run.count]:
                vars(block)[LEFT_OUT] = True
        yield
    finally:
        for members, held in undo:
            members.clear()
            members.update(held)
            for left in held.values():
                vars(left).pop(LEFT_OUT, None)


Spot = tuple[int, int, str]
"""A note of a block: number of the run, index of the block, ``in`` or ``out``."""
START: Spot = (-1, 0, "in")
Origin = tuple[Spot, int]
"""The note after which a storage was first seen, and its number there: 1, 2, ... if allocated, -1, -2, ... if found."""


class _End(NamedTuple):
    """End of a storage that a run allocated."""

    place: Origin
    """Origin of the storage, with its block counted within the period."""
    period: int
    name: int


class Watch(parts.NotCompiled, parts.TorchDispatchMode):
    """Log of every operator, its arguments, the origins of its tensors, and the ends of storages.

    The origin of a tensor of another block is its distance in periods; for the first period, and outside the run, it is
    an absolute place. So origins do not change when the blocks in between are left out.
    """

    def __init__(self, fakes: Fakes, found: Sequence[Run], blocks: Sequence[int]) -> None:
        super().__init__()
        self.fakes, self.found = fakes, found
        self.periods = [run.count // run.period if count >= run.first + run.count else KEPT
                        for run, count in zip(found, blocks, strict=True)]  # fmt: skip
        self.ran: list[Any] = []
        self.start = parts.sequence_number()
        self.here = START
        self._origin: dict[int, tuple[Origin, weakref.ref[Any]]] = {}
        """Storage -> its origin, and a weak reference that tells its end."""
        self._seen: Counter[tuple[Spot, bool]] = Counter()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch a forward pass, without garbage collection, which would free storages at an arbitrary block."""
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
        if func is DEVICE:
            return args[0].device
        with parts.DisableTorchFunction():
            return self._noted(func, args, kwargs or {})

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        one, tensors = signature(func), tensors_in((args, kwargs))
        given = [self._argument(leaf, one.name == "pow") for leaf in parts.pytree.tree_leaves((args, kwargs))]
        self.ran.append(hash((one, *given, *flags(), parts.sequence_number() - self.start)))
        output = self.fakes.again(func, args, kwargs, tensors)
        if output is NEW:
            output = func(*args, **kwargs)
        for tensor in tensors_in(output):
            self._known(tensor, made=True)
        return output

    def taken(self) -> tuple[Any, ...]:
        """Log since the last call; storages of all inner periods that end together count once."""
        ends: dict[Origin, set[int]] = {}
        for each in self.ran:
            if isinstance(each, _End):
                ends.setdefault(each.place, set()).add(each.period)
        together = {place: seen for place, seen in ends.items() if seen >= set(range(1, self.periods[place[0][0]] - 1))}
        kept = [each.name if isinstance(each, _End) else each for each in self.ran
                if not (isinstance(each, _End) and each.place in together)]  # fmt: skip
        all_ended = [
            (place, 0 in seen, self.periods[place[0][0]] - 1 in seen) for place, seen in sorted(together.items())
        ]
        self.ran, self.start = [], parts.sequence_number()
        return (*kept, *all_ended)

    # -- origins of tensors -------------------------------------------------------------------------------------------

    def _argument(self, leaf: Any, exact: bool) -> Any:
        """Argument for comparison; for a factor or a rate only if it is zero, since its value is not recorded."""
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        return bool(leaf) if isinstance(leaf, float) and not exact else str(leaf)

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, self._named(self._known(tensor))

    def _known(self, tensor: torch.Tensor, made: bool = False) -> Origin:
        """Origin of the storage of a tensor; a new storage gets the current note, as allocated or found."""
        storage = tensor.untyped_storage()
        address = id(storage)
        found = self._origin.get(address)
        if found is not None:
            return found[0]
        self._seen[self.here, made] += 1
        origin = self.here, self._seen[self.here, made] * (1 if made else -1)
        self._origin[address] = origin, weakref.ref(storage, lambda _: self._ended(address))
        return origin

    def _ended(self, address: int) -> None:
        origin, _ = self._origin.pop(address)
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
        """Name of an origin that does not change when the periods in between are left out."""
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
    """Flags of gradients, automatic mixed precision, and hooks for saved tensors (recomputation): true if on."""
    hooks = parts.top_hooks(True) is not None
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), hooks


def own_functions(output: Any, starts: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Note -> custom autograd functions before it in the graph of an output, with their settings.

    Args:
        output: result of a forward pass.
        starts: number of the next autograd node at the start and at every note.
    """
    found: dict[int, list[tuple[int, str]]] = {}
    leaves = parts.pytree.tree_leaves(output)
    todo = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            number = parts.number_of(node)
            held = sorted((name, setting(name, value)) for name, value in vars(node).items() if name != "to_save")
            text = f"{type(node).__qualname__} {held} saves {len(parts.saved_by(node))}"
            found.setdefault(bisect_left(starts, number + 1) - 1, []).append((number, text))
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        todo.extend(fresh)
    return {number: tuple(text for _, text in sorted(each)) for number, each in found.items()}


Note = tuple[int, int, str, int, tuple[Any, ...]]
"""Number of the run, index of the block, ``in`` or ``out``, autograd nodes since the last note, and the log."""


def repeats(module: torch.nn.Module, inputs: Any, found: list[Run], *, name: str, training: bool) -> str | None:
    """Reason why leaving out the blocks in between changes the rest; None if it does not."""
    try:
        with capturing(module, inputs, name=name, training=training) as (arguments, replaced):
            fakes = replaced.mode
            whole = _notes(module, arguments, fakes, found, training)
            with shortened(module, found):
                short = _notes(module, arguments, fakes, found, training)
    except Exception as error:
        return f"a forward pass with fewer blocks fails ({type(error).__name__})"
    if not _interior_alike(whole, found):
        return "blocks of equal structure run different operators"
    same = _without_copies(whole, found) == short
    return None if same else "what runs outside the blocks changes with their number"


def _notes(module: torch.nn.Module, arguments: Any, fakes: Fakes, found: list[Run], training: bool) -> list[Note]:
    notes: list[Note] = []
    starts = [parts.sequence_number()]
    watch = Watch(fakes, found, [len(parts.members_of(module.get_submodule(run.container))) for run in found])

    def note(run: int, block: int, way: str, tensors: Any) -> None:
        now = parts.sequence_number()
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
            handles.append(
                block.register_forward_hook(lambda _m, _args, output, n=number, i=index: note(n, i, "out", output))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shapes(tensors: Any) -> tuple[Any, ...]:
    leaves = parts.pytree.tree_leaves(tensors)
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in leaves if isinstance(t, torch.Tensor))


def _period(note: Note, run: Run) -> int | None:
    index = note[1] - run.first
    return index // run.period if 0 <= index < run.count else None


def _interior_alike(notes: list[Note], found: list[Run]) -> bool:
    """True if the periods from the third to the last but one are equal; the second is compared when it is recorded."""
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
    """The notes without those of the periods that are not recorded."""
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
