"""Named terms that add up: the result type of every estimate.

A :class:`Terms` is an ordered mapping from a path (``"tp_comm/forward/fc2/ring_reduce_scatter_s"``)
to a value. The last part of a path is the name of the function in :mod:`steptime.cost`
that computed it, so the formula behind a number in a report is one search away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

SEPARATOR = "/"


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
