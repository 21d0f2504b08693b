"""Batch norm and pooling of square images: which shapes are measured, and the work of each.

Sizes of a task: ``batch``, ``channels``, ``side``; of pooling ``kernel`` and ``stride`` too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from steptime.cost import elementwise
from steptime.cost.convolution import output_size
from steptime.cost.elementwise import window_flops
from steptime.cost.memory_bound import streamed_bytes
from steptime.estimate.measured import LOOPED, MAX_POOLS, NORMS
from steptime.lab.calibrate.machine.draws import log_spaced, log_uniform

Shape = Mapping[str, int]

#: Kernel and stride of poolings, in turn.
WINDOWS: Final = ((2, 2), (3, 2), (3, 1))
#: Bytes of the place of a maximum, which max pooling keeps.
INDEX_BYTES: Final = 8
MOST_SAMPLES: Final = 64


def pool_padding(kernel: int) -> int:
    """Pixels on each side: those of a window of three keep it centred, one of two has none.

    >>> pool_padding(2), pool_padding(3)
    (0, 1)
    """
    return (kernel - 1) // 2


def pooled_side(shape: Shape) -> int:
    """Windows along a side of an image."""
    kernel = shape["kernel"]
    return int(output_size(shape["side"], kernel, shape["stride"], pool_padding(kernel)))


def loops_of(kind: str, shape: Shape) -> dict[str, float]:
    """Loops and their steps in all: pixels of a plane (channel of an image), or taps of a window.

    >>> loops_of("batch_norm", {"batch": 2, "channels": 3, "side": 5})
    {'loops': 6.0, 'steps': 150.0}
    >>> loops_of("max_pool", {"batch": 2, "channels": 3, "side": 5, "kernel": 3, "stride": 2})
    {'loops': 54.0, 'steps': 486.0}
    """
    planes = shape["batch"] * shape["channels"]
    if kind in NORMS:
        return {"loops": float(planes), "steps": float(planes * shape["side"] ** 2)}
    windows = planes * pooled_side(shape) ** 2
    return {"loops": float(windows), "steps": float(windows * shape["kernel"] ** 2)}


def counts_of(kind: str, shape: Shape, element_bytes: int) -> dict[str, float]:
    """``vector_flops``, ``moved_bytes`` and ``result_bytes`` (of the largest result), as graphs count them."""
    channels, elements = shape["channels"], shape["batch"] * shape["channels"] * shape["side"] ** 2
    image_bytes, backward = elements * element_bytes, kind.endswith("_backward")
    if kind in NORMS:
        flops = elementwise.batch_norm_backward_flops if backward else elementwise.batch_norm_flops
        sizes = (elements, channels, element_bytes)
        moved = (
            elementwise.batch_norm_backward_bytes(*sizes) if backward else elementwise.batch_norm_bytes(*sizes, 1)
        )  # fmt: skip
        return {"vector_flops": float(flops(elements)), "moved_bytes": float(moved), "result_bytes": float(image_bytes)}
    windows, place = loops_of(kind, shape)["loops"], INDEX_BYTES if kind in MAX_POOLS else 0
    pooled_bytes = windows * (element_bytes + place)
    moved = streamed_bytes(image_bytes + pooled_bytes, image_bytes if backward else 0)
    flops_of = window_flops(elements if backward else windows, shape["kernel"] ** 2)
    result = image_bytes if backward else windows * max(element_bytes, place)
    return {"vector_flops": float(flops_of), "moved_bytes": float(moved), "result_bytes": float(result)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExtent:
    """How large the images are, and how many shapes of them."""

    elements: tuple[float, float]
    """Of a batch norm."""
    windows: tuple[float, float]
    """Of a pooling."""
    sides: tuple[int, int]
    """Pixels: down to those of the last images of a net."""
    channels: tuple[int, int]
    count: int
    """Shapes per operator and dtype."""


def image_shapes(extent: ImageExtent, seed: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Kinds with shapes, of log-uniform sizes."""
    draw = random.Random(f"images {seed}")
    for kind in LOOPED:
        span = extent.elements if kind in NORMS else extent.windows
        for i, size in enumerate(log_spaced(draw, *span, extent.count)):
            kernel, stride = WINDOWS[i % len(WINDOWS)]
            window = {} if kind in NORMS else {"kernel": kernel, "stride": stride}
            yield kind, {**_image(draw, extent, size, window), **window}


def _image(draw: random.Random, extent: ImageExtent, size: float, window: Shape) -> dict[str, int]:
    """An image drawn until some number of samples makes about ``size`` pixels or windows of it."""
    while True:
        channels, side = (log_uniform(draw, *span) for span in (extent.channels, extent.sides))
        shape = {"channels": 8 * round(channels / 8), "side": round(side)}
        one = shape["channels"] * (pooled_side({**shape, **window}) if window else shape["side"]) ** 2
        batch = round(size / one)
        if 1 <= batch <= MOST_SAMPLES:
            return {"batch": batch, **shape}
