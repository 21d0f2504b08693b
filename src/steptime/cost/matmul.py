r"""Work and traffic of matrix products, their time on a chip with three levels of memory, and arithmetic intensity.

In the model of three levels (:func:`three_level_matmul_s`) weights of $d_1 \times d_2$ meet activations of
$d_2 \times b$. At each boundary (device memory to L2, L2 to multiprocessor, shared memory to registers) the weight
matrix is cut into tiles that fit the lower level, as square as possible; weights then cross once, activations once per
row or column of tiles. Computing and all traffic overlap, so the slowest resource sets the time. The product of a
weight gradient ($d_1 \times b$ by $b \times d_2$) is tiled in the same way: `weight_gradient` selects it. The model is
optimistic: large products come out at 97 to 100 % of the sustained peak.

Source: E. Erdil and D. Schneider-Joseph, "Data movement limits to frontier model training", arXiv 2411.01137,
and the authors' device module.
"""

from __future__ import annotations

from typing import Any, Final

from steptime.num import Num, ceil_div, maximum, minimum, where

LOOSE_BYTES: Final = 16
"""Multiples of this are what matrix units load at full rate."""
ODD_BYTES: Final = 4
"""The least piece of an asynchronous copy on a GPU."""


def matmul_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Floating-point operations of one product of $m \times k$ by $k \times n$.

    $$F = m n (2k - 1 + a)$$

    where each of the $mn$ outputs takes $k$ multiplications and $k-1$ additions, and $a$ = `accumulate` is 1 if the
    result is added to an accumulator (the field's $2mnk$) and 0 if it is not.

    Source: definition.

    >>> matmul_flops(2, 3, 4, 1), matmul_flops(2, 3, 4, 0)
    (48, 42)
    """
    return m * n * (2 * k - 1 + accumulate)


def matmul_backward_flops(m: Num, n: Num, k: Num, accumulate: Num) -> Num:
    r"""Operations of both gradients of one product: $dX = dY\,W^T$ and $dW = X^T dY$.

    $$F = m k (2n - 1 + a) + k n (2m - 1 + a)$$

    with $m, n, k$ of the forward product and $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> matmul_backward_flops(2, 3, 4, 1) == 2 * matmul_flops(2, 3, 4, 1)
    True
    """
    return matmul_flops(m, k, n, accumulate) + matmul_flops(k, n, m, accumulate)


def off_boundary(m: Num, n: Num, k: Num, turned: Num, element_bytes: Num, boundary_bytes: Num) -> Num:
    r"""1.0 if rows of an operand or of the result of a product begin off a boundary of memory, else 0.0.

    $$q E \bmod B \ne 0 \quad\text{for}\quad q = n \ \text{or}\ q = (m \text{ if } u \text{ else } k)$$

    where $E$ = `element_bytes`, $B$ = `boundary_bytes`, and $u$ = `turned` is 1 where the left operand ($m \times k$)
    lies in memory as its transpose. A vocabulary of 50,257 elements of 2 bytes puts every other row of logits off a
    boundary of 4 bytes, and all but one in eight off one of 16.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (16 bytes for tensor cores); CUDA Programming Guide:
    the tensor memory accelerator takes strides that are multiples of 16 bytes, an asynchronous copy 4, 8 or 16 bytes.

    >>> [off_boundary(8, 50257, 768, 0, 2, boundary) for boundary in (16, 4)]
    [1.0, 1.0]
    >>> [off_boundary(8, 50258, 768, 0, 2, boundary) for boundary in (16, 4)]
    [1.0, 0.0]
    >>> off_boundary(50257, 768, 8, 1, 2, 16), off_boundary(50257, 768, 8, 0, 2, 16)
    (1.0, 0.0)
    """
    along = where(turned > 0, m, k)
    return where((along * element_bytes % boundary_bytes > 0) | (n * element_bytes % boundary_bytes > 0), 1.0, 0.0)


def matmul_bytes(m: Num, n: Num, k: Num, element_bytes: Num, output_passes: Num) -> Num:
    r"""Device-memory traffic of one product: each operand read once, the output written.

    $$M = (m k + k n + p\, m n) E$$

    where $E$ = `element_bytes` and $p$ = `output_passes` is how often the output goes through memory (1, or the
    number of panels of a blocked product that accumulates in memory).

    Source: arXiv 2410.00273, section on operation counts.

    >>> matmul_bytes(2, 3, 4, 2, 1)
    52
    """
    return (m * k + k * n + output_passes * m * n) * element_bytes


def matmul_backward_bytes(m: Num, n: Num, k: Num, element_bytes: Num, output_passes: Num) -> Num:
    r"""Traffic of both gradients: $dY$ twice, $W$, $X$, $dX$, $dW$ once each.

    $$M = 2 (m k + k n + p\, m n) E$$

    with the symbols of `matmul_bytes`.

    Source: arXiv 2410.00273, section on operation counts.

    >>> matmul_backward_bytes(2, 3, 4, 2, 1)
    104
    """
    return 2 * matmul_bytes(m, n, k, element_bytes, output_passes)


def blocked_matmul_flops(m: Num, n: Num, k: Num) -> Num:
    r"""Operations of a product in panels along $k$: every panel adds to an accumulator, $F = 2 m n k$.

    Source: definition.

    >>> blocked_matmul_flops(2, 3, 4)
    48
    """
    return 2 * m * n * k


def tile_rows(d1: Num, d2: Num, width_bytes: Num, tile_bytes: Num) -> Num:
    r"""Rows of tiles when a matrix is cut into the fewest tiles that fit, as square as possible.

    $$r = \min\Big(k, \max\big(1, \sqrt{k d_1 / d_2}\big)\Big), \quad
        k = \Big\lceil \frac{d_1 d_2 w}{c} \Big\rceil$$

    The number is a real one: rows need not divide the matrix.

    Args:
        d1: $d_1$, rows of the matrix (elements).
        d2: $d_2$, columns of the matrix (elements).
        width_bytes: $w$, bytes per word.
        tile_bytes: $c$, bytes that a tile may have.

    Source: arXiv 2411.01137, device module, tiling.

    >>> tile_rows(64, 64, 2, 2048)  # 4 tiles, 2 x 2
    2.0
    >>> tile_rows(16, 256, 2, 2048)  # 4 tiles side by side
    1
    """
    tiles = tile_count(d1, d2, width_bytes, tile_bytes)
    return minimum(tiles, maximum(1, (tiles * d1 / d2) ** 0.5))


def tile_count(d1: Num, d2: Num, width_bytes: Num, tile_bytes: Num) -> Num:
    r"""Fewest tiles that fit.

    $$k = \Big\lceil \frac{d_1 d_2 w}{c} \Big\rceil$$

    Args:
        d1: $d_1$, rows of the matrix (elements).
        d2: $d_2$, columns of the matrix (elements).
        width_bytes: $w$, bytes per word.
        tile_bytes: $c$, bytes that a tile may have.

    Source: arXiv 2411.01137, device module, tiling.

    >>> tile_count(64, 64, 2, 2048)
    4
    """
    return ceil_div(d1 * d2 * width_bytes, tile_bytes)


def resident_weight_bytes(d1: Num, d2: Num, width_bytes: Num, tile_bytes: Num, units: Num, weight_gradient: Any) -> Num:
    r"""Bytes of weights or weight gradients that cross a boundary: none if both stay below it.

    $$W = \begin{cases} 0 & 2 d_1 d_2 w \le c u \\ g \, d_1 d_2 w & \text{else} \end{cases}$$

    with $g = 2$ for a weight gradient (read and written) and 1 otherwise.

    Args:
        d1: $d_1$, rows of the weights (elements).
        d2: $d_2$, columns of the weights (elements).
        width_bytes: $w$, bytes per word.
        tile_bytes: $c$, bytes that one unit of the lower level holds.
        units: $u$, units of the lower level that work at once.
        weight_gradient: true where the product is that of the weight gradient.

    Source: arXiv 2411.01137, device module, traffic between levels.

    >>> resident_weight_bytes(64, 64, 2, 2048, 1, True)
    16384
    >>> resident_weight_bytes(64, 64, 2, 2048, 8, True)
    0
    """
    weight_bytes = d1 * d2 * width_bytes
    return where(2 * weight_bytes <= tile_bytes * units, 0, where(weight_gradient, 2, 1) * weight_bytes)


def level_bytes(
    d1: Num, d2: Num, b: Num, width_bytes: Num, tile_bytes: Num, units: Num, joined: Any, weight_gradient: Any
) -> Num:
    r"""Bytes that cross one boundary of the memory hierarchy.

    $$W = W_w + r \, d_2 b w + (2 q - 1) \, d_1 b w, \quad q = k / r$$

    and $q$ in place of $2q - 1$ for a weight gradient. Right-hand activations cross once per row
    of tiles; outputs are read and written once per column, the first time written only.

    Args:
        d1: $d_1$, rows of the weights (elements).
        d2: $d_2$, columns of the weights (elements).
        b: $b$, tokens.
        width_bytes: $w$, bytes per word.
        tile_bytes: bytes that one unit of the lower level holds.
        units: units of the lower level that work at once.
        joined: true where the units share what they hold, so that together they hold one tile.
        weight_gradient: true where the product is that of the weight gradient.

    $W_w$ is `resident_weight_bytes`, $r$ `tile_rows`, $k$ `tile_count`.

    Source: arXiv 2411.01137, device module, traffic between levels.

    >>> level_bytes(64, 64, 10, 2, 2048, 1, False, False)  # 8192 + 2 * 1280 + 3 * 1280
    14592.0
    """
    reach_bytes = where(joined, tile_bytes * units, tile_bytes)
    rows = tile_rows(d1, d2, width_bytes, reach_bytes)
    columns = tile_count(d1, d2, width_bytes, reach_bytes) / rows
    weights = resident_weight_bytes(d1, d2, width_bytes, tile_bytes, units, weight_gradient)
    passes = where(weight_gradient, columns, 2 * columns - 1)
    return weights + (rows * d2 + passes * d1) * b * width_bytes


def shared_network_bytes(d1: Num, d2: Num, b: Num, width_bytes: Num, tile_bytes: Num) -> Num:
    r"""Bytes between multiprocessors that share their memories, both ends counted.

    $$W = 2 \big((r - 1) d_2 + (q - 1) d_1\big) b w$$

    with the rows and columns of tiles of one multiprocessor: each copy beyond the first comes from a neighbour.

    Args:
        d1: $d_1$, rows of the weights (elements).
        d2: $d_2$, columns of the weights (elements).
        b: $b$, tokens.
        width_bytes: $w$, bytes per word.
        tile_bytes: bytes that one multiprocessor holds.

    Source: arXiv 2411.01137, device module, distributed shared memory.

    >>> shared_network_bytes(64, 64, 10, 2, 2048)  # 2 * (1 + 1) * 64 * 20
    5120.0
    """
    rows = tile_rows(d1, d2, width_bytes, tile_bytes)
    columns = tile_count(d1, d2, width_bytes, tile_bytes) / rows
    return 2 * ((rows - 1) * d2 + (columns - 1) * d1) * b * width_bytes


def padded_matmul_flops(d1: Num, d2: Num, b: Num, chunk: Num) -> Num:
    r"""FLOPs of a product whose dims are rounded up to the matrix unit.

    $$F = 2 s^3 \lceil d_1/s \rceil \lceil d_2/s \rceil \lceil b/s \rceil$$

    Args:
        d1: $d_1$, rows of the weights (elements).
        d2: $d_2$, columns of the weights (elements).
        b: $b$, tokens.
        chunk: $s$, edge of what the matrix unit takes at once (16).

    Source: arXiv 2411.01137, device module.

    >>> padded_matmul_flops(17, 16, 1, 16)
    16384
    """
    return 2 * ceil_div(d1, chunk) * ceil_div(d2, chunk) * ceil_div(b, chunk) * chunk**3


def three_level_matmul_s(
    d1: Num,
    d2: Num,
    b: Num,
    weight_gradient: Any,
    width_bytes: Num,
    multiprocessors: Num,
    register_bytes: Num,
    l2_bytes: Num,
    memory_Bps: Num,
    l2_Bps: Num,
    shared_Bps: Num,
    flops_per_s: Num,
    kernel_s: Num,
    distributed_shared_memory: Any,
) -> Num:
    r"""Seconds of one product: a latency and the slowest of four resources.

    $$t = t_k + \max\Big(\frac{W_1}{B_m}, \frac{W_1 + W_2}{B_2}, \frac{W_2 + W_x + W_3}{B_s},
        \frac{F}{R}\Big)$$

    Args:
        d1: rows of the weights (elements).
        d2: columns of the weights (elements).
        b: tokens.
        weight_gradient: true where the product is that of the weight gradient.
        width_bytes: bytes per word.
        multiprocessors: multiprocessors of the chip, of four processing blocks each.
        register_bytes: usable registers of one processing block (bytes).
        l2_bytes: usable L2 (bytes).
        memory_Bps: $B_m$, bandwidth of device memory (bytes/s).
        l2_Bps: $B_2$, bandwidth of L2 (bytes/s).
        shared_Bps: $B_s$, bandwidth of all shared memories together (bytes/s).
        flops_per_s: $R$, sustained rate of the matrix units (FLOP/s).
        kernel_s: $t_k$, latency of a kernel (s).
        distributed_shared_memory: true where multiprocessors read each other's shared memory.

    $W_1, W_2, W_3$ are `level_bytes` at L2, multiprocessor and registers, $W_x$ is
    `shared_network_bytes`, $F$ is `padded_matmul_flops`.

    Source: arXiv 2411.01137, device module, `matmul_time_seconds`.

    >>> round(three_level_matmul_s(8192, 8192, 8192, False, 2, 108, 49152, 0.75 * 40 * 2**20,
    ...     1555e9, 5603e9, 128 * 108 * 0.85 * 1410e6, 16 * 128 * 108 * 0.85 * 1410e6, 4.5e-6, False) * 1e6, 3)
    4152.207
    """
    in_l2 = level_bytes(d1, d2, b, width_bytes, l2_bytes, 1, False, weight_gradient)
    sm_bytes = 4 * register_bytes
    in_sm = level_bytes(d1, d2, b, width_bytes, sm_bytes, multiprocessors, distributed_shared_memory, weight_gradient)
    between = where(distributed_shared_memory, shared_network_bytes(d1, d2, b, width_bytes, sm_bytes), 0)
    in_registers = level_bytes(d1, d2, b, width_bytes, register_bytes, 4 * multiprocessors, False, weight_gradient)
    memory = maximum(in_l2 / memory_Bps, (in_l2 + in_sm) / l2_Bps)
    compute = padded_matmul_flops(d1, d2, b, 16) / flops_per_s
    return kernel_s + maximum(memory, maximum((in_sm + between + in_registers) / shared_Bps, compute))


def arithmetic_intensity(flops: Num, moved_bytes: Num) -> Num:
    r"""Operations per byte: $I = F / M$, with $F$ = `flops` and $M$ = `moved_bytes`.

    Source: roofline model, Williams et al. 2009.

    >>> arithmetic_intensity(8e12, 4e9)
    2000.0
    """
    return flops / moved_bytes


def attainable_flops_per_s(intensity: Num, flops_per_s: Num, memory_Bps: Num) -> Num:
    r"""Rate that a device can reach: $\min(R,\ I\,\beta)$.

    where $I$ = `intensity` (FLOP per byte), $R$ = `flops_per_s` and $\beta$ = `memory_Bps`.

    Source: roofline model, Williams et al. 2009.

    >>> attainable_flops_per_s(100.0, 1e15, 2e12), attainable_flops_per_s(1000.0, 1e15, 2e12)
    (200000000000000.0, 1000000000000000.0)
    """
    return minimum(flops_per_s, intensity * memory_Bps)
