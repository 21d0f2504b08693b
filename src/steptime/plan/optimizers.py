"""Optimisers as rows: what each keeps of an element, and what it does with a matrix of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from steptime.cost.optimizers import (
    factored_state_bytes,
    newton_schulz_flops,
    shampoo_flops,
    shampoo_state_bytes,
    soap_flops,
    soap_state_bytes,
)
from steptime.cost.quantisation import state_8bit_element_bytes
from steptime.num import Num
from steptime.registry import Registry

OfMatrix = Callable[[Num, Num], Num]
"""Something of a matrix of rows and columns."""
MOMENTUM_BYTES: Final = 2.0
"""An element of a momentum that travels in bf16; arXiv 2502.16982, section 2.3."""


def nothing(rows: Num, columns: Num) -> Num:
    """No states, no operations."""
    return 0.0 * rows * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate:
    """What an optimiser does with a matrix of a layer; products that are computed as one are one matrix."""

    element_bytes: float
    """States of each element."""
    state_bytes: OfMatrix = nothing
    """Further states of a matrix."""
    flops: OfMatrix = nothing
    """Operations of its update."""
    gathered: bool = False
    """Ranks that share its states gather its momentum, as an update needs all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """States that an optimiser keeps per parameter, the fp32 copy of the weight apart."""

    name: str
    state_bytes: float
    matrices: MatrixUpdate | None = None
    """For matrices of layers, where those are treated as such; the embedding, the head and vectors are not."""
    source: str = ""

    def bytes_per_parameter(self, *, master_weights: bool) -> float:
        """States and, with reduced precision, the fp32 master weight (Adam with bf16: 12)."""
        return self.state_bytes + (4.0 if master_weights else 0.0)


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "steptime.optimizers")
for _optimizer in (
    Optimizer(name="adam", state_bytes=8.0),
    Optimizer(name="adamw", state_bytes=8.0),
    Optimizer(name="adam8bit", state_bytes=2.0 * float(state_8bit_element_bytes())),
    Optimizer(name="sgd", state_bytes=0.0),
    Optimizer(name="momentum", state_bytes=4.0),
    Optimizer(name="lion", state_bytes=4.0, source="Chen et al., arXiv 2302.06675: one momentum"),
    Optimizer(
        name="ademamix", state_bytes=12.0, source="Pagliardini et al., arXiv 2409.03137: two momenta, one variance"
    ),
    Optimizer(
        name="schedule-free", state_bytes=8.0, source="Defazio et al., arXiv 2405.15682: AdamW with z and a variance"
    ),
    Optimizer(
        name="adafactor",
        state_bytes=0.0,
        matrices=MatrixUpdate(element_bytes=0.0, state_bytes=factored_state_bytes),
        source="Shazeer and Stern, arXiv 1804.04235, without momentum; vectors are not counted",
    ),
    Optimizer(
        name="muon",
        state_bytes=8.0,
        matrices=MatrixUpdate(element_bytes=4.0, flops=newton_schulz_flops, gathered=True),
        source="Liu et al., arXiv 2502.16982: matrices of layers, the rest by AdamW",
    ),
    Optimizer(
        name="shampoo",
        state_bytes=8.0,
        matrices=MatrixUpdate(element_bytes=4.0, state_bytes=shampoo_state_bytes, flops=shampoo_flops, gathered=True),
        source="Gupta et al., arXiv 1802.09568, with momentum; the rest by AdamW",
    ),
    Optimizer(
        name="soap",
        state_bytes=8.0,
        matrices=MatrixUpdate(element_bytes=8.0, state_bytes=soap_state_bytes, flops=soap_flops, gathered=True),
        source="Vyas et al., arXiv 2409.11321; the rest by AdamW",
    ),
):
    OPTIMIZERS.add(_optimizer.name, _optimizer)
