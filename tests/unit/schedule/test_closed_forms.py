"""Closed forms against tables that are played: bubble, activations, weight versions, staleness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pipelines import SERVED, UNEQUAL, table_of
from seconds_of import longest_wait_s, most_held, versions_and_staleness

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, Pipeline, Times

SYNCHRONOUS = [name for name, each in SCHEDULES.items() if each.synchronous]
SEARCHED = ("zb-1p", "zb-2p", "searched")
SIZES = list(range(1, 7))


def sampled(name: str) -> list[Pipeline]:
    return [each for each in SERVED[name] if each.ranks <= 4 and each.micro_batches <= 16][::2]


def share_of(pipeline: Pipeline, stages: int) -> float:
    """What part of a p-th part of the model a stage is."""
    return pipeline.ranks / stages


@pytest.mark.parametrize("name", [each for each in SYNCHRONOUS if each not in SEARCHED])
def test_the_bubble_is_exact(name: str) -> None:
    schedule, told = SCHEDULES[name], 0
    for pipeline in sampled(name):
        table = table_of(name, pipeline)
        for times in UNEQUAL:
            bubble_s = schedule.bubble_s(replace(pipeline, times=times))
            if bubble_s is not None:
                waited_s = longest_wait_s(table, times, share_of(pipeline, table.stages))
                assert bubble_s == pytest.approx(waited_s, abs=1e-9), (pipeline, times)
                told += 1
        assert schedule.bubble_s(pipeline) is not None
    assert told


def test_dual_pipe_where_the_wait_for_the_first_gradient_is_long() -> None:
    for ranks, name, chunks in ((6, "dualpipe", 1), (8, "dualpipe", 1), (4, "dualpipev", 2)):
        pipeline = Pipeline(ranks=ranks, chunks=chunks, micro_batches=2 * ranks)
        table = table_of(name, pipeline)
        for inputs_s, weights_s in ((1.2, 0.9), (1.4, 2.0), (2.0, 0.7)):
            times = Times(input_gradient_s=inputs_s, weight_gradient_s=weights_s)
            waited_s = longest_wait_s(table, times, share_of(pipeline, table.stages))
            assert SCHEDULES[name].bubble_s(replace(pipeline, times=times)) == pytest.approx(waited_s)


def test_fractions_of_gpipe_and_interleaving() -> None:
    """(p - 1) / (m + p - 1), and a v-th of the bubble over ideal time."""
    for name in ("gpipe", "1f1b"):
        pipeline = Pipeline(ranks=8, micro_batches=32)
        assert SCHEDULES[name].bubble_fraction(pipeline) == pytest.approx(7 / 39)
        assert SCHEDULES[name].bubble_s(pipeline) == 4 * SCHEDULES["interleaved"].bubble_s(replace(pipeline, chunks=4))
    assert SCHEDULES["naive"].bubble_fraction(Pipeline(ranks=8, micro_batches=32)) == pytest.approx(7 / 8)
    alike = Pipeline(ranks=8, micro_batches=32, times=Times(forward_s=2.0))
    assert SCHEDULES["chimera"].bubble_fraction(alike) == pytest.approx(6 / (2 * 32 + 6))
    one_group = Pipeline(ranks=8, micro_batches=8)
    assert SCHEDULES["chimera"].bubble_fraction(one_group) == pytest.approx(6 / (3 * 8 / 2 + 6))
    doubled, plain = SCHEDULES["chimera-doubled"], SCHEDULES["1f1b"]
    for micro_batches, fraction in ((16, 9 / 57), (32, 9 / 105), (64, 9 / 201)):
        more = Pipeline(ranks=8, micro_batches=micro_batches)
        assert doubled.bubble_fraction(more) == pytest.approx(fraction)
        assert fraction < min(plain.bubble_fraction(more), SCHEDULES["chimera"].bubble_fraction(more))
        halves = replace(more, times=Times(input_gradient_s=0.5, weight_gradient_s=0.5))
        assert doubled.bubble_fraction(halves) == pytest.approx(6 / (2 * micro_batches + 6))
    assert SCHEDULES["zb-2p"].bubble_fraction(Pipeline(ranks=8, micro_batches=32)) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_are_exact(name: str) -> None:
    told = 0
    for pipeline in sampled(name):
        table = table_of(name, pipeline)
        for rank in range(pipeline.ranks):
            held = SCHEDULES[name].in_flight(pipeline, rank)
            if held is not None:
                assert held == pytest.approx(most_held(table, rank, share_of(pipeline, table.stages))), (pipeline, rank)
                told += 1
    assert told or name in (*SEARCHED, "ampnet")


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("per_update", [1, 2, 3])
def test_weight_versions_and_staleness_of_a_long_run(ranks: int, per_update: int) -> None:
    pipeline = Pipeline(ranks=ranks, micro_batches=8 * ranks + 12, per_update=per_update)
    for rank in range(ranks):
        stashing, mirrored = SCHEDULES["pipedream"], SCHEDULES["pipemare"]
        table = table_of("pipedream", pipeline)
        versions, stale = versions_and_staleness(table, rank)
        assert stashing.weight_versions(pipeline, rank) == versions
        assert stale - 1 < stashing.staleness(pipeline, rank) <= stale
        _, stale = versions_and_staleness(table_of("pipemare", pipeline), rank)
        assert stale - 1 < mirrored.staleness(pipeline, rank) <= stale
        assert mirrored.weight_versions(pipeline, rank) == 1
        double = replace(pipeline, per_update=None)
        versions, stale = versions_and_staleness(table_of("pipedream-2bw", double), rank)
        assert versions <= SCHEDULES["pipedream-2bw"].weight_versions(double, rank) == 2
        assert stale <= SCHEDULES["pipedream-2bw"].staleness(double, rank) == 1


def test_columns() -> None:
    """Synchronous pipelines converge as one device does and wait; asynchronous ones do not, and do not."""
    assert {name for name, each in SCHEDULES.items() if not each.synchronous} == {
        "ampnet", "pipedream", "pipedream-2bw", "pipemare",
    }  # fmt: skip
    assert [name for name, each in SCHEDULES.items() if not each.any_graph] == ["terapipe"]
    assert all(each.bubble_free for each in SCHEDULES.values() if not each.synchronous)
    for name, each in SCHEDULES.items():
        stale = {each.staleness(Pipeline(ranks=4, micro_batches=8), rank) for rank in range(4)}
        assert (stale == {0.0}) == each.synchronous, name


NAMES = (
    "gpipe 1f1b interleaved zb-h1 zb-h2 dualpipe naive looped-bfs zb-1p zb-2p zb-v dualpipev chimera chimera-doubled "
    "terapipe ampnet pipedream pipedream-2bw pipemare searched"
)


def test_names() -> None:
    assert sorted(SCHEDULES) == sorted(NAMES.split())
    assert all(name == each.name and each.source for name, each in SCHEDULES.items())
    with pytest.raises(UserError, match="there is no schedule '1fib'\n  did you mean 1f1b"):
        SCHEDULES["1fib"]


@pytest.mark.parametrize(("name", "sizes", "message"), [
    ("interleaved", (4, 2, 6), "schedule interleaved requires a number of micro-batches that the number of ranks "
                               "divides, where there are several chunks; got 4 ranks, 2 chunks, 6 micro-batches"),
    ("chimera", (3, 1, 6), "schedule chimera requires an even number of ranks; got 3 ranks, 1 chunk, 6 micro-batches"),
    ("chimera", (4, 1, 6), "schedule chimera requires a number of micro-batches that the number of ranks divides; got"),
    ("dualpipe", (4, 1, 9), "schedule dualpipe requires an even number of micro-batches; got"),
    ("dualpipe", (4, 1, 6), "schedule dualpipe requires at least twice as many micro-batches as ranks; got"),
    ("dualpipev", (2, 1, 6), "schedule dualpipev requires 2 chunks; got 2 ranks, 1 chunk, 6 micro-batches"),
    ("zb-v", (2, 3, 6), "schedule zb-v requires 2 chunks; got 2 ranks, 3 chunks, 6 micro-batches"),
    ("gpipe", (2, 2, 6), "schedule gpipe requires 1 chunk; got"),
    ("1f1b", (0, 1, 6), "schedule 1f1b requires whole numbers of ranks, chunks, micro-batches"),
    ("1f1b", (2, 1, 2.5), "schedule 1f1b requires whole numbers of ranks, chunks, micro-batches"),
])  # fmt: skip
def test_requirements(name: str, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SCHEDULES[name].actions(*sizes)
    assert str(caught.value).startswith(message)


def test_further_requirements() -> None:
    with pytest.raises(
        UserError, match="pipedream-2bw requires at least as many micro-batches per update as ranks; got"
    ):
        SCHEDULES["pipedream-2bw"].actions(4, 1, 8, per_update=2)
    with pytest.raises(UserError, match=r"1f1b requires 1 slice; got 4 ranks, 1 chunk, 8 micro-batches, 2 slices"):
        SCHEDULES["1f1b"].actions(4, 1, 8, slices=2)
    with pytest.raises(UserError, match="zb-1p requires memory for the activations of one micro-batch"):
        SCHEDULES["zb-1p"].actions(4, 1, 8, memory_limit=0.5)
    with pytest.raises(
        UserError, match=r"pipedream requires whole numbers of ranks, .* and micro-batches per update from 1"
    ):
        SCHEDULES["pipedream"].actions(4, 1, 8, per_update=0)
    for times in (Times(forward_s=0.0), Times(weight_gradient_s=float("nan")), Times(message_s=-1.0)):
        with pytest.raises(UserError, match="zb-1p requires times from 0 on, of forward passes above 0; got 4 ranks"):
            SCHEDULES["zb-1p"].actions(4, 1, 8, times=times)
    assert SCHEDULES["1f1b"].actions(np.int64(4), 1, 8, times=Times(forward_s=2.0)).ranks == 4
