"""Work and time of two-dimensional convolutions as implicit matrix products."""

from __future__ import annotations

from steptime.cost.gemm import wave_factor
from steptime.num import Num, ceil_div, floor_div, maximum, minimum, soft_maximum, where


def output_size(size: Num, kernel: Num, stride: Num, padding: Num) -> Num:
    r"""Pixels of one side of the output: $\lfloor (h + 2p - r)/u \rfloor + 1$, at least 1.

    where $h$ = `size` of the input, $p$ = `padding` on both sides, $r$ = `kernel` and $u$ = `stride`, in pixels.

    Source: definition.

    >>> output_size(224, 7, 2, 3)
    112
    """
    return maximum(floor_div(size + 2 * padding - kernel, stride) + 1, 1)


def convolution_flops(batch: Num, pixels: Num, channels_in: Num, channels_out: Num, taps: Num) -> Num:
    r"""Operations of a convolution, or of either of its gradients: $F = 2\,n\,p\,c_i c_o\,t$.

    $n$ = `batch` images, $p$ = `pixels` of an output, $c_i$ = `channels_in`, $c_o$ = `channels_out`, $t$ = `taps` =
    kernel height x width.

    Source: definition.

    >>> convolution_flops(5, 4, 2, 3, 9)
    2160
    """
    return 2 * batch * pixels * channels_in * channels_out * taps


def implicit_product(pixels: Num, inward: Num, outward: Num, taps: Num, groups: Num) -> tuple[Num, Num, Num]:
    r"""Rows, columns and depth of a convolution as a product: $m = p\,g$, $n = c_o$, $k = c_i t$.

    $p$ = `pixels` of all images (of the output), $t$ = `taps`; $c_i$ = `inward` and $c_o$ = `outward`, the channels of
    a group that are summed over and that are made: of the input and of the output, forward and for the gradient of the
    weights (whose blocks divide the pixels), and the other way round for the gradient of the data. The $g$ =
    `groups` stand below one another.

    Source: implicit product, cuDNN, arXiv 1410.0759.

    >>> implicit_product(100, 8, 16, 9, 4)   # 32 channels to 64 in four groups
    (400, 16, 72)
    """
    return pixels * groups, outward, inward * taps


def channelwise(inward: Num, outward: Num, groups: Num) -> Num:
    r"""1 where a group has a single channel in or out (depthwise): no matrix product is left; else 0.

    `inward` and `outward` are the channels of one of the `groups`, as in `implicit_product`.

    Source: definition.

    >>> channelwise(1, 2, 32), channelwise(4, 4, 8), channelwise(1, 64, 1)
    (1.0, 0.0, 0.0)
    """
    return where((groups > 1) & (minimum(inward, outward) <= 1), 1.0, 0.0)


def convolution_s(
    rows: Num,
    columns: Num,
    depth: Num,
    moved_bytes: Num,
    winograd_taps: Num,
    matrix_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    launch_s: Num,
    efficiency: Num,
    memory_efficiency: Num,
    tail: Num,
    tile: Num,
    start_depth: Num,
    winograd: Num,
) -> Num:
    r"""Time of a convolution as a product of `rows` x `depth` by `depth` x `columns`.

    $$t = \tau + \left[\Big(\frac{2\,m'n'\,(k + k_0)}{\varepsilon R\,w}\,\omega\Big)^3
      + \Big(\frac{M}{\eta\beta}\Big)^3\right]^{1/3}$$

    where $m', n'$ are `rows` and `columns` rounded up to tiles of 32 (what a tile of `tile` loses is in $\omega$),
    $k$ = `depth` and $k_0$ = `start_depth` starts and ends a block, $\omega$ is
    `wave_factor` of the tiles on `sm_count` processors with `tail`, and $w$ = `winograd` where `winograd_taps` is 1
    (three by three, stride one), else 1. $M$ = `moved_bytes`, $R$ = `matrix_flops_per_s`, $\beta$ = `memory_Bps`,
    $\varepsilon$ = `efficiency`, $\eta$ = `memory_efficiency` and $\tau$ = `launch_s`. Rows are the pixels of all
    images; forward and for the gradient of the weights (whose blocks divide the pixels) $n = c_o$, $k = c_i t$, for
    the gradient of the data $n = c_i$, $k = c_o t$, with $c_i, c_o, t$ of `convolution_flops`.

    Source: implicit product, cuDNN, arXiv 1410.0759; Winograd, arXiv 1509.09308 (at most 2.25 fewer operations).

    >>> t = convolution_s(1024, 1024, 1024, 1e6, 0, 1e13, 1e12, 64, 0, 1, 1, 0, 128, 0, 1)
    >>> round(t / (2 * 1024**3 / 1e13), 3)
    1.0
    >>> less = convolution_s(1024, 1024, 1024, 1e6, 1, 1e13, 1e12, 64, 0, 1, 1, 0, 128, 0, 2.25)   # Winograd's
    >>> round(t / less, 3)
    2.25
    """
    padded = ceil_div(rows, 32) * ceil_div(columns, 32) * 1024
    blocks = ceil_div(rows, tile) * ceil_div(columns, tile)
    saved = where(winograd_taps > 0, winograd, 1.0)
    compute = 2 * padded * (depth + start_depth) / (efficiency * matrix_flops_per_s * saved)
    memory = moved_bytes / (memory_efficiency * memory_Bps)
    return launch_s + soft_maximum(compute * wave_factor(blocks, sm_count, tail), memory, 3)


