"""Attention core (between the qkv and the output projection): work, traffic, kept bytes and time.

Symbols: $P$ = `pairs` = number of (query, key) pairs over all local heads and sequences, $R$ = `rows` = number of
query rows over all local heads, $C$ = `keys` = number of key rows seen over all local query heads, $C'$ = `kv_rows` =
key rows over the local key heads, $q$ = `head_dim`, $E$ = `element_bytes`; $a$ = `accumulate` as in `matmul_flops` and
$d$ = `dropout`, 1 with dropout on the probabilities, else 0.
Without a mask $P$ = batch x heads x queries x keys; a causal mask halves it (see `causal_pairs`).

Time of fused kernels: the work is counted in tiles, as the kernels do it; a block owns `tile_rows` queries of one head
and walks over the keys that they may see. Coefficients (`launch_s`, `efficiency`, ...) come from a profile of the
device.
"""

from __future__ import annotations

from typing import Final

from steptime.cost.gemm import wave_factor
from steptime.num import Num, ceil_div, floor_div, maximum, minimum, soft_maximum, where

ALIGNED_BYTES: Final = 16
"""Alignment of operands that matrix units load at full rate."""


def causal_pairs(rows: Num, keys_per_row: Num) -> Num:
    r"""Unmasked (query, key) pairs when row $i$ sees the keys up to itself.

    $$P = R\,(l + 1) / 2$$

    where $R$ = `rows` and $l$ = `keys_per_row` is the whole sequence; rows spread evenly over the sequence (a
    sequence shard is assumed to be balanced, as zig-zag context parallelism does).

    Source: definition.

    >>> causal_pairs(4, 4)
    10.0
    """
    return rows * (keys_per_row + 1) / 2


def windowed_pairs(rows: Num, keys_per_row: Num, window: Num) -> Num:
    r"""Unmasked pairs when row $i$ sees at most the last $w$ keys up to itself.

    $$P = R \left(w - \frac{w (w - 1)}{2 l}\right)$$

    where $R$ = `rows`, $l$ = `keys_per_row` is the whole sequence and $w$ = `window` is at most $l$.

    Source: definition.

    >>> windowed_pairs(4, 4, 2), windowed_pairs(4, 4, 4) == causal_pairs(4, 4)
    (7.0, True)
    """
    return rows * (window - window * (window - 1) / (2 * keys_per_row))


