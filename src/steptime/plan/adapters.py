"""Low-rank adapters (LoRA, arXiv 2106.09685): the weights are frozen, two narrow products beside each are trained.

A product of m x k by k x n gets m x k by k x r and m x r by r x n for every projection that it joins (queries, keys
and values; gate and up). Frozen products have no gradient of their weights; their input is kept where an adapter
needs it. With a 4-bit format of its own (QLoRA, arXiv 2305.14314) a weight is expanded before each product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from steptime.num import Num
from steptime.plan.job import Adapter, Job
from steptime.plan.quantise import NARROW
from steptime.plan.rows import Row, matmul, move

#: Products that join several projections, each with an adapter of its own.
PROJECTIONS = {"qkv": 3}
#: Products whose columns are whole and whose rows are cut over the tensor ranks: their second matrix is whole.
ROW_PARALLEL = ("attention_out", "mlp_out", "shared_out")
FROZEN = {
    "matmul": "frozen_matmul", "wide_matmul": "frozen_wide_matmul", "grouped_matmul": "frozen_grouped_matmul",
    "bias": "frozen_bias", "embedding": "frozen_embedding",
}  # fmt: skip
PRODUCTS = ("matmul", "wide_matmul", "grouped_matmul")


def adapted(rows: Iterable[Row], job: Job, *, layer: bool) -> list[Row]:
    """The rows with frozen weights; in a ``layer``, with adapters beside the products."""
    adapter = job.adapter
    if adapter is None:
        return list(rows)
    out: list[Row] = []
    for row in rows:
        targeted = layer and row.operator == "matmul" and row.name != "router"
        targeted = targeted and (adapter.targets == "linear" or row.block == "attention")
        stored = layer and row.operator in PRODUCTS and row.name != "router" and adapter.weight_bytes is not None
        out += _frozen(row, job, adapter.weight_bytes if stored else None, layer)
        if targeted:
            out += _adapter(row, job, adapter)
    return out


def _frozen(row: Row, job: Job, weight_bytes: float | None, layer: bool) -> list[Row]:
    element = job.precision.element_bytes
    # The adapter's first product keeps the input instead; without one nothing needs it.
    kept = 0.0 * row.kept_bytes if row.operator in PRODUCTS else row.kept_bytes
    stored = element if weight_bytes is None else weight_bytes
    if not layer and job.adapter is not None and job.adapter.weight_bytes is not None:
        stored = job.memory.quantised_ends_bytes or element
    narrow = job.precision.quantised_bytes
    if layer and weight_bytes is None and job.memory.narrow_frozen and narrow is not None and row.operator in NARROW:
        stored = narrow
    frozen = replace(
        row, operator=FROZEN.get(row.operator, row.operator), trained=False, kept_bytes=kept,
        replicated=0.0, weight_bytes=stored,
    )  # fmt: skip
    if weight_bytes is None:
        return [frozen]
    expanded = move(f"{row.name}_dequantise", row.block, row.weights * weight_bytes, row.weights * element)
    return [replace(expanded, share=row.share), frozen]


def _adapter(row: Row, job: Job, adapter: Adapter) -> list[Row]:
    element, rank = job.precision.element_bytes, adapter.rank
    m, n, k = row.shape["m"], row.shape["n"], row.shape["k"]
    projections = PROJECTIONS.get(row.name, job.model.mlp_inputs if row.name in ("mlp_in", "shared_in") else 1)
    first: Num = projections * rank * k
    second: Num = rank * n
    cut = row.name in ROW_PARALLEL
    down = matmul(f"{row.name}_adapter_down", row.block, m, projections * rank, k, element_bytes=element,
                  kept_elements=row.kept_bytes / element, weights=first)  # fmt: skip
    # The second product adds to the frozen one's result, which is read and written once more.
    up = matmul(f"{row.name}_adapter_up", row.block, m, n, rank, element_bytes=element,
                kept_elements=m * projections * rank, weights=second, output_passes=2)  # fmt: skip
    return [
        replace(down, share=row.share, replicated=0.0 if cut else first),
        replace(up, share=row.share, replicated=second if cut else 0.0),
    ]