def either_convolution_s(
    rows: Num,
    columns: Num,
    depth: Num,
    moved_bytes: Num,
    winograd_taps: Num,
    matrix_flops_per_s: Num,
    memory_Bps: Num,
    sm_count: Num,
    launch_s: Num,
    efficiency: Num,
    memory_efficiency: Num,
    tail: Num,
    tile: Num,
    start_depth: Num,
    winograd: Num,
    wide_flops_per_s: Num,
    wide_efficiency: Num,
    wide_memory_efficiency: Num,
    wide_tail: Num,
    wide_tile: Num,
    wide_start_depth: Num,
    wide_winograd: Num,
) -> Num:
    r"""Time of a convolution of a narrow type, which a library may also compute in fp32: $\min(t, t_w)$.

    $t$ is :func:`convolution_s` with the coefficients of the narrow type, and $t_w$ the same with those of fp32,
    `wide_flops_per_s`, `wide_efficiency`, `wide_memory_efficiency`, `wide_tail`, `wide_tile`, `wide_start_depth` and
    `wide_winograd`: both read the same `moved_bytes` and have the same `launch_s`. So no convolution is slower in a
    narrow type than in fp32. Its other arguments (`rows`, `columns`, `depth`, `winograd_taps`, `matrix_flops_per_s`,
    `memory_Bps`, `sm_count`, `efficiency`, `memory_efficiency`, `tail`, `tile`, `start_depth`, `winograd`) are those of
    :func:`convolution_s`.

    Source: algorithms and types of computation of cuDNN (pseudo half, pseudo bfloat16), which takes the faster.

    >>> shape, rates = (1024, 1024, 1024, 1e6, 1), dict(memory_Bps=1e12, sm_count=64, launch_s=0)
    >>> plain = dict(efficiency=1, memory_efficiency=1, tail=0, tile=128, start_depth=0, winograd=1)
    >>> wide = {f"wide_{n}": v for n, v in (plain | {"winograd": 2.25}).items()}
    >>> t = either_convolution_s(*shape, 2e13, **rates, **plain, wide_flops_per_s=1e13, **wide)
    >>> round(2 * 1024**3 / t / 1e13, 2)   # Winograd's algorithm in fp32 is faster than twice the rate
    2.25
    """
    shape, rates = (rows, columns, depth, moved_bytes, winograd_taps), (memory_Bps, sm_count, launch_s)
    own = (efficiency, memory_efficiency, tail, tile, start_depth, winograd)
    wide = (wide_efficiency, wide_memory_efficiency, wide_tail, wide_tile, wide_start_depth, wide_winograd)
    return minimum(
        convolution_s(*shape, matrix_flops_per_s, *rates, *own), convolution_s(*shape, wide_flops_per_s, *rates, *wide)
    )


def channelwise_s(
    rows: Num, columns: Num, depth: Num, moved_bytes: Num, vector_flops_per_s: Num, memory_Bps: Num, launch_s: Num
) -> Num:
    r"""Time of a pass of a convolution whose groups have a single channel (depthwise): the vector units run it.

    $$t = \tau + \max\left(\frac{2mnk}{R_v},\ \frac{M}{\beta}\right)$$

    where $m$ = `rows`, $n$ = `columns` and $k$ = `depth` are those of `implicit_product` (pixels of all groups, one
    channel, taps), $M$ = `moved_bytes`, $R_v$ = `vector_flops_per_s` and $\beta$ = `memory_Bps` (sustained) and
    $\tau$ = `launch_s`.

    Source: roofline, Williams et al. 2009.

    >>> channelwise_s(1000, 1, 9, 1e6, 1e9, 1e9, 1e-6), channelwise_s(1e6, 1, 49, 1e6, 1e9, 1e9, 0.0)
    (0.001001, 0.098)
    """
    return launch_s + maximum(2 * rows * columns * depth / vector_flops_per_s, moved_bytes / memory_Bps)


LIBRARY_ELEMENTS = 20480
"""Elements of a single image above which PyTorch gives a convolution to oneDNN on one thread."""


def blocked_by_library(images: Num, elements: Num, kernel: Num, groups: Num, plain: Num) -> Num:
    r"""1 if PyTorch on one thread of a CPU gives a convolution of fp32 to oneDNN, 0 if it unfolds it.

    $$(k \ne 1 \lor n \ge 16 \lor \lnot p) \land (g > 1 \lor k > 3 \lor n > 1 \lor e > 20480)$$

    where $k$ = `kernel` is the side of the window, $n$ = `images`, $e$ = `elements` of the input, $g$ = `groups`, and
    $p$ = `plain` is 1 without stride and dilation.

    Source: `ConvParams::use_mkldnn` of PyTorch (aten/src/ATen/native/Convolution.cpp).

    >>> blocked_by_library(1, 4096, 3, 1, 1), blocked_by_library(1, 30000, 3, 1, 1)
    (0.0, 1.0)
    """
    wanted = where(kernel != 1, 1.0, where(images >= 16, 1.0, 1.0 - plain))
    large = where(groups > 1, 1.0, where(kernel > 3, 1.0, where(images > 1, 1.0, elements > LIBRARY_ELEMENTS)))
    return wanted * large
