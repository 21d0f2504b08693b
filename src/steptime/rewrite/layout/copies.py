"""Costs to convert a value into another layout, or to read it across its order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from steptime.captured.graph import Node, Nodes, TensorType
from steptime.captured.ops import making
from steptime.hardware.records import Device
from steptime.rewrite.flow import Flow
from steptime.rewrite.layout.strides import CHANNELS_LAST, Order
from steptime.rewrite.search.problem import METRICS, CostModel

TENSOR_CORES: Final = frozenset({"fp16", "bf16", "tf32", "fp8", "int8", "fp4"})
"""Element types with matrix units on GPUs."""
FEW: Final = 4
"""Largest number of channels of images, such as colours, that do not fill a vector register of a CPU."""


@dataclass(frozen=True, kw_only=True)
class Tariff:
    """Costs of operators and copies under one cost model."""

    model: CostModel
    _nodes: Nodes = field(default_factory=Nodes, repr=False)
    _known: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> Device:
        """The device of the cost model."""
        return self.model.prices.timer.device

    def of(self, flow: Flow, node: Node) -> float:
        """Cost of an operator with operands in the layouts of its kernel."""
        return self.model.of_node(flow, node)

    def conversion(self, type: TensorType) -> float:
        """Cost of a copy as a separate operator: every element read and written, one launch, issued by the host."""
        return self._copy(type)[0]

    def inside(self, type: TensorType) -> float:
        """Cost of a copy that a library makes inside another operator, for which the host only issues the launch."""
        return self._copy(type)[1]

    def strided(self, type: TensorType) -> float:
        """Cost of reading a value across its order: the traffic of a copy without its launch (assumed: each memory
        sector is fetched twice)."""
        return self._copy(type)[2]

    def _copy(self, type: TensorType) -> tuple[float, float, float]:
        key = (type.dtype, type.elements)
        found = self._known.get(key)
        if found is None:
            x = self._nodes.source("input", "x", TensorType((type.elements,), type.dtype))
            node = making.clone(self._nodes, x).node
            metrics = self.model.metrics(_NO_FLOW, node)
            more_s = min(self.model.prices.timer.host_more_s, metrics["host_s"])
            inside = {**metrics, "host_s": more_s}
            moved = {**dict.fromkeys(METRICS, 0.0), **{m: metrics[m] for m in ("device_s", "moved_bytes")}}
            weights = self.model.weights
            whole, within, only = (sum(w * each[m] for m, w in weights.items()) for each in (metrics, inside, moved))
            found = self._known[key] = (whole, within, only)
        return found

    def native(self, flow: Flow, node: Node, rank: int) -> Order | None:
        """Order of dims of the library's convolution kernels; None: there are kernels for each order.

        Tensor cores work on NHWC, and cuDNN transposes NCHW before and after (NVIDIA, Convolutional Layers User's
        Guide, tensor layouts); CUDA cores work on NCHW. On a CPU both are as fast (ratios of 0.87 to 1.11 in seven of
        eight shapes measured with oneDNN, 1.63 in one), but for images of few channels: NCHW took 1.7 and 2.5 times as
        long, of which the cost of copies explains a part. AMD's and other libraries: NCHW, assumed.
        """
        cost = self.model.prices.cost(flow, node)
        last, first = CHANNELS_LAST[rank], tuple(range(rank))
        if self.device.is_host:
            return last if node.inputs[0].type.shape[1] <= FEW else None
        return last if self._has_cores("fp32" if cost is None else cost.dtype) else first

    def _has_cores(self, dtype: str) -> bool:
        matrix, vector = self.device.matrix_flops_per_s.get(dtype, 0.0), self.device.vector_flops_per_s.get(dtype, 0.0)
        return self.device.runs_cuda and dtype in TENSOR_CORES and matrix > 2 * vector


_NO_FLOW: Final = Flow(name="", nodes=Nodes(), outputs=(), names=(), places={})
