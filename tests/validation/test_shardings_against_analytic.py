"""Fixed to the analytic plan's shardings, the problem has its step time within 3 %.

In fp32 both have the same optimiser. A module in bf16 has its states in bf16 and no fp32 copy of the weights, as the
estimate has one: there the steps agree with the optimiser of one of them."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

import steptime.api as api
from steptime.captured.cost import Timer
from steptime.hardware import load_cluster
from steptime.sharding.build import built
from steptime.sharding.flow import flow_of
from steptime.sharding.mesh import mesh_on
from steptime.sharding.planner import planned
from steptime.sharding.shard import captured_step
from steptime_lab.planners.analytic import analytic

MODEL = f"{Path(__file__).parents[1] / 'models' / 'megatron.py'}:gpt3_1_3b"
OF_PASSES = ("compute", "memory_bound", "tp_comm")


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("dgx-h100")


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def flow(cluster, dtype):
    return flow_of(captured_step(MODEL, cluster, batch=8, dtype=dtype, optimizer="adamw-fused"))


@pytest.mark.quick("fp32-1-8")
@pytest.mark.parametrize(("tp", "dp"), [(8, 1), (2, 4), (1, 8)])
def test_the_analytic_plan_and_the_problem_of_shardings_agree(cluster, flow, dtype, tp, dp):
    axes = {name: size for name, size in (("data", dp), ("model", tp)) if size > 1}
    problem = built(flow, mesh_on(cluster, axes), Timer(device=cluster.device), inf)
    names = list(axes)
    fixed = analytic(
        problem,
        data=names.index("data") if dp > 1 else None,
        tensor=names.index("model") if tp > 1 else None,
    )
    found = planned(fixed, seconds=30)
    plan = {"micro_batch": 8 // dp, "tp": tp, "dp": dp, "pp": 1, "sp": False, "zero": 0}
    job = {"gpus": 8, "global_batch": 8, "framework": "ideal", "dtype": dtype, "optimizer": "adamw"}
    estimate = api.estimate(MODEL, "dgx-h100", plan=plan, **job)
    computing_s, _, others_s = found.parts_s
    updates = [n for n, item in enumerate(flow.items) if item.kind == "update"]
    update_s = sum(float(problem.seconds.inside[n][found.choice[n]]) for n in updates)
    passes_s = sum(s for path, s in estimate.time.items() if path.split("/")[0] in OF_PASSES)
    assert computing_s + others_s - update_s == pytest.approx(passes_s, rel=0.01)
    optimizer_s = estimate.time["optimizer/memory_bound_s"]
    assert found.step_s - update_s + optimizer_s == pytest.approx(estimate.step_time_s, rel=0.03)
    assert dtype == "bf16" or found.step_s == pytest.approx(estimate.step_time_s, rel=0.03)
    assert str(found.parameters["blocks.2.up.weight"][-1]) == ("S(0)" if tp > 1 else "R")
    # The shardings really are fixed: most operators have one option left.
    left = [
        int(np.isfinite(each).sum())
        for each, item in zip(fixed.seconds.inside, flow.items, strict=True)
        if item.kind != "copy"
    ]
    assert sum(n > 1 for n in left) < len(left) / 4
