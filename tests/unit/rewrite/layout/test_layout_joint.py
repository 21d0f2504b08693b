"""Layouts and substitutions together: better than either alone, and why better than one after the other."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from layout_cases import cost_model  # noqa: E402
from rewritten import ops  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.layout.joint import best_first, compared, joint  # noqa: E402
from steptime.rewrite.layout.model import layout_cost, layouts_under  # noqa: E402
from steptime.rewrite.passes import PASSES  # noqa: E402
from steptime.rewrite.search.problem import Problem  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

V100 = device_within("v100-sxm2-16gb")
EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(scope="module")
def problem_of():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import transposed
    finally:
        sys.path.remove(str(EXAMPLES))

    def make(name):
        flow = trace(*getattr(transposed, name)(), target="cuda").flow
        return Problem(flow=flow, moves=PASSES, cost=cost_model(flow, V100), on_cuda=True)

    return make


@pytest.mark.parametrize("name", ["taso", "bert", "patches"])
def test_both_together_beat_either_alone(problem_of, name):
    problem = problem_of(name)
    found = compared(problem)
    cost = {key: each.cost for key, each in found.items()}
    assert cost["joint"] < min(cost["substitutions only"], cost["layouts only"]) < cost["as given"]
    assert cost["joint"] <= cost["substitutions, then layouts"] * (1 + 1e-9)
    assert cost["joint"] <= cost["layouts, then substitutions"] * (1 + 1e-9)
    for each in found.values():
        assert check(problem.flow, each.flow).passed
        assert each.bound <= each.cost


def test_four_copies_of_tasos_attention_go_and_four_products_stay(problem_of):
    found = compared(problem_of("taso"))
    assert ops(found["as given"].flow).count("clone") == ops(found["substitutions only"].flow).count("clone") == 4
    assert ops(found["joint"].flow) == ["mm", "bmm", "bmm", "mm"]


def test_one_after_the_other_loses_a_merge_or_a_pattern_that_both_together_have(problem_of):
    """A copy between a tensor and its readers keeps them from merging until layouts leave it out; layouts that come
    first take the transposes away that the pattern of attention looks for."""
    found = compared(problem_of("patches"))
    later = found["substitutions, then layouts"], found["layouts, then substitutions"]
    assert all(found["joint"].cost < each.cost * 0.95 for each in later)
    products = {key: ops(each.flow).count("mm") for key, each in found.items()}
    fused = {key: any("attention" in op for op in ops(each.flow)) for key, each in found.items()}
    assert products["joint"] == products["substitutions, then layouts"] - 1
    assert fused["joint"] and not fused["layouts, then substitutions"]


def test_the_bound_is_the_cost_where_every_graph_was_priced(problem_of):
    problem = problem_of("taso")
    whole = joint(problem, alpha=float("inf"), budget=10_000)
    assert whole.bound == pytest.approx(whole.cost) == pytest.approx(joint(problem).cost)
    assert joint(problem, budget=2).bound == 0.0


def test_a_cost_that_is_asked_again_is_not_solved_again(problem_of):
    problem = problem_of("bert")
    first = layout_cost(problem.flow, problem.cost)
    memo = layouts_under(problem.cost).memo
    solved = memo.trees + memo.programs
    assert layout_cost(problem.flow, problem.cost) == first
    assert memo.trees + memo.programs == solved
    searched = best_first(problem, lambda flow: layout_cost(flow, problem.cost), PASSES)
    assert searched.cost <= first
