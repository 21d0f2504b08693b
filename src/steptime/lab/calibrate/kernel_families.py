"""All families of kernels but the matrix products, in the order in which a row looks for its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from steptime.hardware.records import Curve
from steptime.lab.calibrate import attention, convolution, memory_bound, recurrent
from steptime.lab.calibrate.family import KernelFamily
from steptime.lab.calibrate.kernel_curves import Cell, cells, curves_of
from steptime.lab.calibrate.table import Table

BY_DTYPE: Final[tuple[KernelFamily, ...]] = (*attention.FAMILIES, *convolution.FAMILIES, *recurrent.FAMILIES)
"""One curve per dtype."""
BYTES_ONLY: Final[tuple[KernelFamily, ...]] = memory_bound.FAMILIES
"""One curve for all dtypes, kept as dtype ``any``: the shape arguments are in bytes."""
FAMILIES: Final[tuple[KernelFamily, ...]] = (*BY_DTYPE, *BYTES_ONLY)
"""A row belongs to the first family whose shape arguments are finite for it (see ``family.readable``)."""


def all_cells(table: Table) -> Iterator[Cell]:
    """Cells of all families in the table."""
    yield from cells(table, BY_DTYPE, by_dtype=True)
    yield from cells(table, BYTES_ONLY, by_dtype=False)


def kernel_curves(table: Table) -> dict[str, list[Curve]]:
    """Curves by device name, and under ``generic`` those for devices without measurements."""
    return curves_of(all_cells(table))
