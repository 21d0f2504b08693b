r"""What the model of matrix products leaves over, as a small table: libraries choose kernels by rules of their own.

The table has a value for each knot of a coarse grid over three logs: the length of the sum, the tiles per
multiprocessor and the aspect of the result. Between knots it is linear, and beyond the outermost knots it falls to
0 within one step of the grid, so that it neither grows nor matters where nobody measured. It holds only what
measurements near a knot agree on (:mod:`steptime.lab.calibrate.gemm_residual`), and at most :data:`LIMIT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from steptime.num import Array, Num, log2, maximum, minimum

#: First knot, step and number of knots of each axis, all in octaves: $k$, tiles per multiprocessor, $m / n$.
AXES: Final = ((5.0, 2.0, 6), (-7.0, 3.0, 6), (-10.0, 17.0, 2))
#: Elements of the tile that stands for all tiles.
TILE: Final = 128.0 * 128.0
#: Largest correction (log).
LIMIT: Final = 0.3
#: Names of the coefficients of a curve that make up the table, in its order.
NAMES: Final = tuple(
    f"residual_{a}_{b}_{c}" for a in range(AXES[0][2]) for b in range(AXES[1][2]) for c in range(AXES[2][2])
)
_PADDED: Final = tuple(count + 2 for _, _, count in AXES)


def residual_table(coefficients: Mapping[str, float]) -> Array | None:
    """The table of a curve, with a rim of zeros, flat; None if the curve has none. Missing knots are 0.

    >>> residual_table({"latency_s": 1e-6}) is None
    True
    """
    if not any(name in coefficients for name in NAMES):
        return None
    table = np.zeros(_PADDED)
    inner = np.array([coefficients.get(name, 0.0) for name in NAMES]).reshape([count for _, _, count in AXES])
    table[1:-1, 1:-1, 1:-1] = np.clip(inner, -LIMIT, LIMIT)
    return table.ravel()


def gemm_residual(m: Num, n: Num, k: Num, batch: Num, sm_count: Num, table: Array | None) -> Num:
    r"""Log of measured over modelled time of `batch` products of $m \times k$ by $k \times n$.

    $$\rho = \sum_{ijl} c_{ijl}\, \Lambda_i\Big(\log_2 k\Big)\, \Lambda_j\Big(\log_2 \frac{b\,m\,n}{128^2 S}\Big)\,
        \Lambda_l\Big(\log_2 \frac{m}{n}\Big)$$

    where $\Lambda$ are the hat functions of the knots (1 at the knot, 0 at its neighbours), $b$ = `batch`,
    $S$ = `sm_count`, and $c$ = `table` from :func:`residual_table`; 0 without a table.

    Source: trilinear interpolation; fitted, see the profiles of the catalogue.

    >>> table = residual_table({"residual_3_2_0": 0.1, "residual_3_2_1": 0.1})   # k = 2^11, half a tile
    >>> round(gemm_residual(128, 128, 2048, 1, 2, table), 6), gemm_residual(128, 128, 2, 1, 2, table)
    (0.1, 0.0)
    """
    if table is None:
        return 0.0
    a, x = _place(log2(k), *AXES[0])
    b, y = _place(log2(batch * m * n / (TILE * sm_count)), *AXES[1])
    c, z = _place(log2(m / n), *AXES[2])
    corner = (a * _PADDED[1] + b) * _PADDED[2] + c
    planes = []
    for along_k in (0, _PADDED[1] * _PADDED[2]):
        lines = []
        for along_tiles in (0, _PADDED[2]):
            at = corner + (along_k + along_tiles)
            lines.append(_between(_at(table, at), _at(table, at + 1), z))
        planes.append(_between(lines[0], lines[1], y))
    total = _between(planes[0], planes[1], x)
    return total if isinstance(total, np.ndarray) else float(total)


def _place(value: Num, first: float, step: float, count: int) -> tuple[Any, Num]:
    """Index of the knot below (of the padded table), and the way to the next as a share of the step."""
    at = minimum(maximum((value - first) / step + 1, 0.0), count + 1.0)
    low = np.minimum(at.astype(np.intp), count) if isinstance(at, np.ndarray) else min(int(at), count)
    return low, at - low


def _at(table: Array, index: Any) -> Num:
    """Entries of the table; one of them as a Python number."""
    entry: Num = table[index] if isinstance(index, np.ndarray) else table.item(index)
    return entry


def _between(low: Num, high: Num, share: Num) -> Num:
    return low + share * (high - low)
