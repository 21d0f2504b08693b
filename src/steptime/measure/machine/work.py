"""Operators to measure, over a spread of shapes and dtypes, and the work of each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from steptime.cost import attention, convolution, elementwise, matmul
from steptime.cost.convolution import output_size
from steptime.cost.elementwise import window_flops
from steptime.cost.memory_bound import streamed_bytes
from steptime.estimate.measured import CONVOLVED, CPU, CPU_CONVOLUTION, LOOPED, MAX_POOLS, NORMS
from steptime.measure.machine import cpu_operators
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Num
from steptime.store.journal import content_key


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """A number whose logarithm is uniform between those of two others."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def log_spaced(draw: random.Random, low: float, high: float, count: int) -> Iterator[float]:
    """Numbers at equal distances in logarithm, each moved at random by up to a fifth of the distance."""
    start, end = math.log(low), math.log(high)
    for i in range(count):
        yield math.exp(start + (end - start) * (i + draw.uniform(-0.2, 0.2)) / (count - 1))


Shape = Mapping[str, int]

#: Kernel and stride of poolings, in turn.
POOL_WINDOWS: Final = ((2, 2), (3, 2), (3, 1))
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
        moved = elementwise.batch_norm_backward_bytes(*sizes) if backward else elementwise.batch_norm_bytes(*sizes, 1)
        return {"vector_flops": float(flops(elements)), "moved_bytes": float(moved), "result_bytes": float(image_bytes)}
    windows, place = loops_of(kind, shape)["loops"], INDEX_BYTES if kind in MAX_POOLS else 0
    pooled_bytes = windows * (element_bytes + place)
    moved = streamed_bytes(image_bytes + pooled_bytes, image_bytes if backward else 0)
    flops_of = window_flops(elements if backward else windows, shape["kernel"] ** 2)
    result = image_bytes if backward else windows * max(element_bytes, place)
    return {"vector_flops": float(flops_of), "moved_bytes": float(moved), "result_bytes": float(result)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExtent:
    """Sizes of images, and the number of shapes."""

    elements: tuple[float, float]
    """Elements of a batch norm."""
    windows: tuple[float, float]
    """Windows of a pooling."""
    sides: tuple[int, int]
    """Pixels of a side, down to the last images of a net."""
    channels: tuple[int, int]
    count: int
    """Shapes per operator and dtype."""


def image_shapes(extent: ImageExtent, seed: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Kinds with shapes, of log-uniform sizes."""
    draw = random.Random(f"images {seed}")
    for kind in LOOPED:
        span = extent.elements if kind in NORMS else extent.windows
        for i, size in enumerate(log_spaced(draw, *span, extent.count)):
            kernel, stride = POOL_WINDOWS[i % len(POOL_WINDOWS)]
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


#: The three products of a linear layer in training: X W^T, dY W, dY^T X.
LAYOUTS: Final = ("nt", "nn", "tn")
#: Layout whose left operand is stored transposed.
TURNED: Final = "tn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One operator of one shape in one dtype."""

    kind: str
    dtype: str
    shape: Mapping[str, int]
    layout: str = ""

    @property
    def key(self) -> str:
        """Key that depends on the content alone."""
        return content_key({"kind": self.kind, "dtype": self.dtype, "shape": self.shape, "layout": self.layout})

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """Work of an operator."""

    matrix_flops: float = 0.0
    vector_flops: float = 0.0
    moved_bytes: float = 0.0
    result_bytes: float = 0.0
    """Size of the largest tensor that it returns."""


def work_of(task: Task) -> TaskWork:
    """FLOPs and bytes by the formulas of :mod:`steptime.cost`.

    >>> work_of(Task(kind="matmul", dtype="fp32", shape={"m": 2, "n": 3, "k": 4})).matrix_flops
    48.0
    """
    if task.kind == "matmul":
        return _matmul_work(task)
    if task.kind in ("attention_forward", "attention_backward"):
        return _attention_work(task)
    if task.kind in CONVOLVED:
        return _convolution_work(task)
    if task.kind in CPU:
        return _cpu_work(task)
    if task.kind in LOOPED:
        return TaskWork(**counts_of(task.kind, task.shape, task.element_bytes))
    return TaskWork() if task.kind in LAUNCHES else _map_work(task)


def _cpu_work(task: Task) -> TaskWork:
    if task.kind == CPU_CONVOLUTION:
        moved_bytes = cpu_operators.implicit(task.shape)["tensor_bytes"]
        return TaskWork(moved_bytes=moved_bytes, result_bytes=moved_bytes)
    known = TaskWork.__dataclass_fields__
    return TaskWork(**{n: v for n, v in cpu_operators.counts(task.kind, task.shape).items() if n in known})


def _matmul_work(task: Task) -> TaskWork:
    m, n, k = (task.shape[name] for name in ("m", "n", "k"))
    return TaskWork(
        matrix_flops=float(matmul.matmul_flops(m, n, k, 1)),
        moved_bytes=float(matmul.matmul_bytes(m, n, k, task.element_bytes, 1)),
        result_bytes=float(m * n * task.element_bytes),
    )


def _attention_work(task: Task) -> TaskWork:
    """Causal attention of ``batch`` sequences, ``heads`` heads, ``seq`` tokens, ``head_dim`` wide."""
    shape, width = task.shape, task.element_bytes
    rows = shape["batch"] * shape["heads"] * shape["seq"]
    head_dim = shape["head_dim"]
    pairs = attention.causal_pairs(rows, shape["seq"])
    if task.kind == "attention_forward":
        flops = attention.fused_attention_flops(pairs, rows, head_dim, 1)
        vector = attention.fused_attention_vector_flops(pairs, rows, 0)
        moved = attention.fused_attention_bytes(rows, rows, head_dim, width)
    else:
        flops = attention.fused_attention_backward_flops(pairs, rows, rows, head_dim, 1)
        vector = attention.fused_attention_backward_vector_flops(pairs, rows, 0)
        moved = attention.fused_attention_backward_bytes(rows, rows, rows, head_dim, width)
    return TaskWork(
        matrix_flops=float(flops),
        vector_flops=float(vector),
        moved_bytes=float(moved),
        result_bytes=float(rows * head_dim * width),
    )


def padding_of(kernel: int) -> int:
    """Pixels on each side with which a stride of one keeps the size."""
    return kernel // 2


def output_side(shape: Mapping[str, int]) -> int:
    """Pixels of a side of the output."""
    kernel = shape["kernel"]
    return int(convolution.output_size(shape["side"], kernel, shape["stride"], padding_of(kernel)))


def convolution_sizes(task: Task) -> dict[str, float]:
    """Arguments of :func:`steptime.cost.regression.blocked_convolution_s` for a pass."""
    shape, side = task.shape, output_side(task.shape)
    batch, groups, taps = shape["batch"], shape["groups"], shape["kernel"] ** 2
    inward, outward = shape["channels_in"] / groups, shape["channels_out"] / groups
    images = batch * (shape["channels_in"] * shape["side"] ** 2 + shape["channels_out"] * side**2)
    elements = images + inward * shape["channels_out"] * taps
    if task.kind == "conv_bwd_data":
        inward, outward = outward, inward
    rows, columns, depth = convolution.implicit_product(batch * side**2, inward, outward, taps, groups)
    return {
        "rows": float(rows),
        "columns": float(columns),
        "depth": float(depth),
        "tensor_bytes": float(elements * task.element_bytes),
        "channelwise": float(convolution.channelwise(inward, outward, groups)),
    }


def _convolution_work(task: Task) -> TaskWork:
    """Square images and kernels; ``padding_of`` the kernel on each side."""
    sizes, shape, side = convolution_sizes(task), task.shape, output_side(task.shape)
    inward, taps = shape["channels_in"] / shape["groups"], shape["kernel"] ** 2
    written = {
        "conv_fwd": shape["batch"] * shape["channels_out"] * side**2,
        "conv_bwd_data": shape["batch"] * shape["channels_in"] * shape["side"] ** 2,
        "conv_bwd_weight": inward * shape["channels_out"] * taps,
    }
    flops = convolution.convolution_flops(shape["batch"], side**2, inward, shape["channels_out"], taps)
    return TaskWork(
        matrix_flops=float(flops),
        moved_bytes=sizes["tensor_bytes"],
        result_bytes=float(written[task.kind] * task.element_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """An operator on ``rows`` x ``width`` elements that touches each a few times."""

    flops: float
    """Vector operations per element."""
    passes: float
    """Reads and writes per element."""
    results: float
    """Elements of the result per element of the input."""


def _flops_per_element(formula: Callable[..., Num], *more: float) -> float:
    return float(formula(1.0, *more))


#: Operators that move memory; work per element as in :mod:`steptime.cost.elementwise`.
MAPS: Final[Mapping[str, Map]] = {
    "copy": Map(flops=0.0, passes=2.0, results=0.0),
    "add": Map(flops=_flops_per_element(elementwise.residual_flops), passes=3.0, results=1.0),
    "gelu": Map(flops=_flops_per_element(elementwise.gelu_flops), passes=2.0, results=1.0),
    "gelu_backward": Map(flops=_flops_per_element(elementwise.gelu_backward_flops), passes=3.0, results=1.0),
    "layer_norm": Map(flops=_flops_per_element(elementwise.layer_norm_flops), passes=2.0, results=1.0),
    "layer_norm_backward": Map(flops=12.0, passes=5.0, results=1.0),
    "softmax": Map(flops=_flops_per_element(attention.softmax_flops, 0.0), passes=2.0, results=1.0),
    "softmax_backward": Map(flops=_flops_per_element(attention.softmax_backward_flops, 0.0), passes=3.0, results=1.0),
    "column_sum": Map(flops=1.0, passes=1.0, results=0.0),
    "update": Map(flops=2.0, passes=3.0, results=0.0),
}
#: Smallest operators: one launched from the host; both passes of a perceptron, and what they run called one by one.
LAUNCHES: Final = ("launch", "training_passes", "training_operators")
#: Operators of those passes, forward and backward.
TRAINED: Final = 3 + 6


def _map_work(task: Task) -> TaskWork:
    operator = MAPS[task.kind]
    elements = task.shape["rows"] * task.shape["width"]
    return TaskWork(
        vector_flops=operator.flops * elements,
        moved_bytes=operator.passes * elements * task.element_bytes,
        result_bytes=operator.results * elements * task.element_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Sizes and numbers of the shapes for a device."""

    side: tuple[int, int]
    """Smallest and largest dim of a matrix product."""
    flops: tuple[float, float]
    elements: tuple[float, float]
    """Elements of a memory-bound operator."""
    tokens: tuple[int, int]
    """Tokens of a sequence of attention."""
    products: int
    """Matrix products per dtype."""
    maps: int
    """Shapes per memory-bound operator and dtype."""
    attentions: int
    images: tuple[int, int]
    """Pixels of a side of the images of a convolution."""
    channels: tuple[int, int]
    convolutions: int
    """Convolutions per dtype, each measured in its three passes."""
    imaged: ImageExtent
    """Images of batch norm and pooling."""
    largest_bytes: float
    """Largest number of bytes of all operands of one task together."""
    streams: tuple[float, ...] = ()
    """Bytes that further copies and updates move: more than a last cache that holds all other sizes."""


#: Times the last cache that further copies and updates move, and the share of the memory that they may take.
_PAST_CACHE: Final = (2.0, 3.0)
_STREAM_SHARE: Final = 1 / 6


def extent_of(device: str, quick: bool, memory_bytes: float, cache_bytes: float = 0.0) -> Extent:
    """The spread of shapes for a ``"cpu"`` core or a ``"cuda"`` device with that memory and that last cache.

    >>> extent_of("cpu", True, 16e9).side
    (16, 2048)
    >>> [round(moved / 2**20) for moved in extent_of("cpu", True, 16e9, 260 * 2**20).streams]
    [520, 780]
    """
    extent = _spread(device, quick, memory_bytes)
    usual_bytes = min(extent.largest_bytes, MAPS["copy"].passes * 4 * extent.elements[1])
    if usual_bytes >= _PAST_CACHE[0] * cache_bytes:
        return extent
    streams = {min(times * cache_bytes, memory_bytes * _STREAM_SHARE) for times in _PAST_CACHE}
    return replace(extent, streams=tuple(sorted(streams)))


def _spread(device: str, quick: bool, memory_bytes: float) -> Extent:
    """Shapes that do not depend on the cache."""
    if device == "cpu":
        return Extent(
            side=(16, 2048), flops=(3e5, 1.5e9 if quick else 6e9), elements=(2e3, 2.0e7 if quick else 3e7),
            tokens=(32, 512 if quick else 1024), products=48 if quick else 96, maps=12 if quick else 20,
            attentions=24 if quick else 48, images=(7, 64 if quick else 112), channels=(16, 512),
            convolutions=36 if quick else 72, largest_bytes=min(4e8, memory_bytes / 16),
            imaged=ImageExtent(
                elements=(1e4, 4e6 if quick else 3e7), windows=(1e3, 1e5 if quick else 2e6), sides=(4, 64),
                channels=(16, 512), count=10 if quick else 16,
            ),
        )  # fmt: skip
    return Extent(
        side=(64, 16384), flops=(1e8, 2e12 if quick else 1e13), elements=(1e5, 2e8 if quick else 1e9),
        tokens=(256, 8192 if quick else 16384), products=60 if quick else 200, maps=8 if quick else 16,
        attentions=16 if quick else 40, images=(7, 112), channels=(32, 2048), convolutions=36 if quick else 72,
        largest_bytes=memory_bytes / 8,
        imaged=ImageExtent(
            elements=(1e5, 1e8 if quick else 4e8), windows=(1e5, 2e7 if quick else 1e8), sides=(4, 112),
            channels=(32, 2048), count=8 if quick else 16,
        ),
    )  # fmt: skip


def cpu_tasks(quick: bool, seed: int = 1) -> list[Task]:
    """Operators of PyTorch on a CPU as a graph calls them."""
    made = cpu_operators.shapes(seed, quick)
    return list({task.key: task for task in (Task(kind=k, dtype="fp32", shape=shape) for k, shape in made)}.values())


def tasks(extent: Extent, dtypes: tuple[str, ...], convolved: tuple[str, ...], *, seed: int = 1) -> list[Task]:
    """Every task once, in a fixed order; another ``seed`` gives other shapes of the same spread.

    ``convolved``: dtypes in which convolutions and other operators on images are measured.
    """
    found: dict[str, Task] = {}
    for dtype in dtypes:
        made = [*_matmuls(extent, dtype, seed), *_attentions(extent, dtype, seed), *_maps(extent, dtype, seed)]
        if dtype in convolved:
            made += [*_convolutions(extent, dtype, seed), *_images(extent, dtype, seed)]
        for task in made:
            found.setdefault(task.key, task)
    return list(found.values())


def launches() -> list[Task]:
    """The tasks that measure the cost of a launch."""
    return [Task(kind=kind, dtype="fp32", shape={"rows": 1, "width": 64}) for kind in LAUNCHES]


def _side(draw: random.Random, extent: Extent) -> int:
    """A log-uniform dim; three of four are multiples of 16 as in models, the others any number."""
    value = round(log_uniform(draw, *extent.side))
    return max(16, value // 16 * 16) if draw.random() < 0.75 else value


def _matmuls(extent: Extent, dtype: str, seed: int) -> Iterator[Task]:
    draw = random.Random(f"matmul {seed}")
    made = 0
    while made < extent.products:
        shape = {name: _side(draw, extent) for name in ("m", "n", "k")}
        task = Task(kind="matmul", dtype=dtype, shape=shape, layout=LAYOUTS[made % len(LAYOUTS)])
        work = work_of(task)
        if extent.flops[0] <= work.matrix_flops <= extent.flops[1] and work.moved_bytes <= extent.largest_bytes:
            made += 1
            yield task


def _attentions(extent: Extent, dtype: str, seed: int) -> Iterator[Task]:
    draw = random.Random(f"attention {seed}")
    if dtype == "tf32":  # the fused kernels have no tf32 mode
        return
    for i in range(extent.attentions):
        seq = max(16, round(log_uniform(draw, *extent.tokens)) // 16 * 16)
        head_dim = draw.choice((64, 128))
        heads = draw.choice((4, 8, 16))
        room = extent.flops[1] / 4 / (4 * heads * seq * seq * head_dim)
        batch = max(1, min(8, int(room)))
        shape = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}
        yield Task(kind=("attention_forward", "attention_backward")[i % 2], dtype=dtype, shape=shape)


def _maps(extent: Extent, dtype: str, seed: int) -> Iterator[Task]:
    draw = random.Random(f"maps {seed}")
    if dtype == "tf32":
        return
    for kind, operator in MAPS.items():
        for elements in log_spaced(draw, *extent.elements, extent.maps):
            width = 64 * round(log_uniform(draw, 2, 64))
            task = Task(kind=kind, dtype=dtype, shape={"rows": max(1, round(elements / width)), "width": width})
            if max(operator.passes, 1) * elements * task.element_bytes <= extent.largest_bytes:
                yield task
    for kind in ("copy", "update") if dtype == "fp32" else ():
        for moved in extent.streams:
            rows = max(1, round(moved / (MAPS[kind].passes * ELEMENT_BYTES[dtype] * _STREAM_WIDTH)))
            yield Task(kind=kind, dtype=dtype, shape={"rows": rows, "width": _STREAM_WIDTH})


#: Elements of a row of the further copies.
_STREAM_WIDTH: Final = 4096
DEPTHWISE: Final = 0
#: Kernel, stride and groups of convolution nets, in turn; :data:`DEPTHWISE`: as many groups as channels.
WINDOWS: Final = (
    (3, 1, 1), (1, 1, 1), (3, 1, DEPTHWISE), (3, 2, 1), (1, 1, 1), (7, 2, 1), (3, 1, 1), (3, 2, DEPTHWISE), (1, 2, 1),
    (3, 1, 1), (7, 1, DEPTHWISE), (3, 1, 8),
)  # fmt: skip
COLOURS: Final = 3
#: A convolution of single channels has at most this share of the work of a product: it runs at a fraction of the rate.
_SINGLE: Final = 1 / 16


def _convolutions(extent: Extent, dtype: str, seed: int) -> Iterator[Task]:
    """Log-uniform images, channels and samples; the first convolution of a net, of colours, needs no data gradient."""
    draw = random.Random(f"convolutions {seed}")
    made = 0
    low, high = extent.flops[0], extent.flops[1] / 3
    while made < extent.convolutions:
        kernel, stride, groups = WINDOWS[made % len(WINDOWS)]
        inward, outward = (16 * round(log_uniform(draw, *extent.channels) / 16) for _ in range(2))
        if groups != 1:
            outward, groups = inward, inward if groups == DEPTHWISE else groups
        elif (kernel, stride) == (7, 2):
            inward = COLOURS
        shape = {
            "batch": round(log_uniform(draw, 1, 32)),
            "channels_in": inward,
            "channels_out": outward,
            "side": round(log_uniform(draw, *extent.images)),
            "kernel": kernel,
            "stride": stride,
            "groups": groups,
        }
        each = [Task(kind=kind, dtype=dtype, shape=shape) for kind in CONVOLVED]
        work, share = work_of(each[0]), _SINGLE if convolution_sizes(each[0])["channelwise"] else 1.0
        if low * share <= work.matrix_flops <= high * share and work.moved_bytes <= extent.largest_bytes:
            made += 1
            yield from (one for one in each if inward != COLOURS or one.kind != "conv_bwd_data")


def _images(extent: Extent, dtype: str, seed: int) -> Iterator[Task]:
    if dtype == "tf32":
        return
    for kind, shape in image_shapes(extent.imaged, seed):
        task = Task(kind=kind, dtype=dtype, shape=shape)
        if work_of(task).moved_bytes <= extent.largest_bytes:
            yield task
