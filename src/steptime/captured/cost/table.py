"""Costs of all calls of a program as arrays, and their sums by module, operator and phase."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from steptime.captured.cost.timing import BOUNDS, FREE, HOST_BAND, STEP_BAND, UNKNOWN, OperatorCost, Timer
from steptime.captured.graph import PHASES, Call, Program
from steptime.cost.host import issued_s
from steptime.cost.matmul import arithmetic_intensity
from steptime.estimate.learned import ISSUERS, Issuer
from steptime.num import Array, Num, minimum, where

WHOLE: Final = "(model)"
LOSS: Final = "(loss)"
OPTIMIZER: Final = "(optimizer)"
OUTSIDE: Final = "(outside modules)"
TOPS: Final = (WHOLE, LOSS, OPTIMIZER, OUTSIDE)
NUMBERED: Final = re.compile(r"\*|\d[\d,/+-]*")
"""Pattern of members of a list of modules: one, some (:func:`members_text`), or all."""
PARTS: Final = 3
"""Largest number of runs of members that a name lists."""


class Named(Protocol):
    """An object with a name."""

    @property
    def name(self) -> str:
        """Path of a module, or one of `TOPS`."""
        ...


T = TypeVar("T", bound=Named)


def labels(calls: Sequence[Call]) -> list[str]:
    """Module of each call; one of `TOPS` for calls outside submodules.

    In training, calls after the last submodule of the forward and before the first of the backward pass are the loss.
    Calls of the root module itself are not distinguished from other calls outside submodules. All calls of a program
    without submodules belong to the model, except for the optimiser.
    """
    inside = [number for number, call in enumerate(calls) if call.module and call.phase == "forward"]
    back = [number for number, call in enumerate(calls) if call.module and call.phase == "backward"]
    elsewhere = OUTSIDE if inside or back else WHOLE
    trains = any(call.phase == "backward" for call in calls)
    between = range(inside[-1] + 1, back[0]) if trains and inside and back else range(0)
    return [
        call.module or (OPTIMIZER if call.phase == "optimizer" else LOSS if number in between else elsewhere)
        for number, call in enumerate(calls)
    ]


def ancestors(path: str, depth: int) -> list[str]:
    """A path and its ancestors, from the root down to a depth; numbers of members do not count as levels.

    >>> ancestors("layers.0.attn.q", 2)
    ['(model)', 'layers', 'layers.0', 'layers.0.attn']
    >>> ancestors("(loss)", 2)
    ['(loss)']
    """
    if path in TOPS:
        return [path]
    words, out, levels = path.split("."), [WHOLE], 0
    for number, word in enumerate(words, 1):
        levels += not NUMBERED.fullmatch(word)
        if levels > depth:
            break
        out.append(".".join(words[:number]))
    return out


def folded_names(paths: Iterable[str], forward: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Path of each module -> a name shared by the members of one list that run the same operators.

    ``forward``: module and cost of each call of the forward pass, in order. The backward pass may differ, since the
    input of the first block needs no gradient.

    >>> folded_names(["l.0.a", "l.1.a"], [("l.0.a", 7), ("l.1.a", 7)])
    {'l.0.a': 'l.*.a', 'l.1.a': 'l.*.a'}
    >>> folded_names(["l.0", "l.1", "l.2"], [("l.0", 7), ("l.1", 8), ("l.2", 8)])
    {'l.0': 'l.0', 'l.1': 'l.1-2', 'l.2': 'l.1-2'}
    """
    ran: dict[str, list[tuple[str, Hashable]]] = {}
    for path, cost in forward:
        for member, below in _members(path):
            ran.setdefault(member, []).append((below, cost))
    known = dict.fromkeys(paths)
    lists: dict[str, dict[int, Hashable]] = {}
    for path in known:
        for member, _ in _members(path):
            above, _, number = member.rpartition(".")
            lists.setdefault(above, {})[int(number)] = tuple(ran.get(member, ()))
    texts = {above: _texts(costs) for above, costs in lists.items()}
    return {path: _folded(path, texts) for path in known}


def _members(path: str) -> list[tuple[str, str]]:
    """Members of lists on the path to a module, and its path below each.

    >>> _members("layers.0.mlp.2.act")
    [('layers.0', 'mlp.2.act'), ('layers.0.mlp.2', 'act')]
    """
    words = path.split(".")
    return [(".".join(words[: n + 1]), ".".join(words[n + 1 :])) for n, word in enumerate(words) if word.isdecimal()]


