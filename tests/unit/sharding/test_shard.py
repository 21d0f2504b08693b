"""What the planner finds for modules of which the best shardings are known, and what its costs and memory mean."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt  # noqa: E402
from torch import nn  # noqa: E402

from steptime.captured.cost import Timer, cost_table  # noqa: E402
from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.ops.placement import shard  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import Built, built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.ilp import least_memory  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import memory_of, planned  # noqa: E402
from steptime.sharding.problem import total_s  # noqa: E402
from steptime.sharding.recipes import followed  # noqa: E402

MACHINES = load_cluster("dgx-h100")
TIMER = Timer(device=MACHINES.device)


@cache
def block(batch: int, tokens: int) -> Program:
    """A GPT of one block."""
    module = gpt.GPT(1, 256, 4, 512, tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return capture(module, (ids,), loss=gpt.loss, optimizer="adamw", training=True, target="cuda")


def on(program: Program, axes: str = "4", devices: int = 4, limit_bytes: float = inf) -> Built:
    return built(flow_of(program), mesh_on(MACHINES, parse_axes(axes), devices), TIMER, limit_bytes)


def test_without_a_limit_a_block_is_data_parallel() -> None:
    given = on(block(64, 256))
    plan = planned(given, overlaps=False, gap=1e-6)
    parallel, why = followed("data parallel", plan.built, plan.built.problem(None))
    assert parallel is not None, why
    assert plan.bound_s * (1 - 1e-9) <= plan.step_s <= parallel.total_s * (1 + 1e-9)
    assert {str(each) for sharding in plan.parameters.values() for each in sharding} == {"R"}
    (tokens,) = [n for n, item in enumerate(given.flow.items) if item.node.op == "input"]
    assert plan.sharding_of(tokens) == (shard(0),)


@pytest.mark.slow
def test_with_a_tight_limit_parameters_are_sharded_and_every_call_fits() -> None:
    free = on(block(4, 64))
    found = least_memory(free.problem(None))
    assert found is not None
    limit = 1.15 * found.peak_bytes
    plan = planned(replace(free, limit_bytes=limit), overlaps=False)
    assert memory_of(plan.built, plan.choice)[1:].max() <= limit * (1 + 1e-9)
    assert memory_of(free, np.zeros(len(free.flow.items), int))[1:].max() > limit
    assert any(not each.replicated for sharding in plan.parameters.values() for each in sharding)


def test_one_long_sequence_is_sharded_by_tokens() -> None:
    given = on(block(1, 16384))
    plan = planned(given, overlaps=False, gap=1e-6)
    attention = [
        n for n, item in enumerate(given.flow.items)
        if "attention" in item.node.op and item.phase == "forward" and item.kind == "operator"
    ]  # fmt: skip
    assert attention
    widths = [n for n, item in enumerate(given.flow.items) if item.name.startswith("blocks.0.norm_1: ")]
    assert any(plan.sharding_of(n) == (shard(1),) for n in widths)


def test_a_wide_resnet_is_never_slower_than_data_or_filter_parallel() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1), nn.BatchNorm2d(512), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 64),
    )  # fmt: skip
    program = capture(module, (torch.randn(8, 3, 8, 8),), optimizer="adamw", training=True, target="cuda",
                      loss=lambda y: y.square().mean())  # fmt: skip
    plan = planned(on(program, "2x4", 8), overlaps=False, gap=1e-6)
    problem = plan.built.problem(None)
    for name in ("data parallel", "filter parallel"):
        found, why = followed(name, plan.built, problem)
        assert found is not None, why
        assert plan.step_s <= found.total_s * (1 + 1e-9), name


def test_everything_replicated_is_one_device() -> None:
    program = block(4, 64)
    given = on(program)
    choice = np.zeros(len(given.flow.items), int)
    computing, data, others = given.parts_s(choice)
    seconds = cost_table(program, TIMER).seconds
    optimizing = np.array([call.phase == "optimizer" for call in program.calls])
    assert computing == pytest.approx(seconds[~optimizing].sum(), rel=1e-9)
    assert data == 0.0 and others == pytest.approx(seconds[optimizing].sum(), rel=1e-9)
    assert total_s(given.problem(None), choice) == pytest.approx(seconds.sum(), rel=1e-9)
    assert memory_of(given, choice).tolist() == Liveness(program).in_use_bytes.tolist()


def test_the_bound_of_the_overlap_holds() -> None:
    given = on(block(4, 64), "2x2")
    plan = planned(given)
    low, high = plan.bracket_s
    assert plan.bound_s <= plan.step_s * (1 + 1e-9)
    assert low <= plan.step_s <= high
    for name in ("data parallel", "zero-1"):
        found, _ = followed(name, given, given.problem(None))
        assert found is not None and found.choice is not None
        computing, data, others = given.parts_s(np.asarray(found.choice))
        assert others + max(computing, data) >= plan.bound_s * (1 - 1e-9), name
