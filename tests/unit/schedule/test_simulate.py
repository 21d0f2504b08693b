"""The simulator against a naive player, closed forms, and cases by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_player import Player

from event_player import Key, neighbour, order_of, order_of_zero_bubble, played
from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable
from steptime.schedule.actions import Kind
from steptime.schedule.schedules import Pipeline, Times
from steptime.simulation.graph import Transport, graph_of
from steptime.simulation.idle import Spent, spent
from steptime.simulation.memory import Footprint, memory_replay, weight_versions
from steptime.simulation.messages import with_copies, with_messages
from steptime.simulation.simulate import (
    Durations,
    Jitter,
    Simulation,
    longest,
    sampled_step_s,
    seconds_of_rows,
    simulate,
    total,
    two_streams,
)
from suites import examples

EQUAL = Durations(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)
TOGETHER = (longest, total, two_streams, lambda most, every, collectives: 0.7 * every)


def random_durations(random: np.random.Generator, table: ActionTable, together: int) -> Durations:
    shape = (table.stages, table.micro_batches, table.slices)
    return Durations(
        forward_s=random.random(shape), input_gradient_s=random.random(shape[:2]),
        weight_gradient_s=random.random(shape[:1]), unshard_s=random.random(table.stages),
        reduce_s=random.random(table.stages), update_s=float(random.random()),
        offload_s=2 * random.random(table.stages), reload_s=2 * random.random(table.stages),
        message_s=random.random((table.ranks, table.ranks)), slowdown=1 + random.random(table.ranks),
        together=TOGETHER[together], collective_share=random.random(table.stages),
    )  # fmt: skip


def split(table: ActionTable, random: np.random.Generator) -> ActionTable:
    """Each backward pass in its two parts, the second put off by up to three actions."""
    names = ("rank", "kind", "stage", "micro_batch", "slice", "together")
    columns: dict[str, list[int]] = {name: [] for name in names}
    for rank in range(table.ranks):
        late: list[tuple[int, int]] = []
        rows = np.flatnonzero(table.rank == rank).tolist()
        for place, row in enumerate([*rows, -1]):
            for due, one in [each for each in late if each[0] <= place or row < 0]:
                late.remove((due, one))
                for name in names:
                    columns[name].append(int(getattr(table, name)[one]))
                columns["kind"][-1] = Kind.WEIGHT_GRADIENT
            if row >= 0:
                for name in names:
                    columns[name].append(int(getattr(table, name)[row]))
                if table.kind[row] == Kind.BACKWARD:
                    columns["kind"][-1] = Kind.INPUT_GRADIENT
                    late.append((place + 1 + int(random.integers(3)), row))
    return replace(table, **{name: np.array(values) for name, values in columns.items()})


@st.composite
def tables(draw: st.DrawFn) -> tuple[ActionTable, np.random.Generator]:
    name = draw(st.sampled_from(["naive", "gpipe", "1f1b", "interleaved", "looped-bfs"]))
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2)) if name in ("interleaved", "looped-bfs") else 1
    table = SCHEDULES[name].actions(ranks, chunks, ranks * draw(st.integers(1, 2)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        table = split(table, random)
    if draw(st.booleans()):
        together = np.full(len(table), -1)
        for row in np.flatnonzero((table.kind[1:] == Kind.WEIGHT_GRADIENT) & (np.diff(table.rank) == 0)).tolist():
            if together[row] < 0:
                together[row : row + 2] = row
        table = replace(table, together=together)
    if draw(st.booleans()):
        table = with_copies(table, ahead=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        table = with_messages(table, gathered=draw(st.integers(0, 2)), reduces=draw(st.booleans()),
                              updates=draw(st.booleans()))  # fmt: skip
    return table, random


def checked(found: Simulation) -> Spent:
    """What holds for any simulation: causes add up, and the critical path is the step."""
    causes = spent(found)
    assert causes.total_s == pytest.approx(np.full(found.table.ranks, found.step_s), rel=1e-9)
    assert all(getattr(causes, name).min() >= -1e-9 for name in Spent.__slots__)
    path = found.critical_path()
    assert path.seconds.sum() == pytest.approx(found.step_s, rel=1e-9)
    assert (path.row >= 0).all()
    return causes


@pytest.mark.slow
@given(
    drawn=tables(), together=st.integers(0, 3), overlap=st.booleans(), buffers=st.sampled_from([None, 2, 4]),
    shared=st.booleans(), ahead=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=examples(60))
def test_as_the_naive_player(
    drawn: tuple[ActionTable, np.random.Generator],
    together: int,
    overlap: bool,
    buffers: int | None,
    shared: bool,
    ahead: int,
) -> None:
    table, random = drawn
    durations = random_durations(random, table, together)
    number = random.integers(3, size=(table.ranks, table.ranks))
    transport = Transport(overlap=overlap, buffers=buffers, link=(lambda a, b: number[a, b]) if shared else None,
                          copies_ahead=ahead)  # fmt: skip
    player = Player(
        table, seconds_of_rows(table, durations).tolist(), durations.together,
        durations.collective_share.tolist(), lambda a, b: durations.message_s[a, b],
        overlap, buffers, (lambda a, b: number[a, b]) if shared else None, ahead,
    )  # fmt: skip
    try:
        found = simulate(table, durations, transport)
    except UserError:
        with pytest.raises(AssertionError, match="deadlock"):
            player.play()
        return
    ends = player.play()
    assert found.step_s == pytest.approx(player.step_s, rel=1e-9)
    for row, end in ends.items():
        if row >= 0:
            assert found.end_s[row] == pytest.approx(end, rel=1e-9)
    for message, sent in zip(found.graph.messages.item, found.graph.messages.send, strict=True):
        assert found.ends[message] == pytest.approx(player.out[int(sent)].end, rel=1e-9)
    checked(found)


def slowest_wait_s(found: Simulation) -> float:
    """Longest time that a rank waits from the start of its first pass to the end of its last."""
    return float((found.rank_span_s - spent(found).passes_s).max())


TIMES = (Times(), Times(forward_s=1.0, input_gradient_s=1.25, weight_gradient_s=0.75))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].synchronous])
def test_bubble_of_equal_stages_is_the_closed_form(name: str, times: Times) -> None:
    schedule, compared = SCHEDULES[name], 0
    for p, v, m, slices in [(p, v, p * n, s) for p in (2, 4, 6) for v in (1, 2, 3) for n in (1, 2, 4) for s in (1, 2)]:
        pipeline = Pipeline(ranks=p, chunks=v, micro_batches=m, slices=slices, times=times)
        try:
            schedule.check(pipeline)
        except UserError:
            continue
        expected = schedule.bubble_s(pipeline)
        if expected is None:
            continue
        table = schedule.order(pipeline)
        share = p / table.stages / slices
        found = simulate(table, Durations(
            forward_s=share * times.forward_s, input_gradient_s=share * times.input_gradient_s,
            weight_gradient_s=share * times.weight_gradient_s,
        ))  # fmt: skip
        assert slowest_wait_s(found) == pytest.approx(expected, rel=1e-9, abs=1e-9), pipeline
        held = memory_replay(
            found, Footprint(activation_bytes=share * slices, deferred_bytes=share * slices)
        ).peak_bytes
        for rank in range(p):
            if (most := schedule.in_flight(pipeline, rank)) is not None:
                assert held[rank] == pytest.approx(most), (pipeline, rank)
        compared += 1
    searched, of_equal_passes = name in ("zb-1p", "zb-2p", "searched"), name in ("zb-v", "dualpipe", "dualpipev")
    assert compared >= 3 or searched or (of_equal_passes and times != Times())


def step_s(name: str, p: int, v: int, m: int) -> float:
    return simulate(SCHEDULES[name].actions(p, v, m), EQUAL).step_s


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 5), (8, 8), (8, 64)])
def test_bubble_fractions_by_hand(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert 1 - 3 * m / step_s(name, p, 1, m) == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    for v in (2, 4):
        if m % p == 0:
            assert step_s("interleaved", p, v, m) / v - 3 * m == pytest.approx(3 * (p - 1) / v, rel=1e-12)
    held = {
        name: memory_replay(
            simulate(SCHEDULES[name].actions(p, 1, m), EQUAL), Footprint(activation_bytes=1.0)
        ).peak_bytes.tolist()
        for name in ("gpipe", "1f1b")
    }
    assert held == {"gpipe": [m] * p, "1f1b": [min(p - rank, m) for rank in range(p)]}


@pytest.mark.parametrize(
    ("name", "depth", "p", "v", "m"),
    [("1f1b", 0, 4, 1, 6), ("interleaved", 0, 4, 2, 8), ("interleaved", 0, 2, 3, 4), ("zb-h1", 1, 4, 1, 6),
     ("zb-h2", 2, 3, 1, 8), ("zb-h2", 2, 4, 1, 4)],
)  # fmt: skip
def test_as_the_player_of_events(name: str, depth: int, p: int, v: int, m: int) -> None:
    """Unequal passes, no messages: each pass ends when the player of lists of passes says so."""
    random = np.random.default_rng(p * m)
    split = depth > 0
    forward, inputs, weights = random.random((3, p * v, m))
    seconds = {"F": forward, "B": inputs if split else inputs + weights, "W": weights}
    streams: dict[Key, list[Key]] = {
        s: [(each, s) for each in (order_of_zero_bubble(s, p, m, depth) if split else order_of(s, p, m, v))]
        for s in range(p)
    }
    taken: dict[Key, float] = {
        (each, s): float(seconds[each[0]][each[2] * p + s, each[1]])
        for keys in streams.values()
        for each, s in keys  # type: ignore[misc, index]
    }
    after = {key: [one] for key in taken if (one := neighbour(*key[0], key[1], p, v)) is not None}  # type: ignore[index, misc]
    ends = played(streams, taken, after)
    table = SCHEDULES[name].actions(p, v, m)
    found = simulate(table, Durations(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights))
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRADIENT: "B", Kind.WEIGHT_GRADIENT: "W"}
    for row, end in enumerate(found.end_s.tolist()):
        chunk, rank = divmod(int(table.stage[row]), p)
        key = (letters[Kind(table.kind[row])], int(table.micro_batch[row]), chunk), rank
        assert end == pytest.approx(ends[key], rel=1e-12)


def test_two_ranks_by_hand() -> None:
    """One micro-batch over two ranks: what each second of a rank is, and the path."""
    table = with_messages(SCHEDULES["1f1b"].actions(2, 1, 1), reduces=True, updates=True)
    durations = Durations(
        forward_s=np.array([1.0, 2.0]), backward_s=3.0, message_s=np.array([[0, 0.5], [0.25, 0]]), reduce_s=4.0,
        update_s=0.125, slowdown=np.array([1.0, 2.0]),
    )  # fmt: skip
    found = simulate(table, durations)
    causes = checked(found)
    # Rank 0: F 0-1, waits until 1.5 + 4 + 6 = 11.5 and its message until 11.75, B to 14.75, reduces to 18.75, updates.
    assert found.step_s == 18.875
    assert causes.fill_s.tolist() == [10.5, 1.0] and causes.message_s.tolist() == [0.25, 0.5]
    assert causes.data_s.tolist() == [4.0, 4.0] and causes.update_s.tolist() == [0.125, 0.25]
    assert causes.drain_s.tolist() == [0.0, 3.125] and causes.peers_s.tolist() == [0.0, 0.0]
    path = found.critical_path()
    assert path.seconds.tolist() == [1.0, 0.5, 4.0, 6.0, 0.25, 3.0, 4.0, 0.125]
    names = [table.named(row) for row in path.row]
    assert names == ["0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0", "0REDUCE_GRAD", "0UPDATE"]
    assert path.message.tolist() == [name.startswith(("0SEND", "1SEND")) for name in names]


def test_a_longer_stage_makes_its_peers_wait() -> None:
    forward = np.array([1.0, 1.0, 2.0, 1.0])
    causes = checked(
        simulate(SCHEDULES["1f1b"].actions(4, 1, 16), Durations(forward_s=forward, backward_s=2 * forward))
    )
    assert causes.peers_s[2] == 0 and (causes.peers_s[[0, 1, 3]] > 20).all()
    equal = checked(simulate(SCHEDULES["1f1b"].actions(4, 1, 16), EQUAL))
    assert (equal.peers_s == 0).all() and (equal.fill_s + equal.drain_s == 9).all()


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_without_actions_and_tables_without_backward_passes(overlap: bool) -> None:
    table = SCHEDULES["1f1b"].actions(3, 1, 4)
    durations, transport = Durations(forward_s=1.0, backward_s=2.0, message_s=0.5), Transport(overlap=overlap)
    idle = simulate(replace(table, ranks=5), durations, transport)
    assert idle.rank_span_s[3:].tolist() == [0, 0] and checked(idle).drain_s[3:].tolist() == [idle.step_s] * 2
    forward = simulate(table.taken(table.kind == Kind.FORWARD), durations, transport)
    assert checked(forward).passes_s.tolist() == [4, 4, 4]
    assert simulate(table.taken(table.kind < 0), durations, transport).step_s == 0


def test_messages_that_do_not_overlap_hold_their_sender() -> None:
    table = SCHEDULES["1f1b"].actions(2, 1, 4)
    durations = Durations(forward_s=1.0, backward_s=2.0, message_s=0.5)
    apart, held = (checked(simulate(table, durations, Transport(overlap=each))) for each in (True, False))
    assert held.total_s[0] > apart.total_s[0] and held.message_s[1] >= 4 * 0.5


def test_samples_by_seed_and_without_jitter() -> None:
    graph = graph_of(SCHEDULES["interleaved"].actions(4, 2, 8))
    exact = simulate(graph, EQUAL).step_s
    assert sampled_step_s(graph, EQUAL, Jitter(), 3).tolist() == [exact] * 3
    jitter = Jitter(action=0.1, rank=0.05, message=0.1)
    many = sampled_step_s(graph, EQUAL, jitter, 200, seed=5)
    assert many[:7].tolist() == sampled_step_s(graph, EQUAL, jitter, 7, seed=5).tolist()
    assert many.mean() > exact and many.std() > 0
    assert many[:7].tolist() != sampled_step_s(graph, EQUAL, jitter, 7, seed=6).tolist()


def test_random_factors_have_a_mean_of_one() -> None:
    graph = graph_of(SCHEDULES["1f1b"].actions(1, 1, 50))
    samples = sampled_step_s(graph, EQUAL, Jitter(action=0.5), 400)
    assert samples.mean() == pytest.approx(150, rel=0.01)
    assert samples.std() == pytest.approx(0.5 * np.sqrt(50 * (1 + 4)), rel=0.15)


def test_passes_that_run_together() -> None:
    """A pass with a number of its own runs alone; the second and third take what the function says."""
    table = SCHEDULES["naive"].actions(1, 1, 3)
    table = replace(table, together=np.array([7, 8, 8, -1, -1, -1]))
    told: list[float] = []

    def joint(most: Any, every: Any, collectives: Any) -> Any:
        told.extend([most.max(), every.max(), collectives.max()])
        return 0 * every + 2.5

    durations = Durations(forward_s=1.0, backward_s=2.0, together=joint, collective_share=0.5)
    found = simulate(table, durations)
    assert found.end_s.tolist() == [1.0, 3.5, 3.5, 5.5, 6.5, 8.5]
    assert told == [2.0, 3.0, 1.5]


def test_communication_of_passes_stands_apart_and_takes_no_further_time() -> None:
    """A pair of F (2 s, half of it communication) and B (4 s, a quarter): two streams of 4 s and 2 s make 4 s."""
    table = replace(SCHEDULES["naive"].actions(1, 1, 3), together=np.array([-1, -1, 5, 5, -1, -1]))
    share = np.array([[0.5, 0.25, 0.9, 0.0]])
    durations = Durations(forward_s=2.0, backward_s=4.0, together=two_streams, collective_share=share)
    found = simulate(table, durations)
    assert found.step_s == 16.0 and found.tensor_s.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    causes = checked(found)
    assert causes.tensor_s.tolist() == [4.0] and causes.passes_s.tolist() == [12.0]
    held = checked(simulate(table, replace(durations, together=total)))
    assert held.tensor_s.tolist() == [6.0] and held.passes_s.tolist() == [12.0]
    mostly = replace(durations, collective_share=np.array([[0.75, 0.75, 0.0, 0.0]]))
    # Streams of 1.5 s and 4.5 s: the pair computes 1.5 s, and for 3 s of the 4.5 s it only communicates.
    assert simulate(table, mostly).tensor_s[2:4].tolist() == pytest.approx([1.0, 2.0])
    assert checked(simulate(table, replace(durations, collective_share=0.0))).tensor_s.tolist() == [0.0]


@given(drawn=tables())
@settings(max_examples=examples(20))
def test_levels_give_the_same_ends(drawn: tuple[ActionTable, np.random.Generator]) -> None:
    graph = graph_of(drawn[0])
    seconds = drawn[1].random((graph.size, 2))
    seconds[0] = 0
    both = graph.ends_of_samples_s(seconds)
    assert both.T.tolist() == [graph.ends_s(each).tolist() for each in seconds.T]


def test_split_backward_keeps_a_part_until_its_weights() -> None:
    table = SCHEDULES["zb-h2"].actions(4, 1, 12)
    found = simulate(table, EQUAL)
    whole = memory_replay(found, Footprint(activation_bytes=1.0, deferred_bytes=1.0)).peak_bytes
    part = memory_replay(found, Footprint(activation_bytes=1.0)).peak_bytes
    assert whole.tolist() == [7.0] * 4 and part.tolist() == [7.0, 5.0, 3.0, 1.0]


def test_memory_of_one_micro_batch_over_time() -> None:
    table = SCHEDULES["zb-h1"].actions(2, 1, 1)
    replay = memory_replay(
        simulate(table, EQUAL), Footprint(activation_bytes=10.0, deferred_bytes=4.0, fixed_bytes=1.0)
    )
    entries = zip(replay.rank.tolist(), replay.time_s.tolist(), replay.in_use_bytes.tolist(), strict=True)
    assert list(entries) == [
        (0, 0, 1), (0, 0, 11), (0, 4, 5), (0, 5, 1),
        (1, 0, 1), (1, 1, 11), (1, 3, 5), (1, 4, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "further"), [("pipedream", {}), ("pipedream-2bw", {"per_update": 4})])
def test_versions_of_weights(name: str, further: dict[str, Any]) -> None:
    pipeline = Pipeline(ranks=4, micro_batches=16, **further)
    found = simulate(SCHEDULES[name].order(pipeline), EQUAL)
    stated = [SCHEDULES[name].weight_versions(pipeline, rank) for rank in range(4)]
    assert all(had <= most for had, most in zip(weight_versions(found), stated, strict=True))
    if name == "pipedream":
        assert weight_versions(found).tolist() == stated == [4, 3, 2, 1]
    without = memory_replay(found, Footprint(weights_bytes=1.0, stashes=False)).peak_bytes
    assert without.tolist() == [1.0] * 4


def test_received_results_and_gathered_weights_take_memory() -> None:
    table = with_messages(SCHEDULES["gpipe"].actions(2, 1, 4), gathered=1)
    found = simulate(table, Durations(forward_s=np.array([1.0, 4.0]), backward_s=1.0, message_s=0.5))
    held = memory_replay(found, Footprint(message_bytes=1.0)).peak_bytes
    assert held.tolist() == [1.0, 3.0]  # rank 1 makes its first pass while the three others come
    gathered = memory_replay(found, Footprint(gathered_bytes=np.array([5.0, 7.0]), fixed_bytes=1.0)).peak_bytes
    assert gathered.tolist() == [6.0, 8.0]


def without(table: ActionTable, kind: Kind, stage: int, micro_batch: int) -> ActionTable:
    return table.taken(~((table.kind == kind) & (table.stage == stage) & (table.micro_batch == micro_batch)))


def test_tables_that_cannot_run() -> None:
    table = SCHEDULES["1f1b"].actions(3, 1, 4)
    for broken, words in (
        (without(table, Kind.FORWARD, 1, 2), "1F2 is missing"),
        (replace(table, rank=table.rank[::-1].copy()), "rank"),
        (replace(table, stage=table.stage + 1), "stages are 0 to 2"),
        (without(with_messages(table), Kind.RECEIVE_FORWARD, 2, 1), "rank 2: 2F1"),
        (without(with_messages(table), Kind.SEND_BACKWARD, 2, 0), "rank 1: 1RECV_B0"),
    ):
        with pytest.raises(UserError, match=words):
            simulate(broken, EQUAL)
    with pytest.raises(UserError, match="rank 1: 1B0 waits for rank 2: 2B0; rank 2: 2F1 waits for rank 1: 1F1"):
        simulate(SCHEDULES["gpipe"].actions(3, 1, 4).taken(circle()), EQUAL)


def circle() -> np.ndarray[Any, Any]:
    """Rows of GPipe on three ranks whose second rank turns its first two forward passes round the wrong way."""
    rows = np.arange(24)
    rows[8:16] = [8, 12, 9, 10, 11, 13, 14, 15]
    return rows


def test_durations_that_are_none() -> None:
    table = SCHEDULES["1f1b"].actions(2, 1, 2)
    for durations, words in (
        (Durations(forward_s=np.ones(3)), r"forward_s has the shape \(3,\)"),
        (Durations(forward_s=-1.0), "forward_s is not a time: -1.0"),
        (Durations(forward_s=1.0, message_s=np.ones(2)), "message_s is an array by rank"),
        (Durations(forward_s=1.0, slowdown=float("nan")), "slowdown is not a time"),
    ):
        with pytest.raises(UserError, match=words):
            simulate(table, durations)
    with pytest.raises(UserError, match="0 buffers"):
        simulate(table, EQUAL, Transport(buffers=0))
