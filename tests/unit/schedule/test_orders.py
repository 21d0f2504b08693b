"""Orders of passes: by hand, against the orders that the closed forms were tested with, and against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from event_player import order_of, order_of_dual_pipe, order_of_zero_bubble
from steptime.schedule import SCHEDULES, ActionTable, Kind

SIZES = [(1, 1, 4), (2, 1, 2), (2, 1, 8), (4, 1, 4), (4, 1, 10), (5, 1, 3), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9)]


@pytest.mark.parametrize(("name", "chunks", "orders"), [
    ("naive", 1, ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
    ("gpipe", 1, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
    ("1f1b", 1, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
    ("looped-bfs", 2, ["0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0",
                       "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0"]),
    ("zb-h1", 1, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
    ("pipedream", 1, ["0F0 0F1 0B0 0UPDATE0 0F2 0B1 0UPDATE1 0B2 0UPDATE2",
                      "1F0 1B0 1UPDATE0 1F1 1B1 1UPDATE1 1F2 1B2 1UPDATE2"]),
    ("pipedream-2bw", 1, ["0F0 0F1 0B0 0F2 0B1 0UPDATE1 0B2", "1F0 1B0 1F1 1B1 1UPDATE1 1F2 1B2"]),
    ("pipemare", 1, ["0F0 0F1 0F2 0B0 0UPDATE0 0B1 0UPDATE1 0B2 0UPDATE2",
                     "1F0 1F1 1B0 1UPDATE0 1F2 1B1 1UPDATE1 1B2 1UPDATE2"]),
    ("ampnet", 1, ["0F0 0F1 0B0 0UPDATE0 0F2 0B1 0UPDATE1 0B2 0UPDATE2",
                   "1F0 1B0 1UPDATE0 1F1 1B1 1UPDATE1 1F2 1B2 1UPDATE2"]),
])  # fmt: skip
def test_two_ranks_and_three_micro_batches(name: str, chunks: int, orders: list[str]) -> None:
    table = SCHEDULES[name].actions(2, chunks, 3)
    assert [" ".join(table.of_rank(rank)) for rank in range(2)] == orders


def test_two_ranks_that_micro_batches_enter_from_both_ends() -> None:
    """Chimera (arXiv 2107.06925, figure 3) with a group of micro-batches per two ranks; TeraPipe with two slices."""
    table = SCHEDULES["chimera"].actions(4, 1, 4)
    assert " ".join(table.of_rank(0)) == "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1"
    assert " ".join(table.of_rank(1)) == "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1"
    table = SCHEDULES["terapipe"].actions(1, 1, 2, slices=2)
    assert " ".join(table.of_rank(0)) == "0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0"


def passes_of(table: ActionTable, rank: int) -> list[tuple[str, int, int]]:
    """Letter, micro-batch and chunk of the passes of a rank; B: of gradients of inputs, too."""
    rows = np.flatnonzero(table.rank == rank)
    return [
        ("FBBW"[table.kind[row]], int(table.micro_batch[row]), int(table.stage[row]) // table.ranks) for row in rows
    ]


@pytest.mark.parametrize(("ranks", "chunks", "count"), SIZES)
def test_one_forward_one_backward(ranks: int, chunks: int, count: int) -> None:
    table = SCHEDULES["interleaved"].actions(ranks, chunks, count)
    for rank in range(ranks):
        assert passes_of(table, rank) == order_of(rank, ranks, count, chunks)


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (3, 8), (4, 3), (4, 12), (5, 5)])
@pytest.mark.parametrize(("name", "depth"), [("zb-h1", 1), ("zb-h2", 2)])
def test_zero_bubble(name: str, depth: int, ranks: int, count: int) -> None:
    table = SCHEDULES[name].actions(ranks, 1, count)
    for rank in range(ranks):
        assert passes_of(table, rank) == order_of_zero_bubble(rank, ranks, count, depth)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 16), (4, 8), (4, 16), (8, 20)])
def test_dual_pipe(ranks: int, count: int) -> None:
    """The same order, with the whole backward pass where its two parts follow each other in a pair or alone."""
    table = SCHEDULES["dualpipe"].actions(ranks, 1, count)
    for rank in range(ranks):
        expected = []
        for action in order_of_dual_pipe(rank, ranks, count):
            whole = ("B" in {kind for kind, _, _ in action}) and any(kind == "W" for kind, _, _ in action)
            for kind, number, way in action:
                letter = {"F": "F", "B": "B" if whole else "I", "W": "W"}[kind]
                if kind != "W" or not whole:
                    expected.append(f"{ranks - 1 - rank if way else rank}{letter}{number + way * count // 2}")
        assert table.of_rank(rank) == expected


Actions = dict[int, list[Any]]


def of_torch(name: str, ranks: int, chunks: int, count: int) -> Actions:
    """What PyTorch generates."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None, is_last=False,
                        has_backward=True, is_first=True, stage_index=each)
        for each in range(chunks)
    ]  # fmt: skip
    made: Callable[..., Any] = getattr(schedules, name)
    single = issubclass(made, schedules.PipelineScheduleSingle)  # type: ignore[arg-type]
    return dict(made(stages[0] if single else stages, count).pipeline_order)


