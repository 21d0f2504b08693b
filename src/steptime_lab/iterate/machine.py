"""Cost coefficients of a processor for the parts of a kernel, fitted to kernels timed in loops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import InputFileError
from steptime.store.files import read_text, write_whole
from steptime_lab.cost.iterate import loop_kernel_s, sparse_product_s
from steptime_lab.iterate.loop import OPS

BYTES: Final = ("l3_byte_s", "memory_byte_s")
"""Names of the seconds per byte served by the last cache and by memory."""
GATHERS: Final = ("l2_gather_s", "l3_gather_s", "memory_gather_s")
PRODUCT: Final = ("nonzero_s", "row_s", "uneven_row_s", *GATHERS)
ELEMENTS: Final = tuple(f"{op}_element_s" for op in OPS if op != "spmv")
COEFFICIENTS: Final = ("call_s", *ELEMENTS, *BYTES, *PRODUCT)
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one kernel, independent of a machine."""

    op: str
    elements: float
    """Elements computed; rows of a sparse product."""
    level_bytes: tuple[float, float]
    """Bytes served by the last cache and by memory."""
    nonzeros: float = 0.0
    uneven_rows: float = 0.0
    """Rows whose length differs from that of the row before."""
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Gathers that are not prefetched, by the level that serves them: second cache, last cache, memory."""

    def counts(self) -> dict[str, float]:
        """Coefficient -> its multiplicity in the time of the kernel."""
        out = {"call_s": 1.0, **dict(zip(BYTES, self.level_bytes, strict=True))}
        if self.op == "spmv":
            out |= {"nonzero_s": self.nonzeros, "row_s": self.elements, "uneven_row_s": self.uneven_rows}
            return out | dict(zip(GATHERS, self.gathered, strict=True))
        return out | {f"{self.op}_element_s": self.elements}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Coefficients of a processor."""

    processor: str
    """Name of its caches (``steptime cache list``)."""
    last_share: float
    """Share of the last cache available to a thread; other threads and machines use it too."""
    values: Mapping[str, float]
    source: str
    date: str
    rows: int
    """Number of kernels in the fit."""
    error: float
    """Mean relative error of whole iterations on matrix families held out of the fit."""

    def seconds(self, work: Work) -> float:
        """Time of one kernel."""
        v = self.values
        each = [v[name] for name in BYTES]
        if work.op != "spmv":
            element_s = v[f"{work.op}_element_s"]
            return float(loop_kernel_s(v["call_s"], work.elements, element_s, work.level_bytes, each))
        streamed = loop_kernel_s(v["call_s"], work.uneven_rows, v["uneven_row_s"], work.level_bytes, each)
        found = sparse_product_s(
            work.nonzeros, v["nonzero_s"], work.elements, v["row_s"], work.gathered, [v[name] for name in GATHERS]
        )
        return float(streamed + found)

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        write_whole(path, json.dumps(asdict(self) | {"values": dict(self.values)}, indent=1) + "\n")


def read_profile(path: str | Path) -> Profile:
    """Read a profile from a file.

    Raises:
        InputFileError: the file is no profile.
    """
    text = read_text(path, MAX_BYTES, "a profile of kernels")
    try:
        table: Any = json.loads(text)
        found = Profile(**table)
        if not 0 < found.last_share <= 1:
            raise ValueError
        invalid = [name for name in COEFFICIENTS if not 0 <= float(found.values[name]) < 1]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise InputFileError(str(path), "is no profile of kernels", hint="steptime iterate --calibrate FILE") from None
    if invalid:
        raise InputFileError(str(path), f"{invalid[0]} is out of range", hint="steptime iterate --calibrate FILE")
    return found


def fitted(works: Sequence[Work], seconds: Sequence[float]) -> tuple[dict[str, float], float]:
    """Non-negative coefficients with the least sum of squares of relative errors, and the root of that sum."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    table = np.array([[work.counts().get(name, 0.0) for name in COEFFICIENTS] for work in works])
    scaled = table / np.asarray(seconds)[:, None]
    scale = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    found, left = nnls(scaled / scale, np.ones(len(works)), maxiter=20 * len(COEFFICIENTS))
    return dict(zip(COEFFICIENTS, (found / scale).tolist(), strict=True)), float(left)
