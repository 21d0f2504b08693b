r"""Words that a tiled product moves between two levels of memory, and the fewest that any order moves.

A product of $m \times k$ by $k \times n$ (of $n \times n$ by $n \times n$ where only $n$ is given) is made of $mnk$
multiplications. A word is one element. Formulas hold for sizes that the tiles divide; where they do not,
:func:`tile_reads_words` rounds up.

Source: lecture notes on machine-learning systems (CSE 234, UC San Diego), matrix multiplication: cache-aware and
register-aware tiling, GPU kernels v1 to v3, checked here against simulated traffic; bounds at each function.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, floor, maximum, minimum


def naive_reads_words(n: Num) -> Num:
    r"""Words that a product without tiles reads, one thread or loop per output (GPU kernel v1): $2 n^3$.

    where each of $n^2$ outputs, $n$ = `n`, reads a row and a column of $n$.

    Source: lecture notes, GPU Matmul v1.

    >>> naive_reads_words(1024) / 2**30
    2.0
    """
    return 2 * n**3


def thread_tile_reads_words(n: Num, v: Num) -> Num:
    r"""Words read where a thread makes $v \times v$ outputs and keeps a row of the left operand (v1.5).

    $$W = \frac{n^2}{v^2} (n v + n v^2) = \frac{n^3}{v} + n^3$$

    with $n$ = `n` and $v$ = `v`: a row is read once for $v$ outputs, a column once for each output.

    Source: lecture notes, GPU Matmul v1.5.

    >>> thread_tile_reads_words(64, 8)
    294912.0
    """
    return n**3 / v + n**3


def thread_tile_words(n: Num, v: Num) -> Num:
    r"""Words that a thread of kernel v1.5 keeps: $v^2 + 2 n$ (sums, a row and a column) with $n$ = `n`, $v$ = `v`.

    Source: lecture notes, GPU Matmul v1.5.

    >>> thread_tile_words(64, 8)
    192
    """
    return v**2 + 2 * n


def outer_product_reads_words(n: Num, v: Num) -> Num:
    r"""Words read where a thread makes $v \times v$ outputs as a sum of outer products (v2): $2 n^3 / v$.

    with $n$ = `n` and $v$ = `v`: each of $n^2 / v^2$ threads reads $2 v$ words in each of $n$ steps.

    Source: lecture notes, GPU Matmul v2.

    >>> outer_product_reads_words(64, 8)
    65536.0
    """
    return 2 * n**3 / v


def outer_product_words(v: Num) -> Num:
    r"""Words that a thread of kernel v2 keeps in registers: $v^2 + 2 v$ with $v$ = `v`.

    Source: lecture notes, GPU Matmul v2.

    >>> outer_product_words(8)
    80
    """
    return v**2 + 2 * v


def block_tile_reads_words(n: Num, tile: Num) -> Num:
    r"""Words that blocks of threads read from device memory into shared memory (v3): $2 n^3 / l$.

    where each of $n^2 / l^2$ blocks reads two panels of $n \times l$, with $n$ = `n`, $l$ = `tile`.

    Source: lecture notes, GPU Matmul v3.

    >>> block_tile_reads_words(64, 32)
    16384.0
    """
    return 2 * n**3 / tile


def block_shared_reads_words(n: Num, v: Num) -> Num:
    r"""Words that threads read from shared memory into registers (v3): $2 n^3 / v$, with $n$ = `n`, $v$ = `v`.

    Source: lecture notes, GPU Matmul v3: $2 v n$ of each of $n^2 / v^2$ threads.

    >>> block_shared_reads_words(64, 8)
    65536.0
    """
    return 2 * n**3 / v


def block_shared_words(tile: Num, depth: Num) -> Num:
    r"""Words of shared memory of a block (v3): $2 s l$, with $s$ = `depth`, $l$ = `tile`.

    Source: lecture notes, GPU Matmul v3.

    >>> block_shared_words(128, 16)
    4096
    """
    return 2 * depth * tile


def block_threads(tile: Num, v: Num) -> Num:
    r"""Threads of a block (v3): $(l / v)^2$, with $l$ = `tile`, $v$ = `v`.

    Source: lecture notes, GPU Matmul v3.

    >>> block_threads(128, 8)
    256.0
    """
    return (tile / v) ** 2


def cooperative_loads(tile: Num, depth: Num, v: Num) -> Num:
    r"""Words that a thread loads in each step when a block fetches together: $2 s l / (l / v)^2$.

    with $l$ = `tile`, $s$ = `depth`, $v$ = `v`; without cooperation each thread would load $2 s v$ itself.

    Source: lecture notes, cooperative fetching.

    >>> cooperative_loads(128, 16, 8)
    16.0
    """
    return block_shared_words(tile, depth) / block_threads(tile, v)


def panel_reads_words(n: Num, b1: Num) -> Num:
    r"""Words read into a cache that keeps a panel of the left operand (cache-aware tiling): $n^2 + n^3 / b_1$.

    with $n$ = `n` and $b_1$ = `b1` rows of a panel: the left operand is read once, the right one for each panel.

    Source: lecture notes, Cache-aware tiled matrix multiplication.

    >>> panel_reads_words(64, 16)
    20480.0
    """
    return n**2 + n**3 / b1


def panel_words(n: Num, b1: Num, b2: Num) -> Num:
    r"""Words of the panels in the cache: $b_1 n + b_2 n$, with $n$ = `n`, $b_1$ = `b1`, $b_2$ = `b2` rows.

    Least-recently-used replacement also needs space for the next panel of the right operand: $b_1 n + 2 b_2 n$.

    Source: lecture notes, Cache-aware tiled matrix multiplication.

    >>> panel_words(64, 16, 8)
    1536
    """
    return b1 * n + b2 * n


def register_reads_words(n: Num, v1: Num, v2: Num) -> Num:
    r"""Words read into registers with tiles of $v_1 \times v_3$ and $v_2 \times v_3$: $n^3 / v_2 + n^3 / v_1$.

    with $n$ = `n`, $v_1$ = `v1`, $v_2$ = `v2`; the depth $v_3$ does not enter.

    Source: lecture notes, Register-aware tiling; also between first level and registers in the combined kernel.

    >>> register_reads_words(64, 4, 8)
    98304.0
    """
    return n**3 / v2 + n**3 / v1


def register_writes_words(n: Num) -> Num:
    r"""Words of the result that are written where sums stay in registers: $n^2$ with $n$ = `n`.

    Source: lecture notes, Register-aware tiling.

    >>> register_writes_words(64)
    4096
    """
    return n**2


def register_words(v1: Num, v2: Num, v3: Num) -> Num:
    r"""Registers of a register tile: $v_1 v_3 + v_2 v_3 + v_1 v_2$, with $v_1$ = `v1`, $v_2$ = `v2`, $v_3$ = `v3`.

    Source: lecture notes, Register-aware tiling.

    >>> register_words(4, 8, 1)
    44
    """
    return v1 * v3 + v2 * v3 + v1 * v2


def square_tile_reads_words(n: Num, b: Num) -> Num:
    r"""Words read with square tiles of all three matrices where the result's tile stays: $2 n^3 / b + n^2$.

    with $n$ = `n`, $b$ = `b`; the result is read once ($n^2$, counted) and written once (not counted).

    Source: lecture notes, tiles; M. Lam, E. Rothberg and M. Wolf, "The cache performance and optimizations of blocked
    algorithms", ASPLOS 1991.

    >>> square_tile_reads_words(64, 16)
    36864.0
    """
    return 2 * n**3 / b + n**2


def tile_reads_words(m: Num, n: Num, k: Num, bm: Num, bn: Num) -> Num:
    r"""Words of both operands that a product reads with tiles of $b_m \times b_n$ outputs, of any size.

    $$W = m k \lceil n / b_n \rceil + k n \lceil m / b_m \rceil$$

    with $m$ = `m`, $n$ = `n`, $k$ = `k`, $b_m$ = `bm`, $b_n$ = `bn`.

    Source: count; $2 n^3 / b$ where all are equal and divide.

    >>> tile_reads_words(64, 64, 64, 8, 8), tile_reads_words(65, 64, 1, 8, 8)
    (65536, 1096)
    """
    return m * k * ceil_div(n, bn) + k * n * ceil_div(m, bm)


def tile_traffic_words(m: Num, n: Num, k: Num, bm: Num, bn: Num, result_passes: Num) -> Num:
    r"""Words in both directions: :func:`tile_reads_words` and $p\, m n$ of the result.

    with $p$ = `result_passes`: 1 where the result is only written, 2 where it is read and written.

    Source: count.

    >>> tile_traffic_words(64, 64, 64, 8, 8, 2)
    73728
    """
    return tile_reads_words(m, n, k, bm, bn) + result_passes * m * n


def shared_reuse_loads(outputs: Num, window: Num) -> tuple[Num, Num]:
    r"""Loads of a window over neighbouring inputs, with shared memory and without.

    $$W_s = t + w - 1, \qquad W = t w$$

    where a block makes $t$ = `outputs`, each from $w$ = `window` inputs in a row.

    Source: lecture notes, CUDA memory access example: 130 against 384.

    >>> shared_reuse_loads(128, 3)
    (130, 384)
    """
    return outputs + window - 1, outputs * window


def vector_loads(elements: Num, lanes: Num) -> Num:
    r"""Iterations of a loop over elements with vector instructions: $\lceil N / w \rceil$.

    with $N$ = `elements`, $w$ = `lanes` of a vector.

    Source: lecture notes, Vectorization: 256 elements in 64 iterations.

    >>> vector_loads(256, 4)
    64
    """
    return ceil_div(elements, lanes)


def intensity_flops_per_byte(flops: Num, moved_bytes: Num) -> Num:
    r"""Operations per byte that crosses a boundary: $I = F / M$, with $F$ = `flops`, $M$ = `moved_bytes`.

    Source: S. Williams, A. Waterman and D. Patterson, "Roofline", CACM 52 (2009).

    >>> intensity_flops_per_byte(2 * 64**3, 4 * 73728)
    1.7777777777777777
    """
    return flops / moved_bytes


def best_square_tile(capacity_words: Num, depth: Num) -> Num:
    r"""Side of the square tile of outputs that fits with strips of both operands (real number).

    $$b^2 + 2 b s = Z \quad\Rightarrow\quad b = \sqrt{s^2 + Z} - s$$

    where $Z$ = `capacity_words` hold $b \times b$ outputs and, of each operand, a strip $s$ = `depth` deep. A square
    reads the fewest words of all tiles with as many outputs; $s = b$ gives $b = \sqrt{Z / 3}$.

    Source: condition of lecture notes, Register-aware tiling, solved for $v_1 = v_2 = b$, $v_3 = s$.

    >>> best_square_tile(80, 1), round(best_square_tile(3 * 32 * 32, 32), 9)
    (8.0, 32.0)
    """
    return (depth**2 + capacity_words) ** 0.5 - depth


def best_cube_tile(capacity_words: Num) -> Num:
    r"""Side of three equal square tiles that fit: $b = \lfloor \sqrt{Z / 3} \rfloor$, $Z$ = `capacity_words`.

    Source: condition $3 b^2 \le Z$ of blocked products, Lam et al., ASPLOS 1991.

    >>> best_cube_tile(4096)
    36
    """
    return floor((capacity_words / 3) ** 0.5)


def best_panel_rows(n: Num, capacity_words: Num, b2: Num) -> Num:
    r"""Rows of the panel that stays: $b_1 = \lfloor Z / n \rfloor - b_2$.

    where $Z$ = `capacity_words` hold $b_1$ + $b_2$ = `b2` rows of $n$ = `n` words.

    Source: lecture notes, Cache-aware tiled matrix multiplication, its constraint solved for $b_1$.

    >>> best_panel_rows(64, 2048, 8)
    24
    """
    return maximum(floor(capacity_words / n) - b2, 0)


def least_traffic_words(m: Num, n: Num, k: Num, capacity_words: Num, units: Num = 1) -> Num:
    r"""Words that any order of the multiplications moves into and out of a level, at least.

    $$W \ge \max\Big(\frac{2 m n k}{\sqrt{Z}} - 2 p Z,\ \ m k + k n + m n\Big)$$

    with $m$ = `m`, $n$ = `n`, $k$ = `k`, where each of $p$ = `units` copies of the level holds $Z$ = `capacity_words`
    and does a part of the multiplications. The second is what must be read and written once.

    Source: T. Smith, B. Lowery, J. Langou and R. van de Geijn, "A tight I/O lower bound for matrix multiplication",
    arXiv 1702.02017, summed over copies; its order $\Omega(n^3 / \sqrt{Z})$ is of J. Hong and H. Kung, "I/O complexity:
    the red-blue pebble game", STOC 1981.

    >>> least_traffic_words(1024, 1024, 1024, 4096)
    33546240.0
    """
    most = 2 * m * n * k / capacity_words**0.5 - 2 * units * capacity_words
    return maximum(most, m * k + k * n + m * n)


def hong_kung_words(n: Num, capacity_words: Num) -> Num:
    r"""Words by the older bound, whose constant is weaker: $W \ge \frac{n^3}{2 \sqrt{2}\,\sqrt{Z}} - Z$.

    with $n$ = `n`, $Z$ = `capacity_words`.

    Source: J. Hong and H. Kung, STOC 1981, with the constant of D. Irony, S. Toledo and A. Tiskin, "Communication lower
    bounds for distributed-memory matrix multiplication", JPDC 64 (2004).

    >>> hong_kung_words(1024, 8192) > least_traffic_words(1024, 1024, 1024, 8192)
    False
    """
    return maximum(n**3 / (2 * 2**0.5 * capacity_words**0.5) - capacity_words, 0.0)


def excess_over_bound(words: Num, bound_words: Num) -> Num:
    r"""Relative excess of a tiling over a bound: $x = W / W_0 - 1$, with $W$ = `words`, $W_0$ = `bound_words`.

    Source: definition.

    >>> excess_over_bound(150.0, 100.0)
    0.5
    """
    return words / bound_words - 1


def waves(tiles: Num, units: Num) -> Num:
    r"""Rounds in which units work through tiles: $\lceil T / p \rceil$, with $T$ = `tiles`, $p$ = `units`.

    Source: definition.

    >>> waves(133, 132)
    2
    """
    return ceil_div(tiles, units)


def wave_efficiency(tiles: Num, units: Num) -> Num:
    r"""Share of units that have a tile, on average: $\eta = T / (p \lceil T / p \rceil)$.

    with $T$ = `tiles`, $p$ = `units`.

    Source: definition.

    >>> wave_efficiency(133, 132) < 0.51, wave_efficiency(264, 132)
    (True, 1.0)
    """
    return tiles / (units * waves(tiles, units))


def padded_share(size: Num, tile: Num) -> Num:
    r"""Share of whole tiles that a dim fills: $s / (b \lceil s / b \rceil)$, with $s$ = `size`, $b$ = `tile`.

    Source: definition.

    >>> padded_share(100, 64)
    0.78125
    """
    return size / (tile * ceil_div(size, tile))


def held_level_words(m: Num, n: Num, k: Num, bm: Num, bn: Num, depth: Num) -> Num:
    r"""Words that a level keeps for a tile that is no larger than the product: $b_m b_n + (b_m + b_n) s$.

    with $b_m$ = `bm`, $b_n$ = `bn`, $s$ = `depth`, each at most `m`, `n`, `k`.

    Source: lecture notes, Register-aware tiling.

    >>> held_level_words(64, 64, 64, 8, 4, 1), held_level_words(4, 64, 64, 8, 4, 1)
    (44, 24)
    """
    rows, columns, strip = minimum(bm, m), minimum(bn, n), minimum(depth, k)
    return rows * columns + (rows + columns) * strip