def scores_flops(pairs: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Operations of $Q K^T$: $F = P (2q - 1 + a)$, with $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> scores_flops(10, 64, 1)
    1280
    """
    return pairs * (2 * head_dim - 1 + accumulate)


def attend_flops(pairs: Num, rows: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Operations of a product over the keys: $F = 2 P q - (1 - a) R q$.

    That is $A V$ (with $R$ = `rows` outputs of width $q$), and the gradients of $Q$ (rows) and of $K$ and $V$
    (with the key rows in place of $R$). $a$ = `accumulate` as in `matmul_flops`.

    Source: definition.

    >>> attend_flops(10, 4, 64, 1), attend_flops(10, 4, 64, 0)
    (1280, 1024)
    """
    return 2 * pairs * head_dim - (1 - accumulate) * rows * head_dim


def softmax_flops(pairs: Num, rows: Num) -> Num:
    r"""Vector operations of softmax: subtract, exponentiate, sum and divide, $F = 3P - R$.

    Source: arXiv 2410.00273, fused attention.

    >>> softmax_flops(10, 4)
    26
    """
    return 3 * pairs - rows


def softmax_backward_flops(pairs: Num, rows: Num) -> Num:
    r"""Vector operations of the gradient of softmax: $F = 4P - R$.

    Source: arXiv 2410.00273, fused attention.

    >>> softmax_backward_flops(10, 4)
    36
    """
    return 4 * pairs - rows


def fused_attention_flops(pairs: Num, rows: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Matrix operations of fused attention forward: scores and $AV$.

    $$F = P(2q - 1 + a) + 2Pq - (1-a)Rq$$

    Source: arXiv 2410.00273, fused attention; FlashAttention, arXiv 2205.14135.

    >>> fused_attention_flops(10, 4, 64, 1)
    2560
    """
    return scores_flops(pairs, head_dim, accumulate) + attend_flops(pairs, rows, head_dim, accumulate)


def fused_attention_vector_flops(pairs: Num, rows: Num, dropout: Num) -> Num:
    r"""Vector operations of fused attention forward: softmax, and one per pair for dropout.

    $$F = 3P - R + d\,P$$

    where $d$ = `dropout` is 1 with dropout on the probabilities, else 0.

    Source: arXiv 2410.00273, fused attention.

    >>> fused_attention_vector_flops(10, 4, 1)
    36
    """
    return softmax_flops(pairs, rows) + dropout * pairs


def fused_attention_backward_flops(pairs: Num, rows: Num, keys: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Matrix operations of fused attention backward: scores again, then $dV, dA, dQ, dK$.

    $$F = 2P(2q-1+a) + [2Pq-(1-a)Rq] + 2[2Pq-(1-a)Cq]$$

    Source: arXiv 2410.00273, fused attention; FlashAttention, arXiv 2205.14135, algorithm 4.

    >>> fused_attention_backward_flops(10, 4, 4, 64, 1) / fused_attention_flops(10, 4, 64, 1)
    2.5
    """
    return (
        2 * scores_flops(pairs, head_dim, accumulate)
        + attend_flops(pairs, rows, head_dim, accumulate)
        + 2 * attend_flops(pairs, keys, head_dim, accumulate)
    )


def fused_attention_backward_vector_flops(pairs: Num, rows: Num, dropout: Num) -> Num:
    r"""Vector operations of fused attention backward: softmax gradient, softmax and dropout again.

    $$F = (4P - R) + (3P - R) + 2 d P$$

    Source: arXiv 2410.00273, fused attention.

    >>> fused_attention_backward_vector_flops(10, 4, 0), fused_attention_backward_vector_flops(10, 4, 1)
    (62, 82)
    """
    return softmax_backward_flops(pairs, rows) + softmax_flops(pairs, rows) + 2 * dropout * pairs


def fused_attention_bytes(rows: Num, kv_rows: Num, head_dim: Num, element_bytes: Num) -> Num:
    r"""Traffic of fused attention forward: read $Q, K, V$, write $O$ and one statistic a row.

    $$M = (2 R q + 2 C' q + R) E$$

    where $C'$ = `kv_rows` counts the rows of $K$ over the local key heads (all of the gathered sequence).

    Source: arXiv 2410.00273, fused attention.

    >>> fused_attention_bytes(4, 4, 64, 2)
    2056
    """
    return (2 * rows * head_dim + 2 * kv_rows * head_dim + rows) * element_bytes


def fused_attention_backward_bytes(
    rows: Num, kv_rows: Num, kv_rows_read: Num, head_dim: Num, element_bytes: Num
) -> Num:
    r"""Traffic of fused attention backward: read $Q, K, V, O, dO$ and statistics, write $dQ, dK, dV$.

    $$M = (4 R q + 2 C' q + 2 C'' q + 2 R) E$$

    where $C'$ = `kv_rows` rows of $dK$ and $dV$ are written and $C''$ = `kv_rows_read` rows of $K$ and $V$ read.

    Source: arXiv 2410.00273, fused attention.

    >>> fused_attention_backward_bytes(4, 4, 4, 64, 2)
    4112
    """
    return (4 * rows * head_dim + 2 * kv_rows * head_dim + 2 * kv_rows_read * head_dim + 2 * rows) * element_bytes


def fits_matrix_units(head_dim: Num, element_bytes: float) -> bool:
    r"""True if the rows of one head begin at multiples of 16 bytes, as loads of the matrix units need.

    $$q E \bmod 16 = 0$$

    where $q$ = `head_dim` and $E$ = `element_bytes` (bytes). Heads of a query lie side by side, so that those of 108
    elements of 2 bytes begin anywhere. Kernels that attend in one pass pad them; products of their own run on the
    vector units instead, at the rate of fp32.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (alignment to 16 bytes). That the vector units take
    over: BigScience's runs with heads 108 and 150 wide, 1.3 to 1.4 times as long as with 96 to 216 (chronicles of the
    176B training); their attention then reaches some 13 TFLOP/s of the 19.5 in fp32.

    >>> fits_matrix_units(128, 2), fits_matrix_units(108, 2), fits_matrix_units(108, 4)
    (True, False, True)
    """
    return bool(head_dim * element_bytes % ALIGNED_BYTES == 0)


def scores_bytes(rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num, panels: Num) -> Num:
    r"""Traffic of $Q K^T$ on its own: $M = (p R q + C' q + P) E$, with $p$ = `panels` passes over $Q$.

    Source: arXiv 2410.00273, unfused attention.

    >>> scores_bytes(4, 4, 16, 64, 2, 1)
    1056
    """
    return (panels * rows * head_dim + kv_rows * head_dim + pairs) * element_bytes


def scores_backward_bytes(rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num) -> Num:
    r"""Traffic of the gradients of $Q K^T$: $M = (3 R q + C' q + 2 P) E$.

    Source: arXiv 2410.00273, unfused attention.

    >>> scores_backward_bytes(4, 4, 16, 64, 2)
    2112
    """
    return (3 * rows * head_dim + kv_rows * head_dim + 2 * pairs) * element_bytes


def attend_bytes(rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num, panels: Num) -> Num:
    r"""Traffic of $A V$ on its own: $M = (P + C' q + p R q) E$, with $p$ = `panels` passes over the output.

    Source: arXiv 2410.00273, unfused attention.

    >>> attend_bytes(4, 4, 16, 64, 2, 1)
    1056
    """
    return (pairs + kv_rows * head_dim + panels * rows * head_dim) * element_bytes


def attend_backward_bytes(rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num) -> Num:
    r"""Traffic of the gradients of $A V$: $M = (3 R q + 2 P + C' q) E$.

    Source: arXiv 2410.00273, unfused attention.

    >>> attend_backward_bytes(4, 4, 16, 64, 2)
    2112
    """
    return (3 * rows * head_dim + 2 * pairs + kv_rows * head_dim) * element_bytes


def scores_backward_flops(pairs: Num, rows: Num, keys: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Operations of $dQ$ and $dK$: $F = [2Pq-(1-a)Rq] + [2Pq-(1-a)Cq]$.

    Source: definition.

    >>> scores_backward_flops(16, 4, 4, 64, 1)
    4096
    """
    return attend_flops(pairs, rows, head_dim, accumulate) + attend_flops(pairs, keys, head_dim, accumulate)


def attend_backward_flops(pairs: Num, keys: Num, head_dim: Num, accumulate: Num) -> Num:
    r"""Operations of $dA$ and $dV$: $F = P(2q-1+a) + [2Pq-(1-a)Cq]$.

    Source: definition.

    >>> attend_backward_flops(16, 4, 64, 1)
    4096
    """
    return scores_flops(pairs, head_dim, accumulate) + attend_flops(pairs, keys, head_dim, accumulate)


def blocked_attend_flops(pairs: Num, head_dim: Num) -> Num:
    r"""Operations of $A V$ in panels: every panel adds to an accumulator, $F = 2 P q$.

    Source: definition.

    >>> blocked_attend_flops(10, 64)
    1280
    """
    return 2 * pairs * head_dim


def blocked_scores_backward_bytes(
    rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num, panels: Num
) -> Num:
    r"""Traffic of both gradients of $Q K^T$ in panels: twice that of the forward product, `scores_bytes`.

    Source: arXiv 2410.00273, SUMMA attention.

    >>> blocked_scores_backward_bytes(4, 4, 16, 64, 2, 1)
    2112
    """
    return 2 * scores_bytes(rows, kv_rows, pairs, head_dim, element_bytes, panels)


def blocked_attend_backward_bytes(
    rows: Num, kv_rows: Num, pairs: Num, head_dim: Num, element_bytes: Num, panels: Num
) -> Num:
    r"""Traffic of both gradients of $A V$ in panels: twice that of the forward product, `attend_bytes`.

    Source: arXiv 2410.00273, SUMMA attention.

    >>> blocked_attend_backward_bytes(4, 4, 16, 64, 2, 1)
    2112
    """
    return 2 * attend_bytes(rows, kv_rows, pairs, head_dim, element_bytes, panels)


def keys_of_tiles(queries: Num, keys: Num, causal: Num, window: Num, window_keys: Num, rows: Num) -> tuple[Num, Num]:
    r"""Keys that the tiles of one head walk over: the mean, and those of the longest tile.

    Tile $j = 1 \dots n$ of $r$ = `rows` queries sees
    $$k_j = \min(s_k - s_q + j r,\ c) \quad\text{(causal)}, \qquad k_j = c \quad\text{(not causal)}, \qquad
      c = \min(s_k,\ w + r + g)$$
    where $s_q$ = `queries`, $s_k$ = `keys`, $n = \lceil s_q / r \rceil$, and a sliding window of $w$ = `window` keys
    ends at a boundary of $g$ = `window_keys` keys; `window` 0 means none and then $c = s_k$.

    Source: tiling of FlashAttention-2, arXiv 2307.08691, section 3.3.

    >>> keys_of_tiles(512, 512, 1, 0, 0, 128)   # 128, 256, 384, 512
    (320.0, 512)
    >>> keys_of_tiles(512, 512, 1, 128, 0, 128)   # 128, 256, 256, 256
    (224.0, 256)
    """
    tiles = ceil_div(queries, rows)
    cap = minimum(keys, where(window > 0, window + rows + window_keys, keys))
    first = where(causal > 0, keys - queries, keys)
    growing = minimum(maximum(floor_div(cap - first, rows), 0), tiles)
    total = growing * first + rows * growing * (growing + 1) / 2 + (tiles - growing) * cap
    return total / tiles, minimum(first + tiles * rows, cap)


def packed_share(queries: Num, group: Num, tile_rows: Num, packing: Num) -> Num:
    r"""Tiles that remain when the query heads of one key head share tiles (matters for few queries).

    $$\phi = \left(\frac{\lceil s_q g / t\rceil}{g\,\lceil s_q / t\rceil}\right)^{p}$$

    where $g$ = `group` query heads share a key head, $t$ = `tile_rows`, and $p$ = `packing` is 1 for a kernel that
    packs and 0 for one that does not.

    Source: definition; grouped-query packing of FlashAttention-3.

    >>> packed_share(1, 8, 128, 1.0), packed_share(1, 8, 128, 0.0), packed_share(256, 8, 128, 1.0)
    (0.125, 1.0, 1.0)
    """
    packed: Num = (ceil_div(queries * group, tile_rows) / (group * ceil_div(queries, tile_rows))) ** packing
    return packed


def tiled_compute_s(
    blocks: Num, tile_rows: Num, mean_keys: Num, longest_keys: Num, pair_s: Num, sm_count: Num, tail: Num
) -> Num:
    r"""Time of blocks that walk over keys, spread over the processors of a device.

    $$t = \max\left(B\,r\,\bar k\,\sigma\,\omega,\ r\,k_{\max}\,\sigma\,S\right)$$

    where $B$ = `blocks` of $r$ = `tile_rows` queries see $\bar k$ = `mean_keys` keys each, the longest
    $k_{\max}$ = `longest_keys`; $\sigma$ = `pair_s` is the time (s) of one pair on the whole device of
    $S$ = `sm_count` processors, and $\omega$ is `wave_factor` of the blocks with `tail`.

    Source: wave quantisation; blocks of unequal length bound from below by the longest.

    >>> [round(1e9 * tiled_compute_s(blocks, 1, 1, 1, 1e-9, 100, 1.0)) for blocks in (50, 100, 101, 200)]
    [100, 100, 200, 200]
    """
    spread_s = blocks * tile_rows * mean_keys * pair_s
    return maximum(spread_s * wave_factor(blocks, sm_count, tail), tile_rows * longest_keys * pair_s * sm_count)


def tiled_attention_s(
    batch: Num,
    heads: Num,
    kv_heads: Num,
    queries: Num,
    keys: Num,
    causal: Num,
    window: Num,
    pair_flops: Num,
    moved_bytes: Num,
    matrix_flops_per_s: Num,
    vector_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    launch_s: Num,
    efficiency: Num,
    softmax_flops: Num,
    memory_efficiency: Num,
    tail: Num,
    overlap: Num,
    fill_keys: Num,
    window_keys: Num,
    packing: Num,
    serial_passes: Num,
    tile_rows: Num,
) -> Num:
    r"""Time of a fused attention kernel over whole sequences, forward or backward.

    $$t = \tau + (t_c^{\,p} + t_m^{\,p})^{1/p} + n_s t_m, \qquad
      \sigma = \frac{f}{\varepsilon R_m} + \frac{v}{R_v}, \qquad t_m = \frac{M}{\eta\beta}$$

    $t_c$ is `tiled_compute_s` of $b\,h\,\lceil s_q / r\rceil\,\phi$ blocks ($b$ = `batch`, $h$ = `heads`, $s_q$ =
    `queries`, $r$ = `tile_rows`, $\phi$ = `packed_share`) with $\sigma$ seconds per pair and $\bar k, k_{\max}$ of
    `keys_of_tiles` for $s_k$ = `keys` per head, each plus `fill_keys` for the start and the end of a block. $f$ =
    `pair_flops` on the matrix units (peak $R_m$, share $\varepsilon$ = `efficiency`) and $v$ = `softmax_flops` on the
    vector units (peak $R_v$) do not overlap within a pair; $M$ = `moved_bytes`; $p$ = `overlap` (1: none); $n_s$ =
    `serial_passes` counts kernels other than attention (rotary embedding, writing the cache) in units of its traffic;
    $\tau$ = `launch_s`. $R_m$ =
    `matrix_flops_per_s`, $R_v$ = `vector_flops_per_s` and $\beta$ = `memory_Bps` are rates of the datasheet, $\eta$ =
    `memory_efficiency`. The `kv_heads` and `packing` say how many query heads share tiles.

    Source: FlashAttention-2, arXiv 2307.08691; FlashAttention-3, arXiv 2407.08608 (softmax overlaps with the products).

    >>> t = tiled_attention_s(1, 32, 32, 8192, 8192, 1, 0, 512, 2.7e8, 989e12, 67e12, 3.35e12, 132,
    ...     1e-5, 0.8, 20, 0.8, 0.5, 2, 100, 0, 1, 0, 128)
    >>> round(1e3 * t, 2), round(1e3 * 32 * 8192**2 / 2 * (512 / 0.8 / 989e12 + 20 / 67e12), 2)   # the products alone
    (1.09, 1.02)
    """
    rows = minimum(tile_rows, queries)
    mean, longest = keys_of_tiles(queries, keys, causal, window, window_keys, rows)
    share = packed_share(queries, heads / kv_heads, tile_rows, packing)
    blocks = batch * heads * ceil_div(queries, tile_rows) * share
    pair_s = pair_flops / (efficiency * matrix_flops_per_s) + softmax_flops / vector_flops_per_s
    compute = tiled_compute_s(blocks, tile_rows, mean + fill_keys, longest + fill_keys, pair_s, sm_count, tail)
    memory = moved_bytes / (memory_efficiency * memory_Bps)
    return launch_s + soft_maximum(compute, memory, overlap) + serial_passes * memory


def attention_pair_flops(qk_dim: Num, v_dim: Num) -> Num:
    r"""Matrix operations of one (query, key) pair, forward: $f = 2 (d_{qk} + d_v)$.

    where $d_{qk}$ = `qk_dim` and $d_v$ = `v_dim` are the dims of a head.

    Source: `steptime.cost.attention.fused_attention_flops` per pair.

    >>> attention_pair_flops(128, 128)
    512
    """
    return 2 * (qk_dim + v_dim)


def attention_backward_pair_flops(qk_dim: Num, v_dim: Num) -> Num:
    r"""Matrix operations of one pair, backward: $f = 2 (3 d_{qk} + 2 d_v)$ (scores again, $dA, dV, dQ, dK$).

    Symbols as in `attention_pair_flops`.

    Source: `steptime.cost.attention.fused_attention_backward_flops` per pair.

    >>> attention_backward_pair_flops(128, 128) / attention_pair_flops(128, 128)
    2.5
    """
    return 2 * (3 * qk_dim + 2 * v_dim)


def attention_backward_bytes(forward_bytes: Num) -> Num:
    r"""Traffic of attention backward: $M_b = 2 M$.

    where $M$ = `forward_bytes`: queries, outputs, keys and values are read, and the gradients of all of them pass too.

    Source: count of bytes, as `attention_bytes`.

    >>> attention_backward_bytes(15360)
    30720
    """
    return 2 * forward_bytes


def seen_keys(queries: Num, keys: Num, window: Num) -> Num:
    r"""Keys that are read at all: $\min(s_k, w + s_q)$ with a window, else $s_k$.

    where $s_q$ = `queries`, $s_k$ = `keys` and $w$ = `window` (0: none).

    Source: definition.

    >>> seen_keys(1, 4096, 128), seen_keys(1, 4096, 0)
    (129, 4096)
    """
    return minimum(keys, where(window > 0, window + queries, keys))


def attention_bytes(
    batch: Num, heads: Num, kv_heads: Num, queries: Num, keys: Num, width: Num, element_bytes: Num
) -> Num:
    r"""Traffic of attention forward: queries and outputs once, keys and values once.

    $$M = b\,D\,E\,(h\,s_q + h_k\,s_k)$$

    where $b$ = `batch`, $D$ = `width` = $d_{qk} + d_v$, $E$ = `element_bytes`, $h$ = `heads`, $h_k$ = `kv_heads`,
    $s_q$ = `queries` and $s_k$ = `keys` those of `seen_keys`.

    Source: as `steptime.cost.attention.fused_attention_bytes` without the statistics.

    >>> attention_bytes(1, 2, 1, 10, 10, 256, 2)
    15360
    """
    return batch * width * (heads * queries + kv_heads * keys) * element_bytes
