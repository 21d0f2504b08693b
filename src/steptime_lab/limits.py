"""Limits of scale of a layer and a training run, set by data movement and latency."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from steptime.api.request import MAX_COUNT, text, whole
from steptime.cost import matmul
from steptime.errors import FieldError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware import load_cluster
from steptime.num import Num
from steptime.options import number
from steptime_lab.cost import limits as formulas

if TYPE_CHECKING:
    from steptime_lab.scale import Curve

THREE_MONTHS_S: Final = 91.3125 * 86400
PRODUCTS: Final = 4
"""Products of a block one after the other, forward and backward."""
NETWORK_LATENCY_S: Final = 5e-6
"""Latency of a reduction; arXiv 2411.01137, the same on every level."""
REFERENCE_FLOPS: Final = 1e25
"""Compute of the reference run of the laws for batch and depth."""
GROWTH: Final = 1 / 6
"""Power of the compute with which batch and depth grow."""
CHANGED: Final = ", changed"
"""Suffix of the name of a device with changed figures."""
HIDDEN_FACTOR: Final = 5
"""Hidden width over model width, attention included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A linear layer split over two tensor axes and a data axis.

    >>> LinearLayer(d_in=16384, d_out=81920, tp_in=8, tp_out=40, dp=32, width_bytes=2).parameters
    1342177280
    """

    d_in: int
    d_out: int
    tp_in: int
    """Ranks that share the input dim."""
    tp_out: int
    """Ranks that share the output dim."""
    dp: int
    """Data ranks."""
    width_bytes: float
    """Bytes per word of weights, activations and gradients."""

    @property
    def parameters(self) -> int:
        """Weights of the whole layer."""
        return self.d_in * self.d_out

    @property
    def devices(self) -> int:
        """Devices that hold a part of the layer or a copy of it."""
        return self.tp_in * self.tp_out * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDevice:
    """Rates at which a device computes and moves data; all resources overlap.

    >>> layer = LinearLayer(d_in=16384, d_out=81920, tp_in=8, tp_out=40, dp=32, width_bytes=2)
    >>> H100_SXM5.linear_layer_forward_backward_s(layer, 2048**2 / 128)
    3.2554072481051035e-05
    >>> H100_SXM5.linear_layer_end_of_batch_s(layer)
    2.7088213333333335e-05
    >>> H100_SXM5.binding(layer, 2048**2 / 128)
    'flop'
    """

    name: str
    flops_per_s_8bit: float
    """Dense peak at 8 bits; 16 bits run at half of it."""
    memory_Bps: float
    network_Bps: float
    """Bandwidth of the links, both directions together."""
    utilization: float
    """Share of peak and memory bandwidth that is sustained under throttling."""
    kernel_latency_s: float = 4.5e-6
    """Latency of a kernel; the default is the authors' observation."""

    @property
    def layer_latency_s(self) -> float:
        """Least time of a block, forward and backward: four products, each with its reduction."""
        return float(formulas.layer_latency_s(PRODUCTS, self.kernel_latency_s, NETWORK_LATENCY_S))

    def resources_s(self, layer: LinearLayer, tokens: Num) -> dict[str, Num]:
        """Seconds of each resource for forward and backward over a micro-batch of `tokens`."""
        shape = (layer.d_in, layer.d_out, tokens, layer.tp_in, layer.tp_out, layer.dp)
        width = layer.width_bytes
        flops = formulas.forward_backward_flops(*shape)
        words = formulas.forward_backward_memory_words(*shape)
        sent = formulas.forward_backward_network_words(*shape)
        return {
            "flop": formulas.flops_s(flops, width, self.flops_per_s_8bit, self.utilization),
            "memory": formulas.memory_s(words, width, self.memory_Bps, self.utilization),
            "network": formulas.network_s(sent, width, self.network_Bps),
        }

    def binding(self, layer: LinearLayer, tokens: float) -> str:
        """The slowest resource: `flop`, `memory` or `network`; the first among equal ones."""
        seconds = self.resources_s(layer, tokens)
        return max(seconds, key=lambda name: float(seconds[name]))

    def linear_layer_forward_backward_s(self, layer: LinearLayer, tokens: Num) -> Num:
        """Seconds of a micro-batch by `steptime_lab.cost.limits.linear_layer_forward_backward_s`."""
        return formulas.linear_layer_forward_backward_s(
            layer.d_in,
            layer.d_out,
            tokens,
            layer.tp_in,
            layer.tp_out,
            layer.dp,
            layer.width_bytes,
            self.flops_per_s_8bit,
            self.memory_Bps,
            self.network_Bps,
            self.utilization,
        )

    def linear_layer_end_of_batch_s(self, layer: LinearLayer) -> Num:
        """Seconds of the gradient all-reduce by `steptime_lab.cost.limits.linear_layer_end_of_batch_s`."""
        return formulas.linear_layer_end_of_batch_s(
            layer.d_in,
            layer.d_out,
            layer.tp_in,
            layer.tp_out,
            layer.dp,
            layer.width_bytes,
            self.memory_Bps,
            self.network_Bps,
            self.utilization,
        )


