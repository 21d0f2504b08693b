"""Work and traffic of operators that touch each element a few times: maps, norms, reductions.

Symbols: $x$ = `elements` of the local activation, in $r$ = `rows` of $w$ = `width` or in $c$ = `channels`, $E$ =
`element_bytes`, $M$ = `mask_bytes` of one dropout flag.
FLOP counts are vector operations; they matter only where the vector rate, not the memory, is the limit.
"""

from __future__ import annotations

from steptime.num import Num, log2


def bias_flops(elements: Num) -> Num:
    r"""Additions of a bias, or of its gradient: $F = x$.

    Source: arXiv 2410.00273, operation counts.

    >>> bias_flops(6)
    6
    """
    return elements


def bias_bytes(elements: Num, width: Num, element_bytes: Num) -> Num:
    r"""Traffic of a bias: $M = (x + w) E$ with $w$ = `width` weights.

    One pass over the activation is charged: the other is that of the product before it.

    Source: arXiv 2410.00273, operation counts.

    >>> bias_bytes(6, 3, 2)
    18
    """
    return (elements + width) * element_bytes


def gelu_flops(elements: Num) -> Num:
    r"""GELU forward (tanh form): $F = 8x$.

    Source: arXiv 2410.00273, operation counts.

    >>> gelu_flops(2)
    16
    """
    return 8 * elements


def gelu_backward_flops(elements: Num) -> Num:
    r"""GELU backward: $F = 13x$.

    Source: arXiv 2410.00273, operation counts.

    >>> gelu_backward_flops(2)
    26
    """
    return 13 * elements


def map_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a one-to-one map forward: $M = 2xE$ (read, write).

    Source: definition.

    >>> map_bytes(3, 2)
    12
    """
    return 2 * elements * element_bytes


def map_backward_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a one-to-one map backward: $M = 3xE$ (read input and gradient, write gradient).

    Source: definition.

    >>> map_backward_bytes(3, 2)
    18
    """
    return 3 * elements * element_bytes


def gated_flops(elements: Num) -> Num:
    r"""Gated activation forward, $y = g(u) \cdot v$ with $x$ outputs: $F = 9x$ (8 for $g$, 1 product).

    Source: count of operations, activation as in `gelu_flops`.

    >>> gated_flops(2)
    18
    """
    return gelu_flops(elements) + elements


def gated_backward_flops(elements: Num) -> Num:
    r"""Gated activation backward: $F = 23x$ ($g$ again, $g'$, two products).

    Source: count of operations, activation as in `gelu_backward_flops`.

    >>> gated_backward_flops(2)
    46
    """
    return gelu_flops(elements) + gelu_backward_flops(elements) + 2 * elements


def gated_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a gated activation forward: $M = 3xE$ (read $u, v$, write $y$).

    Source: definition.

    >>> gated_bytes(2, 2)
    12
    """
    return 3 * elements * element_bytes


def gated_backward_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a gated activation backward: $M = 5xE$ (read $u, v, dy$, write $du, dv$).

    Source: definition.

    >>> gated_backward_bytes(2, 2)
    20
    """
    return 5 * elements * element_bytes


def triangular_softmax_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a softmax that reads half of its $x$ scores and writes all probabilities: $M = 3xE / 2$.

    Source: definition; Megatron-LM, `scaled_upper_triang_masked_softmax`.

    >>> triangular_softmax_bytes(2, 2)
    6.0
    """
    return 1.5 * elements * element_bytes


def triangular_softmax_backward_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic backward: half of the gradient and of the probabilities read, all of the gradient written: $M = 2xE$.

    Source: as of `triangular_softmax_bytes`.

    >>> triangular_softmax_backward_bytes(2, 2)
    8
    """
    return 2 * elements * element_bytes


def dropout_flops(elements: Num) -> Num:
    r"""Dropout forward or backward: $F = x$.

    Source: arXiv 2410.00273, operation counts.

    >>> dropout_flops(4)
    4
    """
    return elements


def dropout_bytes(elements: Num, element_bytes: Num, mask_bytes: Num) -> Num:
    r"""Traffic of dropout forward or backward: $2xE + xM$.

    Source: arXiv 2410.00273, operation counts.

    >>> dropout_bytes(4, 2, 1)
    20
    """
    return 2 * elements * element_bytes + elements * mask_bytes


def residual_flops(elements: Num) -> Num:
    r"""Addition of the residual stream: $F = x$ (backward only passes the gradient on).

    Source: definition.

    >>> residual_flops(4)
    4
    """
    return elements


