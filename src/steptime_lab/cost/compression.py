r"""Compressed weights, activations and gradients: bytes, times, and the limits within which compression pays.

Bytes of quantised tensors and of their scales are in :mod:`steptime.cost.quantisation`. A product has $m$ = `tokens`
rows of activations and a weight of $n \times k$ = `rows` x `columns`; memory gives $\beta$ = `memory_Bps`, the units
for products $R$ = `flops_per_s`.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum

SPARSE_GROUP, SPARSE_KEPT = 4, 2
"""Structured sparsity keeps 2 of every 4 consecutive weights."""
INDEX_BITS = 2
"""Bits of the index of a kept weight among 4."""


def structured_sparse_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Bytes of a 2:4 sparse tensor: $M = \frac{N}{2} (E + \frac{2}{8})$.

    with $N$ = `elements` of $E$ = `element_bytes`: half of them are stored, each with an index of 2 bits.

    Source: NVIDIA A100 architecture white paper, fine-grained structured sparsity; A. Mishra et al., "Accelerating
    sparse deep neural networks", arXiv 2104.08378.

    >>> structured_sparse_bytes(1024, 2), structured_sparse_bytes(1024, 1)
    (1152.0, 640.0)
    """
    return elements * SPARSE_KEPT / SPARSE_GROUP * (element_bytes + INDEX_BITS / 8)


def bitmap_sparse_bytes(elements: Num, density: Num, element_bytes: Num) -> Num:
    r"""Bytes of an unstructured sparse tensor with a bit per element: $M = N (d E + 1/8)$.

    with $N$ = `elements`, $d$ = `density` (share that is not zero), $E$ = `element_bytes`.

    Source: definition of the format.

    >>> bitmap_sparse_bytes(1024, 0.5, 2)
    1152.0
    """
    return elements * (density * element_bytes + 1 / 8)


def indexed_sparse_bytes(rows: Num, columns: Num, density: Num, element_bytes: Num, index_bytes: Num) -> Num:
    r"""Bytes of an unstructured sparse matrix in rows (CSR): $M = d\, n k (E + I) + (n + 1) I$.

    with $n$ = `rows`, $k$ = `columns`, $d$ = `density`, $E$ = `element_bytes`, $I$ = `index_bytes`.

    Source: Y. Saad, "Iterative methods for sparse linear systems", section 3.4.

    >>> indexed_sparse_bytes(100, 100, 0.1, 2, 2)
    4202.0
    """
    return density * rows * columns * (element_bytes + index_bytes) + (rows + 1) * index_bytes


def indexed_break_even_density(element_bytes: Num, index_bytes: Num) -> Num:
    r"""Share of kept elements below which indices make a matrix smaller: $d = E / (E + I)$.

    with $E$ = `element_bytes`, $I$ = `index_bytes`; row pointers left out.

    Source: :func:`indexed_sparse_bytes` set equal to $n k E$.

    >>> indexed_break_even_density(2, 2)
    0.5
    """
    return element_bytes / (element_bytes + index_bytes)


def low_rank_elements(rows: Num, columns: Num, rank: Num) -> Num:
    r"""Elements of a weight as a product of two: $r (n + k)$, with $n$ = `rows`, $k$ = `columns`, $r$ = `rank`.

    Source: definition.

    >>> low_rank_elements(4096, 4096, 512)
    4194304
    """
    return rank * (rows + columns)


def low_rank_break_even(rows: Num, columns: Num) -> Num:
    r"""Rank below which two factors have fewer elements, and take fewer FLOPs: $r = n k / (n + k)$.

    with $n$ = `rows`, $k$ = `columns`.

    Source: :func:`low_rank_elements` set equal to $n k$.

    >>> low_rank_break_even(4096, 4096), low_rank_break_even(16384, 4096)
    (2048.0, 3276.8)
    """
    return rows * columns / (rows + columns)


def low_rank_flops(tokens: Num, rows: Num, columns: Num, rank: Num) -> Num:
    r"""FLOPs of the two products: $2 m r (n + k)$, with $m$ = `tokens`, $n$ = `rows`, $k$ = `columns`, $r$ = `rank`.

    Source: definition.

    >>> low_rank_flops(1, 4096, 4096, 512)
    8388608
    """
    return 2 * tokens * low_rank_elements(rows, columns, rank)


def compressed_product_s(
    flops: Num, flops_per_s: Num, weight_bytes: Num, activation_bytes: Num, memory_Bps: Num, latency_s: Num
) -> Num:
    r"""Time of a product with a compressed weight: $t = \tau + \max(F / R,\ (M_w + M_a) / \beta)$.

    with $F$ = `flops` at $R$ = `flops_per_s` of the units that do them, $M_w$ = `weight_bytes`, $M_a$ =
    `activation_bytes` in and out, $\beta$ = `memory_Bps`, $\tau$ = `latency_s`.

    Source: roofline model, Williams et al. 2009.

    >>> compressed_product_s(8e12, 4e12, 1e9, 1e9, 1e12, 0.0)
    2.0
    """
    return latency_s + maximum(flops / flops_per_s, (weight_bytes + activation_bytes) / memory_Bps)


def memory_bound_tokens(element_bytes: Num, flops_per_s: Num, memory_Bps: Num) -> Num:
    r"""Tokens up to which reading the weight takes longer than the product: $m = E R / (2 \beta)$.

    with $E$ = `element_bytes` of a stored weight, $R$ = `flops_per_s`, $\beta$ = `memory_Bps`. With more tokens,
    smaller weights alone do not make a product faster; faster units do.

    Source: $2 m n k / R = n k E / \beta$.

    >>> memory_bound_tokens(2, 1000e12, 2e12)
    500.0
    """
    return element_bytes * flops_per_s / (2 * memory_Bps)


