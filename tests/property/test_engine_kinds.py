"""Properties of the evaluation where layers are of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from engine_cases import Case, cases, close, legal_plans, stacked
from hypothesis import given, settings
from hypothesis import strategies as st

from explained_terms import lines_of
from steptime.estimate.ledger import exposed_terms, fullest_stage, memory_terms
from steptime.model.kinds import MIXERS, with_kinds
from steptime.model.spec import LayerKind, ModelSpec
from steptime.plan.strategies import CORRECTED
from suites import examples

QUICK = settings(max_examples=examples(40), derandomize=True)


def _mixers(model: ModelSpec) -> dict[str, Any]:
    heads, width = model.heads, 32
    return {
        "mamba": {"state": 8},
        "mamba2": {"heads": heads, "head_dim": width, "state": 16, "groups": heads},
        "delta_net": {"key_heads": heads, "value_heads": heads, "key_dim": width, "value_dim": width},
        "gated_linear": {"heads": heads},
        "recurrent": {"blocks": heads},
        "cross": {"context": 100},
        "opaque": {"parameters": 4096, "flops_per_token": 1e4, "bytes_per_token": 1e3, "kept_bytes_per_token": 100.0},
    }


@st.composite
def layered(draw: st.DrawFn) -> Case:
    """A case whose layers are of up to three kinds in any order."""
    case = draw(cases(names=("1d", "context"), methods=(CORRECTED,)))
    model, kinds = case.job.model, []
    for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(_mixers(model))), min_size=1, max_size=3))):
        operators = MIXERS[name](**_mixers(model)[name]).operators(model)
        kinds.append(LayerKind(
            name=f"k{number}", block=model, operators=operators, attention=draw(st.booleans()),
            mlp=draw(st.booleans()), tokens=draw(st.sampled_from([0, 0, 512]))))  # fmt: skip
    pattern = draw(st.lists(st.sampled_from([kind.name for kind in kinds]), min_size=1, max_size=24))
    return replace(case, job=replace(case.job, model=with_kinds(model, kinds, pattern)))


@QUICK
@given(st.data())
def test_a_block_of_plans_is_its_plans_one_by_one(data: Any) -> None:
    case = data.draw(layered())
    plans = data.draw(st.lists(legal_plans(case), min_size=2, max_size=4))
    block = case.evaluate(stacked(plans))
    for place, one in enumerate(plans):
        alone = case.evaluate(one)
        many = (np.broadcast_to(value, len(plans))[place] for value in (block.step.total_s, block.peak_bytes))
        for value, single in zip(many, (alone.step.total_s, alone.peak_bytes), strict=True):
            assert close(float(value), float(single))


@QUICK
@given(st.data())
def test_terms_add_up(data: Any) -> None:
    case = data.draw(layered())
    found = case.evaluate(data.draw(legal_plans(case)))
    assert close(float(exposed_terms(lines_of(found)).total), float(found.step_time_s), 1e-9)
    assert close(float(memory_terms(found, fullest_stage(found)).total), float(found.peak_bytes), 1e-9)


@QUICK
@given(st.data())
def test_one_kind_costs_what_equal_blocks_cost(data: Any) -> None:
    """Of attention and MLP alone, all with a window or none; a window without a mask is of kinds alone."""
    case = data.draw(cases(names=("1d", "context"), methods=(CORRECTED,)))
    model = replace(case.job.model, norms_per_layer=2)
    model = replace(model, windowed_layers=model.layers if model.windowed_layers and model.causal else 0)
    same = with_kinds(model, [LayerKind(name="all", block=model)], ["all"] * model.layers)
    plans = data.draw(legal_plans(replace(case, job=replace(case.job, model=model))))
    equal, kinds = (case.evaluate(plans, job=replace(case.job, model=each)) for each in (model, same))
    assert close(float(equal.step.total_s), float(kinds.step.total_s), 1e-9)
    assert close(float(equal.peak_bytes), float(kinds.peak_bytes), 1e-9)
