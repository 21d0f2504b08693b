"""Recipes as pins, and methods on one problem: what is reported is under one cost, and no method beats the bound."""

from __future__ import annotations

import importlib.util
from math import inf

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from torch import nn  # noqa: E402

from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.ops.placement import R, shard  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.sharding.local_search import Budget, Trace, descend, searched  # noqa: E402
from steptime.sharding.problem import Problem, total_s  # noqa: E402
from steptime.sharding.recipes import RECIPES, batch, inner_matrix, outer_batch, pins, spread, whole  # noqa: E402
from steptime_lab.planners import comparison  # noqa: E402
from steptime_lab.planners.comparison import Comparison, planners  # noqa: E402

QUICK = ("greedy", "local", "hierarchical", *RECIPES)


@pytest.fixture(scope="module")
def program() -> Program:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return capture(module, (torch.randn(32, 64),), optimizer="adamw", training=True, target="cuda",
                   loss=lambda y: y.square().mean())  # fmt: skip


@pytest.fixture(scope="module")
def found(program: Program) -> Comparison:
    return planners(
        program, "dgx-h100", gpus=4, mesh="2x2", methods=QUICK, cpu_s=1.0, memory_bytes=inf, framework="ideal"
    )


def test_rules_count_the_axes_that_are_as_asked() -> None:
    both, outer, inner = (shard(0), shard(0)), (shard(0), R), (R, shard(1))
    assert [batch(each, 2) for each in (both, outer, inner)] == [2, 1, 0]
    assert [outer_batch(each, 2) for each in (both, outer, inner)] == [1, 2, 0]
    assert [whole(each, 2) for each in (both, outer, inner)] == [0, 1, 1]
    assert [spread(each, 2) for each in (both, outer, inner)] == [2, 1, 1]
    assert [inner_matrix(each, 2) for each in (both, outer, inner)] == [1, 0, 2]


@pytest.mark.slow
def test_data_parallel_pins_inputs_and_weights(found: Comparison) -> None:
    given = found.plan.built
    allowed = pins(given, RECIPES["data parallel"])
    for number, item in enumerate(given.flow.items):
        if item.node.op in ("input", "parameter") and item.kind != "operator":
            want = (shard(0), shard(0)) if item.node.op == "input" else (R, R)
            assert [given.ways[number][option].outputs[0] for option in allowed[number]] == [want]
        else:
            assert number not in allowed


def test_no_method_beats_planner_or_bound(found: Comparison) -> None:
    planner, *others = found.entries
    assert planner.name == "planner" and [each.name for each in others] == list(QUICK)
    assert all(each.step_s is not None and each.step_s >= found.bound_s * (1 - 1e-9) for each in others)
    assert found.best_other is not None and found.plan.step_s <= (found.best_other.step_s or 0) * (1 + 1e-6)
    assert planner.step_s == pytest.approx(total_s(found.plan.built.problem(None), found.plan.choice), rel=1e-9)


def test_what_does_not_fit_is_said(program: Program) -> None:
    free = planners(program, "dgx-h100", gpus=4, mesh="4", methods=("data parallel",), cpu_s=1.0, memory_bytes=inf)
    limit = 0.6 * free.plan.memory_bytes.max()
    tight = planners(program, "dgx-h100", gpus=4, mesh="4", methods=("data parallel",), cpu_s=1.0, memory_bytes=limit)
    (entry,) = tight.entries[1:]
    assert entry.step_s is None and entry.stop == "does not fit"
    assert tight.plan.memory_bytes[1:].max() <= limit


def test_a_missing_package_is_said(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = planners(program, "dgx-h100", gpus=4, methods=("bayesian",), cpu_s=1.0, memory_bytes=inf)
    assert "steptime[learn]" in given.entries[1].stop and given.entries[1].step_s is None


def test_an_interruption_keeps_what_is_there(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "search", interrupted)
    given = planners(program, "dgx-h100", gpus=4, methods=("data parallel", "greedy", "local"), cpu_s=1.0)
    assert [each.name for each in given.entries] == ["planner", "data parallel", "greedy"]
    assert given.entries[-1].stop == "interrupted"


def test_searches_share_one_budget(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search leaves is for those after it; a recipe takes none of it."""
    given_s = []

    def noted(name: str, problem: Problem, budget: Budget, seed: int) -> Trace:
        given_s.append(budget.cpu_s)
        return searched(descend, problem, Budget(cpu_s=0.02), seed)

    monkeypatch.setattr(comparison, "search", noted)
    planners(program, "dgx-h100", gpus=4, methods=("greedy", "data parallel", "local", "mcmc"), cpu_s=9.0)
    assert given_s[0] == 3.0 and 4.0 < given_s[1] < 4.5 and 8.0 < given_s[2] < 9.0


def test_an_unknown_method_is_refused(program: Program) -> None:
    with pytest.raises(UserError, match="no method 'gredy'"):
        planners(program, "dgx-h100", gpus=4, methods=("gredy",))