def residual_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a residual addition: $M = 3xE$ (two reads, one write); backward adds gradients with the same traffic.

    Source: definition.

    >>> residual_bytes(4, 2)
    24
    """
    return 3 * elements * element_bytes


def dropout_add_flops(elements: Num) -> Num:
    r"""Dropout and the addition of the residual stream in one kernel, forward or backward: $F = 2x$.

    Source: sum of `dropout_flops` and `residual_flops`.

    >>> dropout_add_flops(4)
    8
    """
    return dropout_flops(elements) + residual_flops(elements)


def dropout_add_bytes(elements: Num, element_bytes: Num, mask_bytes: Num) -> Num:
    r"""Traffic of dropout and residual addition in one kernel: $M = 3xE + xm$ (read $x$, stream; write sum, mask).

    Source: definition; Megatron-LM, `bias_dropout_add_fused_train`.

    >>> dropout_add_bytes(4, 2, 1)
    28
    """
    return residual_bytes(elements, element_bytes) + elements * mask_bytes


def dropout_add_backward_bytes(elements: Num, element_bytes: Num, mask_bytes: Num) -> Num:
    r"""Traffic backward: $M = 5xE + xm$, the dropout's gradient and the sum of the two gradients of the stream.

    Source: sum of `dropout_bytes` and `residual_bytes`.

    >>> dropout_add_backward_bytes(4, 2, 1)
    44
    """
    return dropout_bytes(elements, element_bytes, mask_bytes) + residual_bytes(elements, element_bytes)


def rope_flops(elements: Num) -> Num:
    r"""Rotary embedding of $x$ elements of queries and keys: $F = 3x$ (a 2 x 2 rotation per pair).

    Source: RoFormer, arXiv 2104.09864, equation 34.

    >>> rope_flops(4)
    12
    """
    return 3 * elements


def complex_rope_bytes(elements: Num, element_bytes: Num) -> Num:
    r"""Traffic of a rotary embedding by complex numbers, forward or backward: $M = (2E + 16) x$.

    Three kernels: to fp32 (read $E$, write 4), the complex product (read 4, write 4), back (read 4, write $E$).
    PyTorch's compiler makes no code for complex numbers, and so fuses none of them.

    Source: torchtitan, `apply_rotary_emb`; the code that `torch.compile` makes of it.

    >>> complex_rope_bytes(4, 2)
    80
    """
    return (2 * element_bytes + 16) * elements


def layer_norm_flops(elements: Num) -> Num:
    r"""LayerNorm forward: $F = 9x$.

    Source: arXiv 2410.00273, operation counts.

    >>> layer_norm_flops(2)
    18
    """
    return 9 * elements


def layer_norm_backward_flops(elements: Num, rows: Num, width: Num) -> Num:
    r"""LayerNorm backward: $F = 8x + 4 r (w - 1)$ with $r$ = `rows` of $w$ = `width` elements.

    Source: arXiv 2410.00273, operation counts.

    >>> layer_norm_backward_flops(8, 2, 4)
    88
    """
    return 8 * elements + 4 * rows * (width - 1)


def layer_norm_bytes(elements: Num, rows: Num, width: Num, element_bytes: Num) -> Num:
    r"""LayerNorm forward traffic: $M = (2x + 2r + 2w) E$.

    Source: arXiv 2410.00273, operation counts.

    >>> layer_norm_bytes(8, 2, 4, 2)
    56
    """
    return (2 * elements + 2 * rows + 2 * width) * element_bytes


def layer_norm_backward_bytes(elements: Num, width: Num, element_bytes: Num) -> Num:
    r"""LayerNorm backward traffic: $M = (5x + 2w) E$.

    Source: arXiv 2410.00273, operation counts.

    >>> layer_norm_backward_bytes(8, 4, 2)
    96
    """
    return (5 * elements + 2 * width) * element_bytes


def one_pass_layer_norm_backward_bytes(elements: Num, rows: Num, width: Num, element_bytes: Num) -> Num:
    r"""LayerNorm backward traffic of a kernel that makes all gradients from one reading: $M = (3x + 2r + 2w) E$.

    where $x$ elements of the input and of the gradient are read and as many written, with mean and deviation of each of
    $r$ = `rows` rows of $w$ = `width`.

    Source: definition; Apex, `apex/contrib/layer_norm` (`ln_bwd_kernel`), and Transformer Engine.

    >>> one_pass_layer_norm_backward_bytes(8, 2, 4, 2)
    72
    """
    return (3 * elements + 2 * rows + 2 * width) * element_bytes


def rms_norm_flops(elements: Num) -> Num:
    r"""RMSNorm forward: $F = 4x$ (square, sum, scale, weight).

    Source: count of operations, Zhang and Sennrich, arXiv 1910.07467, equation 4.

    >>> rms_norm_flops(2)
    8
    """
    return 4 * elements


def rms_norm_backward_flops(elements: Num) -> Num:
    r"""RMSNorm backward: $F = 8x$.

    Source: count of operations, Zhang and Sennrich, arXiv 1910.07467, section 4.

    >>> rms_norm_backward_flops(2)
    16
    """
    return 8 * elements


def rms_norm_bytes(elements: Num, rows: Num, width: Num, element_bytes: Num) -> Num:
    r"""RMSNorm forward traffic: $M = (2x + r + w) E$.

    Source: definition.

    >>> rms_norm_bytes(8, 2, 4, 2)
    44
    """
    return (2 * elements + rows + width) * element_bytes


def rms_norm_backward_bytes(elements: Num, rows: Num, width: Num, element_bytes: Num) -> Num:
    r"""RMSNorm backward traffic: $M = (3x + r + 2w) E$ (read $x, dy$, write $dx$; weights and their gradient).

    Source: definition.

    >>> rms_norm_backward_bytes(8, 2, 4, 2)
    68
    """
    return (3 * elements + rows + 2 * width) * element_bytes


def embedding_bytes(tokens: Num, width: Num, element_bytes: Num) -> Num:
    r"""Traffic of a table look-up, or of its gradient: $M = 2 t w E$ for $t$ = `tokens` rows.

    Source: definition.

    >>> embedding_bytes(3, 4, 2)
    48
    """
    return 2 * tokens * width * element_bytes


def cross_entropy_flops(elements: Num) -> Num:
    r"""Softmax cross-entropy over $x$ = tokens times local vocabulary: $F = 4x$ forward, and the same backward.

    Source: count of operations (maximum, subtract, exponentiate, sum).

    >>> cross_entropy_flops(2)
    8
    """
    return 4 * elements


def cross_entropy_bytes(elements: Num, forward_bytes: Num) -> Num:
    r"""Traffic of softmax cross-entropy forward: $M = x f$ with $f$ = `forward_bytes` per logit of all its kernels.

    Source: definition; what software makes of it: `steptime.plan.job`.

    >>> cross_entropy_bytes(2, 8)
    16
    """
    return elements * forward_bytes


def cross_entropy_backward_bytes(elements: Num, backward_bytes: Num) -> Num:
    r"""Traffic of softmax cross-entropy backward: $M = x b$ with $b$ = `backward_bytes` per logit of all its kernels.

    Source: as of `cross_entropy_bytes`.

    >>> cross_entropy_backward_bytes(2, 8)
    16
    """
    return elements * backward_bytes


def pointwise_flops(elements: Num, operations: Num) -> Num:
    r"""Vector operations of a map or a reduction: $F = x\,o$.

    where $x$ = `elements` are computed (of a reduction: read) with $o$ = `operations` each.

    Source: definition.

    >>> pointwise_flops(6, 2)
    12
    """
    return elements * operations


def window_flops(outputs: Num, taps: Num) -> Num:
    r"""Vector operations of a pooling: $F = y\,t$, one per tap of the window.

    where $y$ = `outputs` and $t$ = `taps` = height x width of the window.

    Source: definition.

    >>> window_flops(4, 9)
    36
    """
    return outputs * taps


def sort_flops(rows: Num, steps: Num, width: Num) -> Num:
    r"""Comparisons of a sort of $r$ = `rows` of $w$ = `width` elements in $s$ = `steps`: $F = r\,w\,s$.

    A radix sort of keys of $b$ bits takes a step per 8 bits; a merge sort $\log_2 w$.

    Source: Merrill and Grimshaw 2011 (radix sorting on GPUs: digits of a few bits, one pass each).

    >>> sort_flops(2, 4, 8)
    64
    """
    return rows * width * steps


def transform_flops(elements: Num, points: Num, real: Num) -> Num:
    r"""Operations of fast Fourier transforms: $F = 5\,N \log_2 p \cdot (1 - r / 2)$.

    With $N$ = `elements` in all, $p$ = `points` of one transform, $r$ = `real`: 1 where one side is real, which halves
    the work, else 0.

    Source: Frigo and Johnson 2005 (FFTW 3), section on benchmarks: 5 N log2 N, and half of it for real data.

    >>> float(transform_flops(16, 8, 0)), float(transform_flops(16, 8, 1))
    (240.0, 120.0)
    """
    return 5 * elements * log2(points) * (1 - real / 2)


def batch_norm_flops(elements: Num) -> Num:
    r"""Batch norm forward: $F = 7x$ (mean 1, variance 3, scale and shift 3).

    Source: count of operations, Ioffe and Szegedy, arXiv 1502.03167, algorithm 1.

    >>> batch_norm_flops(2)
    14
    """
    return 7 * elements


def batch_norm_backward_flops(elements: Num) -> Num:
    r"""Batch norm backward: $F = 11x$ (two sums 5, gradient of the input 6).

    Source: count of operations, Ioffe and Szegedy, arXiv 1502.03167, section 3.

    >>> batch_norm_backward_flops(2)
    22
    """
    return 11 * elements


def batch_norm_bytes(elements: Num, channels: Num, element_bytes: Num, training: Num) -> Num:
    r"""Traffic forward: $M = ((2 + t)\,x + 4c)\,E$.

    where the statistics of $x$ = `elements` are read in a pass of their own if $t$ = `training` is 1, and $c$ =
    `channels` have a weight, a bias, a mean and a variance.

    Source: definition.

    >>> batch_norm_bytes(8, 2, 2, 1), batch_norm_bytes(8, 2, 2, 0)
    (64, 48)
    """
    return ((2 + training) * elements + 4 * channels) * element_bytes


def batch_norm_backward_bytes(elements: Num, channels: Num, element_bytes: Num) -> Num:
    r"""Traffic backward: $M = (5x + 5c) E$ (input and gradient read twice, gradient written).

    Source: definition.

    >>> batch_norm_backward_bytes(8, 2, 2)
    100
    """
    return (5 * elements + 5 * channels) * element_bytes
