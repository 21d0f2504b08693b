r"""Layers whose cost grows with the sequence and not with its square: state-space models, linear attention.

Symbols: $T$ = `tokens` on a device, $h$ = `heads`, $P$ = `head_dim`, $N$ = `state`, $G$ = `groups` of heads that share
input and output matrices, $Q$ = `chunk` tokens computed at once, $d_k$ = `key_dim`, $d_v$ = `value_dim`,
$C$ = `channels`, $E$ = `element_bytes`. States pass from chunk to chunk in fp32.

Backward, a product has two gradients, and kernels make the products within a chunk again instead of keeping them.
"""

from __future__ import annotations

from steptime.num import Num

STATE_BYTES = 4.0
"""Bytes of an element of a state."""


def ssd_flops(tokens: Num, heads: Num, head_dim: Num, state: Num, groups: Num, chunk: Num) -> Num:
    r"""Products of state-space duality: $F = 2TQ(GN + hP) + 4ThPN$.

    Within a chunk $C B^T$ per group and its product with the inputs per head; the state that a chunk leaves, and what
    earlier states add to its outputs.

    Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060, section 6.

    >>> ssd_flops(2, 1, 3, 5, 1, 2)
    184
    """
    return 2 * tokens * chunk * (groups * state + heads * head_dim) + 4 * tokens * heads * head_dim * state


def ssd_backward_flops(tokens: Num, heads: Num, head_dim: Num, state: Num, groups: Num, chunk: Num) -> Num:
    r"""Gradients of all products, and states and $C B^T$ again: $F' = 2F + 2TQGN + 2ThPN$.

    Source: as :func:`ssd_flops`; the fused kernels keep neither.

    >>> ssd_backward_flops(2, 1, 3, 5, 1, 2) - 2 * ssd_flops(2, 1, 3, 5, 1, 2)
    100
    """
    again = 2 * tokens * chunk * groups * state + 2 * tokens * heads * head_dim * state
    return 2 * ssd_flops(tokens, heads, head_dim, state, groups, chunk) + again


def ssd_vector_flops(tokens: Num, heads: Num, head_dim: Num, state: Num, chunk: Num) -> Num:
    r"""Decay within a chunk (exponential, two products per pair) and from chunk to chunk: $F_v = 3ThQ + 2ThPN/Q$.

    Source: as :func:`ssd_flops`, count of operations.

    >>> ssd_vector_flops(2, 1, 3, 5, 2)
    42.0
    """
    return 3 * tokens * heads * chunk + 2 * tokens * heads * head_dim * state / chunk


def ssd_bytes(tokens: Num, heads: Num, head_dim: Num, state: Num, groups: Num, chunk: Num, element_bytes: Num) -> Num:
    r"""Inputs and outputs once, states of chunks twice: $M = T(2hP + 2GN + h)E + 2 \cdot 4\,ThPN/Q$.

    Source: as :func:`ssd_flops`, the three kernels of a chunk.

    >>> ssd_bytes(2, 1, 3, 5, 1, 2, 2)
    188.0
    """
    streams = tokens * (2 * heads * head_dim + 2 * groups * state + heads) * element_bytes
    return streams + 2 * STATE_BYTES * tokens * heads * head_dim * state / chunk


def ssd_backward_bytes(
    tokens: Num, heads: Num, head_dim: Num, state: Num, groups: Num, chunk: Num, element_bytes: Num
) -> Num:
    r"""Inputs again, their gradients and that of the output: $M' = 2M + ThPE$.

    Source: as :func:`ssd_bytes`.

    >>> ssd_backward_bytes(2, 1, 3, 5, 1, 2, 2)
    388.0
    """
    return (
        2 * ssd_bytes(tokens, heads, head_dim, state, groups, chunk, element_bytes)
        + tokens * heads * head_dim * element_bytes
    )


def selective_scan_flops(tokens: Num, channels: Num, state: Num) -> Num:
    r"""Vector operations of the selective scan: $F_v = TC(8N + 2)$.

    Per state two products and an exponential make the matrices discrete (and one more the input's), two update the
    state, two sum the output; two more skip.

    Source: Gu and Dao, Mamba, arXiv 2312.00752, section 3.3, count of operations.

    >>> selective_scan_flops(3, 2, 16)
    780
    """
    return tokens * channels * (8 * state + 2)


def selective_scan_backward_flops(tokens: Num, channels: Num, state: Num) -> Num:
    r"""The scan again and the scan of its gradients, twice as much: $F_v' = 3F_v$.

    Source: as :func:`selective_scan_flops`, section 3.3.2 (states are made again).

    >>> selective_scan_backward_flops(3, 2, 16)
    2340
    """
    return 3 * selective_scan_flops(tokens, channels, state)


