"""The formulas of a transformer block and the captured block of the same module: the same products and parameters,
and kept bytes of which every difference has a name (`docs/captured.md`; `pytest -s` prints the table)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from captured_cases import BATCH, CASES, Case

from steptime.captured.cost import work_of
from steptime.captured.cut.sections import Sections, kept_storages, sections_of
from steptime.captured.record.step import capture
from steptime.estimate.operators import OPERATORS
from steptime.estimate.sizes import part_of
from steptime.model.parameters import parameter_terms
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Block, Row
from steptime.plan.strategies import CORRECTED

NAMES = [case.name for case in CASES]
PARTS = ("first", "layer", "last")
DOCUMENT = Path(__file__).parents[2] / "docs" / "captured.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@cache
def captured(name: str) -> Sections:
    """The recorded step of a case in its parts."""
    case = CASES[NAMES.index(name)]
    module, inputs = case.build()
    return sections_of(capture(module, inputs, optimizer=None, loss=case.loss, target="cuda"))


@cache
def analytic(name: str) -> Block:
    """The rows of the same model on one device."""
    case = CASES[NAMES.index(name)]
    job = Job(model=case.spec, gpus=1, global_batch=BATCH, seq_len=case.spec.seq_len, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return CORRECTED.strategies["1d"].block(job, Plans(micro_batch=BATCH))


def row_flops(rows: tuple[Row, ...], phase: str) -> float:
    """Matrix operations of rows."""
    formulas = [(getattr(OPERATORS[row.operator], phase).matrix_flops, row) for row in rows]
    return sum(float(formula(row.shape) * row.share) for formula, row in formulas if formula is not None)


def part_calls(sections: Sections, part: str) -> tuple[int, ...]:
    return {"first": sections.head, "layer": sections.each[sections.typical], "last": sections.tail}[part]


def call_flops(sections: Sections, part: str, phase: str) -> float:
    """Matrix operations of recorded calls; a causal mask counts once, as in the rows."""
    calls = [sections.program.calls[number] for number in part_calls(sections, part)]
    return float(sum(work_of(call.node).matrix_flops for call in calls if call.phase == phase and not call.view))


def kept_bytes(sections: Sections) -> float:
    """What a block in the middle keeps for its backward pass."""
    storages = kept_storages(sections)[sections.typical]
    return float(sum(sections.program.storages[number].size_bytes for number in storages))


def differences(case: Case, quantity: str) -> float:
    return sum(d.amount(case.spec, case.tokens) for d in case.differences if d.quantity == quantity)


@pytest.mark.quick("Llama 3 8B, fused SwiGLU", "GPT-2 with dropout")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_layer_is_a_block(case: Case) -> None:
    sections = captured(case.name)
    assert len(sections.each) == case.spec.layers
    assert sections.program.folded


@pytest.mark.each("phase", ["forward", "backward"])
@pytest.mark.each("case", CASES, ids=NAMES)
def test_products_are_the_same(case: Case, phase: str) -> None:
    sections, block = captured(case.name), analytic(case.name)
    assert call_flops(sections, "layer", phase) == row_flops(block.layer, phase)
    if case.ends:
        first = row_flops(block.first, phase) + differences(case, f"head_{phase}")
        assert call_flops(sections, "first", phase) == first
        assert call_flops(sections, "last", phase) == row_flops(block.last, phase)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_parameters_are_the_same(case: Case) -> None:
    sections = captured(case.name)
    block = [p.elements for p in sections.program.parameters if sections.blocks.index_of(p.name) == 0]
    assert sum(block) == part_of(analytic(case.name).layer).weights
    if case.ends:
        assert sections.program.parameter_count == parameter_terms(case.spec).total


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_kept_byte_has_a_name(case: Case) -> None:
    kept, formula = kept_bytes(captured(case.name)), float(part_of(analytic(case.name).layer).kept_bytes)
    assert kept == formula + differences(case, "kept")
    if case.same_kernels:
        assert kept == pytest.approx(formula, rel=0.02)


def shown(amount: float) -> str:
    return f"{amount:+,.0f}" if abs(amount) >= 1 else f"{amount:+.1g}"


def table() -> str:
    """What a block keeps both ways, and what makes the difference, in bytes per token."""
    lines = ["| Model | Kept by the formula | Difference | Bytes | Reason | Kept by the module |", f"|{'---|' * 6}"]
    for case in CASES:
        kept = kept_bytes(captured(case.name)) / case.tokens
        formula = float(part_of(analytic(case.name).layer).kept_bytes) / case.tokens
        begin, end = f"{case.name} | {formula:,.0f}", f"{kept:,.0f}"
        for each in (d for d in case.differences if d.quantity == "kept"):
            amount = each.amount(case.spec, case.tokens) / case.tokens
            lines.append(f"| {begin} | {each.what} | {shown(amount)} | {each.reason} | {end} |")
            begin, end = " | ", ""
    lines += ["", "| Model | Part | Difference | Operations | Reason |", "|---|---|---|---|---|"]
    for case in CASES:
        for each in (d for d in case.differences if d.quantity != "kept"):
            part, amount = each.quantity.replace("_", ", "), each.amount(case.spec, case.tokens) / BATCH
            lines.append(f"| {case.name} | {part} | {each.what} | {amount:+.4g} | {each.reason} |")
    return "\n".join(lines)


def test_the_committed_table_is_what_is_measured(capsys: Any) -> None:
    with capsys.disabled():
        print(f"\n{table()}")
    text = DOCUMENT.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()
