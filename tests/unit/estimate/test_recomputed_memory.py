"""Memory of layers of which parts are made again: never more than without, and of the layers that a stage has."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from steptime.api.models import load_model
from steptime.estimate.memory import memory_of, stage_terms
from steptime.estimate.result import PlannedJob, planned_job
from steptime.estimate.sizes import sizes_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans, broken_rules
from steptime.plan.recompute import recompute_code
from steptime.plan.strategies import CORRECTED

STRATEGY, S = CORRECTED.strategies["context"], 4096
PARTS = ("attention", "norm", "activation", "attention_out", "up_projection", "mlp", "experts")
CODES = [sum(RECOMPUTE_CODES[part] for part in parts) for n in (1, 2, 3) for parts in combinations(PARTS, n)]
DEGREES: list[dict[str, int]] = [
    {}, {"tp": 8}, {"tp": 2, "cp": 2, "pp": 4, "ep": 8, "micro_batch": 2}, {"pp": 16, "ep": 8}, {"pp": 24}, {"pp": 61},
    {"tp": 4, "pp": 2, "sp": 0}, {"cp": 4, "ep": 8, "zero": 3},
]  # fmt: skip
WORKING = "working/backward/largest_temporary_bytes"


def planned(name: str, plans: Plans, **changes: Any) -> PlannedJob:
    plain = Job(model=load_model(name), gpus=256, global_batch=256, seq_len=S, precision=PRECISIONS["bf16"],
                optimizer=OPTIMIZERS["adam"])  # fmt: skip
    job = replace(plain, **changes)
    return planned_job(CORRECTED, STRATEGY, job, plans, sizes_of(STRATEGY.block(job, plans)))


@pytest.mark.quick(every=3)
@pytest.mark.each("attention", ["fused", "unfused"])
@pytest.mark.each("name", ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_no_stage_needs_more_for_parts_that_it_does_not_keep(name: str, attention: str) -> None:
    for degrees in DEGREES:
        ranks = degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("pp", 1)
        plans = Plans(dp=max(256 // ranks, 1), **degrees)
        whole = planned(name, plans, attention=attention)
        if broken_rules(whole.job, plans):
            continue
        most = {stage: each.totals for stage, each in memory_of(whole).items()}
        for code in CODES:
            made = planned(name, replace(plans, recompute=code), attention=attention)
            kept, again = made.sizes.layer.kept_bytes, made.sizes.layer.remade_bytes
            assert again >= 0 and kept + again == pytest.approx(whole.sizes.layer.kept_bytes)
            for stage, each in memory_of(made).items():
                for phase, total in each.totals.items():
                    assert total <= most[stage][phase] * (1 + 1e-12), (degrees, code, stage, phase)


@pytest.mark.parametrize(("pp", "layers"), [(24, 2), (16, 3), (4, 15)])
def test_a_stage_makes_again_what_its_own_layers_have(pp: int, layers: int) -> None:
    """DeepSeek-V3's first three layers have an MLP of 18432 columns, all others experts."""
    found = {}
    for part in ("none", "mlp", "experts"):
        made = planned("deepseek-v3", Plans(pp=pp, dp=8, recompute=recompute_code(part)))
        assert made.split.first == layers
        found[part] = [stage_terms(made, stage, "backward")[WORKING] for stage in ("first", "middle")]
    experts = 2 * S * (256 * 2 + 8 * 7168 + 8 * 3 * 2048 + 3 * 2048)
    more = {part: [a - b for a, b in zip(found[part], found["none"], strict=True)] for part in ("mlp", "experts")}
    assert more["mlp"] == pytest.approx([2 * S * 3 * 18432, 0], abs=1)
    assert more["experts"] == pytest.approx([experts if layers > 3 else 0, experts], abs=1)


@pytest.mark.parametrize("context", ["all_gather", "ring"])
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_up_projections_make_queries_keys_and_values_again(attention: str, context: str) -> None:
    """128 heads of 192 and 192 + 128; the statistics of the softmax, and what a ring keeps of its output, stay."""
    plain, code = Plans(cp=2, dp=8), RECOMPUTE_CODES["up_projection"]
    whole, made = (
        planned("deepseek-v3", each, attention=attention, context=context).sizes.layer
        for each in (plain, replace(plain, recompute=code))
    )
    again = 2 * S / 2 * 128 * (192 + 192 + 128)
    assert whole.kept_bytes - made.kept_bytes == pytest.approx(made.remade_bytes) == pytest.approx(again)
