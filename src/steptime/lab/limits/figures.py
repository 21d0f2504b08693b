"""Figures of the data-movement limits as their authors state them, beside what the formulas give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from steptime.cost import limits
from steptime.lab.limits.model import H100_SXM5, PRODUCTS, THREE_MONTHS_S, LinearLayer, TrainingRun, load_matmul_devices

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
    """As its authors round it."""
    computed: float
    source: str

    @property
    def error(self) -> float:
        """Computed over stated, less 1."""
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
        duration_s=duration_s, layer_latency_s=layer_latency_s, reference_batch_tokens=2048**2, reference_layers=120,
        tokens_per_parameter=20,
    )  # fmt: skip


def figures() -> list[Figure]:
    """Every figure that is stated in words or printed by the authors' code."""
    layer = LinearLayer(d_in=16384, d_out=81920, tp_in=8, tp_out=40, dp=32, width_bytes=2)
    each_s = 1e7 / (notebook_run(1e7, 1.0).least_duration_s(4e26) * PRODUCTS)
    inside_s = limits.layer_latency_s(PASSES, 4.5e-6, 9.2e-6)
    tree_s = limits.tree_latency_s(7.4e-6, 2.75, 0.6e-6, 16, 5e-6)
    wall = notebook_run(THREE_MONTHS_S, H100_SXM5.layer_latency_s).wall_flops
    rows = (
        ("linear layer, both passes", "s", 3.2554072481051035e-05,
         H100_SXM5.linear_layer_forward_backward_s(layer, 2048**2 / 128), NOTEBOOK),
        ("product, 4e26 FLOP in 1e7 s", "s", 2393.0e-6, each_s, NOTEBOOK),
        ("block on 8 GPUs of a node", "s", 110e-6, inside_s, REPORT),
        ("product over 16 nodes", "s", 50e-6, tree_s, REPORT),
        ("block over 16 nodes", "s", 400e-6, limits.layer_latency_s(PASSES, tree_s, 0.0), REPORT),
        ("run of 7e14 parameters", "FLOP", 6e31, limits.training_flops(7e14, 1.4e16), REPORT),
        ("latency wall, three months", "FLOP", 2e31, wall, "arXiv 2411.01137"),
    )  # fmt: skip
    return [
        Figure(name=name, unit=unit, stated=stated, computed=float(computed), source=source)
        for name, unit, stated, computed, source in rows
    ]


def product_times() -> list[ProductTime]:
    """Every shape of :data:`SHAPES` on every device of the authors' table."""
    return [
        ProductTime(
            device=name, rows=d1, columns=d2, tokens=b, forward_s=float(device.matmul_s(d1, d2, b)),
            weight_gradient_s=float(device.matmul_s(d1, d2, b, weight_gradient=True)),
        )
        for d1, d2, b in SHAPES
        for name, device in load_matmul_devices().items()
    ]  # fmt: skip