def _texts(costs: Mapping[int, Hashable]) -> dict[int, str]:
    """Member of a list -> name of all members with the same cost."""
    alike: dict[Hashable, list[int]] = {}
    for number in sorted(costs):
        alike.setdefault(costs[number], []).append(number)
    if len(alike) == 1 and len(costs) > 1:
        return dict.fromkeys(costs, "*")
    return {number: members_text(like) for like in alike.values() for number in like}


def _folded(path: str, texts: Mapping[str, Mapping[int, str]]) -> str:
    words = path.split(".")
    return ".".join(texts[".".join(words[:n])][int(word)] if word.isdecimal() else word for n, word in enumerate(words))


def members_text(numbers: Sequence[int]) -> str:
    """Text of members of a list: runs, a step after ``/``, and the number of others after ``+``; without a point.

    >>> members_text([0, 1, 2, 5]), members_text([4, 12, 20, 28]), members_text([0, 1, 5, 8, 9, 11, 12, 13])
    ('0-2,5', '4-28/8', '0-1,5,8-9,+3')
    """
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and 1 not in steps:
        return f"{numbers[0]}-{numbers[-1]}/{steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:PARTS]]
    more = sum(len(run) for run in runs[PARTS:])
    return ",".join([*parts, *([f"+{more}"] if more else [])])


def tree_order(groups: Mapping[str, T]) -> list[T]:
    """Groups as a tree: parents before their members, members in the given order."""
    members: dict[str, list[str]] = {}
    for name in groups:
        if name not in TOPS:
            members.setdefault(name.rpartition(".")[0] or WHOLE, []).append(name)
    out: list[T] = []

    def visit(name: str) -> None:
        out.append(groups[name])
        for member in members.get(name, ()):
            visit(member)

    for top in TOPS:
        if top in groups:
            visit(top)
    return out


LOOPS: Final = ("GRU", "LSTM", "RNN")
"""Modules that are one call from Python with any number of operators."""


def issuers(program: Program) -> tuple[int, ...]:
    """Issuer of each call of a program, as an index into :data:`steptime.estimate.learned.ISSUERS`."""
    inside = ISSUERS.index("inside")
    out = []
    before = ("", "")
    for call in program.calls:
        here = (call.module, call.phase)
        looped = here == before and call.phase != "optimizer" and program.modules.get(call.module) in LOOPS
        out.append(inside if looped else ISSUERS.index(call.phase))
        before = here
    return tuple(out)


def bare(issuer: Issuer, timer: Timer) -> bool:
    """True if no module and no Python code runs between one call and the next.

    On a CPU this also holds in optimisers, which record no gradients.
    """
    return issuer == "inside" or (timer.in_turn and issuer == "optimizer")