#: The device of the authors' notebook: datasheet peaks of the NVIDIA H100 SXM5, an assumed utilisation of 0.8.
H100_SXM5 = LimitDevice(
    name="H100 SXM5", flops_per_s_8bit=1979e12, memory_Bps=3352e9, network_Bps=900e9, utilization=0.8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run of bounded duration, whose batch and depth grow with its compute.

    >>> run = TrainingRun(duration_s=7.889e6, layer_latency_s=38e-6, reference_batch_tokens=2048**2,
    ...     reference_layers=120, tokens_per_parameter=20)
    >>> f"{run.wall_flops:.3g}"
    '1.58e+31'
    """

    duration_s: float
    layer_latency_s: float
    reference_batch_tokens: float
    """Tokens of a step of a run of 1e25 FLOP."""
    reference_layers: float
    """Blocks of a run of 1e25 FLOP."""
    tokens_per_parameter: float

    @property
    def wall_flops(self) -> float:
        """FLOPs of the largest run, by `steptime_lab.cost.limits.latency_wall_flops`."""
        wall = formulas.latency_wall_flops(
            self.duration_s,
            self.layer_latency_s,
            self.reference_batch_tokens,
            self.reference_layers,
            self.tokens_per_parameter,
        )
        return float(wall)

    @property
    def wall_parameters(self) -> float:
        """Parameters of the largest run."""
        return float(formulas.optimal_parameters(self.wall_flops, self.tokens_per_parameter))

    @property
    def wall_tokens(self) -> float:
        """Training tokens of the largest run."""
        return float(formulas.optimal_tokens(self.wall_flops, self.tokens_per_parameter))

    @property
    def wall_batch_tokens(self) -> float:
        """Tokens of a step of the largest run."""
        return self._grown(self.wall_flops, self.reference_batch_tokens)

    @property
    def wall_layers(self) -> float:
        """Blocks of the largest run."""
        return self._grown(self.wall_flops, self.reference_layers)

    @property
    def wall_width(self) -> float:
        """Model width of the largest run."""
        return float(formulas.block_width(self.wall_parameters, self.wall_layers, HIDDEN_FACTOR))

    def least_duration_s(self, compute_flops: float) -> float:
        """Least duration of a run of `compute_flops`: its steps and blocks one after the other.

        >>> run = TrainingRun(duration_s=7.889e6, layer_latency_s=38e-6, reference_batch_tokens=2048**2,
        ...     reference_layers=120, tokens_per_parameter=20)
        >>> round(run.least_duration_s(run.wall_flops))
        7889000
        """
        tokens = formulas.optimal_tokens(compute_flops, self.tokens_per_parameter)
        batch = self._grown(compute_flops, self.reference_batch_tokens)
        layers = self._grown(compute_flops, self.reference_layers)
        return float(formulas.serial_latency_s(tokens, batch, layers, self.layer_latency_s))

    def _grown(self, compute_flops: float, reference: float) -> float:
        return float(formulas.scaled_with_compute(compute_flops, REFERENCE_FLOPS, reference, GROWTH))


def limit_device(name: str) -> LimitDevice:
    """A device of the catalogue with the innermost links of its common node.

    The 8-bit peak of a device without an 8-bit rate is twice its 16-bit peak; the utilisation is its
    ``matrix_efficiency``.

    Raises:
        UserError: the device or cluster is unknown, or has neither an 8-bit nor a 16-bit rate.

    >>> limit_device("h100-sxm").flops_per_s_8bit, limit_device("a100-sxm-80gb").network_Bps
    (1978900000000000.0, 600000000000.0)
    """
    cluster = load_cluster(name)
    device, level = cluster.device, cluster.levels[0]
    wide = next((rate for dtype in ("bf16", "fp16") if (rate := device.matrix_rate(dtype))), None)
    narrow = device.matrix_rate("fp8") or (2 * wide if wide else None)
    if narrow is None:
        known = ", ".join(device.matrix_flops_per_s)
        raise FieldError("", "device", f"{device.name} has neither an 8-bit nor a 16-bit rate", hint=f"it has {known}")
    return LimitDevice(
        name=device.name,
        flops_per_s_8bit=narrow,
        memory_Bps=device.memory_Bps,
        network_Bps=2 * level.link_Bps * level.links_per_device,
        utilization=device.matrix_efficiency,
        kernel_latency_s=device.kernel_latency_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulDevice:
    """A chip with three levels of memory, for `steptime.cost.matmul` (16-bit words).

    >>> device = load_matmul_devices()["a100-sxm"]
    >>> round(device.matmul_s(8192, 8192, 8192) * 1e6, 3)
    4152.207
    >>> round(device.layer_latency_s * 1e6, 6)
    38.0
    """

    title: str
    multiprocessors: int
    flops_per_clock_per_thread: int
    clock_Hz: float
    utilization: float
    """Share of the clock that large products sustain."""
    l2_Bps: float
    l2_bytes: int
    memory_Bps: float
    memory_bytes: float
    distributed_shared_memory: bool
    network_Bps: tuple[float, ...]
    """Bandwidth of each network level, both directions together."""
    network_latency_s: tuple[float, ...]
    kernel_latency_s: float

    @property
    def peak_flops_per_s(self) -> float:
        """Peak at 16 bits: FLOPs per clock and thread, 128 threads per multiprocessor, full clock."""
        return self.flops_per_clock_per_thread * 128 * self.multiprocessors * self.clock_Hz

    @property
    def sustained_flops_per_s(self) -> float:
        """Peak at the clock that large products sustain."""
        return self.peak_flops_per_s * self.utilization

    @property
    def shared_Bps(self) -> float:
        """All shared memories together: 32 banks of 4 bytes per multiprocessor and sustained clock."""
        return 32 * 4 * self.multiprocessors * self.clock_Hz * self.utilization

    @property
    def layer_latency_s(self) -> float:
        """Least time of a block, forward and backward: four products, each with its reduction."""
        return float(formulas.layer_latency_s(PRODUCTS, self.kernel_latency_s, self.network_latency_s[0]))

    def matmul_s(self, d1: Num, d2: Num, b: Num, *, weight_gradient: bool = False) -> Num:
        """`steptime.cost.matmul.three_level_matmul_s`; 3/4 of registers and L2 are usable."""
        return matmul.three_level_matmul_s(
            d1,
            d2,
            b,
            weight_gradient,
            2,
            self.multiprocessors,
            0.75 * 64 * 2**10,
            0.75 * self.l2_bytes,
            self.memory_Bps,
            self.l2_Bps,
            self.shared_Bps,
            self.sustained_flops_per_s,
            self.kernel_latency_s,
            self.distributed_shared_memory,
        )


@cache
def load_matmul_devices() -> Mapping[str, MatmulDevice]:
    """The device table, by name (`v100-sxm`, `a100-sxm`, `h100-pcie`, `h100-sxm`)."""
    text = resources.files("steptime_lab").joinpath("data/limit_devices.toml").read_text(encoding="utf-8")
    return {name: _device(row) for name, row in tomllib.loads(text).items()}


def _device(row: Mapping[str, object]) -> MatmulDevice:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return MatmulDevice(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times of a layer by resource, and the largest run that latency allows."""

    layer: LinearLayer
    tokens: float
    """Tokens per micro-batch, all ranks."""
    device: LimitDevice
    run: TrainingRun
    curves: tuple[Curve, ...] = ()
    """Utilisation against compute under each requested rule of overlap."""

    @property
    def resources_s(self) -> Mapping[str, float]:
        """Seconds of ``flop``, ``memory`` and ``network`` for forward and backward of a micro-batch."""
        return {name: float(value) for name, value in self.device.resources_s(self.layer, self.tokens).items()}

    @property
    def forward_backward_s(self) -> float:
        """Seconds of a micro-batch, forward and backward; all resources overlap."""
        return float(self.device.linear_layer_forward_backward_s(self.layer, self.tokens))

    @property
    def binding(self) -> str:
        """The slowest resource."""
        return self.device.binding(self.layer, self.tokens)

    @property
    def end_of_batch_s(self) -> float:
        """Seconds of the all-reduce of gradients at the end of a batch."""
        return float(self.device.linear_layer_end_of_batch_s(self.layer))

    @property
    def wall_parameters(self) -> float:
        """Parameters of the largest run."""
        return self.run.wall_parameters

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        layer, run = self.layer, self.run
        return {
            "schema_version": SCHEMA_VERSION,
            "layer": asdict(layer) | {"tokens": self.tokens, "parameters": layer.parameters, "devices": layer.devices},
            "device": asdict(self.device),
            **{f"{name}_s": value for name, value in self.resources_s.items()},
            "forward_backward_s": self.forward_backward_s,
            "binding": self.binding,
            "end_of_batch_s": self.end_of_batch_s,
            "run": asdict(run),
            "latency_wall_flops": run.wall_flops,
            "latency_wall_parameters": run.wall_parameters,
            "latency_wall_tokens": run.wall_tokens,
            "latency_wall_batch_tokens": run.wall_batch_tokens,
            "latency_wall_layers": run.wall_layers,
            "latency_wall_width": run.wall_width,
            "source": "arXiv 2411.01137",
            **({"curve": [each.to_json() for each in self.curves]} if self.curves else {}),
        }


def limits(
    *,
    d_in: int = 16384,
    d_out: int = 81920,
    tokens: float = 32768,
    tp_in: int = 8,
    tp_out: int = 40,
    dp: int = 32,
    width_bytes: float = 2,
    device: str | None = None,
    flops_8bit_per_s: float | None = None,
    memory_Bps: float | None = None,
    network_Bps: float | None = None,
    utilization: float | None = None,
    duration_s: float = THREE_MONTHS_S,
    layer_latency_s: float | None = None,
    batch_tokens: float = 2048**2,
    layers: int = 120,
    tokens_per_parameter: float = 20,
    overlap: Sequence[str] = (),
    batch_growth: float = GROWTH,
    fast_domain: int | None = None,
    latency_factor: float = 1.0,
) -> Limits:
    """Limits of scale of a layer and a training run, set by data movement and latency.

    Args:
        d_in: width of the layer's input.
        d_out: width of its output.
        tokens: tokens per micro-batch, all ranks.
        tp_in: ranks that share the input dim.
        tp_out: ranks that share the output dim.
        dp: data ranks.
        width_bytes: bytes per word.
        device: catalogue name of a device or cluster, or TOML file of a cluster; None: the H100 SXM5 of arXiv
            2411.01137. The next four arguments replace single figures of it.
        flops_8bit_per_s: dense 8-bit peak.
        memory_Bps: bandwidth of device memory.
        network_Bps: bandwidth of a device's links, both directions together.
        utilization: share of peak and memory bandwidth that is sustained under throttling.
        duration_s: longest training run.
        layer_latency_s: least time of one block; None: four kernels of the device with a reduction each.
        batch_tokens: tokens per step of a run of 1e25 FLOP.
        layers: blocks of a run of 1e25 FLOP.
        tokens_per_parameter: training tokens per parameter.
        overlap: rules of overlap (:data:`steptime_lab.scale.OVERLAPS`) for curves of utilisation against the compute of
            a run; empty: no curves. The remaining arguments are for the curves only. Their default device is the H100
            of the authors' table.
        batch_growth: power of the compute with which tokens per step grow.
        fast_domain: devices on the fast links; None: the device's.
        latency_factor: all latencies are multiplied by it.

    Raises:
        UserError: something in the input is wrong; the message says what to change.

    >>> limits().forward_backward_s, limits().binding
    (3.2554072481051035e-05, 'flop')
    """
    counts = {"d_in": d_in, "d_out": d_out, "tp_in": tp_in, "tp_out": tp_out, "dp": dp}
    found = H100_SXM5 if device is None else limit_device(text("device", device))
    found = _changed(found, flops_8bit_per_s, memory_Bps, network_Bps, utilization)
    if layer_latency_s is None:
        layer_latency_s = found.layer_latency_s
    found_run = TrainingRun(
        duration_s=number("duration_s", duration_s, 1.0, 1e12, "seconds of the longest run"),
        layer_latency_s=number("layer_latency_s", layer_latency_s, 1e-12, 1e6, "seconds of a block"),
        reference_batch_tokens=number("batch_tokens", batch_tokens, 1, 1e15, "tokens per step"),
        reference_layers=whole("layers", layers, 1, MAX_COUNT),
        tokens_per_parameter=number("tokens_per_parameter", tokens_per_parameter, 1e-3, 1e9, "training tokens"),
    )
    from steptime_lab.scale import curves_of

    growth = number("batch_growth", batch_growth, 0.0, 0.5, "power of the compute")
    factor = number("latency_factor", latency_factor, 0.0, 1e3, "times the latencies")
    domain = None if fast_domain is None else whole("fast_domain", fast_domain, 1, MAX_COUNT)
    return Limits(
        layer=LinearLayer(
            **{name: whole(name, value, 1, MAX_COUNT) for name, value in counts.items()},
            width_bytes=number("width_bytes", width_bytes, 0.125, 16, "bytes per word"),
        ),
        tokens=number("tokens", tokens, 1, 1e15, "tokens per micro-batch"),
        device=found,
        run=found_run,
        curves=curves_of(device, found, found_run, overlap, (growth, domain, factor)),
    )


def _changed(
    device: LimitDevice, flops: float | None, memory: float | None, network: float | None, utilization: float | None
) -> LimitDevice:
    """The device with the given figures replaced."""
    given = {
        "flops_per_s_8bit": ("flops_8bit_per_s", flops, 1e6, 1e24, "FLOP per second"),
        "memory_Bps": ("memory_Bps", memory, 1e3, 1e21, "bytes per second"),
        "network_Bps": ("network_Bps", network, 1e3, 1e21, "bytes per second"),
        "utilization": ("utilization", utilization, 1e-3, 1.0, "share of peak and memory bandwidth"),
    }
    values = {name: number(*check) for name, check in given.items() if check[1] is not None}
    return replace(device, name=f"{device.name}{CHANGED}", **values) if values else device


NOTEBOOK: Final = "arXiv 2411.01137, notebook"
REPORT: Final = "Epoch, scaling until 2030"
PASSES: Final = 2 * PRODUCTS
"""Products of a block one after the other as the report counts them: forward and backward."""
SHAPES: Final = ((8192, 8192, 8192), (16384, 2048, 1024), (2048, 2048, 1024), (2048, 2048, 64), (512, 512, 512))
"""Products of the table: rows and columns of the weights, and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, in seconds or FLOP."""

    name: str
    unit: str
    """``s`` or ``FLOP``."""
    stated: float
    """The published value, as rounded by its authors."""
    computed: float
    source: str

    @property
    def error(self) -> float:
        """Computed over published value, less 1."""
        return self.computed / self.stated - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Time of one product on a chip with three levels of memory."""

    device: str
    rows: int
    columns: int
    tokens: int
    forward_s: float
    weight_gradient_s: float


def notebook_run(duration_s: float, layer_latency_s: float) -> TrainingRun:
    """A run with the laws of the authors' notebook."""
    return TrainingRun(
        duration_s=duration_s,
        layer_latency_s=layer_latency_s,
        reference_batch_tokens=2048**2,
        reference_layers=120,
        tokens_per_parameter=20,
    )


def figures() -> list[Figure]:
    """Every figure that the authors publish in words or their code prints."""
    layer = LinearLayer(d_in=16384, d_out=81920, tp_in=8, tp_out=40, dp=32, width_bytes=2)
    each_s = 1e7 / (notebook_run(1e7, 1.0).least_duration_s(4e26) * PRODUCTS)
    inside_s = formulas.layer_latency_s(PASSES, 4.5e-6, 9.2e-6)
    tree_s = formulas.tree_latency_s(7.4e-6, 2.75, 0.6e-6, 16, 5e-6)
    wall = notebook_run(THREE_MONTHS_S, H100_SXM5.layer_latency_s).wall_flops
    rows = (
        (
            "linear layer, both passes",
            "s",
            3.2554072481051035e-05,
            H100_SXM5.linear_layer_forward_backward_s(layer, 2048**2 / 128),
            NOTEBOOK,
        ),
        ("product, 4e26 FLOP in 1e7 s", "s", 2393.0e-6, each_s, NOTEBOOK),
        ("block on 8 GPUs of a node", "s", 110e-6, inside_s, REPORT),
        ("product over 16 nodes", "s", 50e-6, tree_s, REPORT),
        ("block over 16 nodes", "s", 400e-6, formulas.layer_latency_s(PASSES, tree_s, 0.0), REPORT),
        ("run of 7e14 parameters", "FLOP", 6e31, formulas.training_flops(7e14, 1.4e16), REPORT),
        ("wall, three months", "FLOP", 2e31, wall, "arXiv 2411.01137"),
        ("wall, nine months, 120 us", "FLOP", 6e31, _wall_of_report(120e-6), REPORT),
        ("wall, nine months, 400 us", "FLOP", 7e30, _wall_of_report(400e-6), REPORT),
    )
    return [
        Figure(name=name, unit=unit, stated=stated, computed=float(computed), source=source)
        for name, unit, stated, computed, source in rows
    ]


def _wall_of_report(block_latency_s: float) -> float:
    """The wall of nine months with steps of 6e7 tokens, GPT-3's 96 blocks, and blocks growing as parameters^0.27."""
    parameters = formulas.latency_wall_parameters(2.33e7, block_latency_s, 20, 175e9, 6e7, 0, 96, 0.27)
    return float(formulas.training_flops(parameters, 20 * parameters))


def product_times() -> list[ProductTime]:
    """Every shape of :data:`SHAPES` on every device of the authors' table."""
    return [
        ProductTime(
            device=name,
            rows=d1,
            columns=d2,
            tokens=b,
            forward_s=float(device.matmul_s(d1, d2, b)),
            weight_gradient_s=float(device.matmul_s(d1, d2, b, weight_gradient=True)),
        )
        for d1, d2, b in SHAPES
        for name, device in load_matmul_devices().items()
    ]
