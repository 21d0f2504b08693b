r"""Time of one matrix product on one device, with the library's choice of tile and split.

A library cuts the result into tiles, one per multiprocessor at a time, and takes the tile and the split of $k$
that finish first. Operands cross the memory once while the multiprocessors compute, and the slower of the two
sets the time, softly. All coefficients are fitted to measurements (:mod:`steptime_lab.calibrate.gemm`); all but the
latencies are in units of the datasheet, so that they carry over to devices that nobody measured. Only plain arithmetic
and a loop over a fixed table of tiles: a million shapes cost about a second.

The residual (:func:`gemm_residual`) is what this model leaves over, because libraries choose kernels by rules of their
own. It is a table with a value for each knot of a coarse grid over three logs: the length of the sum, the tiles per
multiprocessor and the aspect of the result. Between knots it is linear, and beyond the outermost knots it falls to
0 within one step of the grid, so that it neither grows nor matters where nobody measured. It holds only what
measurements near a knot agree on (:mod:`steptime_lab.calibrate.gemm`), and at most :data:`LIMIT`.

A wave (:func:`wave_factor`) is a round in which the blocks of a kernel pass over the processors of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import starmap
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.num import Array, Num, ceil, exp, floor, log2, maximum, minimum, soft_maximum, where


def quantised_waves(tiles: Num, sm_count: Num, quantisation: Num) -> Num:
    r"""Rounds that the tiles take, between the even share and whole rounds.

    $$w = f + q (\lceil f \rceil - f), \quad f = T / S$$

    where $T$ = `tiles`, $S$ = `sm_count` and $q$ = `quantisation` is 1 for hard rounds and 0 for work that is
    spread evenly.

    Source: NVIDIA, matrix multiplication background user's guide, wave quantisation.

    >>> quantised_waves(15, 10, 1.0), quantised_waves(15, 10, 0.5)
    (2.0, 1.75)
    """
    share = tiles / sm_count
    return share + quantisation * (ceil(share) - share)


def wave_factor(blocks: Num, sm_count: Num, tail: Num) -> Num:
    r"""Time of blocks that pass in rounds, over that of the same work spread evenly.

    $$\omega = 1 + \theta \left(\frac{\lceil B / S \rceil}{B / S} - 1\right)$$

    where $B$ = `blocks`, $S$ = `sm_count` and $\theta$ = `tail` in [0, 1] says how much of the last, partly filled
    round is lost: `quantised_waves` over $B / S$.

    Source: as `quantised_waves`.

    >>> wave_factor(50, 100, 1.0), wave_factor(150, 100, 0.75), wave_factor(200, 100, 1.0)
    (2.0, 1.25, 1.0)
    """
    return quantised_waves(blocks, sm_count, tail) / (blocks / sm_count)


#: Tiles $(b_m, b_n)$ that every library has.
TILES: Final = (
    (16, 128), (128, 16), (32, 128), (128, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64),
    (128, 256), (256, 128), (256, 256),
)  # fmt: skip
#: Tiles whose edge is no power of two: libraries since about 2022 have them, at the cost `odd_tile`.
ODD_TILES: Final = (
    (64, 192), (192, 64), (96, 128), (128, 96), (128, 160), (160, 128), (128, 192), (192, 128), (128, 224),
    (224, 128), (192, 192), (192, 256), (256, 192),
)  # fmt: skip
#: Tiles of more elements than this need the registers of newer devices, or cost `large_tile`.
LARGE_TILE: Final = 128 * 256
#: Tile of libraries that do not choose among tiles for batched products.
BATCHED_TILE: Final = (128, 128)
#: Products of which the times under all tiles are computed at once.
FEW: Final = 512
#: Bytes of one partial sum of a split.
PARTIAL_BYTES: Final = 4

#: Bytes per element of the wider formats of matrix units. Left operands with fewer are made from such activations.
WIDE_BYTES: Final = 2

#: Elements of $k$ that one step of the inner loop takes, of up to `WIDE_BYTES` bytes and of more.
STEP_K: Final = (32, 8)
#: A split of $k$ leaves at least this many elements to each part.
LEAST_K: Final = 128
#: Distance between rows (bytes) that `stride` counts in.
PAGE_BYTES: Final = 65536
#: Sharpness of the maximum of the rates inside one multiprocessor.
INNER_NORM: Final = 8
#: Steepness of the transition between products that stay in the last-level cache and those that do not.
CACHE_STEEPNESS: Final = 8
#: Rows, columns and depth of a large product.
LARGE: Final = 16384.0
_HOLDING_STEPS: Final = 10
#: Duration (s) beyond which a chip under full load lowers its clock.
THROTTLE_S: Final = 1e-3


def tile_step_s(
    rows: Num,
    columns: Num,
    element_bytes: Num,
    peak_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    compute_efficiency: Num,
    operand_speed: Num,
    step_s: Num,
) -> Num:
    r"""Time that one multiprocessor needs per element of $k$ of one tile.

    $$\sigma = \Big(\big(\tfrac{2 b_m b_n S}{\eta_c R}\big)^8 + \tau_k^8\Big)^{1/8}
        + \frac{(b_m + b_n) E S}{\omega \beta}$$

    where $R$ = `peak_flops_per_s` and $\beta$ = `memory_Bps` (datasheet), $S$ = `sm_count` multiprocessors that
    share them, $b_m$ = `rows`, $b_n$ = `columns`, $E$ = `element_bytes` of both operands, $\eta_c$ =
    `compute_efficiency`, $\tau_k$ = `step_s` (s, latency of the inner loop per element of $k$) and $\omega$ =
    `operand_speed`, the rate of the last-level cache in units of $\beta$.

    Source: this model; fitted, see the profiles of the catalogue.

    >>> round(tile_step_s(100, 50, 2, 1e12, 1e11, 10, 1.0, 30.0, 0.0) * 1e9, 6)   # arithmetic 100 ns, operands 1 ns
    101.0
    """
    arithmetic = 2 * rows * columns * sm_count / (peak_flops_per_s * compute_efficiency)
    inner = soft_maximum(arithmetic, step_s, INNER_NORM)
    return inner + (rows + columns) * element_bytes * sm_count / (memory_Bps * operand_speed)


def gemm_memory_s(
    m: Num,
    n: Num,
    k: Num,
    batch: Num,
    a_bytes: Num,
    b_bytes: Num,
    out_bytes: Num,
    memory_Bps: Num,
    l2_bytes: Num,
    memory_efficiency: Num,
    output_cost: Num,
    cached_cost: Num,
    cache_copies: Num,
) -> Num:
    r"""Time of the operand traffic.

    $$t_m = \big(1 - h (1 - \gamma)\big) \frac{A + B + \kappa C}{\eta_m \beta}, \quad
        h = \frac{1}{1 + \big((\rho B + A + C)/L\big)^8}$$

    where $A$, $B$, $C$ are the bytes of left operand, right operand and result (of `batch` products `m` x `k` by `k` x
    `n`, elements of `a_bytes`, `b_bytes`, `out_bytes`), $\beta$ = `memory_Bps`, $\eta_m$ = `memory_efficiency`,
    $\kappa$ = `output_cost` (a byte written against a byte read), $\gamma$ = `cached_cost` (time of a byte from the
    last-level cache of $L$ = `l2_bytes` against one from memory) and $\rho$ = `cache_copies`, how many weights of this
    size pass between two uses of the same. $L = 0$ gives the time with cold caches.

    Source: this model; benchmarks rotate a few copies of the weights.

    >>> gemm_memory_s(10, 20, 30, 1, 2, 2, 2, 1e3, 0, 1.0, 1.0, 0.5, 6.0)   # 2200 bytes at 1 kB/s
    2.2
    """
    left, right, result = batch * m * k * a_bytes, batch * k * n * b_bytes, batch * m * n * out_bytes
    filled = (cache_copies * right + left + result) / maximum(l2_bytes, 1.0)
    hit = 1 / (1 + minimum(filled, 1e6) ** CACHE_STEEPNESS)
    return (1 - hit * (1 - cached_cost)) * (left + right + output_cost * result) / (memory_efficiency * memory_Bps)


def knee_s(compute_s: Num, memory_s: Num, overlap: Num, overlap_per_s: Num) -> Num:
    r"""Larger of the two times, rounded off where they are nearly equal.

    $$t = (t_c^p + t_m^p)^{1/p}, \quad p = p_0 + p_1 t_m$$

    where $t_c$ = `compute_s`, $t_m$ = `memory_s`, $p_0$ = `overlap` and $p_1$ = `overlap_per_s` (1/s): long products
    overlap better than short ones.

    Source: p-norm roofline.

    >>> knee_s(3.0, 4.0, 2.0, 0.0), knee_s(1.0, 4.0, 1.0, 0.0)
    (5.0, 5.0)
    """
    power = overlap + overlap_per_s * memory_s
    larger = maximum(compute_s, memory_s)
    return larger * (1 + (minimum(compute_s, memory_s) / larger) ** power) ** (1 / power)


def gemm_s(
    m: Num,
    n: Num,
    k: Num,
    batch: Num,
    a_bytes: Num,
    b_bytes: Num,
    out_bytes: Num,
    peak_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    l2_bytes: Num,
    compute_efficiency: Num,
    memory_efficiency: Num,
    latency_s: Num,
    overlap: Num,
    overlap_per_s: Num,
    split_s: Num,
    fill_k: Num,
    step_s: Num,
    operand_speed: Num,
    output_cost: Num,
    cached_cost: Num,
    cache_copies: Num,
    quantisation: Num,
    throttle: Num,
    odd_tile: Num,
    large_tile: Num,
    batched_tile: Num,
    epilogue: Num,
    split_traffic: Num,
    quantise_s: Num,
    quantise_row: Num,
    stride: Num,
    residual: Num,
) -> Num:
    r"""Time of `batch` independent products of $m \times k$ by $k \times n$.

    $$t = \max\big((\tau + t_q + v)\,e^{\rho},\ t_0\big), \quad
      v = u + \theta\,\frac{\min(u, c_1)\, u}{u + 1\,\mathrm{ms}}, \quad
        u = \min\big(K(c_1, t_m),\ K(c_s, t_m) + \tau_s\big)$$

    $$c_1 = \min_{\mathrm{tiles}} w(T) \, \big((\lceil k \rceil_g + k_0)\, \sigma + \epsilon\big), \quad
        \epsilon = e_0 \frac{b_m b_n S}{\beta}$$

    $$c_s = \min_{\mathrm{tiles}} w(sT) \, \big((\lceil k/s \rceil_g + k_0)\, \sigma + \epsilon\big)
        + \frac{4 \lambda s\,b m n}{\beta}, \quad t_q = \phi\,\frac{b m (k + k_r)}{S}$$

    $$\sigma = (1 + \zeta\, k E / 64\,\mathrm{KiB})\; o\, l\, a\; \sigma_0$$

    with $K$ = `knee_s`, $t_m$ = `gemm_memory_s`, $w$ = `quantised_waves`, $\sigma_0$ = `tile_step_s`, $E$ the mean
    bytes per element of both operands, $T = b\lceil m/b_m \rceil \lceil n/b_n \rceil$ tiles, and
    $s = \min(\lfloor S/T \rfloor, k/128)$ the split of $k$ that fills the device; a tile with $s \le 1$ is as in $c_1$.
    The inner loop takes whole steps: $\lceil x \rceil_g$ is $x$ rounded up to a multiple of $g$ = 32 elements, or of 8
    where $E > 2$. Factors of a tile: $o$ = `odd_tile` for `ODD_TILES`, $l$ = `large_tile` for more than 128 x 256
    elements, $a$ = `batched_tile` for all but 128 x 128 where $b > 1$; else 1. $t_0$ is the time of every
    operand once through memory at the rate of the datasheet, with cold caches.

    Args:
        m: $m$, rows of the result.
        n: $n$, columns of the result.
        k: $k$, length of the sum.
        batch: $b$, independent products.
        a_bytes: bytes per element of the left operand.
        b_bytes: bytes per element of the right operand (weights).
        out_bytes: bytes per element of the result.
        peak_flops_per_s: datasheet peak of the dtype (FLOP/s).
        memory_Bps: datasheet bandwidth (bytes/s).
        sm_count: multiprocessors.
        l2_bytes: last-level cache (bytes); 0 for cold caches.
        compute_efficiency: share of the peak inside a large tile.
        memory_efficiency: share of the bandwidth.
        latency_s: $\tau$, time of an empty product (s).
        overlap: $p_0$ of `knee_s`.
        overlap_per_s: $p_1$ of `knee_s` (1/s).
        split_s: $\tau_s$, cost of splitting $k$ (s).
        fill_k: $k_0$, start and end of a tile in elements of $k$.
        step_s: latency per element of $k$ (s).
        operand_speed: see `tile_step_s`.
        output_cost: see `gemm_memory_s`.
        cached_cost: see `gemm_memory_s`.
        cache_copies: see `gemm_memory_s`.
        quantisation: see `quantised_waves`.
        throttle: $\theta$, slow-down of long products under the power limit.
        odd_tile: $o$, cost of `ODD_TILES` against `TILES`.
        large_tile: $l$, cost of tiles of more than 128 x 256 against others.
        batched_tile: $a$, cost of tiles other than 128 x 128 against it where $b > 1$: some libraries do not choose
            among tiles for batched products.
        epilogue: $e_0$, bytes that a multiprocessor could move while it finishes one element of a tile.
        split_traffic: $\lambda$, time of a byte of partial sums against one from memory.
        quantise_s: $\phi$, time (s) in which a multiprocessor converts one element of a left operand of less than 2
            bytes, in a kernel of its own before the product (0 for wider operands).
        quantise_row: $k_r$, cost of a row of this conversion in elements.
        stride: $\zeta$, what it costs that rows of $k$ elements lie 64 KiB apart: each is on pages of its own, and
            their addresses are translated again.
        residual: $\rho$, see :func:`steptime.cost.gemm.gemm_residual`.

    Source: this model; fitted, see the profiles of the catalogue.

    >>> ideal = dict(compute_efficiency=1.0, memory_efficiency=1.0, latency_s=0.0, overlap=100.0, overlap_per_s=0.0,
    ...     split_s=1.0, fill_k=0.0, step_s=0.0, operand_speed=1e9, output_cost=1.0, cached_cost=1.0,
    ...     cache_copies=1.0, quantisation=1.0, throttle=0.0, odd_tile=1.0, large_tile=1.0, batched_tile=1.0,
    ...     epilogue=0.0, split_traffic=0.0, quantise_s=0.0,
    ...     quantise_row=0.0, stride=0.0, residual=0.0)
    >>> t = gemm_s(1280, 1280, 1024, 1, 2, 2, 2, 1e14, 1e13, 100, 0.0, **ideal)   # 100 tiles of 128 x 128
    >>> round(t * 1e14 / (2 * 1280 * 1280 * 1024), 6)
    1.0
    """
    shape = (m, n, k, batch)
    whole_s, split_compute_s = _fastest_tiles_s(
        *shape,
        (a_bytes + b_bytes) / 2,
        peak_flops_per_s,
        memory_Bps,
        sm_count,
        compute_efficiency,
        fill_k,
        step_s,
        operand_speed,
        quantisation,
        odd_tile,
        large_tile,
        batched_tile,
        epilogue,
        split_traffic,
        stride,
    )
    traffic_s = gemm_memory_s(
        *shape,
        a_bytes,
        b_bytes,
        out_bytes,
        memory_Bps,
        l2_bytes,
        memory_efficiency,
        output_cost,
        cached_cost,
        cache_copies,
    )
    whole = knee_s(whole_s, traffic_s, overlap, overlap_per_s)
    split = knee_s(split_compute_s, traffic_s, overlap, overlap_per_s) + split_s
    busy = minimum(whole, split)
    slowed = busy + throttle * minimum(busy, whole_s) * busy / (busy + THROTTLE_S)
    converted_s = where(a_bytes < WIDE_BYTES, quantise_s * batch * m * (k + quantise_row) / sm_count, 0.0)
    modelled = (latency_s + converted_s + slowed) * exp(residual)
    once_s = batch * (m * k * a_bytes + k * n * b_bytes + m * n * out_bytes) / memory_Bps
    return maximum(modelled, where(l2_bytes > 0, 0.0, once_s))


def _fastest_tiles_s(
    m: Num,
    n: Num,
    k: Num,
    batch: Num,
    element_bytes: Num,
    peak_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    compute_efficiency: Num,
    fill_k: Num,
    step_s: Num,
    operand_speed: Num,
    quantisation: Num,
    odd_tile: Num,
    large_tile: Num,
    batched_tile: Num,
    epilogue: Num,
    split_traffic: Num,
    stride: Num,
) -> tuple[Num, Num]:
    """Compute time of the best tile with whole $k$, and with $k$ split until the device is full."""
    step_k = where(element_bytes > WIDE_BYTES, STEP_K[1], STEP_K[0])
    whole_k = ceil(k / step_k) * step_k + fill_k
    apart = 1 + stride * k * element_bytes / PAGE_BYTES
    odd, batched = apart * odd_tile, where(batch > 1, batched_tile, 1.0)
    most_splits = maximum(k / LEAST_K, 1)
    partial_s = split_traffic * PARTIAL_BYTES * batch * m * n / memory_Bps
    rates = (element_bytes, peak_flops_per_s, memory_Bps, sm_count, compute_efficiency, operand_speed, step_s)
    best: tuple[Num, Num] | None = None
    for tile in _tiles((m, n, k, batch), rates):
        sigma = tile.step_s * where(tile.is_odd, odd, apart) * where(tile.is_large, large_tile, 1)
        sigma = sigma * where(tile.is_batched, 1, batched)
        end_s = epilogue * tile.rows * tile.columns * sm_count / memory_Bps
        share = ceil(m / tile.rows) * (batch / sm_count) * ceil(n / tile.columns)
        whole = quantised_waves(share, 1, quantisation) * (whole_k * sigma + end_s)
        splits = minimum(floor(1 / share), most_splits)
        filled = share * splits
        split_k = ceil(k / maximum(splits, 1) / step_k) * step_k + fill_k
        split = (filled + quantisation * (1 - filled)) * (split_k * sigma + end_s) + partial_s * splits
        split = where(splits > 1, split, whole)
        if isinstance(tile.rows, np.ndarray):
            return _least(whole, m, n, k, batch), _least(split, m, n, k, batch)
        best = (whole, split) if best is None else (minimum(best[0], whole), minimum(best[1], split))
    assert best is not None
    return best


def _least(times_s: Any, *shape: Num) -> Num:
    """Least of each column; of one product, whose shape are numbers, a number."""
    least: Array = times_s.min(axis=0)
    return least if least.size > 1 or any(isinstance(each, np.ndarray) for each in shape) else float(least[0])


class _Tile(NamedTuple):
    """One tile, or all of them as a column each."""

    rows: Num
    columns: Num
    is_odd: Any
    is_large: Any
    is_batched: Any
    """True for a tile that libraries use for batched products even if they do not choose among tiles for them."""
    step_s: Num


def _tiles(shape: tuple[Num, ...], rates: tuple[Num, ...]) -> Iterable[_Tile]:
    """Tiles one after another; all at once, a row each, where the products are few: their table fits the cache."""
    if all(each.size <= FEW if isinstance(each, np.ndarray) else isinstance(each, (float, int)) for each in shape):
        try:
            return (_known_tiles(rates),)
        except TypeError:  # an array among the rates has no hash
            pass
    return starmap(partial(_tile, rates), (*TILES, *ODD_TILES))


def _tile(rates: tuple[Num, ...], rows: int, columns: int) -> _Tile:
    tile, step_s = (rows, columns), tile_step_s(rows, columns, *rates)
    return _Tile(*tile, tile in ODD_TILES, rows * columns > LARGE_TILE, tile == BATCHED_TILE, step_s)


@lru_cache(maxsize=256)
def _known_tiles(rates: tuple[float, ...]) -> _Tile:
    each = [_tile(rates, *tile) for tile in (*TILES, *ODD_TILES)]
    return _Tile(*(np.array(column)[:, None] for column in zip(*each, strict=True)))


def share_of_peak(edge: Num, time_s: Num, peak_flops_per_s: Num) -> Num:
    r"""Share of the peak that a product of as many rows and columns as its depth reaches.

    $$\eta = \frac{2\,n^3}{P\,t}$$

    where $n$ = `edge`, $t$ = `time_s` is the time of the product (s) and $P$ = `peak_flops_per_s` the datasheet's peak.

    Source: definition.

    >>> share_of_peak(1000, 4e-6, 1e15)
    0.5
    """
    return 2 * edge**3 / (time_s * peak_flops_per_s)


def held_efficiency(efficiency: float, share_with: Callable[[float], float], most: float) -> float:
    r"""Largest share of the peak inside a tile, $\eta_c$, with which a large product stays below a share of the peak.

    $$\eta_c \leftarrow \eta_c / \max\big(\eta(\eta_c) / \eta_{\max},\, 1\big)$$

    ten times over, where $\eta$ = `share_with` is the share (:func:`share_of_peak`) that a large product reaches with
    it and $\eta_{\max}$ = `most`; at first $\eta_c$ = `efficiency`.

    Source: definition of a peak.

    >>> round(held_efficiency(1.3, lambda inside: 0.9 * inside, 1.0), 6)
    1.111111
    """
    for _ in range(_HOLDING_STEPS):
        efficiency /= max(share_with(efficiency) / most, 1.0)
    return efficiency


def gemm_backward_s(
    m: Num,
    n: Num,
    k: Num,
    batch: Num,
    a_bytes: Num,
    b_bytes: Num,
    out_bytes: Num,
    input_residual: Num,
    weight_residual: Num,
    **rest: Num,
) -> Num:
    r"""Time of both gradients of a product: $dX = dY\,W^T$ ($m \times k$) and $dW = X^T dY$ ($k \times n$).

    $$t = t(m, k, n) + t(k, n, m)$$

    with $t$ = `gemm_s`, its residuals `input_residual` and `weight_residual`, and its further arguments in `rest`.

    Source: definition.
    """
    to_input = gemm_s(m, k, n, batch, out_bytes, b_bytes, a_bytes, residual=input_residual, **rest)
    return to_input + gemm_s(k, n, m, batch, a_bytes, out_bytes, b_bytes, residual=weight_residual, **rest)


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
