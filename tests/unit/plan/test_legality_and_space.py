"""What makes a plan impossible, and which plans a space lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime.api.models import load_model
from steptime.model.spec import Experts
from steptime.plan.framework_file import habits_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import (
    BIT,
    CAPTURED_RULES,
    MEANING,
    NAMES,
    RISK,
    RULES,
    Plans,
    broken_rules,
    concatenate,
    names_of,
)
from steptime.plan.space import (
    Constraint,
    CorrectedSpace,
    factorisations,
    micro_batch_choices,
    panel_counts,
    partial_fillings,
    rows_of,
)
from steptime.plan.strategies import CORRECTED
from steptime.schedule.schedules import NAMED

MODEL = load_model("llama3-8b")  # 32 layers, 32 heads, 8 key-value heads, hidden 4096
JOB = Job(model=MODEL, gpus=64, global_batch=16, seq_len=8192, precision=PRECISIONS["bf16"],
          optimizer=OPTIMIZERS["adam"])  # fmt: skip

BROKEN = {
    "heads": [Plans(tp=3), Plans(tp=64)],
    "kv_heads": [Plans(tp=3), Plans(tp=12)],
    "stages": [Plans(pp=33), Plans(pp=16, vpp=3)],
    "batch": [Plans(dp=17)],
    "micro_batch": [Plans(micro_batch=17), Plans(dp=8, micro_batch=3)],
    "interleaving": [Plans(vpp=2), Plans(pp=3, vpp=2), Plans(pp=4, vpp=5), Plans(pp=4, vpp=2, dp=8)],
    "panels": [Plans(panels=4097)],
    "zero_pipeline": [Plans(zero=2, pp=2), Plans(zero=3, pp=4)],
    "experts": [Plans(ep=2, dp=2), Plans(etp=2, tp=2)],
    "expert_mesh": [Plans(ep=4, dp=2), Plans(ep=2, dp=3)],
    "shard": [Plans(dp=4, shard=3)],
    "recompute_every": [Plans(recompute_every=2), Plans(recompute=5, recompute_every=2)],
}
MOE = replace(MODEL, experts=Experts(experts=8, experts_per_token=2, expert_ffn_hidden=1000, moe_layers=32))
ENDS = [
    # Llama 3 405B as Meta trained it: embedding and head are the first and the last of 128 virtual stages.
    (126, Plans(tp=8, pp=16, vpp=8), (7, 8, 7)),
    (127, Plans(pp=16, vpp=8), (8, 8, 7)),
    (94, Plans(pp=32, vpp=3), (2, 3, 2)),
]
BROKEN_EXPERTS = {
    "experts": [Plans(ep=3, dp=3), Plans(ep=16, dp=16)],
    "expert_width": [Plans(etp=16, tp=16)],
    "expert_mesh": [Plans(cp=2, dp=2, ep=8), Plans(tp=2, dp=4, ep=8, etp=2)],
    "expert_sequence": [Plans(tp=2, sp=0)],
    "summa_model": [Plans(tp2=2)],
}
FINE = [
    Plans(), Plans(tp=32), Plans(tp=16), Plans(tp=8, pp=32, dp=16), Plans(pp=4, vpp=2, dp=4), Plans(pp=4, vpp=8, dp=2),
    Plans(pp=2, vpp=2),
    Plans(dp=3, micro_batch=6), Plans(zero=3, dp=16), Plans(panels=4096), Plans(zero=3, dp=16, shard=8),
    Plans(recompute=2, recompute_every=3),
]  # fmt: skip


@pytest.mark.each(("name", "plans"), [(name, p) for name, each in BROKEN.items() for p in each])
def test_each_rule_refuses(name, plans):
    assert name in names_of(broken_rules(JOB, plans))


@pytest.mark.parametrize(("name", "plans"), [(name, p) for name, each in BROKEN_EXPERTS.items() for p in each])
def test_each_rule_of_experts_refuses(name, plans):
    assert name in names_of(broken_rules(replace(JOB, model=MOE), plans))


def test_experts_over_folded_ranks():
    """Eight experts on tp 2 x dp 4, each cut in two: two replicas of the experts are left."""
    plans = Plans(tp=2, dp=8, ep=4, etp=2, in_tp=2, in_dp=2)
    assert names_of(broken_rules(replace(JOB, model=MOE), plans)) == ()
    assert (plans.edp, plans.inside("etp"), plans.inside("ep"), plans.inside("edp")) == (2, 2, 2, 1)
    assert names_of(broken_rules(replace(JOB, model=MOE), Plans(tp=2, sp=1))) == ()
    assert names_of(broken_rules(replace(JOB, model=MOE), Plans(cp=4, dp=2, ep=8))) == (), "context ranks are ranks"
    assert names_of(broken_rules(replace(JOB, context="ulysses"), Plans(tp=8, cp=8))) == ("heads",)


@pytest.mark.each("plans", FINE)
def test_legal_plans_break_nothing(plans):
    assert names_of(broken_rules(JOB, plans)) == ()


@pytest.mark.each(("layers", "plans", "stages"), ENDS)
def test_the_first_and_the_last_virtual_stage_may_have_no_layer(layers, plans, stages):
    job = replace(JOB, model=replace(MODEL, layers=layers), global_batch=64)
    assert names_of(broken_rules(job, plans)) == ()
    split = CORRECTED.stage_split(job, plans)
    assert (split.first, split.middle, split.last) == stages
    fewer = replace(job, model=replace(MODEL, layers=int(plans.pp * plans.vpp) - 3))
    assert "stages" in names_of(broken_rules(fewer, plans))
    alone = plans.with_columns({"pp": plans.pp * plans.vpp, "vpp": 1})
    assert names_of(broken_rules(job, alone)) == ("stages",), "a rank without any layer"


def test_short_sequences():
    assert names_of(broken_rules(replace(JOB, seq_len=4), Plans(tp=4, cp=2))) == ("sequence",)


def test_masks_of_blocks_are_those_of_their_plans():
    plans = [p for each in BROKEN.values() for p in each] + FINE
    block = concatenate(plans, [1] * len(plans))
    assert broken_rules(JOB, block).tolist() == [broken_rules(JOB, p) for p in plans]


def test_every_reason_has_its_bit_and_its_meaning():
    assert (
        set(BROKEN)
        | set(BROKEN_EXPERTS)
        | {
            "sequence",
            "memory",
            "ranks",
            "schedule",
            "schedule_offload",
            "causal_slices",
            "host_weights",
            *(rule.name for rule in NAMED),
        }
        == {r.name for r in RULES} | {"memory"}
        == set(NAMES) - {r.name for r in CAPTURED_RULES}
    )
    assert {*NAMES, RISK} == set(MEANING)
    assert sorted(BIT.values()) == [1 << i for i in range(len(NAMES))]


def test_factorisations():
    assert len(factorisations(2**10, 4)) == 286  # 13 over 3
    table = factorisations(360, 3)
    assert (table.prod(axis=1) == 360).all()
    assert len(np.unique(table, axis=0)) == len(table) == 10 * 6 * 3
    assert factorisations(1, 5).tolist() == [[1] * 5]


def test_partial_fillings_fit_and_divide():
    ways = partial_fillings(12, 8, 2)
    assert {int(n) for n in ways.prod(axis=1)} == {1, 2, 3, 4, 6}
    assert len(np.unique(ways, axis=0)) == len(ways)


def test_panels_and_micro_batches():
    assert panel_counts(25600, 64) == [64]
    assert panel_counts(4096, 1) == [1, 2, 4, 8]
    assert panel_counts(4096, 16) == [16]
    assert micro_batch_choices(1) == [1]
    assert micro_batch_choices(12) == [1, 2, 3, 4, 6, 8, 12]


def _listing(*constraints, **changes):
    job = replace(JOB, **changes)
    return CorrectedSpace().list(job, CORRECTED.strategies["1d"], 8, RULES, constraints)


def test_a_listing_is_consistent():
    listing = _listing()
    c = listing.configurations
    assert (np.asarray(c.ranks) == 64).all()
    assert not np.any(broken_rules(JOB, c))
    assert (np.diff(listing.mesh_of) >= 0).all()
    assert rows_of(listing.placements) == listing.placement_count.sum()
    assert (np.asarray(listing.placements.domain_ranks) == 8).all()
    assert listing.candidates == listing.multiplicity.sum() + listing.rejected_rows
    assert sum(listing.rejected.values()) >= listing.rejected_rows > 0


def test_constraints_restrict_meshes_configurations_and_placements():
    listing = _listing(Constraint(column="tp", relation="=", value=4),
                       Constraint(column="micro_batch", relation="<", value=3),
                       Constraint(column="in_tp", relation=">=", value=2))  # fmt: skip
    assert set(np.asarray(listing.configurations.tp).tolist()) == {4}
    assert set(np.asarray(listing.configurations.micro_batch).tolist()) == {1, 2}
    assert set(np.asarray(listing.placements.in_tp).tolist()) == {2, 4}


def test_fixed_columns_may_leave_the_usual_choices():
    space = CorrectedSpace().fixed({"micro_batch": 5, "zero": 2, "vpp": 2, "tp": 4})
    assert (space.micro_batch, space.zero, space.vpp, space.recompute) == ((5,), (2,), (2,), (0, 2))


@pytest.mark.parametrize("habits", ["torchtitan", "ddp", "maxtext", "megatron-core"])
def test_stages_of_a_framework_leave_no_mesh_of_experts_out(habits):
    """Where nobody has the same weights all ZeRO stages are one plan, whichever of them a framework has."""
    job = replace(JOB, model=replace(MOE, experts=replace(MOE.experts, expert_ffn_hidden=1024)), gpus=8)
    columns = ("tp", "pp", "dp", "ep", "micro_batch", "recompute")
    listed = []
    for space in (CorrectedSpace(), CorrectedSpace().with_habits(habits_of(habits))):
        c = space.list(job, CORRECTED.strategies["1d"], 8, RULES).configurations
        listed.append({tuple(int(getattr(c, name)[i]) for name in columns) for i in range(rows_of(c))})
    assert (8, 1, 1, 8, 16, 0) in listed[1]
    assert listed[0] == listed[1]


def test_domains_that_devices_do_not_fill():
    """64 devices in domains of 72: everything inside; 128 devices: at most 64 of 72; 2304 fill 32 domains exactly."""
    space, strategy = CorrectedSpace(), CORRECTED.strategies["1d"]
    for gpus, inside in ((64, 64), (128, 64), (2304, 72)):
        meshes = space.meshes(replace(JOB, gpus=gpus), strategy)
        _, placements = space.placements(strategy, meshes, gpus, 72, nearer_is_faster=True)
        assert set(np.asarray(placements.domain_ranks).tolist()) == {inside}


def test_where_near_links_are_slower_every_placement_is_listed():
    space, strategy = CorrectedSpace(), CORRECTED.strategies["1d"]
    meshes = space.meshes(replace(JOB, gpus=8), strategy)
    listed = {near: space.placements(strategy, meshes, 8, 8, nearer_is_faster=near) for near in (True, False)}
    assert len(listed[True][0]) < len(listed[False][0])
    assert 1 in np.asarray(listed[False][1].domain_ranks)


def test_plans_are_columns():
    block = Plans(tp=np.array([1, 2, 4]), pp=2)
    assert (block.row(2).tp, block.row(2).pp, rows_of(block), rows_of(Plans())) == (4, 2, 3, 1)
    assert np.asarray(block.ranks).tolist() == [2, 4, 8]
    assert np.asarray(block.take([0, 2]).tp).tolist() == [1, 4]
