"""Random graphs: the recommended search is as cheap as all reachable graphs tell, no search is below them."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from test_rewrites_keep_results import WEIGHTS, N, graph  # noqa: E402

from rewritten import H100, traced  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.passes import MOVES  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.search.best_first import CLOSED, best_first  # noqa: E402
from steptime.rewrite.search.presets import SEARCHES, Run  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem, time_weights  # noqa: E402
from steptime.rewrite.search.space import Space, operators  # noqa: E402

CLOSING = 1500
"""Graphs up to which a set is closed here; larger ones are left out."""


def problem(seed):
    flow = traced(graph(seed), torch.randn(N, N), torch.randn(N, N), target="cuda", **WEIGHTS).flow
    moves = tuple(row for row in MOVES if not row.trades_memory)
    prices = Prices(FusedTimer(device=H100))
    cost = CostModel(prices=prices, weights=time_weights(prices, flow))
    return Problem(flow=flow, moves=moves, cost=cost, on_cuda=True)


def run(name, given, **options):
    return SEARCHES[name](Run(problem=given, **options))


def exhaustive(given):
    return best_first(given, alpha=float("inf"), budget=CLOSING)


@pytest.mark.quick("3")
@pytest.mark.parametrize("block", range(4))
def test_recommended_is_proved_best_on_small_graphs(block):
    closed = 0
    for seed in range(12 * block, 12 * block + 12):
        given = problem(seed)
        if operators(given.flow) > 20:
            continue
        best = exhaustive(given)
        if best.stop != CLOSED:
            continue
        closed += 1
        assert run("recommended", given).cost == pytest.approx(best.cost, rel=1e-9)
        parts = run("recommended", given, small=0)
        assert best.cost * (1 - 1e-9) <= parts.cost <= best.cost * 1.02
        for other in (run("taso", given, budget=50), run("metaflow", given, budget=50, part=8)):
            assert other.cost >= best.cost * (1 - 1e-9)
        assert check(given.flow, best.flow, seeds=1).passed
        assert check(given.flow, parts.flow, seeds=1).passed
    assert closed >= 8


@pytest.mark.parametrize("seed", range(6))
def test_tidying_at_once_loses_nothing(seed):
    """The set with tidy moves one by one has the same cheapest graph."""
    given = problem(seed)
    single = replace(given, moves=tuple(replace(row, tidy=False) for row in given.moves))
    apart, at_once = exhaustive(single), exhaustive(given)
    if apart.stop == at_once.stop == CLOSED:
        assert at_once.cost == pytest.approx(apart.cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_price_of_a_candidate_is_that_of_the_graph_that_it_makes(seed):
    given = problem(seed)
    space = Space(problem=replace(given, moves=tuple(row for row in given.moves if not row.tidy)))
    for each in space.candidates(given.flow, given.start):
        made = space.applied(given.flow, *each.matches)
        if made is not None:
            assert each.cost == pytest.approx(given.cost.of_graph(made), rel=0.05)
