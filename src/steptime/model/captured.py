"""A recorded module reduced for planning: its operators, with sizes as lines over the micro-batch.

A *way* is a number of tensor ranks, with or without sequence parallelism between the products. Every size is
$c_w + s_w b$ for way $w$ and micro-batch $b$ (samples).

Names of factories: a torch module in the user's own code, as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from steptime.num import Num

NOISE = 1e-9
Way = tuple[int, int]
"""Tensor ranks, and 1 if they shard the tokens between products."""
Group = Literal["product", "weights", "attention", "pass", "nothing"]
"""Kind of an operator, which decides its rate; ``weights`` are products that make gradients of weights."""


@dataclass(frozen=True, slots=True)
class Line:
    r"""A size $c_w + s_w b$ by way; one entry stands for all ways.

    >>> Line((0.0,), (2.0,)).at(0, 3)
    6.0
    """

    constant: tuple[float, ...]
    slope: tuple[float, ...]

    def at(self, way: Num, micro_batch: Num) -> Num:
        """Size for a micro-batch under a way."""
        return _entry(self.constant, way) + _entry(self.slope, way) * micro_batch

    def scaled(self, share: float) -> Line:
        """The line times a share."""
        return Line(tuple(share * c for c in self.constant), tuple(share * s for s in self.slope))

    def plus(self, other: Line) -> Line:
        """Sum with another one."""
        ways = max(len(self.constant), len(other.constant))
        return line(
            (_entry(self.constant, w) + _entry(other.constant, w) for w in range(ways)),
            (_entry(self.slope, w) + _entry(other.slope, w) for w in range(ways)),
        )


def _entry(values: tuple[float, ...], way: Num) -> Num:
    if len(values) == 1:
        return values[0]
    return np.array(values)[np.asarray(way, dtype=np.int64)] if isinstance(way, np.ndarray) else values[int(way)]


def line(constant: Iterable[Any], slope: Iterable[Any]) -> Line:
    """A line by way, shorter where all ways are equal; a constant that is rounding noise is nothing."""
    s = tuple(float(value) for value in slope)
    c = tuple(0.0 if abs(v) < NOISE * abs(w) else v for v, w in zip(map(float, constant), s, strict=True))
    return Line(c[:1], s[:1]) if len(set(c)) == 1 and len(set(s)) == 1 else Line(c, s)


NOTHING = Line((0.0,), (0.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Operator of a strategy table, with its sizes, by which a fitted model times a captured operator."""

    operator: str
    backward: bool
    shape: Mapping[str, Line]
    launches: float
    """Number of launched kernels, used if no fitted model times it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A sum over the tensor ranks."""

    size_bytes: Line
    tokens: bool
    """True for a sum of activations, which ranks that shard the tokens scatter and gather instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective over ranks that are no axis of a plan."""

    collective: str
    """Collective, named as in :class:`steptime.plan.rows.Transfer`."""
    size_bytes: float
    group: Any
    """The ranks and their place: a ``Group`` of :mod:`steptime.estimate.communication`."""


class Turn(NamedTuple):
    """A message of parameters or their gradients, and all equal ones of a pass."""

    exchange: Exchange
    beside: tuple[float, ...]
    """Share of the pass that may overlap with each message: backward the part after the gradient is made, forward the
    part before the weights are read."""

    @property
    def size_bytes(self) -> float:
        """Bytes of all equal messages together."""
        return self.exchange.size_bytes * len(self.beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Traffic of parameters and memory of a device under a choice of shardings, in addition to its operators."""

    mesh: Mapping[str, int]
    """Devices of each axis, the outermost first."""
    placements: Mapping[str, str]
    """Sharding of each parameter, in the words of ``steptime shard``."""
    gradients: tuple[Turn, ...]
    """Traffic of gradients, and of weights that the backward pass gathers."""
    weights: tuple[Turn, ...]
    """Traffic of weights before and in the forward pass."""
    memory: Mapping[str, float]
    """Bytes at the moment of the peak, by path of their term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a part, or several equal ones."""

    name: str
    group: Group
    backward: bool
    times: int = 1
    matrix_flops: Line = NOTHING
    vector_flops: Line = NOTHING
    moved_bytes: Line = NOTHING
    kernel: Kernel | None = None
    issued: float = 1.0
    """Operators that the host issues for it; a share if an operator is divided over its kernels."""
    kept_bytes: Line = NOTHING
    """Bytes of the storages that it makes and that live into the backward pass."""
    weights: Line = NOTHING
    """Trained parameters that it is the first to read."""
    replicated: Line = NOTHING
    frozen: Line = NOTHING
    tied: bool = False
    """True if another part has the same weights: they count only if both parts are on different stages."""
    reductions: tuple[Reduction, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    """Collectives that a choice of shardings adds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedModel:
    """A module as a workload: head, one block that repeats, tail."""

    name: str
    source: str
    layers: int
    """Number of equal blocks; without equal blocks the number of slices into which the model is divided."""
    repeats: bool
    """True if there is a run of equal blocks."""
    ways: tuple[Way, ...]
    sequence_parallel: bool
    """True if all operators between pairs of products work on single tokens."""
    seq_len: int
    """Tokens of a sample; 1 if samples are no sequences."""
    head: tuple[Operator, ...]
    block: tuple[Operator, ...]
    tail: tuple[Operator, ...]
    boundary_bytes: Line
    """Bytes that one block hands to the next."""
    working_bytes: tuple[Line, ...]
    """Candidates for the largest temporary in the backward pass of a block, in addition to the kept bytes."""
    loss_bytes: tuple[Line, ...]
    model_flops: Line
    """Matrix operations of a step of a micro-batch, without recomputation."""
    forward_flops: Mapping[str, Line]
    """Forward matrix operations of ``embedding``, ``layers`` (all) and ``head``."""
    parameters: int
    dtype: str
    """Element type of most of its parameters."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operator of no table -> number of calls; such operators are timed by their bytes."""
    turns: tuple[tuple[float, float], ...] = ()
    """Without equal blocks, for each parameter in the order of the forward pass: share of the pass before the parameter
    is read, and share of all parameters."""
    sharded: Sharded | None = None
    """Choice of shardings, if the operators are those of one device; None: they are those of the whole module."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of tensor ranks that can cut the module."""
        return tuple(sorted({tp for tp, _ in self.ways}))

    def way(self, tp: Num, sp: Num) -> Num:
        """Index of the way of a plan; an impossible plan has the index of a single rank."""
        shared = self.sequence_parallel
        if not isinstance(tp, np.ndarray) and not isinstance(sp, np.ndarray):
            wanted = (int(tp), int(sp > 0) if shared and tp > 1 else 0)
            return self.ways.index(wanted) if wanted in self.ways else 0
        ranks, shares = np.broadcast_arrays(np.asarray(tp), np.asarray(sp))
        out = np.zeros(ranks.shape, dtype=np.int64)
        for index, (degree, share) in enumerate(self.ways):
            fits = (ranks == degree) & (((shares > 0) & shared & (ranks > 1)) == bool(share))
            out = np.where(fits, index, out)
        return out


TARGET: Final = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_][\w.]*)")


def is_target(text: str) -> bool:
    """True if a text is written as ``pkg.module:factory`` or ``file.py:factory``.

    >>> is_target("my_pkg.models:gpt"), is_target("./train.py:build"), is_target("llama3-8b"), is_target("model.onnx")
    (True, True, False, False)
    """
    return TARGET.fullmatch(text) is not None