def selective_scan_bytes(tokens: Num, channels: Num, state: Num, element_bytes: Num) -> Num:
    r"""Input, step size and output of each channel, both matrices of each token: $M = T(3C + 2N)E$.

    Source: as :func:`selective_scan_flops`: states stay on the chip.

    >>> selective_scan_bytes(3, 2, 16, 2)
    228
    """
    return tokens * (3 * channels + 2 * state) * element_bytes


def selective_scan_backward_bytes(tokens: Num, channels: Num, state: Num, element_bytes: Num) -> Num:
    r"""Inputs again and their gradients: $M' = 2M$.

    Source: as :func:`selective_scan_bytes`.

    >>> selective_scan_backward_bytes(3, 2, 16, 2)
    456
    """
    return 2 * selective_scan_bytes(tokens, channels, state, element_bytes)


def delta_rule_flops(tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num) -> Num:
    r"""Products of the chunked delta rule: $F = Th\,(Q(6d_k + 4d_v) + 6 d_k d_v)$.

    Within a chunk $K K^T$, $Q K^T$ and the inverse applied to keys (three of $2Qd_k$), the inverse applied to values
    and scores times values (two of $2Qd_v$); with states three of $2d_kd_v$. The inverse itself is
    :func:`delta_rule_vector_flops`.

    Source: Yang et al., arXiv 2406.06484, section 3.2; with decay arXiv 2412.06464, section 3.3.

    >>> delta_rule_flops(2, 1, 3, 5, 2)
    332
    """
    return tokens * heads * (chunk * (6 * key_dim + 4 * value_dim) + 6 * key_dim * value_dim)


def delta_rule_backward_flops(tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num) -> Num:
    r"""Gradients of all products, and what was not kept again: $F' = 3F$.

    Source: as :func:`delta_rule_flops`; the chunked kernels keep the inverse alone.

    >>> delta_rule_backward_flops(2, 1, 3, 5, 2)
    996
    """
    return 3 * delta_rule_flops(tokens, heads, key_dim, value_dim, chunk)


def delta_rule_vector_flops(tokens: Num, heads: Num, chunk: Num) -> Num:
    r"""Inverse of a unit triangular matrix of each chunk, and its decay: $F_v = Th(Q^2/3 + 3Q)$.

    Source: forward substitution, count of operations.

    >>> delta_rule_vector_flops(2, 1, 3)
    24.0
    """
    return tokens * heads * (chunk * chunk / 3 + 3 * chunk)


def linear_attention_flops(tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num) -> Num:
    r"""Products of chunked linear attention: $F = Th\,(2Q(d_k + d_v) + 4 d_k d_v)$.

    Source: Yang et al., Gated linear attention, arXiv 2312.06635, section 3.1 and 4.

    >>> linear_attention_flops(2, 1, 3, 5, 2)
    184
    """
    return tokens * heads * (2 * chunk * (key_dim + value_dim) + 4 * key_dim * value_dim)


def linear_attention_backward_flops(tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num) -> Num:
    r"""Gradients of all products, and states and scores again: $F' = 2F + Th\,(2Qd_k + 2d_kd_v)$.

    Source: as :func:`linear_attention_flops`, section 3.3.

    >>> linear_attention_backward_flops(2, 1, 3, 5, 2) - 2 * linear_attention_flops(2, 1, 3, 5, 2)
    84
    """
    again = tokens * heads * (2 * chunk * key_dim + 2 * key_dim * value_dim)
    return 2 * linear_attention_flops(tokens, heads, key_dim, value_dim, chunk) + again


def linear_attention_vector_flops(tokens: Num, heads: Num, key_dim: Num, chunk: Num) -> Num:
    r"""Decay of the pairs of a chunk and of its keys: $F_v = Th(3Q + 4d_k)$.

    Source: as :func:`linear_attention_flops`, count of operations.

    >>> linear_attention_vector_flops(2, 1, 3, 2)
    36
    """
    return tokens * heads * (3 * chunk + 4 * key_dim)


def linear_attention_bytes(
    tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num, element_bytes: Num
) -> Num:
    r"""Queries, keys, values and outputs once, states twice: $M = Th\,(2d_k + 2d_v)E + 2 \cdot 4\,Th\,d_kd_v/Q$.

    Source: as :func:`linear_attention_flops`; the delta rule moves as much.

    >>> linear_attention_bytes(2, 1, 3, 5, 2, 2)
    184.0
    """
    streams = tokens * heads * 2 * (key_dim + value_dim) * element_bytes
    return streams + 2 * STATE_BYTES * tokens * heads * key_dim * value_dim / chunk


def linear_attention_backward_bytes(
    tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num, element_bytes: Num
) -> Num:
    r"""Inputs again, their gradients and that of the output: $M' = 2M$.

    Source: as :func:`linear_attention_bytes`.

    >>> linear_attention_backward_bytes(2, 1, 3, 5, 2, 2)
    368.0
    """
    return 2 * linear_attention_bytes(tokens, heads, key_dim, value_dim, chunk, element_bytes)


