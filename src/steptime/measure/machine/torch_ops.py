"""From a task to a call of torch, and how long the call takes on a CPU core or on a CUDA device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from steptime.errors import UserError
from steptime.estimate.measured import CONVOLVED, CPU, LOOPED, NORMS
from steptime.measure.machine import cpu_operators
from steptime.measure.machine.work import (
    LAUNCHES,
    Task,
    output_side,
    padding_of,
    pool_padding,
    pooled_side,
    work_of,
)
from steptime.num import round_up

OperatorRun = Callable[[int], object]
"""Runs an operator on one of its copies of the operands, by number."""

_DTYPES: Final = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Copies together are at least this many times the last cache, so that operands come from memory.
_CACHES: Final = 2.0
MAX_COPIES: Final = 8


def room_bytes(memory_bytes: float) -> float:
    """Bytes of a memory that all sets of operands of one task may take."""
    return memory_bytes / 8


def copies_of(task: Task, cache_bytes: float, room_bytes: float) -> int:
    """Number of sets of operands that calls go through in turn.

    >>> copies_of(Task(kind="copy", dtype="fp32", shape={"rows": 1024, "width": 1024}), 32e6, 1e9)
    8
    """
    if task.kind in CPU:
        return task.shape.get("sets", 1)
    one = max(work_of(task).moved_bytes, 1.0)
    return max(1, min(MAX_COPIES, round(_CACHES * cache_bytes / one), int(room_bytes / one)))


class Pool:
    """Random numbers from which operands are cut, so that no task spends its time on drawing them."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._device = torch, device
        self._blocks: dict[str, Any] = {}
        self._used = 0

    def reset(self) -> None:
        """Give every block back; tensors that were cut before must not be used any more."""
        self._used = 0

    def cut(self, dtype: str, *shape: int) -> Any:
        """A tensor of ``shape``, disjoint from all others since the last reset."""
        count, dtype = math.prod(shape), _DTYPES[dtype]
        block = self._blocks.get(dtype)
        if block is None or self._used + count > len(block):
            held = 0 if block is None else len(block)
            block = self._blocks[dtype] = self._filled(dtype, max(2 * held, count, 2**20))
            self._used = 0
        tensor = block[self._used : self._used + count].view(shape)
        self._used += round_up(count, 64)
        return tensor

    def _filled(self, dtype: str, count: int) -> Any:
        period = 2**20
        once = self._torch.randn(period, device=self._device).to(getattr(self._torch, dtype))
        return once.repeat(-(-count // period))


def call_of(task: Task, torch: Any, pool: Pool, copies: int) -> OperatorRun:
    """A function of a number that runs the operator on that copy of its operands, and returns the result."""

    def random(*shape: int) -> Any:
        return pool.cut(task.dtype, *shape)

    if task.kind in CPU:
        return cpu_operators.call(task.kind, task.shape, torch, random)
    if task.kind == "matmul":
        return _matmul(task, random, copies)
    if task.kind.startswith("attention"):
        return _attention(task, torch, random, copies)
    if task.kind in CONVOLVED:
        return _convolution(task, torch, random, copies)
    if task.kind in NORMS:
        return _batch_norm(task, torch, random, copies)
    if task.kind in LOOPED:
        return _pool(task, torch, random, copies)
    if task.kind in LAUNCHES:
        return _launch(task, torch, random)
    return _map(task, torch, random, copies)


def _launch(task: Task, torch: Any, random: Callable[..., Any]) -> OperatorRun:
    width = task.shape["width"]
    x, y = random(1, width), random(1, width)
    if task.kind == "launch":
        return lambda i: x + y
    return (_trained if task.kind == "training_passes" else _apart)(torch, random, width)


def _trained(torch: Any, random: Callable[..., Any], width: int) -> OperatorRun:
    """Both passes of a perceptron as users write them."""
    x, gradient = random(width, width), random(width, width)
    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    network = torch.nn.Sequential(*layers).to(x.device)
    trained = list(network.parameters())

    def passes(i: int) -> None:
        network(x).backward(gradient)
        for one in trained:
            one.grad = None

    return passes


def _apart(torch: Any, random: Callable[..., Any], width: int) -> OperatorRun:
    """The :data:`~steptime.measure.machine.work.TRAINED` operators of :func:`_trained`, called one by one."""
    x, weight, bias = random(width, width), random(width, width), random(width)
    turned, aten = weight.t(), torch.ops.aten

    def operators(i: int) -> object:
        y = aten.addmm(bias, aten.gelu(aten.addmm(bias, x, turned)), turned)
        aten.gelu_backward(aten.mm(x, weight), x)
        for _ in range(2):
            aten.mm(turned, x)
            aten.sum(x, [0], True)
        return y

    return operators


def _matmul(task: Task, random: Callable[..., Any], copies: int) -> OperatorRun:
    m, n, k = (task.shape[name] for name in ("m", "n", "k"))
    left = [random(k, m).t() if task.layout == "tn" else random(m, k) for _ in range(copies)]
    right = [random(n, k).t() if task.layout == "nt" else random(k, n) for _ in range(copies)]
    return lambda i: left[i % copies] @ right[i % copies]


def _attention(task: Task, torch: Any, random: Callable[..., Any], copies: int) -> OperatorRun:
    size = tuple(task.shape[name] for name in ("batch", "heads", "seq", "head_dim"))
    attend = torch.nn.functional.scaled_dot_product_attention
    sets = [[random(*size) for _ in range(3)] for _ in range(copies)]
    if task.kind == "attention_forward":
        return lambda i: attend(*sets[i % copies], is_causal=True)
    for tensors in sets:
        for tensor in tensors:
            tensor.requires_grad_()
    outputs = [attend(*tensors, is_causal=True) for tensors in sets]
    gradient = random(*size)
    grad = torch.autograd.grad
    return lambda i: grad(outputs[i % copies], sets[i % copies], gradient, retain_graph=True)


def _convolution(task: Task, torch: Any, random: Callable[..., Any], copies: int) -> OperatorRun:
    shape, side, aten = task.shape, output_side(task.shape), torch.ops.aten
    batch, inward, outward, groups = (shape[n] for n in ("batch", "channels_in", "channels_out", "groups"))
    kernel, stride, padding = shape["kernel"], [shape["stride"]] * 2, [padding_of(shape["kernel"])] * 2
    weights = [random(outward, inward // groups, kernel, kernel) for _ in range(copies)]
    x = [random(batch, inward, shape["side"], shape["side"]) for _ in range(copies)]
    same = (stride, padding, [1, 1], False, [0, 0], groups)
    if task.kind == "conv_fwd":
        return lambda i: aten.convolution(x[i % copies], weights[i % copies], None, *same)
    y = [random(batch, outward, side, side) for _ in range(copies)]
    wanted = [task.kind == "conv_bwd_data", task.kind == "conv_bwd_weight", False]

    def call(i: int) -> object:
        j = i % copies
        return aten.convolution_backward(y[j], x[j], weights[j], None, *same, wanted)

    return call


def _batch_norm(task: Task, torch: Any, random: Callable[..., Any], copies: int) -> OperatorRun:
    """Batch norm in training, by the library that torch chooses on the device."""
    batch, channels, side = (task.shape[name] for name in ("batch", "channels", "side"))
    x = [random(batch, channels, side, side) for _ in range(copies)]
    weight, bias, mean, variance = (random(channels) for _ in range(4))
    aten, known = torch.ops.aten, (weight, bias, mean.zero_(), variance.fill_(1.0))

    def forward(i: int) -> Any:
        return aten._batch_norm_impl_index(x[i % copies], *known, True, 0.1, 1e-5, True)

    if task.kind == "batch_norm":
        return forward
    y = [random(batch, channels, side, side) for _ in range(copies)]
    kept = [forward(i)[1:] for i in range(copies)]

    def backward(i: int) -> object:
        j = i % copies
        saved_mean, saved_scale, reserved, library = kept[j]
        saved = (weight, mean, variance, saved_mean, saved_scale)
        return aten._batch_norm_impl_index_backward(
            library, x[j], y[j], *saved, True, 1e-5, [True, True, True], reserved
        )

    return backward


def _pool(task: Task, torch: Any, random: Callable[..., Any], copies: int) -> OperatorRun:
    batch, channels, side = (task.shape[name] for name in ("batch", "channels", "side"))
    kernel, stride = [task.shape["kernel"]] * 2, [task.shape["stride"]] * 2
    padding, out, aten = [pool_padding(kernel[0])] * 2, pooled_side(task.shape), torch.ops.aten
    x = [random(batch, channels, side, side) for _ in range(copies)]
    if task.kind == "max_pool":
        return lambda i: aten.max_pool2d_with_indices(x[i % copies], kernel, stride, padding)
    if task.kind == "avg_pool":
        return lambda i: aten.avg_pool2d(x[i % copies], kernel, stride, padding)
    y = [random(batch, channels, out, out) for _ in range(copies)]
    if task.kind == "avg_pool_backward":
        plain = (kernel, stride, padding, False, True, None)
        return lambda i: aten.avg_pool2d_backward(y[i % copies], x[i % copies], *plain)
    places = [aten.max_pool2d_with_indices(one, kernel, stride, padding)[1] for one in x]
    same = (kernel, stride, padding, [1, 1], False)
    return lambda i: aten.max_pool2d_with_indices_backward(y[i % copies], x[i % copies], *same, places[i % copies])


def _map(task: Task, torch: Any, random: Callable[..., Any], copies: int) -> OperatorRun:
    rows, width = task.shape["rows"], task.shape["width"]
    x = [random(rows, width) for _ in range(copies)]
    y = [random(rows, width) for _ in range(copies)] if task.kind in _BINARY else x
    scale, shift = random(width), random(width)
    builders: dict[str, Callable[[], OperatorRun]] = {
        "copy": lambda: lambda i: y[i % copies].copy_(x[i % copies]),
        "add": lambda: lambda i: x[i % copies] + y[i % copies],
        "gelu": lambda: lambda i: torch.nn.functional.gelu(x[i % copies]),
        "gelu_backward": lambda: lambda i: torch.ops.aten.gelu_backward(y[i % copies], x[i % copies]),
        "layer_norm": lambda: lambda i: torch.nn.functional.layer_norm(x[i % copies], (width,), scale, shift),
        "layer_norm_backward": lambda: _layer_norm_backward(torch, x, y, scale, shift),
        "softmax": lambda: lambda i: torch.softmax(x[i % copies], -1),
        "softmax_backward": lambda: _softmax_backward(torch, x, y),
        "column_sum": lambda: lambda i: x[i % copies].sum(0),
        "update": lambda: lambda i: x[i % copies].add_(y[i % copies], alpha=-1e-6),
    }
    return builders[task.kind]()


_BINARY: Final = frozenset({"copy", "add", "gelu_backward", "layer_norm_backward", "softmax_backward", "update"})


def _layer_norm_backward(torch: Any, x: list[Any], y: list[Any], scale: Any, shift: Any) -> OperatorRun:
    aten, width = torch.ops.aten, [scale.shape[0]]
    kept = [aten.native_layer_norm(one, width, scale, shift, 1e-5)[1:] for one in x]
    copies, wanted = len(x), [True, True, True]

    def call(i: int) -> object:
        j = i % copies
        return aten.native_layer_norm_backward(y[j], x[j], width, *kept[j], scale, shift, wanted)

    return call


def _softmax_backward(torch: Any, x: list[Any], y: list[Any]) -> OperatorRun:
    aten, copies = torch.ops.aten, len(x)
    kept = [torch.softmax(one, -1) for one in x]
    return lambda i: aten._softmax_backward_data(y[i % copies], kept[i % copies], -1, y[i % copies].dtype)


#: A sample lasts at least this long, so that reading the clock does not show.
SAMPLE_S: Final = 1e-4
#: Share of the samples that are faster than the one that is reported: on a busy machine the rest is noise.
QUANTILE: Final = 0.25
#: Most calls in one sample.
MAX_CALLS: Final = 2000


class Timer(Protocol):
    """Takes samples of a call."""

    @property
    def clock(self) -> str:
        """``thread``, ``wall`` or ``cuda``."""
        ...

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call, several times over, in about ``budget_s`` in all."""
        ...


@dataclass(frozen=True, slots=True)
class CpuTimer:
    """Time of the calling thread, or of the wall if torch runs several threads."""

    clock: str = "thread"
    """``thread`` or ``wall``."""
    least: int = 5
    most: int = 15

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call; the first calls warm up and are not counted."""
        now = time.thread_time if self.clock == "thread" else time.perf_counter
        call(0)
        once_s, index = float("inf"), 1
        for batch in (1, 10):  # the first call is often slow: look again where it decides how many make a sample
            begin = now()
            for i in range(index, index + batch):
                call(i)
            once_s = min(once_s, max(now() - begin, 1e-9) / batch)
            index += batch
            if once_s > SAMPLE_S:
                break
        calls = max(1, min(MAX_CALLS, round(SAMPLE_S / once_s)))
        count = max(self.least, min(self.most, int(budget_s / (once_s * calls))))
        out = []
        for _ in range(count):
            begin = now()
            for i in range(index, index + calls):
                call(i)
            out.append((now() - begin) / calls)
            index += calls
        return out


@dataclass(frozen=True, slots=True)
class CudaTimer:
    """Time between two events on the device; calls are replayed from a graph where one can be captured.

    All work is on the current stream, which must not be the default one: gradients run on the stream of their forward,
    and a graph can only be captured where all of its work is.
    """

    torch: Any
    graphs: bool = True
    clock: str = "cuda"
    least: int = 5
    most: int = 20

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call on the device."""
        once_s = self._warm(call)
        calls = max(1, min(100, round(10 * SAMPLE_S / once_s)))
        run = self._graph(call, calls) if self.graphs else None
        if run is None:
            run = self._loop(call, calls)
        run()
        self.torch.cuda.synchronize()
        count = max(self.least, min(self.most, int(budget_s / (once_s * calls))))
        return [self._between_events_s(run) / calls for _ in range(count)]

    def _warm(self, call: OperatorRun) -> float:
        """Makes three calls, which the capture of a graph requires; returns the seconds of the last."""
        cuda = self.torch.cuda
        for i in range(3):
            cuda.synchronize()
            begin = time.perf_counter()
            call(i)
            cuda.synchronize()
            once_s = time.perf_counter() - begin
        return max(once_s, 1e-6)

    def _graph(self, call: OperatorRun, calls: int) -> Callable[[], object] | None:
        """Replay of ``calls`` calls; None if the operator cannot be captured."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
                for i in range(calls):
                    call(i)
        except RuntimeError:
            self.torch.cuda.synchronize()
            return None
        return lambda: graph.replay()

    def _loop(self, call: OperatorRun, calls: int) -> Callable[[], object]:
        def run() -> None:
            for i in range(calls):
                call(i)

        return run

    def _between_events_s(self, run: Callable[[], object]) -> float:
        cuda = self.torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Summary of the samples of one call."""

    seconds: float
    """Lower quartile."""
    spread: float
    """Relative distance from the lower quartile to the median: the noise within a visit."""
    samples: int
    rejected: int
    """Samples that were zero, negative or not finite."""


def summary(samples_s: Iterable[float], quantile: float = QUANTILE) -> Sampled:
    """Lower quartile (or another quantile) and noise of samples.

    Raises:
        UserError: no sample is a positive time.

    >>> summary([1.0, 1.0, 1.0, 1.0, 5.0, 0.0]).seconds
    1.0
    """
    given = np.fromiter(samples_s, float)
    good = given[np.isfinite(given) & (given > 0)]
    if not len(good):
        raise UserError(
            f"none of {len(given)} samples is a positive time", hint="the clock of this machine is too coarse"
        )
    low, middle = np.quantile(good, [quantile, 0.5], method="nearest")
    return Sampled(
        seconds=float(low), spread=float(middle / low - 1), samples=len(good), rejected=len(given) - len(good)
    )