@pytest.mark.parametrize(("name", "theirs", "sizes"), [
    ("gpipe", "ScheduleGPipe", [(1, 1, 2), (2, 1, 3), (4, 1, 8)]),
    ("1f1b", "Schedule1F1B", [(2, 1, 2), (2, 1, 5), (4, 1, 4), (4, 1, 9)]),
    ("interleaved", "ScheduleInterleaved1F1B", [(2, 2, 4), (4, 3, 8), (3, 2, 9)]),
    ("looped-bfs", "ScheduleLoopedBFS", [(2, 1, 4), (2, 3, 3), (4, 2, 8)]),
    ("zb-h1", "ScheduleInterleavedZeroBubble", [(2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 2, 8), (3, 4, 6)]),
    ("zb-v", "ScheduleZBVZeroBubble", [(1, 2, 2), (2, 2, 2), (2, 2, 8), (4, 2, 5), (4, 2, 12), (3, 2, 6)]),
    ("dualpipev", "ScheduleDualPipeV", [(1, 2, 2), (2, 2, 4), (2, 2, 9), (4, 2, 8), (3, 2, 12), (8, 2, 20)]),
])  # fmt: skip
def test_as_pytorch_generates(name: str, theirs: str, sizes: list[tuple[int, int, int]]) -> None:
    for ranks, chunks, count in sizes:
        table = SCHEDULES[name].actions(ranks, chunks, count)
        for rank, actions in of_torch(theirs, ranks, chunks, count).items():
            leaves = [leaf for each in actions if each is not None for leaf in each.sub_actions or (each,)]
            expected = [str(leaf) for leaf in leaves if "REDUCE" not in str(leaf)]
            if theirs == "Schedule1F1B" and rank == ranks - 1:
                # PyTorch names the forward passes of the last rank from 1 in this table, which its runtime never reads.
                expected = [f"{rank}F{int(each.split('F')[1]) - 1}" if "F" in each else each for each in expected]
            assert table.of_rank(rank) == expected, (ranks, chunks, count, rank)
            pairs = sum(each is not None and each.sub_actions is not None for each in actions)
            alone = table.together[table.rank == rank] < 0
            assert 2 * pairs == int((~alone).sum())


def test_pairs_are_a_forward_and_a_backward_pass_of_different_micro_batches() -> None:
    for name, ranks, chunks in (("dualpipe", 4, 1), ("dualpipev", 2, 2)):
        table = SCHEDULES[name].actions(ranks, chunks, 16)
        rows = np.flatnonzero(table.together >= 0)
        assert len(rows) and (table.together[rows[::2]] == table.together[rows[1::2]]).all()
        assert (table.kind[rows[::2]] == Kind.FORWARD).all() and (table.kind[rows[1::2]] == Kind.BACKWARD).all()
