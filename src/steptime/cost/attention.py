"""Work, traffic and kept bytes of the attention core (between the qkv and the output projection).

Symbols: $P$ = `pairs` = number of (query, key) pairs over all local heads and sequences, $R$ = `rows` = number of
query rows over all local heads, $C$ = `keys` = number of key rows seen over all local query heads, $C'$ = `kv_rows` =
key rows over the local key heads, $q$ = `head_dim`, $E$ = `element_bytes`; $a$ = `accumulate` as in `matmul_flops` and
$d$ = `dropout`, 1 with dropout on the probabilities, else 0.
Without a mask $P$ = batch x heads x queries x keys; a causal mask halves it (see `causal_pairs`).
"""

from __future__ import annotations

from typing import Final

from steptime.num import Num

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
    r"""Whether the rows of one head begin at multiples of 16 bytes, as loads of the matrix units want them.

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
