"""The exact solver of graphs is right on graphs solved by hand, and is the oracle of the chain solver."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from steptime.captured.rematerialisation.chain import Chain, Kind, Schedule, Segment
from steptime.captured.rematerialisation.checkmate import NoSchedule, ProvedOptimal, TimeLimit, solve_dag
from steptime.captured.rematerialisation.dag import Dag, DagStage, Node, dag_of, simulate_dag
from steptime.captured.rematerialisation.rotor import Infeasible, Solution, fill, front
from steptime.captured.rematerialisation.simulate import ScheduleError
from steptime.errors import FieldError, UserError

# a -> b -> c -> d, and d reads a again: keeping a costs 8 bytes, making it again 3 s.
SKIP = Dag(
    nodes=(
        Node(time_s=3, result_bytes=8),
        Node(time_s=1, result_bytes=2, reads=(0,)),
        Node(time_s=1, result_bytes=9, reads=(1,)),
        Node(time_s=1, result_bytes=1, reads=(2,)),
        Node(time_s=1, result_bytes=1, reads=(0, 3)),
    )
)


def test_a_result_is_made_again_where_keeping_it_does_not_fit():
    # Kept, 8 + 2 + 9 bytes live while c runs; made again after d, 2 + 9 while c and 8 + 2 while b runs.
    kept, again, none = solve_dag(SKIP, 19), solve_dag(SKIP, 18), solve_dag(SKIP, 10)
    assert isinstance(kept.stop, ProvedOptimal)
    assert isinstance(again.stop, ProvedOptimal)
    assert (kept.run.time_s, kept.run.peak_bytes) == (7, 19)
    assert (again.run.time_s, again.run.peak_bytes, again.run.runs) == (10, 11, (2, 1, 1, 1, 1))
    assert none.stop == NoSchedule(limit_bytes=10)
    assert none.run is None
    assert solve_dag(SKIP, np.inf).run.time_s == 7


def test_a_by_product_counts_only_where_it_is_made():
    nodes = (
        Node(time_s=2, result_bytes=4, transient_bytes=6),
        Node(time_s=0, result_bytes=5, reads=(0,), by_product=True, transient_bytes=1),
        Node(time_s=1, result_bytes=1, reads=(1,), once=True),
    )
    with_it = (DagStage(runs=(0, 1)), DagStage(runs=(2,), kept=frozenset({1})))
    later = (DagStage(runs=(0,)), DagStage(runs=(0, 1, 2)))
    assert simulate_dag(Dag(nodes=nodes), with_it).peak_bytes == 4 + 5 + 1
    assert simulate_dag(Dag(nodes=nodes, constant_bytes=3), later).peak_bytes == 3 + 4 + 6
    assert solve_dag(Dag(nodes=nodes), 10).run.time_s == 3


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((DagStage(runs=(0,)),), "has 1 stages"),
        ((DagStage(runs=(0,)), DagStage(runs=(1,))), r"reads \[0\]"),
        ((DagStage(runs=(0,)), DagStage(runs=(0,), kept=frozenset({0}))), "does not run node 1"),
        ((DagStage(runs=(0,)), DagStage(runs=(0, 1), kept=frozenset({1}))), r"keeps \[1\], which"),
        ((DagStage(runs=(0,)), DagStage(runs=(1, 0))), "not in order"),
    ],
)
def test_an_illegal_schedule_of_a_graph_is_refused(stages, problem):
    two = Dag(nodes=(Node(time_s=1, result_bytes=4), Node(time_s=2, result_bytes=3, reads=(0,))))
    with pytest.raises(ScheduleError, match=problem):
        simulate_dag(two, stages)


def test_what_runs_once_is_refused_in_another_stage():
    nodes = (Node(time_s=1, result_bytes=4, once=True), Node(time_s=1, result_bytes=3, reads=(0,)))
    with pytest.raises(ScheduleError, match="runs once"):
        simulate_dag(Dag(nodes=nodes), (DagStage(runs=(0,)), DagStage(runs=(0, 1))))


def test_what_holds_others_is_not_kept_without_them():
    nodes = (
        Node(time_s=1, result_bytes=4),
        Node(time_s=1, result_bytes=1, reads=(0,), holds=(0,)),
        Node(time_s=1, result_bytes=9),
        Node(time_s=1, result_bytes=1, reads=(1, 2), once=True),
    )
    alone = (
        DagStage(runs=(0,)), DagStage(runs=(1,), kept=frozenset({0})), DagStage(runs=(2,), kept=frozenset({1})),
        DagStage(runs=(3,), kept=frozenset({1, 2})),
    )  # fmt: skip
    with pytest.raises(ScheduleError, match="without the results that they hold"):
        simulate_dag(Dag(nodes=nodes), alone)
    assert solve_dag(Dag(nodes=nodes), 15).run.time_s == 4
    assert solve_dag(Dag(nodes=nodes), 12).run.time_s == 7
    loose = (nodes[0], replace(nodes[1], holds=()), *nodes[2:])
    assert solve_dag(Dag(nodes=loose), 12).run.time_s == 4


def test_a_graph_that_is_none_is_refused():
    with pytest.raises(FieldError, match="nodes"):
        Dag(nodes=())
    with pytest.raises(FieldError, match=r"nodes\[0\].reads"):
        Dag(nodes=(Node(time_s=1, result_bytes=1, reads=(0,)),))
    with pytest.raises(FieldError, match="result_bytes"):
        Node(time_s=1, result_bytes=-1)
    for wrong in ({"time_limit_s": 0}, {"gap": -1}):
        with pytest.raises(FieldError):
            solve_dag(SKIP, 19, **wrong)


def test_without_scipy_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"steptime\[calibrate\]"):
        solve_dag(SKIP, 19)


# ---- the oracle of the chain solver ----


def even(count: int, *, seed: int, x: int, saved: int, gradient: int) -> Chain:
    """Sizes of one kind are equal and there are no transients; times differ."""
    draw = np.random.default_rng(seed).integers
    return Chain(
        segments=tuple(
            Segment(
                forward_s=int(draw(1, 6)), backward_s=int(draw(1, 6)), input_bytes=x, saved_bytes=saved,
                gradient_bytes=gradient,
            )
            for _ in range(count)
        ),
        output_bytes=x, output_gradient_bytes=gradient,
    )  # fmt: skip


def uneven(count: int, seed: int) -> Chain:
    draw = np.random.default_rng(seed).integers
    return Chain(
        segments=tuple(
            Segment(
                forward_s=int(draw(1, 6)), backward_s=int(draw(1, 6)), input_bytes=int(draw(1, 5)),
                saved_bytes=int(draw(0, 9)), gradient_bytes=int(draw(0, 4)), forward_transient_bytes=int(draw(0, 5)),
                saving_transient_bytes=int(draw(0, 4)), backward_transient_bytes=int(draw(0, 5)),
                output_in_backward=bool(draw(2)),
            )
            for _ in range(count)
        ),
        output_bytes=int(draw(0, 4)), output_gradient_bytes=int(draw(0, 4)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "x", "saved", "gradient", "shares"),
    [(4, 2, 4, 1, (0, 0.3, 0.6)), (5, 1, 3, 1, (0.3, 0.6)), (5, 3, 1, 0, (0.3, 0.6)), (6, 1, 5, 2, (0.3, 0.5, 0.8)),
     (7, 2, 2, 2, (0.7,)), (9, 1, 3, 1, (0.7,))],
)  # fmt: skip
def test_the_chain_solver_reaches_the_proved_optimum_where_the_models_agree(count, x, saved, gradient, shares):
    chain = even(count, seed=count + x, x=x, saved=saved, gradient=gradient)
    table = fill(chain)
    assert table.exact
    least, most = (end.peak_bytes for end in table.ends)
    for share in shares:
        limit = float(int(least + share * (most - least)))
        ours, proved = table.best(limit), solve_dag(dag_of(chain), limit)
        assert isinstance(ours, Solution)
        assert isinstance(proved.stop, ProvedOptimal)
        assert ours.time_s == pytest.approx(proved.run.time_s)
        assert proved.run.peak_bytes <= limit
        assert ours.run.recomputed_forward_s > 0
    below = solve_dag(dag_of(chain), least - 1, time_limit_s=5)
    assert isinstance(below.stop, NoSchedule if count < 6 else (NoSchedule, TimeLimit))
    assert below.run is None
    assert isinstance(table.best(least - 1), Infeasible)


@pytest.mark.parametrize("seed", range(4))
def test_on_unequal_chains_the_proved_optimum_is_never_slower(seed):
    chain = uneven(4, seed)
    for one in front(chain)[::3]:
        proved = solve_dag(dag_of(chain), one.peak_bytes)
        assert isinstance(proved.stop, ProvedOptimal)
        assert proved.run.peak_bytes <= one.peak_bytes
        assert proved.run.time_s <= one.time_s + 1e-9


def stages_of(chain: Chain, schedule: Schedule) -> tuple[DagStage, ...]:
    """A schedule of a chain as one of its graph: a stage ends where a node runs for the first time."""
    n = len(chain)
    order = dag_of(chain).stages
    out: list[DagStage] = []
    runs: list[int] = []
    live: set[int] = set()
    kept: frozenset[int] = frozenset()
    for (kind, i), after in zip(schedule, (*schedule[1:], None), strict=True):
        nodes = {Kind.BACKWARD: [3 * n - 1 - i], Kind.SAVE: [2 * i, 2 * i + 1]}.get(kind, [2 * i])
        live |= set(nodes)
        if kind is Kind.FORWARD:
            live.discard(2 * i - 2)
        if kind is Kind.BACKWARD:
            live -= {2 * i - 2, 2 * i, 2 * i + 1, 3 * n - 2 - i}
            if i and 2 * i - 1 in live and chain.segments[i - 1].output_in_backward:
                live.add(2 * i - 2)
        if after and after.kind is Kind.BACKWARD and not chain.segments[after.segment].output_in_backward:
            live.discard(2 * after.segment)
        runs += nodes
        if order[len(out)] in nodes:
            out.append(DagStage(runs=tuple(sorted(runs)), kept=kept))
            runs, kept = [], frozenset(live)
    return tuple(out)


@pytest.mark.each("seed", range(12))
def test_every_schedule_of_the_chain_solver_is_one_of_the_graph_with_the_same_bytes(seed):
    chain = uneven(3 + seed % 5, seed)
    for one in front(chain):
        run = simulate_dag(dag_of(chain), stages_of(chain, one.schedule))
        assert run.peak_bytes == one.peak_bytes
        assert run.time_s == pytest.approx(one.time_s)
