"""Optimisers as rows: the states of each per element, and its update of a matrix of a layer."""

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
"""Function of the rows and columns of a matrix."""
MOMENTUM_BYTES: Final = 2.0
"""Bytes of an element of a momentum that is sent in bf16; arXiv 2502.16982, section 2.3."""


def nothing(rows: Num, columns: Num) -> Num:
    """Zero: no states, no operations."""
    return 0.0 * rows * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate:
    """Update of a matrix of a layer by an optimiser; products that are computed as one are one matrix."""

    element_bytes: float
    """Bytes of states per element."""
    state_bytes: OfMatrix = nothing
    """Bytes of further states of a matrix."""
    flops: OfMatrix = nothing
    """Operations of the update of a matrix."""
    gathered: bool = False
    """True if ranks that shard the states gather the momentum, as an update needs the whole matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """States that an optimiser keeps per parameter, without the fp32 copy of the weight."""

    name: str
    state_bytes: float
    matrices: MatrixUpdate | None = None
    """Update of matrices of layers as matrices, without embedding, head and vectors; None: element by element."""
    source: str = ""

    def bytes_per_parameter(self, *, master_weights: bool) -> float:
        """Bytes of states and, with ``master_weights``, of the fp32 master weight (Adam with bf16: 12)."""
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
