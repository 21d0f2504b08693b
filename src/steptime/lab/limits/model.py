"""Layers, devices and runs of the data-movement limits: records whose methods only call the formulas."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from steptime.cost import limits, matmul
from steptime.errors import FieldError
from steptime.hardware import load_cluster
from steptime.num import Num

THREE_MONTHS_S: Final = 91.3125 * 86400
PRODUCTS: Final = 4
"""Products of a block that follow one another, forward and backward."""
NETWORK_LATENCY_S: Final = 5e-6
"""Latency of a reduction; arXiv 2411.01137, the same on every level."""
REFERENCE_FLOPS: Final = 1e25
"""Compute of the run whose batch and depth the laws start from; below, the power of the compute that both grow with."""
GROWTH: Final = 1 / 6
HIDDEN_FACTOR: Final = 5
"""Hidden width over model width, attention included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A linear layer and how it is split.

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
    """What a device can move and compute; all resources overlap.

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
    """Both directions together."""
    utilization: float
    """Share of peak and memory bandwidth that throttling leaves."""
    kernel_latency_s: float = 4.5e-6
    """Latency of a kernel; the default is what the authors observed."""

    @property
    def layer_latency_s(self) -> float:
        """Least time of a block, forward and backward: four products, each with its reduction."""
        return float(limits.layer_latency_s(PRODUCTS, self.kernel_latency_s, NETWORK_LATENCY_S))

    def resources_s(self, layer: LinearLayer, tokens: Num) -> dict[str, Num]:
        """Seconds of each resource for forward and backward over a micro-batch of `tokens`."""
        shape = (layer.d_in, layer.d_out, tokens, layer.tp_in, layer.tp_out, layer.dp)
        width = layer.width_bytes
        flops = limits.forward_backward_flops(*shape)
        words = limits.forward_backward_memory_words(*shape)
        sent = limits.forward_backward_network_words(*shape)
        return {
            "flop": limits.flops_s(flops, width, self.flops_per_s_8bit, self.utilization),
            "memory": limits.memory_s(words, width, self.memory_Bps, self.utilization),
            "network": limits.network_s(sent, width, self.network_Bps),
        }

    def binding(self, layer: LinearLayer, tokens: float) -> str:
        """The slowest resource: `flop`, `memory` or `network`; the first of equals."""
        seconds = self.resources_s(layer, tokens)
        return max(seconds, key=lambda name: float(seconds[name]))

    def linear_layer_forward_backward_s(self, layer: LinearLayer, tokens: Num) -> Num:
        """`steptime.cost.limits.linear_layer_forward_backward_s` of this device."""
        return limits.linear_layer_forward_backward_s(
            layer.d_in, layer.d_out, tokens, layer.tp_in, layer.tp_out, layer.dp, layer.width_bytes,
            self.flops_per_s_8bit, self.memory_Bps, self.network_Bps, self.utilization,
        )  # fmt: skip

    def linear_layer_end_of_batch_s(self, layer: LinearLayer) -> Num:
        """`steptime.cost.limits.linear_layer_end_of_batch_s` of this device."""
        return limits.linear_layer_end_of_batch_s(
            layer.d_in, layer.d_out, layer.tp_in, layer.tp_out, layer.dp, layer.width_bytes,
            self.memory_Bps, self.network_Bps, self.utilization,
        )  # fmt: skip


#: The device of the authors' notebook: datasheet peaks of the NVIDIA H100 SXM5, an assumed utilisation of 0.8.
H100_SXM5 = LimitDevice(
    name="H100 SXM5", flops_per_s_8bit=1979e12, memory_Bps=3352e9, network_Bps=900e9, utilization=0.8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run whose length is bounded, and the laws that tie batch and depth to its compute.

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
        """`steptime.cost.limits.latency_wall_flops` of this run."""
        wall = limits.latency_wall_flops(
            self.duration_s, self.layer_latency_s, self.reference_batch_tokens, self.reference_layers,
            self.tokens_per_parameter,
        )  # fmt: skip
        return float(wall)

    @property
    def wall_parameters(self) -> float:
        """Parameters of the largest run."""
        return float(limits.optimal_parameters(self.wall_flops, self.tokens_per_parameter))

    @property
    def wall_tokens(self) -> float:
        """Training tokens of the largest run."""
        return float(limits.optimal_tokens(self.wall_flops, self.tokens_per_parameter))

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
        return float(limits.block_width(self.wall_parameters, self.wall_layers, HIDDEN_FACTOR))

    def least_duration_s(self, compute_flops: float) -> float:
        """Least duration of a run of so many FLOPs: its steps and blocks one after the other.

        >>> run = TrainingRun(duration_s=7.889e6, layer_latency_s=38e-6, reference_batch_tokens=2048**2,
        ...     reference_layers=120, tokens_per_parameter=20)
        >>> round(run.least_duration_s(run.wall_flops))
        7889000
        """
        tokens = limits.optimal_tokens(compute_flops, self.tokens_per_parameter)
        batch = self._grown(compute_flops, self.reference_batch_tokens)
        layers = self._grown(compute_flops, self.reference_layers)
        return float(limits.serial_latency_s(tokens, batch, layers, self.layer_latency_s))

    def _grown(self, compute_flops: float, reference: float) -> float:
        return float(limits.scaled_with_compute(compute_flops, REFERENCE_FLOPS, reference, GROWTH))


def limit_device(name: str) -> LimitDevice:
    """A device of the catalogue with the innermost links of its common node.

    The 8-bit peak of a device that has no 8-bit rate is twice that of 16 bits; the share that throttling leaves is its
    ``matrix_efficiency``.

    Raises:
        UserError: there is no such device or cluster, or it has neither an 8-bit nor a 16-bit rate.

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
        name=device.name, flops_per_s_8bit=narrow, memory_Bps=device.memory_Bps,
        network_Bps=2 * level.link_Bps * level.links_per_device, utilization=device.matrix_efficiency,
        kernel_latency_s=device.kernel_latency_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulDevice:
    """A chip with three levels of memory, as `steptime.cost.matmul` sees it (16-bit words).

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
    """Per network level, both directions together."""
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
        return float(limits.layer_latency_s(PRODUCTS, self.kernel_latency_s, self.network_latency_s[0]))

    def matmul_s(self, d1: Num, d2: Num, b: Num, *, weight_gradient: bool = False) -> Num:
        """`steptime.cost.matmul.three_level_matmul_s`; 3/4 of registers and L2 are usable."""
        return matmul.three_level_matmul_s(
            d1, d2, b, weight_gradient, 2, self.multiprocessors, 0.75 * 64 * 2**10, 0.75 * self.l2_bytes,
            self.memory_Bps, self.l2_Bps, self.shared_Bps, self.sustained_flops_per_s, self.kernel_latency_s,
            self.distributed_shared_memory,
        )  # fmt: skip


@cache
def load_matmul_devices() -> Mapping[str, MatmulDevice]:
    """The device table, by name (`v100-sxm`, `a100-sxm`, `h100-pcie`, `h100-sxm`)."""
    text = resources.files("steptime.lab.limits").joinpath("data/limit_devices.toml").read_text(encoding="utf-8")
    return {name: _device(row) for name, row in tomllib.loads(text).items()}


def _device(row: Mapping[str, object]) -> MatmulDevice:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return MatmulDevice(**values)  # type: ignore[arg-type]