def linear_recurrence_flops(tokens: Num, channels: Num) -> Num:
    r"""Vector operations of a gated recurrence per channel: two sigmoids, power, root, update: $F_v = 14TC$.

    Source: De et al., Griffin, arXiv 2402.19427, section 2.4, count of operations.

    >>> linear_recurrence_flops(2, 3)
    84
    """
    return 14 * tokens * channels


def linear_recurrence_bytes(tokens: Num, channels: Num, element_bytes: Num) -> Num:
    r"""Input, both gates and output: $M = 4TCE$.

    Source: as :func:`linear_recurrence_flops`, section 4.1 (bounded by memory).

    >>> linear_recurrence_bytes(2, 3, 2)
    48
    """
    return 4 * tokens * channels * element_bytes


def linear_recurrence_backward_bytes(tokens: Num, channels: Num, element_bytes: Num) -> Num:
    r"""Inputs and states again, their gradients: $M' = 2M$.

    Source: as :func:`linear_recurrence_bytes`.

    >>> linear_recurrence_backward_bytes(2, 3, 2)
    96
    """
    return 2 * linear_recurrence_bytes(tokens, channels, element_bytes)


def convolution_flops(elements: Num, kernel: Num) -> Num:
    r"""Causal convolution of each channel and its activation function: $F_v = x(2k + 4)$ of $x$ = `elements`,
    $k$ = `kernel` taps.

    Source: definition.

    >>> convolution_flops(5, 4)
    60
    """
    return elements * (2 * kernel + 4)


def convolution_backward_flops(elements: Num, kernel: Num) -> Num:
    r"""Gradients of input and taps, the function again: $F_v' = x(6k + 8)$ of $x$ = `elements`, $k$ = `kernel` taps.

    Source: definition.

    >>> convolution_backward_flops(5, 4)
    160
    """
    return elements * (6 * kernel + 8)


def index_scores_flops(pairs: Num, index_heads: Num, index_dim: Num) -> Num:
    r"""Scores of an indexer: $F = 2 p h (d + 1)$ of $p$ = `pairs` of query and key, $h$ = `index_heads` heads of width
    $d$ = `index_dim`, weighed and summed.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1, equation 1.

    >>> index_scores_flops(3, 2, 4)
    60
    """
    return 2 * pairs * index_heads * (index_dim + 1)


def index_scores_vector_flops(pairs: Num, index_heads: Num) -> Num:
    r"""A rectifier per score, one comparison per pair: $F_v = p(h + 1)$.

    Source: as :func:`index_scores_flops`.

    >>> index_scores_vector_flops(3, 2)
    9
    """
    return pairs * (index_heads + 1)


def index_scores_bytes(pairs: Num, index_rows: Num, index_heads: Num, index_dim: Num, element_bytes: Num) -> Num:
    r"""Queries and keys once, sums written and read for the choice: $M = r d (h + 1) E + 8 p$ of $r$ = `index_rows`.

    Source: as :func:`index_scores_flops`; scores of heads stay on the chip.

    >>> index_scores_bytes(3, 2, 2, 4, 2)
    72
    """
    return index_rows * index_dim * (index_heads + 1) * element_bytes + 8 * pairs


def index_scores_backward_flops(chosen: Num, index_heads: Num, index_dim: Num) -> Num:
    r"""Gradients of the scores of $c$ = `chosen` pairs, which alone meet the indexer's loss: $F' = 4 c h (d + 1)$.

    Source: as :func:`index_scores_flops`, equation 4 (the loss of sparse training is over the chosen keys).

    >>> index_scores_backward_flops(3, 2, 4)
    120
    """
    return 2 * index_scores_flops(chosen, index_heads, index_dim)


def index_scores_backward_bytes(
    chosen: Num, index_rows: Num, index_heads: Num, index_dim: Num, element_bytes: Num
) -> Num:
    r"""Queries and keys and their gradients, the gradient of each chosen sum: $M' = 2 r d (h + 1) E + 4 c$ of $r$ =
    `index_rows` and $c$ = `chosen` pairs.

    Source: as :func:`index_scores_backward_flops`.

    >>> index_scores_backward_bytes(3, 2, 2, 4, 2)
    108
    """
    return 2 * index_rows * index_dim * (index_heads + 1) * element_bytes + 4 * chosen


def twice_matrix_flops(matrix_flops: Num) -> Num:
    r"""Backward pass of given work, a gradient of input and of weights for each product: $F' = 2F$ of $F$ =
    `matrix_flops`.

    Source: definition.

    >>> twice_matrix_flops(3)
    6
    """
    return 2 * matrix_flops


def twice_bytes(moved_bytes: Num) -> Num:
    r"""Traffic of the backward pass of given work: $M' = 2M$ of $M$ = `moved_bytes`.

    Source: definition.

    >>> twice_bytes(3)
    6
    """
    return 2 * moved_bytes
