"""Named terms that add up: the result type of every estimate; and the tape that says how each was computed.

A :class:`Terms` is an ordered mapping from a path (``"tp_comm/forward/fc2/ring_reduce_scatter_s"``)
to a value. The last part of a path is the name of the function in :mod:`steptime.cost`
that computed it, so the formula behind a number in a report is one search away.

An estimate is explained by an evaluation under a tape (:func:`taped`): it keeps arguments and results of formulas by
the path that :func:`at` sets, and :func:`term` adds their share of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

from steptime.num import Num

SEPARATOR = "/"
Basis: TypeAlias = str | Callable[[], str]
"""Basis of a number, as a text, or as a function if the text is slow to make."""


class Terms(Mapping[str, float]):
    """Immutable ordered mapping from term path to value.

    >>> t = Terms({"compute/fc1/x_s": 2.0, "compute/fc2/x_s": 1.0, "bubble/x_s": 1.0})
    >>> t.total
    4.0
    >>> t.group("compute")
    3.0
    >>> dict((t + t).scaled(0.5)) == dict(t)
    True
    >>> t.rollup(1)
    {'compute': 3.0, 'bubble': 1.0}
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values: dict[str, float] = dict(values or {})

    def __getitem__(self, path: str) -> float:
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Terms({self._values!r})"

    def __add__(self, other: Mapping[str, float]) -> Terms:
        """Term by term sum; paths of either side are kept."""
        out = dict(self._values)
        for path, value in other.items():
            out[path] = out.get(path, 0.0) + value
        return Terms(out)

    def scaled(self, factor: float) -> Terms:
        """Every term times ``factor``."""
        return Terms({path: value * factor for path, value in self._values.items()})

    def without_zeros(self) -> Terms:
        """Only the terms that are not zero."""
        return Terms({path: value for path, value in self._values.items() if value})

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return float(sum(self._values.values()))

    def group(self, prefix: str) -> float:
        """Sum of the term ``prefix`` and everything below it."""
        below = prefix + SEPARATOR
        return float(sum(v for p, v in self._values.items() if p == prefix or p.startswith(below)))

    def rollup(self, depth: int) -> dict[str, float]:
        """Sums by the first ``depth`` parts of the path, in order of first appearance."""
        out: dict[str, float] = {}
        for path, value in self._values.items():
            head = SEPARATOR.join(path.split(SEPARATOR, depth)[:depth])
            out[head] = out.get(head, 0.0) + value
        return out

    def top(self, count: int) -> list[tuple[str, float]]:
        """The ``count`` largest terms, largest first."""
        return sorted(self._values.items(), key=lambda item: -item[1])[:count]


class Called(NamedTuple):
    """A formula that was called while a tape was on."""

    formula: Callable[..., Any]
    arguments: Mapping[str, Any]
    value: Num
    name: str
    """End of the path of a term that it is in."""
    basis: Basis
    factors: Mapping[str, Num]
    """Factors on its result in a term, by meaning."""


class Term(NamedTuple):
    """Seconds of a step with the calls that they are made of."""

    path: str
    calls: Sequence[Called]
    factors: Mapping[str, Num]
    """Factors of all calls."""
    exposed_s: float
    hidden_s: float
    part_s: float
    """Time of calls that other terms are computed from; it is in no sum."""


class Tape:
    """The formulas that were called while it was on, by path, and the terms of a step."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Called]] = {}
        self.terms: list[Term] = []
        self.open: tuple[list[Called], list[Called], Mapping[str, Num]] | None = None
        """Calls within, all calls of their path, and the factors of those within."""


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)


@contextmanager
def taped() -> Iterator[Tape]:
    """A tape that is on.

    >>> def area_m2(width_m, height_m):
    ...     return width_m * height_m
    >>> with taped() as tape, at("hall"):
    ...     size_m2 = call(area_m2, width_m=2.0, height_m=3.0)
    >>> [(one.name, one.value) for one in tape.calls["hall"]]
    [('area_m2', 6.0)]
    """
    token = _TAPE.set(tape := Tape())
    try:
        yield tape
    finally:
        _TAPE.reset(token)


@contextmanager
def at(path: str, **factors: Num) -> Iterator[Sequence[Called]]:
    """Sets the path of the calls within, and the factors on their results in a term; yields the calls."""
    tape, own = _TAPE.get(), list[Called]()
    if tape is None:
        yield own
        return
    before, tape.open = tape.open, (own, tape.calls.setdefault(path, []), factors)
    try:
        yield own
    finally:
        tape.open = before


def call(formula: Callable[..., Num], basis: Basis = "", /, **arguments: Num) -> Num:
    """Value of a formula, noted on the tape where one is on."""
    value = formula(**arguments)
    note(formula, arguments, value, basis)
    return value


def note(
    formula: Callable[..., Any], arguments: Mapping[str, Any], value: Num, basis: Basis = "", name: str = "",
    **factors: Num,
) -> None:  # fmt: skip
    """Notes a formula whose value is known; calls outside of any path are in no term."""
    tape = _TAPE.get()
    if tape is not None and tape.open is not None:
        own, calls, more = tape.open
        own.append(Called(formula, arguments, value, name or formula.__name__, basis, {**factors, **more}))
        calls.append(own[-1])


def term(
    path: str, exposed_s: Num, busy_s: Num | Callable[[], Num] | None = None, of: str = "", /, **factors: Num
) -> Num:  # fmt: skip
    """Exposed seconds of what was called at a path, noted as a term of the step.

    Args:
        path: of the term, but for the name of its formula.
        exposed_s: its exposed time in a step.
        busy_s: its whole time, overlapped time included; None: all of it is exposed.
        of: path of the calls; empty: that of the term.
        factors: factors on the results of all calls.
    """
    tape = _TAPE.get()
    if tape is not None and (calls := tape.calls.get(of or path)):
        busy = busy_s() if callable(busy_s) else busy_s
        hidden_s = 0.0 if busy is None else busy - exposed_s
        tape.terms.append(made_of(path, calls, exposed_s, hidden_s, **factors))
    return exposed_s


def part(path: str, /, **factors: Num) -> None:
    """Notes calls from which terms are computed; they add nothing to a step themselves."""
    tape = _TAPE.get()
    if tape is not None and (calls := tape.calls.get(path)):
        tape.terms.append(made_of(path, calls, **factors))


def made_of(
    path: str, calls: Sequence[Called], exposed_s: Num | None = None, hidden_s: Num = 0.0, /, **factors: Num
) -> Term:  # fmt: skip
    """A term of some calls; without exposed seconds a part."""
    part_s: Num = 0.0
    if exposed_s is None:
        for one in calls:
            part_s = part_s + _times(one.value, one.factors)
        exposed_s, part_s = 0.0, _times(part_s, factors)
    return Term(f"{path}{SEPARATOR}{calls[0].name}", calls, factors, float(exposed_s), float(hidden_s), float(part_s))


def _times(value: Num, factors: Mapping[str, Num]) -> Num:
    for factor in factors.values():
        value = value * factor
    return value
