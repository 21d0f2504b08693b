"""The search space of a tiled product on a core, and the schedules that are left out before measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

from steptime.errors import UserError
from steptime_lab.cost.register_tile import vector_registers
from steptime_lab.hierarchy.caches import Processor

WORD: Final = 4
"""Bytes of an element: single precision."""
ROWS: Final = (4, 6, 8, 12)
VECTORS: Final = (1, 2, 3, 4)
BLOCK_ROWS: Final = (48, 192)
BLOCK_DEPTHS: Final = (128, 256, 512)
PACKINGS: Final = ("none", "b", "both")
LARGEST: Final = 1 << 16
"""Largest size of a product in any dim."""
PANEL_SHARE: Final = 0.5
"""Share of the last cache that a block of the right operand may fill."""
SLACK: Final = 1.15
"""A schedule is left out if its predicted time is more than this multiple of the best predicted time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a core."""

    fma_per_clock: float
    """Multiply-adds of whole vectors that start in a cycle."""
    fma_latency: float
    """Cycles until a sum can be used."""
    loads_per_clock: float
    """Loads of whole vectors in a cycle."""
    fill_bytes_per_clock: tuple[float, ...]
    """Bytes in a cycle from the second level into the first, and so on; the last from memory."""
    clock_Hz: float
    source: str


RATES: Final[Mapping[str, Rates]] = {
    "zen4": Rates(
        fma_per_clock=1.0,
        fma_latency=4.0,
        loads_per_clock=1.0,
        fill_bytes_per_clock=(32.0, 16.0, 8.0),
        clock_Hz=3.5e9,
        source="AMD, Software optimization guide for the AMD Zen4 microarchitecture (57647): vectors of 512 bits in "
        "two halves, 32 bytes a cycle from the second level; further fills and the clock assumed",
    )
}
GENERIC: Final = Rates(
    fma_per_clock=1.0,
    fma_latency=4.0,
    loads_per_clock=1.0,
    fill_bytes_per_clock=(32.0, 16.0, 8.0),
    clock_Hz=3.0e9,
    source="assumed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The core that products are tuned for."""

    processor: Processor
    rates: Rates

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.processor.vector_bytes // WORD


def core_of(processor: Processor) -> Core:
    """A processor with the rates of its core; generic rates where they are not known.

    >>> from steptime_lab.hierarchy.caches import processor
    >>> core_of(processor("zen4")).lanes
    16
    """
    return Core(processor=processor, rates=RATES.get(processor.name, GENERIC))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Schedule:
    """Tiling of a product: one point of the search space."""

    rows: int
    """Rows of a register tile."""
    vectors: int
    """Vectors in a row of a register tile."""
    block_rows: int
    """Rows of the left operand that stay in the second level."""
    block_depth: int
    """Depth of a block of both operands."""
    packing: str
    """Operands that are copied into strips: ``none``, ``b`` or ``both``."""

    @property
    def text(self) -> str:
        """The schedule in a few words.

        >>> Schedule(rows=6, vectors=2, block_rows=48, block_depth=256, packing="b").text
        '6 x 2v, block 48 x 256, packs b'
        """
        return f"{self.rows} x {self.vectors}v, block {self.block_rows} x {self.block_depth}, packs {self.packing}"

    def to_json(self) -> dict[str, int | str]:
        """The knobs by name."""
        return asdict(self)


def block_columns(schedule: Schedule, n: int, core: Core) -> int:
    """Columns of a block of the right operand: whole register tiles that fill at most half of the last cache.

    >>> from steptime_lab.hierarchy.caches import processor
    >>> one = Schedule(rows=6, vectors=2, block_rows=48, block_depth=512, packing="b")
    >>> block_columns(one, 100, core_of(processor("zen4")))
    128
    """
    width = schedule.vectors * core.lanes
    most = int(PANEL_SHARE * core.processor.levels[-1].size_bytes / (WORD * schedule.block_depth * width))
    return max(1, min(-(-n // width), most)) * width


def space() -> tuple[Schedule, ...]:
    """Every combination of the knobs, in order: the template's search space.

    >>> len(space())
    288
    """
    return tuple(
        Schedule(rows=rows, vectors=vectors, block_rows=block_rows, block_depth=depth, packing=packing)
        for rows, vectors, block_rows, depth, packing in product(ROWS, VECTORS, BLOCK_ROWS, BLOCK_DEPTHS, PACKINGS)
    )


def check_shape(shape: tuple[int, int, int]) -> None:
    """Refuse sizes outside 1 to `LARGEST`.

    Raises:
        UserError: a size is outside.

    >>> check_shape((0, 1, 1))
    Traceback (most recent call last):
    steptime.errors.UserError: m: 0 is not a size from 1 to 65,536
    """
    for name, size in zip("mnk", shape, strict=True):
        if not 1 <= size <= LARGEST:
            raise UserError(f"{name}: {size} is not a size from 1 to {LARGEST:,}")


def static_reasons(shape: tuple[int, int, int], core: Core, schedules: Sequence[Schedule]) -> list[str | None]:
    """Reason to leave each schedule out without a prediction; None where there is none.

    ``registers``: its sums do not fit. ``same``: its blocks are cut off at the end of the product, so that it equals an
    earlier schedule.
    """
    m, _, k = shape
    seen: set[tuple[int, int, int, int, str]] = set()
    out: list[str | None] = []
    for one in schedules:
        key = (
            one.rows,
            one.vectors,
            min(one.block_rows, -(-m // one.rows) * one.rows),
            min(one.block_depth, k),
            one.packing,
        )
        spills = vector_registers(one.rows, one.vectors) > core.processor.vector_registers
        out.append("registers" if spills else "same" if key in seen else None)
        seen.add(key)
    return out
