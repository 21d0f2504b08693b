r"""Bytes of tensors in narrow formats: elements, and the scales and zero points that belong to them.

A tensor is cut into groups that share one scale (symmetric) or one scale and one zero point (affine): the whole tensor,
one channel, or a number of elements in a row. A finer group follows outliers better and costs more bytes. The scales
may be quantised again in groups of their own (double quantisation).
"""

from __future__ import annotations

from steptime.num import Num, ceil_div

SCALE_BYTES = 4.0
"""Bytes of an fp32 scale."""
NF4_GROUP, NF4_SCALE_GROUP = 64, 256
"""Weights that share a scale in NF4, and scales that share a second one (QLoRA, arXiv 2305.14314, section 3)."""
BLOCKWISE_GROUP = 128
"""Elements of an activation or gradient that share an fp32 scale (DeepSeek-V3, arXiv 2412.19437, section 3.3.2); of a
weight 128 x 128 do."""
NVFP4_GROUP = 16
"""Elements that share a scale in NVFP4 (NVIDIA, Blackwell architecture)."""
STATE_GROUP = 256
"""Elements of an optimiser state that share an fp32 largest absolute value: blocks of bitsandbytes. The paper has 2048
(arXiv 2110.02861, section 2)."""
LEAST_STATE_ELEMENTS = 4096
"""Tensors with fewer elements keep fp32 states (``min_8bit_size`` of bitsandbytes)."""


def groups_of(elements: Num, group: Num) -> Num:
    r"""Groups with a scale of their own: $n = \lceil N / g \rceil$.

    where $N$ = `elements` and $g$ = `group` = elements that share a scale: all of them (per tensor), those of a
    channel, or fewer.

    Source: definition.

    >>> groups_of(1000, 1000), groups_of(1000, 250), groups_of(1000, 64)
    (1, 4, 16)
    """
    return ceil_div(elements, group)


def quantised_bytes(
    elements: Num, bits: Num, groups: Num, scale_bytes: Num = SCALE_BYTES, zero_point_bytes: Num = 0.0
) -> Num:
    r"""Bytes of a quantised tensor.

    $$M = N b / 8 + n (E_s + E_z)$$

    where $N$ = `elements` of $b$ = `bits`, $n$ = `groups` (:func:`groups_of`) with $E_s$ = `scale_bytes` and, where the
    range is not symmetric, $E_z$ = `zero_point_bytes` each.

    Source: Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
    inference", arXiv 1712.05877, section 2.

    >>> quantised_bytes(1024, 8, groups_of(1024, 1024)), quantised_bytes(1024, 8, groups_of(1024, 128), 2.0, 1.0)
    (1028.0, 1048.0)
    """
    return elements * bits / 8 + groups * (scale_bytes + zero_point_bytes)


def element_bytes(bits: Num, group: Num, scale_bytes: Num = SCALE_BYTES, zero_point_bytes: Num = 0.0) -> Num:
    r"""Bytes of one element with its share of scale and zero point, in long tensors.

    $$E = b / 8 + (E_s + E_z) / g$$

    symbols as in :func:`quantised_bytes` and :func:`groups_of`.

    Source: limit of :func:`quantised_bytes` for many groups.

    >>> element_bytes(8, 32, 1.0), element_bytes(4, 16, 1.0)
    (1.03125, 0.5625)
    """
    return bits / 8 + (scale_bytes + zero_point_bytes) / group


def doubly_quantised_element_bytes(
    bits: Num, group: Num, scale_bits: Num, scale_group: Num, scale_bytes: Num = SCALE_BYTES
) -> Num:
    r"""Bytes of one element whose scales are quantised too.

    $$E = \frac{1}{8} \left(b + \frac{b_s}{g}\right) + \frac{E_s}{g\, g_s}$$

    where $b$ = `bits` of an element, $g$ = `group`, $b_s$ = `scale_bits` of a scale, $g_s$ = `scale_group` of scales
    that share a second scale of $E_s$ = `scale_bytes`.

    Source: QLoRA, Dettmers et al., arXiv 2305.14314, section 3: 0.127 bits per parameter in addition to the 4 of NF4.

    >>> 8 * doubly_quantised_element_bytes(4, 64, 8, 256)
    4.126953125
    """
    return (bits + scale_bits / group) / 8 + scale_bytes / (group * scale_group)


def nf4_element_bytes() -> float:
    """Bytes of a weight in NF4 with double quantisation: :func:`doubly_quantised_element_bytes` of 4 bits.

    Source: QLoRA, Dettmers et al., arXiv 2305.14314, section 3.

    >>> nf4_element_bytes()
    0.515869140625
    """
    return float(doubly_quantised_element_bytes(4, NF4_GROUP, 8, NF4_SCALE_GROUP))


def nvfp4_element_bytes() -> float:
    """Bytes of an element in NVFP4: 4 bits, and one byte of scale for 16 of them (:func:`element_bytes`).

    Source: NVIDIA, Blackwell architecture.

    >>> nvfp4_element_bytes()
    0.5625
    """
    return float(element_bytes(4, NVFP4_GROUP, 1.0))


def state_8bit_bytes(elements: Num, group: Num = STATE_GROUP) -> Num:
    r"""Bytes of one optimiser state in 8 bits with block-wise scales.

    $$M = N + 4 \lceil N / g \rceil$$

    where $N$ = `elements` and $g$ = `group` elements share the fp32 largest absolute value of their block.

    Source: 8-bit optimizers via block-wise quantization, Dettmers et al., arXiv 2110.02861, section 2.

    >>> state_8bit_bytes(1024), state_8bit_bytes(4096, 2048)
    (1040.0, 4104.0)
    """
    return quantised_bytes(elements, 8, groups_of(elements, group))


def state_8bit_element_bytes(group: Num = STATE_GROUP) -> Num:
    r"""Bytes of one element of such a state, in long tensors: $E = 1 + 4/g$ with $g$ = `group`.

    Source: limit of :func:`state_8bit_bytes`.

    >>> state_8bit_element_bytes()
    1.015625
    """
    return element_bytes(8, group)


def dequantised_bytes(elements: Num, stored_element_bytes: Num, wide_element_bytes: Num) -> Num:
    r"""Traffic of one pass that expands a quantised tensor: $M = N (E_q + E_w)$.

    where $N$ = `elements` are read at $E_q$ = `stored_element_bytes` and written at $E_w$ = `wide_element_bytes`.

    Source: count of bytes.

    >>> dequantised_bytes(1000, 0.5, 2.0)
    2500.0
    """
    return elements * (stored_element_bytes + wide_element_bytes)