def issue_s(host_s: Num, launches: Num, short: Num, timer: Timer) -> Num:
    """Time of the host to issue a call (s); where ``short`` (:func:`bare`), only the time per further kernel."""
    return where(short, minimum(host_s, launches * timer.host_more_s), host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sums over some calls."""

    name: str
    calls: int
    flops: float
    """Executed matrix operations, with repeated and recomputed ones; a causal mask counts once."""
    vector_flops: float
    moved_bytes: float
    launches: float
    seconds: float
    """Time of the device."""
    depth: int = 0
    """Depth in the tree of modules."""

    @property
    def intensity(self) -> float:
        """Operations of all kinds per byte; 0 without traffic."""
        return _intensity(self.flops + self.vector_flops, self.moved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """An operator that is in no table, timed by its bytes."""

    op: str
    calls: int
    share_of_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Coverage of a program by the tables of operators."""

    calls: int
    """Number of calls with work, without views."""
    known_share_of_calls: float
    known_share_of_bytes: float
    fitted_share_of_time: float
    """Fraction of the device time that comes from fitted models, not from the roofline."""
    unknown: tuple[Unknown, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a step."""

    model_flops: float
    """Matrix operations of the model, without recomputation; a causal mask counts once."""
    executed_flops: float
    """Executed matrix operations."""
    saved_flops: float
    """Part of the executed operations that Winograd's algorithm saves."""
    vector_flops: float
    moved_bytes: float
    launches: float
    intensity: float
    device_s: float
    host_s: float
    """Time of the host to issue all kernels."""
    step_s: float
    """Time of the step: the smooth maximum of device and host time."""
    bracket_s: tuple[float, float]
    """Bounds: device and host concurrently, and one after the other."""
    band_s: tuple[float, float]
    """Interval in which nine of ten measurements should lie, from the errors of the curves."""
    mfu: float
    """Model FLOPs without the saved ones, over the dense peak of their element types."""
    hfu: float
    """Executed FLOPs without the saved ones, over the dense peak of their element types."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """One row per call of a program, as arrays."""

    program: Program
    timer: Timer
    kinds: tuple[OperatorCost, ...]
    """Distinct costs."""
    kind: Array
    """Number of each call's cost in ``kinds``."""

    def column(self, value: Callable[[OperatorCost], float]) -> Array:
        """A number of the cost of each call."""
        out: Array = np.array([value(cost) for cost in self.kinds], np.float64)[self.kind]
        return out

    @cached_property
    def flops(self) -> Array:
        """Executed matrix operations of each call."""
        return self.column(lambda c: float(c.work.matrix_flops))

    @cached_property
    def model_flops(self) -> Array:
        """Matrix operations of each call that count for the model; 0 if the call is a recomputation."""
        return self.column(lambda c: float(c.work.model_flops)) * ~self.recomputed

    @cached_property
    def saved_flops(self) -> Array:
        """Matrix operations of each call that Winograd's algorithm saves."""
        return self.column(lambda c: c.saved_flops)

    @cached_property
    def vector_flops(self) -> Array:
        """Vector operations of each call."""
        return self.column(lambda c: float(c.work.vector_flops))

    @cached_property
    def moved_bytes(self) -> Array:
        """Traffic of each call."""
        return self.column(lambda c: float(c.work.moved_bytes))

    @cached_property
    def launches(self) -> Array:
        """Kernels that each call launches."""
        return self.column(lambda c: float(c.work.launches))

    @cached_property
    def seconds(self) -> Array:
        """Time of the device for each call."""
        return self.column(lambda c: c.seconds)

    @cached_property
    def issued(self) -> Array:
        """Issuer of each call, an index into :data:`ISSUERS`."""
        return np.array(issuers(self.program), np.int64)

    @cached_property
    def host_s(self) -> Array:
        """Time of the host to issue each call, less where no Python code runs in between (:func:`bare`)."""
        host_s = self.column(lambda c: c.host_s)
        short = np.array([bare(issuer, self.timer) for issuer in ISSUERS])[self.issued]
        out = np.asarray(issue_s(host_s, self.launches, short, self.timer))
        correction = self.timer.correction
        if correction is None:
            return out
        factors: Array = np.exp(correction.host + correction.card(self.timer.device.name)[1])
        return out * factors[self.issued]

    @cached_property
    def recomputed(self) -> Array:
        """True for calls that are recomputations."""
        return np.array([call.recomputed for call in self.program.calls], np.bool_)

    @cached_property
    def works(self) -> Array:
        """True for calls with work."""
        return self.column(lambda c: float(c.bound != "none")) > 0

    # -- sums ---------------------------------------------------------------------------------------------------------

    def by(self, label: Callable[[Call], str]) -> tuple[Group, ...]:
        """Sums over calls with work, by a label; the longest first."""
        groups = self._grouped([label(call) for call in self.program.calls])
        return tuple(sorted(groups, key=lambda group: -group.seconds))

    def by_operator(self) -> tuple[Group, ...]:
        """Sums by operator, the longest first."""
        return self.by(lambda call: call.node.op)

    def by_phase(self) -> tuple[Group, ...]:
        """Sums by phase, in order."""
        order: dict[str, int] = {name: number for number, name in enumerate(PHASES)}
        return tuple(sorted(self.by(lambda call: call.phase), key=lambda group: order.get(group.name, len(order))))

    def by_bound(self) -> tuple[Group, ...]:
        """Sums by what bounds each call: matrix units, vector units, memory, launches."""
        bounds = [self.kinds[number].bound for number in self.kind]
        groups = {group.name: group for group in self._grouped(bounds)}
        return tuple(groups[name] for name in BOUNDS if name in groups)

    def by_basis(self) -> tuple[Group, ...]:
        """Sums by the basis of the times, the longest first."""
        groups = self._grouped([self.kinds[number].basis for number in self.kind])
        return tuple(sorted(groups, key=lambda group: -group.seconds))

    def by_module(self, depth: int = 2, *, folded: bool = False) -> tuple[Group, ...]:
        """Sums by module with all its members, in the order of the tree, down to a depth.

        Numbers of members do not count as levels. Calls outside modules are the loss, the optimiser, or neither.
        ``folded``: members of a list with the same operators (the layers of a stack) are one group.
        """
        sums: dict[str, Group] = {}
        paths = labels(self.program.calls)
        groups = self._grouped(paths)
        names = self._folded(groups, paths) if folded else {}
        for group in groups:
            for level, name in enumerate(ancestors(names.get(group.name, group.name), depth)):
                sums[name] = _joined(sums.get(name), group, name, level)
        return tuple(tree_order(sums))

    def _folded(self, groups: Sequence[Group], paths: Sequence[str]) -> dict[str, str]:
        """Path of each group -> name shared by groups whose forward passes cost the same."""
        alike = [(c.op, c.seconds, c.work.moved_bytes, c.work.matrix_flops, c.work.vector_flops) for c in self.kinds]
        calls = zip(paths, self.kind, self.program.calls, strict=True)
        forward = [(path, alike[kind]) for path, kind, call in calls if call.phase == "forward"]
        return folded_names((group.name for group in groups), forward)

    def _grouped(self, labels: Sequence[str]) -> list[Group]:
        """Sums by label in the order of first appearance."""
        numbers: dict[str, int] = {}
        codes = np.fromiter((numbers.setdefault(label, len(numbers)) for label in labels), np.int64, len(labels))
        working = self.works
        columns = [
            np.bincount(codes, weights=column * working, minlength=len(numbers))
            for column in (working, self.flops, self.vector_flops, self.moved_bytes, self.launches, self.seconds)
        ]
        return [
            Group(
                name=name, calls=int(columns[0][i]), flops=float(columns[1][i]), vector_flops=float(columns[2][i]),
                moved_bytes=float(columns[3][i]), launches=float(columns[4][i]), seconds=float(columns[5][i]),
            )
            for name, i in numbers.items() if columns[0][i]
        ]  # fmt: skip

    @cached_property
    def coverage(self) -> Coverage:
        """Coverage of the program by the tables of operators."""
        unknown = self.column(lambda c: float(c.work.family == UNKNOWN)) > 0
        fitted = self.column(lambda c: float(bool(c.basis) and c.basis != "roofline")) > 0
        calls, moved = int(self.works.sum()), float(self.moved_bytes.sum())
        names = [call.node.op if strange else "" for call, strange in zip(self.program.calls, unknown, strict=True)]
        strangers = [
            Unknown(op=group.name, calls=group.calls, share_of_bytes=_share(group.moved_bytes, moved))
            for group in self._grouped(names)
            if group.name
        ]
        return Coverage(
            calls=calls,
            known_share_of_calls=1.0 - _share(float((unknown & self.works).sum()), calls),
            known_share_of_bytes=1.0 - _share(float(self.moved_bytes[unknown].sum()), moved),
            fitted_share_of_time=_share(float(self.seconds[fitted].sum()), float(self.seconds.sum())),
            unknown=tuple(sorted(strangers, key=lambda each: -each.share_of_bytes)),
        )

    @cached_property
    def totals(self) -> Totals:
        """Sums over the step."""
        device_s, launches = float(self.seconds.sum()), float(self.launches.sum())
        host_s = float(self.host_s.sum()) + self.timer.call_s
        step_s = float(issued_s(device_s, 1.0, host_s, self.timer.sharpness))
        low_s = device_s + host_s if self.timer.in_turn else max(device_s, host_s)
        peak = self.column(lambda c: c.peak_flops_per_s)
        flops, moved = float(self.flops.sum()), float(self.moved_bytes.sum())
        vector = float(self.vector_flops.sum())
        return Totals(
            model_flops=float(self.model_flops.sum()), executed_flops=flops,
            saved_flops=float(self.saved_flops.sum()), vector_flops=vector, moved_bytes=moved,
            launches=launches, intensity=_intensity(flops + vector, moved), device_s=device_s, host_s=host_s,
            step_s=step_s, bracket_s=(low_s, device_s + host_s), band_s=self._band(step_s, host_s),
            mfu=_share(float(((self.model_flops - self.saved_flops * ~self.recomputed) / peak).sum()), step_s),
            hfu=_share(float(((self.flops - self.saved_flops) / peak).sum()), step_s),
        )  # fmt: skip

    def _band(self, step_s: float, host_s: float) -> tuple[float, float]:
        r"""Band of the step time; errors of one curve are correlated, those of different curves independent.

        $$\Delta^2 = \sum_c \big(T_c\,(f_c - 1)\,(d/t)^{p-1}\big)^2 + \big(h\,(f_h - 1)\,(h/t)^{p-1}\big)^2
          + \big(t\,(f_s - 1)\big)^2$$

        with $T_c$ the time on curve $c$ and $f_c$ an end of its band, $d = \sum_c T_c$ and $h$ the times of device and
        host, $(d/t)^{p-1}$ and $(h/t)^{p-1}$ the derivatives of their soft maximum $t$ of exponent $p$
        (:func:`steptime.cost.host.issued_s`), and $f_s$ an end of the band of a step over the sum of its kernels. Ends
        above 1 count for the upper edge, ends below 1 for the lower one. With a learned correction the band is that of
        the steps on which it was calibrated.
        """
        if not step_s:
            return (0.0, 0.0)
        if self.timer.correction is not None:
            low, high = self.timer.correction.band
            return (step_s * low, step_s * high)
        bands = {cost.basis: cost.band for cost in self.kinds}
        groups = self.by_basis()
        device_s = sum(group.seconds for group in groups)
        steep = self.timer.sharpness - 1
        slopes = (device_s / step_s) ** steep, (host_s / step_s) ** steep
        ends = []
        for end in (0, 1):
            parts = [group.seconds * (bands[group.name][end] - 1) * slopes[0] for group in groups]
            parts += [host_s * (HOST_BAND[end] - 1) * slopes[1], step_s * (STEP_BAND[end] - 1)]
            wrong = [part for part in parts if (part > 0) == bool(end)]
            ends.append(float(np.sqrt(np.sum(np.square(wrong)))))
        return (max(step_s - ends[0], 0.0), step_s + ends[1])

    def as_record(self, depth: int = 2) -> dict[str, Any]:
        """Totals, sums and coverage as plain values."""
        from dataclasses import asdict

        return {
            "program": self.program.name, "device": self.timer.device.name, "totals": asdict(self.totals),
            "by_phase": [asdict(group) for group in self.by_phase()],
            "by_operator": [asdict(group) for group in self.by_operator()],
            "by_module": [asdict(group) for group in self.by_module(depth, folded=True)],
            "coverage": asdict(self.coverage),
        }  # fmt: skip


def cost_table(program: Program, timer: Timer) -> CostTable:
    """Costs of every call of a program on a device."""
    kinds: dict[int, int] = {id(FREE): 0}
    costs = [FREE]
    known: dict[tuple[int, bool], int] = {}
    numbers = []
    for call in program.calls:
        key = (id(call.node), call.inplace)
        number = known.get(key)
        if number is None:
            cost = timer.look(call.node.op) if call.view else timer.cost(call.node, inplace=call.inplace)
            number = kinds.setdefault(id(cost), len(costs))
            if number == len(costs):
                costs.append(cost)
            known[key] = number
        numbers.append(number)
    return CostTable(program=program, timer=timer, kinds=tuple(costs), kind=np.array(numbers, np.int64))


def _intensity(flops: float, moved_bytes: float) -> float:
    return float(arithmetic_intensity(flops, moved_bytes)) if moved_bytes else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _joined(before: Group | None, more: Group, name: str, depth: int) -> Group:
    old: Mapping[str, float] = {} if before is None else {n: getattr(before, n) for n in _SUMMED}
    sums = {n: old.get(n, 0) + getattr(more, n) for n in _SUMMED}
    return Group(name=name, depth=depth, calls=int(sums.pop("calls")), **sums)


_SUMMED: Final = ("calls", "flops", "vector_flops", "moved_bytes", "launches", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Cost of a graph: static metrics, and the predicted time."""

    flops: float
    """Operations of the matrix and the vector units."""
    moved_bytes: float
    launches: float
    seconds: float
    """Predicted time of the device."""
    peak_bytes: float = 0.0
    """Largest memory that is alive at once; 0 if not computed."""


def table_metrics(table: CostTable, *, peak_bytes: float = 0.0) -> Metrics:
    """Metrics of a recorded program; the time is the step time, with the host."""
    totals = table.totals
    return Metrics(
        flops=totals.executed_flops + totals.vector_flops, moved_bytes=totals.moved_bytes, launches=totals.launches,
        seconds=totals.step_s, peak_bytes=peak_bytes,
    )  # fmt: skip
