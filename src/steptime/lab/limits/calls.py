"""How far a layer and a training run scale before data movement or latency stops them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from steptime.api.request import MAX_COUNT, number, text, whole
from steptime.estimate.result import SCHEMA_VERSION
from steptime.lab.limits.model import H100_SXM5, THREE_MONTHS_S, LimitDevice, LinearLayer, TrainingRun, limit_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times of a layer by resource, and the largest run that latency allows."""

    layer: LinearLayer
    tokens: float
    """Tokens per micro-batch, all ranks."""
    device: LimitDevice
    run: TrainingRun

    @property
    def resources_s(self) -> Mapping[str, float]:
        """Seconds of each resource for forward and backward of a micro-batch: ``flop``, ``memory``, ``network``."""
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
            "device": asdict(self.device), **{f"{name}_s": value for name, value in self.resources_s.items()},
            "forward_backward_s": self.forward_backward_s, "binding": self.binding,
            "end_of_batch_s": self.end_of_batch_s, "run": asdict(run), "latency_wall_flops": run.wall_flops,
            "latency_wall_parameters": run.wall_parameters, "latency_wall_tokens": run.wall_tokens,
            "latency_wall_batch_tokens": run.wall_batch_tokens, "latency_wall_layers": run.wall_layers,
            "latency_wall_width": run.wall_width, "source": "arXiv 2411.01137",
        }  # fmt: skip


def limits(
    *, d_in: int = 16384, d_out: int = 81920, tokens: float = 32768, tp_in: int = 8, tp_out: int = 40, dp: int = 32,
    width_bytes: float = 2, device: str | None = None, flops_8bit_per_s: float | None = None,
    memory_Bps: float | None = None, network_Bps: float | None = None, utilization: float | None = None,
    duration_s: float = THREE_MONTHS_S, layer_latency_s: float | None = None, batch_tokens: float = 2048**2,
    layers: int = 120, tokens_per_parameter: float = 20,
) -> Limits:  # fmt: skip
    """How far a layer and a training run scale before data movement or latency stops them.

    Args:
        d_in: width of the layer's input.
        d_out: width of its output.
        tokens: tokens per micro-batch, all ranks.
        tp_in: ranks that share the input dim.
        tp_out: ranks that share the output dim.
        dp: data ranks.
        width_bytes: bytes per word.
        device: catalogue name of a device or cluster, or TOML file of a cluster; None: the H100 SXM5 of arXiv
            2411.01137. What follows takes the place of single figures of it.
        flops_8bit_per_s: dense 8-bit peak.
        memory_Bps: bandwidth of device memory.
        network_Bps: bandwidth of a device's links, both directions together.
        utilization: share of peak and memory bandwidth that throttling leaves.
        duration_s: longest training run.
        layer_latency_s: least time of one block; None: four kernels of the device with a reduction each.
        batch_tokens: tokens per step of a run of 1e25 FLOP.
        layers: blocks of a run of 1e25 FLOP.
        tokens_per_parameter: training tokens per parameter.

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
    return Limits(
        layer=LinearLayer(
            **{name: whole(name, value, 1, MAX_COUNT) for name, value in counts.items()},
            width_bytes=number("width_bytes", width_bytes, 0.125, 16, "bytes per word"),
        ),
        tokens=number("tokens", tokens, 1, 1e15, "tokens per micro-batch"),
        device=found,
        run=TrainingRun(
            duration_s=number("duration_s", duration_s, 1.0, 1e12, "seconds of the longest run"),
            layer_latency_s=number("layer_latency_s", layer_latency_s, 1e-12, 1e6, "seconds of a block"),
            reference_batch_tokens=number("batch_tokens", batch_tokens, 1, 1e15, "tokens per step"),
            reference_layers=whole("layers", layers, 1, MAX_COUNT),
            tokens_per_parameter=number("tokens_per_parameter", tokens_per_parameter, 1e-3, 1e9, "training tokens"),
        ),
    )


def _changed(
    device: LimitDevice, flops: float | None, memory: float | None, network: float | None, utilization: float | None
) -> LimitDevice:
    """The device with the figures that are given."""
    given = {
        "flops_per_s_8bit": ("flops_8bit_per_s", flops, 1e6, 1e24, "FLOP per second"),
        "memory_Bps": ("memory_Bps", memory, 1e3, 1e21, "bytes per second"),
        "network_Bps": ("network_Bps", network, 1e3, 1e21, "bytes per second"),
        "utilization": ("utilization", utilization, 1e-3, 1.0, "share of peak and memory bandwidth"),
    }
    values = {name: number(*check) for name, check in given.items() if check[1] is not None}
    return replace(device, name=f"{device.name}, changed", **values) if values else device
