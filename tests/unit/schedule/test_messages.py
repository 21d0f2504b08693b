"""Messages, gathered weights and summed gradients: as PyTorch lowers its schedules, in an order that never hangs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from pipelines import SERVED, table_of

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable, Kind, Pipeline
from steptime.schedule.actions import MESSAGES
from steptime.simulation.messages import with_messages

ON_ONE_RANK = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipev", "zb-2p")
SIZES = [Pipeline(ranks=2, chunks=1, micro_batches=4), Pipeline(ranks=2, chunks=2, micro_batches=6),
         Pipeline(ranks=4, chunks=2, micro_batches=8), Pipeline(ranks=2, chunks=4, micro_batches=8)]  # fmt: skip
CASES = [
    (name, each) for name in ON_ONE_RANK for each in SIZES
    if all(rule.holds(each) for rule in SCHEDULES[name].rules)
]  # fmt: skip


def cells_of(table: ActionTable, rank: int) -> list[str]:
    """Actions of a rank as PyTorch writes them."""
    from steptime.simulation.pytorch_csv import csv_text

    return csv_text(table).splitlines()[rank].split(",")


@pytest.mark.parametrize(("name", "pipeline"), CASES)
@pytest.mark.parametrize("gathered", [1, 3])
def test_as_pytorch_lowers(name: str, pipeline: Pipeline, gathered: int) -> None:
    """Weights and gradients stand where PyTorch has them; messages are the same, in an order that PyTorch runs."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if name == "dualpipev" and gathered == 1:
        pytest.skip("PyTorch frees the weights of a pair before the pair")
    table = table_of(name, pipeline)
    orders = {r: [schedules._Action.from_str(each) for each in cells_of(table, r)] for r in range(table.ranks)}
    on = dict(zip(table.stage.tolist(), table.rank.tolist(), strict=True)).__getitem__
    lowered = {r: schedules._add_unshard_reshard(list(order), gathered) for r, order in orders.items()}
    lowered = {r: schedules._add_reduce_grad(order, table.micro_batches) for r, order in lowered.items()}
    expected = schedules._add_send_recv({r: list(order) for r, order in lowered.items()}, on, table.stages)
    ours = with_messages(table, gathered=gathered, reduces=True)
    plain = ours.taken((ours.kind < MESSAGES[0]) | (ours.kind > MESSAGES[-1]))
    for r in range(table.ranks):
        assert cells_of(plain, r) == list(map(str, lowered[r]))
        assert sorted(cells_of(ours, r)) == sorted(map(str, expected[r]))
    if name != "dualpipev" and gathered == 3:
        messages = with_messages(table)
        made = {r: [schedules._Action.from_str(each) for each in cells_of(messages, r)] for r in range(table.ranks)}
        schedules._simulate_comms_compute(made, on, table.stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_order_of_all_messages(name: str) -> None:
    """Both ranks of a message have it at the same place of one order, which each rank's own order agrees with."""
    for pipeline in SERVED[name][:: max(len(SERVED[name]) // 6, 1)]:
        table = with_messages(table_of(name, pipeline))
        rows = np.flatnonzero((table.kind >= MESSAGES[0]) & (table.kind <= MESSAGES[-1]))
        step = np.array([0, 0, 0, 0, 0, -1, 0, 1])[table.kind[rows]]
        what = (table.kind[rows] // 6, table.stage[rows] + step, table.micro_batch[rows], table.slice[rows])
        names = list(zip(*(each.tolist() for each in what), strict=True))
        after: dict[object, set[object]] = defaultdict(set)
        for rank in range(table.ranks):
            of_rank = [names[i] for i in np.flatnonzero(table.rank[rows] == rank)]
            for one, following in pairwise(of_rank):
                after[following].add(one)
        done: set[object] = set()
        while len(done) < len(set(names)):
            free = {each for each in set(names) - done if after[each] <= done}
            assert free, "no order of messages"
            done |= free
        assert len(names) == 2 * len(set(names))


def test_where_messages_stand() -> None:
    table = with_messages(SCHEDULES["1f1b"].actions(2, 1, 2), reduces=True, updates=True, gathered=1)
    assert " ".join(table.of_rank(0)) == (
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD 0UPDATE"
    )
    assert " ".join(table.of_rank(1)) == (
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD 1UPDATE"
    )


def test_stages_of_one_rank_need_no_message() -> None:
    table = with_messages(SCHEDULES["zb-v"].actions(2, 2, 4))
    turn = (table.stage == 2) & (table.kind == Kind.RECEIVE_FORWARD) | (table.stage == 1) & (
        table.kind == Kind.SEND_FORWARD
    )
    assert not turn.any() and (table.kind == Kind.SEND_FORWARD).sum() == 8


def test_updates_within_a_step_stay() -> None:
    table = with_messages(SCHEDULES["pipedream"].actions(2, 1, 4), updates=True)
    assert (table.kind == Kind.UPDATE).sum() == 8 and (table.micro_batch >= 0).all()


def test_weights_are_gathered_for_the_stages_that_come_next() -> None:
    table = with_messages(SCHEDULES["looped-bfs"].actions(1, 3, 1), gathered=2)
    assert " ".join(table.of_rank(0)) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    )


def test_a_circle_is_refused() -> None:
    """The last rank begins with the last micro-batch, which the first rank sends only after a backward pass."""
    table = SCHEDULES["1f1b"].actions(2, 1, 4)
    order = np.lexsort((np.where(table.rank == 1, -table.micro_batch, 0), table.rank))
    with pytest.raises(UserError, match=r"rank 0: 0B0 waits for 1B0 of rank 1, which waits for it in a circle"):
        with_messages(table.taken(order))