def quantise_pass_bytes(elements: Num, wide_bytes: Num, narrow_bytes: Num, scale_passes: Num) -> Num:
    r"""Traffic of quantising activations or gradients: $M = N (s E_w + E_w + E_q)$.

    with $N$ = `elements` read at $E_w$ = `wide_bytes` and written at $E_q$ = `narrow_bytes`; $s$ = `scale_passes` is 1
    where a separate pass finds the largest value (a scale per tensor), 0 where a whole group is read before it is
    written, or the scale is known from calibration.

    Source: count of bytes.

    >>> quantise_pass_bytes(1000, 2, 1, 0), quantise_pass_bytes(1000, 2, 1, 1)
    (3000, 5000)
    """
    return elements * (scale_passes * wide_bytes + wide_bytes + narrow_bytes)


def fake_quantised_bytes(weights: Num, activations: Num, wide_bytes: Num) -> Num:
    r"""Traffic that quantisation-aware training adds to a step: $M = 4 E (N_w + N_a) + (N_w + N_a) / 4$.

    with $N_w$ = `weights`, $N_a$ = `activations`, $E$ = `wide_bytes`. Forward reads each tensor, rounds it to the
    narrow format and writes it in the wide one; backward reads and writes its gradient. A mask of clipped elements, one
    bit each, is written and read. Products stay wide, so that nothing gets faster.

    Source: straight-through estimator, Jacob et al., arXiv 1712.05877, section 3; count of bytes.

    >>> fake_quantised_bytes(1000, 1000, 2)
    16500.0
    """
    elements = weights + activations
    return 4 * wide_bytes * elements + elements / 4


def calibration_s(samples: Num, forward_s: Num, pass_bytes: Num, memory_Bps: Num) -> Num:
    r"""Time to calibrate post-training quantisation: $t = S (t_f + M / \beta)$.

    with $S$ = `samples` batches of a forward of $t_f$ = `forward_s` (s), and $M$ = `pass_bytes` read for the ranges of
    activations, at $\beta$ = `memory_Bps`.

    Source: count.

    >>> calibration_s(128, 0.5, 1e9, 2e9)
    128.0
    """
    return samples * (forward_s + pass_bytes / memory_Bps)


def exchanged_gradient_s(
    elements: Num, element_bytes: Num, ranks: Num, link_Bps: Num, pass_bytes: Num, memory_Bps: Num
) -> Num:
    r"""Time of an all-reduce of gradients in some format.

    $$t = \frac{2 (p - 1)}{p} \frac{N E}{\beta_l} + \frac{M}{\beta}$$

    with $N$ = `elements` of $E$ = `element_bytes`, $p$ = `ranks`, $\beta_l$ = `link_Bps`, and $M$ = `pass_bytes` of
    quantising and expanding at $\beta$ = `memory_Bps`. No latencies.

    Source: ring all-reduce, P. Patarasuk and X. Yuan, JPDC 69 (2009).

    >>> exchanged_gradient_s(1e9, 2, 2, 1e9, 0.0, 1e12), exchanged_gradient_s(1e9, 1, 2, 1e9, 1e12, 1e12)
    (2.0, 2.0)
    """
    return 2 * (ranks - 1) / ranks * elements * element_bytes / link_Bps + pass_bytes / memory_Bps


def gradient_break_even_Bps(saved_bytes: Num, ranks: Num, pass_bytes: Num, memory_Bps: Num) -> Num:
    r"""Bandwidth of links below which narrow gradients pay: $\beta_l = \frac{2 (p - 1)}{p} \frac{\Delta E}{m} \beta$.

    with $\Delta E$ = `saved_bytes` and $m$ = `pass_bytes`, both per element, $p$ = `ranks`, $\beta$ = `memory_Bps`.

    Source: :func:`exchanged_gradient_s` of both formats set equal.

    >>> gradient_break_even_Bps(1.0, 2, 6.0, 3e12)
    500000000000.0
    """
    return 2 * (ranks - 1) / ranks * saved_bytes / pass_bytes * memory_Bps


def scale_levels_bits(bits: Num, groups: tuple[int, ...], scale_bits: tuple[Num, ...]) -> Num:
    r"""Bits of an element with scales of several levels: $b + \sum_i s_i / \prod_{j \le i} g_j$.

    with $b$ = `bits`; level $i$ has one scale of $s_i$ = `scale_bits` for $g_i$ = `groups` entries of the level above.

    Source: two-level scales of VS-Quant, S. Dai et al., arXiv 2102.04503; QLoRA, arXiv 2305.14314.

    >>> scale_levels_bits(4, (16,), (8,)), scale_levels_bits(4, (64, 256), (8, 32))
    (4.5, 4.126953125)
    """
    total, share = bits, 1
    for group, width in zip(groups, scale_bits, strict=True):
        share *= group
        total = total + width / share
    return total


def scales_of(rows: Num, columns: Num, group: Num) -> Num:
    r"""Scales of a weight with groups of $g$ = `group` along its columns: $n \lceil k / g \rceil$.

    with $n$ = `rows`, $k$ = `columns`: $g = k$ is a scale per channel.

    Source: definition.

    >>> scales_of(4096, 4096, 4096), scales_of(4096, 4096, 128)
    (4096, 131072)
    """
    return rows * ceil_div(columns, group)
