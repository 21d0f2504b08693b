"""Sizes of the rows of a block: parameters and kept bytes, without times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from steptime.model.captured import Sharded
from steptime.num import Num, where
from steptime.plan.job import Job
from steptime.plan.optimizers import MatrixUpdate
from steptime.plan.rows import Block, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sums over some rows per device; activations are per micro-batch."""

    weights: Num
    """Trained parameters, without those of routed experts."""
    replicated: Num
    """Trained parameters that every tensor-parallel rank holds."""
    kept_bytes: Num
    expert_weights: Num = 0.0
    """Trained parameters of routed experts."""
    frozen: Num = 0.0
    """Parameters that are not trained, without those of routed experts."""
    frozen_experts: Num = 0.0
    frozen_bytes: Num = 0.0
    """Bytes of the frozen parameters, which may have a format of their own."""
    frozen_expert_bytes: Num = 0.0
    products: Num = 0.0
    """Parameters of the products; a grouped product counts one of its groups."""
    tensors: Num = 0.0
    """Operators with trained parameters; a bias counts with its product."""
    remade_bytes: Num = 0.0
    """Activation bytes that recomputation of parts of a layer makes again instead of keeping them."""
    matrices: Num = 0.0
    """Parameters of matrices that the optimiser updates as matrices, without those of routed experts."""
    matrix_state_bytes: Num = 0.0
    """Bytes of the further states of these matrices."""
    matrix_flops: Num = 0.0
    expert_matrices: Num = 0.0
    expert_matrix_state_bytes: Num = 0.0
    expert_matrix_flops: Num = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parts of a model as one device holds them."""

    layer: Part
    first: Part
    last: Part
    boundary_bytes: Num
    """Bytes of the activation that one micro-batch hands from stage to stage."""
    working_bytes: Num
    """Largest temporary of a layer in addition to the kept activations."""
    loss_bytes: Num = 0.0
    """Largest temporary at the loss and in the backward pass of the head."""
    later: Part | None = None
    """A layer with experts, if the model begins with dense layers; ``layer`` is then the mean of both kinds."""
    leading: int = 0
    """Number of dense layers with which the model begins."""
    sharded: Sharded | None = None
    """Choice of shardings, whose sizes replace those of the rows."""

    def has(self, pool: str) -> bool:
        """True if any part has a nonzero pool; single plans without it have 0.0 everywhere."""
        for part in (self.layer, self.first, self.last):
            value: Num = getattr(part, pool)
            if not isinstance(value, float) or value:
                return True
        return False


def part_of(
    rows: Iterable[Row],
    count: Callable[[Row], Num] = lambda row: row.share,
    update: MatrixUpdate | None = None,
) -> Part:
    """Sums over rows, each times its occurrences in a layer; ``update``: the optimiser's update of matrices."""
    sums: dict[str, Num] = {"weights": 0.0, "replicated": 0.0, "kept_bytes": 0.0}
    for row in rows:
        share = count(row)
        whole = isinstance(share, float) and share == 1.0
        for name, value in (
            (POOLS[row.expert, row.trained], row.weights),
            ("kept_bytes", row.kept_bytes),
            ("replicated", row.replicated) if row.trained else (_BYTES[row.expert], row.weights * row.weight_bytes),
        ):
            sums[name] = sums.get(name, 0.0) + (value if whole else value * share)
        if not isinstance(row.remade_bytes, float) or row.remade_bytes:
            sums["remade_bytes"] = sums.get("remade_bytes", 0.0) + row.remade_bytes * share
        if update is not None and row.trained and row.operator in PRODUCTS:
            for name, value in _matrices(row, update).items():
                sums[name] = sums.get(name, 0.0) + value * share
        # Row by row of a block, as an operator may have weights under some degrees alone; a bias counts with its
        # product, as a captured module has both in one operator.
        if row.trained and row.operator != "bias":
            sums["tensors"] = sums.get("tensors", 0.0) + share * where(row.weights > 0, 1.0, 0.0)
        if row.trained and row.operator in PRODUCTS:
            sums["products"] = sums.get("products", 0.0) + row.weights / row.shape.get("groups", 1)
    return Part(**sums)


def _matrices(row: Row, update: MatrixUpdate) -> dict[str, Num]:
    """Parameters, further states and FLOPs of the matrices of a row under an optimiser that updates matrices."""
    number, shape, kind = row.shape.get("groups", 1), (row.shape["k"], row.shape["n"]), "expert_" * row.expert
    return {
        f"{kind}matrices": number * shape[0] * shape[1],
        f"{kind}matrix_state_bytes": number * update.state_bytes(*shape),
        f"{kind}matrix_flops": number * update.flops(*shape),
    }


#: Operators whose weight gradients are written to a buffer of all gradients.
PRODUCTS = ("matmul", "grouped_matmul")
#: (Weights are of experts, weights are trained) -> field that counts them.
POOLS = {
    (False, True): "weights", (True, True): "expert_weights", (False, False): "frozen", (True, False): "frozen_experts",
}  # fmt: skip
_BYTES = {False: "frozen_bytes", True: "frozen_expert_bytes"}


def state_bytes_of_model(sizes: Sizes, job: Job, parameters: Num) -> Num:
    """Bytes of optimiser states for ``parameters`` parameters of a whole model, fp32 copies of weights included."""
    update = job.optimizer.matrices
    each = job.optimizer.bytes_per_parameter(master_weights=job.precision.master_weights)
    if update is None:
        return each * parameters

    def sum_of(pool: str) -> Num:
        parts = ((job.model.layers, sizes.layer), (1, sizes.first), (1, sizes.last))
        kinds = (pool, f"expert_{pool}")
        return sum((n * getattr(part, name) for n, part in parts for name in kinds), start=0.0)

    more = (update.element_bytes - job.optimizer.state_bytes) * sum_of("matrices")
    return each * parameters + more + sum_of("matrix_state_bytes")


def sizes_of(block: Block, update: MatrixUpdate | None = None) -> Sizes:
    """Sums over all parts of a block; ``update``: the optimiser's update of the matrices of layers."""
    block = block.whole or block
    later: list[Row] = []
    if block.leading_dense:  # a layer with experts lacks the dense MLP, and has the rows of experts once
        later = [row for row in block.layer if row.block != "mlp" or (isinstance(row.share, float) and row.share == 1)]
    of_later = part_of(later, lambda row: 1.0 if row.block == "experts" else row.share, update) if later else None
    return Sizes(
        later=of_later, leading=block.leading_dense,
        layer=part_of(block.layer, update=update), first=part_of(block.first), last=part_of(block.last),
        boundary_bytes=block.boundary_bytes, working_bytes=block.working_bytes, loss_bytes=block.loss_bytes,
        sharded=block.sharded,
    )  # fmt: skip
