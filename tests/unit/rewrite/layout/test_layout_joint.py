"""Layouts and substitutions together: better than either alone, and why better than one after the other."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from layout_cases import cost_model  # noqa: E402
from rewritten import ops  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.layout.joint import with_layouts_priced  # noqa: E402
from steptime.rewrite.layout.laid import with_layouts  # noqa: E402
from steptime.rewrite.layout.model import Layouts  # noqa: E402
from steptime.rewrite.passes import PASSES  # noqa: E402
from steptime.rewrite.search.best_first import best_first  # noqa: E402
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


def laid(problem, flow):
    found = with_layouts(flow, problem.cost)
    return found.flow, found.cost


def substituted(problem):
    """Substitutions alone, every value as it is recorded."""
    return best_first(with_layouts_priced(problem, fixed=True), together=True)


def joint(problem, **options):
    found = best_first(with_layouts_priced(problem), **{"together": True} | options)
    return found, laid(problem, found.flow)


def compared(problem):
    """Graph and cost: either alone, one after the other in both orders, and both together."""
    given = Layouts.under(problem.cost).cost(problem.flow, fixed=True)
    alone, first = substituted(problem), laid(problem, problem.flow)
    after = substituted(replace(problem, flow=first[0]))
    return {
        "as given": (problem.flow, given),
        "substitutions only": (alone.flow, alone.cost),
        "layouts only": first,
        "substitutions, then layouts": laid(problem, alone.flow),
        "layouts, then substitutions": (after.flow, after.cost),
        "joint": joint(problem)[1],
    }


@pytest.mark.quick("taso")
@pytest.mark.parametrize("name", ["taso", "bert", "patches"])
def test_both_together_beat_either_alone(problem_of, name):
    problem = problem_of(name)
    found = compared(problem)
    cost = {key: cost for key, (_, cost) in found.items()}
    assert cost["joint"] < min(cost["substitutions only"], cost["layouts only"]) < cost["as given"]
    assert cost["joint"] <= cost["substitutions, then layouts"] * (1 + 1e-9)
    assert cost["joint"] <= cost["layouts, then substitutions"] * (1 + 1e-9)
    for flow, _ in found.values():
        assert check(problem.flow, flow).passed


def test_four_copies_of_tasos_attention_go_and_four_products_stay(problem_of):
    found = compared(problem_of("taso"))
    assert ops(found["as given"][0]).count("clone") == ops(found["substitutions only"][0]).count("clone") == 4
    assert ops(found["joint"][0]) == ["mm", "bmm", "bmm", "mm"]


def test_one_after_the_other_loses_a_merge_or_a_pattern_that_both_together_have(problem_of):
    """A copy between a tensor and its readers keeps them from merging until layouts leave it out; layouts that come
    first take the transposes away that the pattern of attention looks for."""
    found = compared(problem_of("patches"))
    later = found["substitutions, then layouts"], found["layouts, then substitutions"]
    assert all(found["joint"][1] < cost * 0.95 for _, cost in later)
    products = {key: ops(flow).count("mm") for key, (flow, _) in found.items()}
    fused = {key: any("attention" in op for op in ops(flow)) for key, (flow, _) in found.items()}
    assert products["joint"] == products["substitutions, then layouts"] - 1
    assert fused["joint"] and not fused["layouts, then substitutions"]


def test_the_bound_is_the_cost_where_every_graph_was_priced(problem_of):
    problem = problem_of("taso")
    whole, _ = joint(problem, alpha=float("inf"), budget=10_000, together=False)
    assert whole.bound == pytest.approx(whole.cost) == pytest.approx(joint(problem)[0].cost)
    assert joint(problem, budget=2)[0].bound is None


def test_a_cost_that_is_asked_again_is_not_solved_again(problem_of, monkeypatch):
    problem = problem_of("bert")
    owner = Layouts.under(problem.cost)
    first = owner.cost(problem.flow)
    monkeypatch.setattr("steptime.rewrite.layout.model.solve", None)
    assert owner.cost(problem.flow) == first
