"""The exact solver and the reductions against trying every choice."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from sharding_problems import every_choice, least_peak_bytes, least_total_s, random_problem

from steptime.errors import UserError
from steptime.sharding.ilp import _Search, least_memory, solve
from steptime.sharding.local_search import Budget
from steptime.sharding.presolve import Conflict, Reduction, presolve
from steptime.sharding.problem import (
    Edge,
    Moment,
    Node,
    Problem,
    delta_s,
    feasible,
    memories_bytes,
    memory_bytes,
    pinned,
    total_s,
    totals_s,
)
from steptime.sharding.relaxation import classes_of, marginals_s, model_of, run
from steptime.units import format_bytes
from steptime_lab.planners.searches import search
from synthetic_shardings import transformer


@pytest.mark.slow
def test_the_solver_finds_the_optimum_of_300_problems():
    outcomes = set()
    for seed in range(300):
        problem = random_problem(seed)
        best, found = least_total_s(problem), solve(problem, gap=0.0)
        outcomes.add((problem.limited, found.stop.reason))
        if not math.isfinite(best):
            assert found.choice is None and found.stop.reason == "infeasible", seed
            continue
        assert found.choice is not None and feasible(problem, found.choice), seed
        assert found.total_s == total_s(problem, found.choice) == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        assert found.bound_s <= found.total_s and found.relaxation_s <= best * (1 + 1e-9) + 1e-12, seed
        assert found.gap <= 1e-8, seed
    assert {(True, "proved_optimal"), (True, "exhausted"), (True, "infeasible"), (False, "infeasible")} <= outcomes


def test_without_reductions_the_model_alone_has_the_optimum():
    for seed in range(60):
        problem = random_problem(seed)
        answer, best = run(model_of(problem), binaries=True, gap=0.0, limit_s=60), least_total_s(problem)
        assert (
            answer.value_s == pytest.approx(best, rel=1e-7, abs=1e-9)
            if math.isfinite(best)
            else answer.status == "infeasible"
        )


def test_branch_and_bound_over_reduced_costs_keeps_the_optimum():
    stages = 0
    for seed in range(200):
        problem = random_problem(seed, memory=True)
        reduction = presolve(problem)
        if isinstance(reduction, Conflict) or not reduction.problem.nodes:
            continue
        stage = _Search(reduction, 0.0, 60.0)
        answer = stage.relax()
        if answer is None:
            continue
        floor = marginals_s(stage.problem, stage.model, answer.duals_s) + stage.bound
        choices = every_choice(stage.problem)
        totals = np.where(
            (memories_bytes(stage.problem, choices) <= problem.limit_bytes).all(axis=1),
            totals_s(stage.problem, choices),
            np.inf,
        )
        for node, start in enumerate(stage.model.starts[:-1]):
            for option in range(stage.problem.sizes[node]):
                assert floor[start + option] <= totals[choices[:, node] == option].min() + 1e-9, seed
        stage.improve(answer)
        stages += 1
        assert stage.total == pytest.approx(totals.min(), rel=1e-9, abs=1e-12), seed
    assert stages > 20


def test_reductions_keep_the_optimum_and_lead_back_to_it():
    for seed in range(300, 600):
        problem = random_problem(seed)
        best, reduction = least_total_s(problem), presolve(problem)
        if isinstance(reduction, Conflict):
            assert not math.isfinite(best), seed
            continue
        small = reduction.problem
        choices = every_choice(small) if small.nodes else np.zeros((1, 0), int)
        fits = (memories_bytes(small, choices) <= small.limit_bytes * (1 + 1e-9)).all(axis=1)
        totals = np.where(fits, totals_s(small, choices), np.inf) + reduction.constant_s
        if not math.isfinite(best):
            assert not np.isfinite(totals).any(), seed
            continue
        assert totals.min() == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        back = reduction.recover(choices[totals.argmin()])
        assert total_s(problem, back) == pytest.approx(best, rel=1e-9, abs=1e-12) and feasible(problem, back), seed


def test_without_memory_trees_are_solved_by_reductions_alone():
    rng = np.random.default_rng(0)
    for _ in range(20):
        nodes = tuple(Node(name=f"n{at}", cost_s=rng.random(4)) for at in range(8))
        edges = tuple(Edge(u=int(rng.integers(at)), v=at, cost_s=rng.random((4, 4))) for at in range(1, 8))
        problem = Problem(nodes=nodes, edges=edges)
        reduction = presolve(problem)
        assert isinstance(reduction, Reduction) and not reduction.problem.nodes
        assert reduction.constant_s == pytest.approx(least_total_s(problem))


def test_where_memory_is_too_small_the_least_limit_is_told():
    told = 0
    for seed in range(150):
        problem = random_problem(seed, memory=True)
        found = solve(problem, gap=0.0)
        if found.stop.reason != "infeasible":
            assert found.least_limit_bytes is None
            continue
        least = least_peak_bytes(problem)
        if not math.isfinite(least):
            assert found.least_limit_bytes is None, seed
            continue
        told += 1
        assert found.least_limit_bytes == pytest.approx(least) and format_bytes(least) in found.stop.because, seed
        enough = Problem(nodes=problem.nodes, edges=problem.edges, moments=problem.moments, limit_bytes=least)
        assert solve(enough, gap=0.0).choice is not None, seed
    assert told > 10


def test_the_least_memory_is_the_least_peak_of_all_choices():
    searched = set()
    for seed in range(150):
        problem = random_problem(seed, memory=True)
        least, found = least_peak_bytes(problem), least_memory(problem)
        if not math.isfinite(least):
            assert found is None, seed
            continue
        assert found is not None and found.proved and found.peak_bytes == pytest.approx(least), seed
        assert found.bound_bytes <= least * (1 + 1e-9) and math.isfinite(total_s(problem, found.choice)), seed
        sizes = memory_bytes(problem, found.choice)
        assert sizes[found.moment] == max(sizes.values()) == found.peak_bytes, seed
        hasty = least_memory(problem, time_limit_s=0.0)
        assert hasty is None or hasty.bound_bytes <= least * (1 + 1e-9) <= hasty.peak_bytes * (1 + 2e-9), seed
        searched.add(hasty is not None and hasty.proved)
    assert searched == {True, False}


@pytest.mark.slow
def test_without_time_there_is_a_choice_that_fits():
    for memory in (None, 0.1, 0.05):
        problem = transformer((1.0, 1.0), memory=memory)
        found = solve(problem, time_limit_s=0.0)
        assert found.choice is not None and feasible(problem, found.choice) and found.stop.reason == "time_limit"
        assert found.bound_s <= solve(problem).total_s <= found.total_s


def test_changes_and_sums_agree():
    for seed in range(40):
        problem = random_problem(seed)
        rng = np.random.default_rng(seed)
        choice = rng.integers(0, problem.sizes)
        by_hand = sum(node.cost_s[o] for node, o in zip(problem.nodes, choice, strict=True))
        by_hand += sum(edge.cost_s[choice[edge.u], choice[edge.v]] for edge in problem.edges)
        assert total_s(problem, choice) == pytest.approx(by_hand)
        for moment in problem.moments:
            size = moment.fixed_bytes + sum(taken[choice[v]] for v, taken in moment.entries)
            assert memory_bytes(problem, choice)[moment.name] == pytest.approx(size)
        node = int(rng.integers(len(choice)))
        option = int(rng.integers(problem.sizes[node]))
        other = np.where(np.arange(len(choice)) == node, option, choice)
        if math.isfinite(total_s(problem, choice)) and math.isfinite(total_s(problem, other)):
            change = total_s(problem, other) - total_s(problem, choice)
            assert delta_s(problem, choice, node, option) == pytest.approx(change, abs=1e-12)


def pair(a: list[float], b: list[float], matrix: list[list[float]]) -> Problem:
    nodes = (Node(name="a", cost_s=np.array(a)), Node(name="b", cost_s=np.array(b)))
    return Problem(nodes=nodes, edges=(Edge(u=0, v=1, cost_s=np.array(matrix)),))


def test_degenerate_problems():
    assert solve(Problem(nodes=())).choice == () and solve(Problem(nodes=())).total_s == 0.0
    one = solve(Problem(nodes=(Node(name="a", cost_s=np.array([3.0, 2.0])),)))
    assert (one.choice, one.total_s, one.bound_s, one.gap) == ((1,), 2.0, 2.0, 0.0)
    apart = solve(Problem(nodes=tuple(Node(name=name, cost_s=np.array([2.0, 1.0])) for name in "abc")))
    assert apart.choice == (1, 1, 1)
    huge = pair([1e15, 1e15 + 2], [1e15 + 2, 1e15], [[0, 1], [4, 0]])
    assert solve(huge, gap=0.0).choice == (0, 1)
    ties = pair([1, 1, 1], [1, 1, 1], [[0] * 3] * 3)
    assert {solve(ties).choice for _ in range(3)} == {(0, 0)}
    zero = solve(pair([0, 0], [0, 0], [[0, 0], [0, 0]]), gap=0.0)
    assert (zero.total_s, zero.gap, zero.stop.reason) == (0.0, 0.0, "exhausted")


def test_the_same_problem_has_the_same_answer():
    for seed in range(20):
        problem = random_problem(seed, memory=True)
        assert solve(problem).choice == solve(problem).choice


def test_contradictions_name_what_contradicts():
    with pytest.raises(UserError, match="gelu: none of its 2 options is legal"):
        Problem(nodes=(Node(name="gelu", cost_s=np.array([np.inf, np.inf])),))
    with pytest.raises(UserError, match="a: fixed to option"):
        pinned(pair([1, 2], [1, 2], [[0, 0], [0, 0]]), {"a": [5]})
    with pytest.raises(UserError, match="no node 'c'"):
        pinned(pair([1, 2], [1, 2], [[0, 0], [0, 0]]), {"c": [0]})
    found = solve(pair([1, 2], [1, np.inf], [[np.inf, 0], [np.inf, 0]]))
    assert found.stop.reason == "infeasible" and "b" in found.stop.because and found.least_limit_bytes is None


def test_pins_hold():
    problem = pair([1, 2], [1, 2], [[0, 0], [0, 0]])
    assert solve(pinned(problem, {"a": [1]})).choice == (1, 0)


def test_a_limit_that_is_met_exactly_is_met():
    nodes = tuple(Node(name=name, cost_s=np.array([1.0, 2.0])) for name in "ab")
    moments = (Moment(name="end", entries=((0, np.array([3e9, 1e9])), (1, np.array([3e9, 1e9]))), fixed_bytes=1e9),)
    for limit, total in ((7e9, 2.0), (7e9 - 1e3, 3.0), (5e9, 3.0), (5e9 - 1e3, 4.0), (3e9, 4.0)):
        problem = Problem(nodes=nodes, moments=moments, limit_bytes=limit)
        assert solve(problem, gap=0.0).total_s == total, limit


def test_a_start_is_the_answer_when_there_is_no_time():
    problem = random_problem(5, memory=False)
    best = solve(problem, gap=0.0)
    assert best.choice is not None
    assert solve(problem, start=best.choice, time_limit_s=0.0).total_s <= best.total_s


@pytest.mark.slow
def test_an_interrupted_relaxation_leaves_the_start(monkeypatch):
    class Impatient(threading.Thread):
        """The first wait for the solver is broken off as by Ctrl-C."""

        asked = 0

        def join(self, timeout=None):
            Impatient.asked += 1
            if Impatient.asked == 1:
                raise KeyboardInterrupt
            super().join(timeout)

    problem = transformer((1.0, 1.0), memory=0.1)
    start = solve(problem).choice
    monkeypatch.setattr(threading, "Thread", Impatient)
    found = solve(problem, start=start)
    assert Impatient.asked > 1 and found.choice == start and found.bound_s <= found.total_s
    assert found.stop.reason == "interrupted"


@pytest.mark.slow
def test_a_block_of_a_transformer_is_solved_within_the_gap():
    for weights, memory in (((1.0,), None), ((1.0,), 0.1), ((1.0, 94.0, 1.0), 0.1)):
        problem = transformer(weights, memory=memory)
        found = solve(problem)
        assert found.choice is not None and feasible(problem, found.choice) and found.gap <= 0.01
        assert found.stop.reason == "proved_optimal" and found.relaxation_s <= found.bound_s


@pytest.mark.slow
def test_a_start_near_the_optimum_meets_the_gap():
    problem = transformer((1.0, 94.0, 1.0), memory=0.1)
    start = search("local", problem, Budget(cpu_s=60.0, evaluations=100_000)).choice
    assert start is not None
    near, nearer = solve(problem, start=start, gap=0.1), solve(problem, start=start, gap=0.01)
    # Such a start is taken as it is where the relaxation proves it near enough, and improved where not.
    assert near.choice == start and near.stop.reason == "proved_optimal" and near.gap <= 0.1
    assert nearer.total_s < near.total_s and nearer.gap <= 0.01


def test_rows_that_differ_by_a_constant_are_one_class():
    row, column, rest, of_row, of_column = classes_of(
        np.array([[1.0, 3.0, np.inf], [5.0, 7.0, np.inf], [0.0, 9.0, 0.0]])
    )
    assert of_row[0] == of_row[1] != of_row[2] and rest.shape == (2, 3)
    back = row[:, None] + column + rest[np.ix_(of_row, of_column)]
    assert np.array_equal(back, [[1.0, 3.0, np.inf], [5.0, 7.0, np.inf], [0.0, 9.0, 0.0]])
