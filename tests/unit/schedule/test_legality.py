"""Every schedule is legal, with and without messages; a table that is changed is refused by rank, action and rule."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import SERVED, UNEQUAL, table_of

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable, Kind
from steptime.schedule.actions import COLUMNS, MESSAGES
from steptime.simulation.legality import check
from steptime.simulation.messages import with_messages
from suites import examples

PIPELINES = st.sampled_from([(name, each) for name, served in SERVED.items() for each in served])


@settings(max_examples=examples(150))
@given(PIPELINES, st.sampled_from(UNEQUAL), st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 2]))
def test_every_schedule_is_legal(case: tuple, times, gathered: int, buffers: int) -> None:
    """Even where each send waits for its receive, with weights gathered, gradients summed and weights updated."""
    name, pipeline = case
    table = table_of(name, replace(pipeline, times=times))
    check(table)
    whole = with_messages(table, gathered=gathered, reduces=True, updates=True)
    check(whole, buffers=buffers)
    again = with_messages(whole)
    check(again, buffers=buffers)
    assert len(again) == len(whole)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_action_is_there_once(name: str) -> None:
    for pipeline in SERVED[name][:: max(len(SERVED[name]) // 5, 1)]:
        table = table_of(name, pipeline)
        passes = table.taken(table.kind < Kind.SEND_FORWARD)
        count = table.stages * table.micro_batches * table.slices
        forward = (passes.kind == Kind.FORWARD).sum()
        whole, inputs, weights = ((passes.kind == kind).sum() for kind in (1, 2, 3))
        assert forward == count and whole + inputs == count and inputs == weights
        assert len(np.unique(passes.identity)) == len(passes)
        assert table.stages == pipeline.ranks * pipeline.chunks


@settings(max_examples=examples(100))
@given(PIPELINES, st.booleans(), st.data())
def test_a_table_without_one_of_its_actions_is_refused(case: tuple, messages: bool, data: st.DataObject) -> None:
    name, pipeline = case
    table = table_of(name, pipeline)
    table = with_messages(table) if messages else table
    rows = np.flatnonzero(table.kind <= MESSAGES[-1])
    row = int(rows[data.draw(st.integers(0, len(rows) - 1))])
    smaller = table.taken(np.arange(len(table)) != row)
    if pipeline.micro_batches == 1 and table.kind[row] == Kind.FORWARD and not len(smaller):
        return
    with pytest.raises(UserError, match=r"rank|a schedule without actions"):
        check(smaller)


@settings(max_examples=examples(100))
@given(PIPELINES, st.data())
def test_a_table_with_an_action_twice_is_refused(case: tuple, data: st.DataObject) -> None:
    table = with_messages(table_of(*case))
    row = int(data.draw(st.sampled_from(np.flatnonzero(table.kind <= MESSAGES[-1]).tolist())))
    rows = np.insert(np.arange(len(table)), row, row)
    with pytest.raises(UserError, match=re.escape(f"rank {table.rank[row]}: {table.named(row)}: ")):
        check(table.taken(rows))


@settings(max_examples=examples(100))
@given(PIPELINES, st.data())
def test_a_backward_pass_before_its_forward_pass_is_refused(case: tuple, data: st.DataObject) -> None:
    table = table_of(*case)
    row = int(data.draw(st.sampled_from(np.flatnonzero(table.kind == Kind.FORWARD).tolist())))
    same = (table.stage == table.stage[row]) & (table.micro_batch == table.micro_batch[row])
    backward = (table.kind == Kind.BACKWARD) | (table.kind == Kind.INPUT_GRADIENT)
    other = int(np.flatnonzero(same & backward & (table.slice == table.slice[row]))[0])
    order = np.arange(len(table))
    order[[row, other]] = other, row
    with pytest.raises(UserError, match=rf"rank {table.rank[row]}: .*(needs|circle)"):
        check(replace(table.taken(order), together=np.full(len(table), -1)))


def sliced() -> ActionTable:
    return SCHEDULES["terapipe"].actions(1, 1, 1, slices=2)


def small(name: str = "1f1b", chunks: int = 1, **settings_: bool) -> ActionTable:
    return with_messages(SCHEDULES[name].actions(2, chunks, 4), **settings_)


def swapped(table: ActionTable, one: str, other: str) -> ActionTable:
    names = [table.named(row) for row in range(len(table))]
    order = np.arange(len(table))
    order[[names.index(one), names.index(other)]] = names.index(other), names.index(one)
    return table.taken(order)


def changed(table: ActionTable, name: str, **columns: int) -> ActionTable:
    row = [table.named(each) for each in range(len(table))].index(name)
    made = {column: getattr(table, column).copy() for column in COLUMNS}
    for column, value in columns.items():
        made[column][row] = value
    return replace(table, **made)


@pytest.mark.parametrize(("table", "message"), [
    (swapped(small(), "0SEND_F0", "0SEND_F1"), "rank 0: 0SEND_F1: stands before 0F1, which it needs"),
    (swapped(small(), "1RECV_F0", "1RECV_F1"), "rank 1: 1F0: stands before 1RECV_F0, which it needs"),
    (swapped(small("gpipe"), "0SEND_F0", "0F3"), "rank 0: 0SEND_F1: rank 1 expects 0SEND_F0 first: two ranks have the"),
    (swapped(small("gpipe"), "0RECV_B0", "0RECV_B1"), "rank 0: 0B0: stands before 0RECV_B0, which it needs"),
    (swapped(sliced(), "0F0.0", "0F0.1"), "rank 0: 0F0.1: stands before 0F0.0, which it needs"),
    (swapped(sliced(), "0B0.0", "0B0.1"), "rank 0: 0B0.0: stands before 0B0.1, which it needs"),
    (changed(small(), "0F2", rank=1), "rank 0: 0RECV_B1: actions of a rank do not follow each other"),
    (changed(small(), "0F2", stage=2), "rank 0: 2F2: stages are 0 to 1"),
    (changed(small(), "0F2", micro_batch=4), "rank 0: 0F4: micro-batches are 0 to 3"),
    (changed(small(), "0F2", micro_batch=1), "rank 0: 0F1: is in the schedule twice"),
    (changed(small(), "0F2", kind=Kind.UPDATE), "rank 0: 0F2 is missing: each stage needs a pass F for micro-batch 2"),
    (changed(small(), "0F2", slice=1), "rank 0: 0F2: slices are 0 to 0"),
    (changed(small("zb-h1"), "0W0", kind=Kind.BACKWARD), "rank 0: 0B0: a backward pass is whole or in two parts"),
    (changed(small("zb-h1"), "0W0", kind=Kind.UPDATE, micro_batch=-1), "rank 0: 0W0 is missing"),
    (changed(small("1f1b", gathered=1), "1UNSHARD", kind=Kind.RESHARD), "rank 1: 1RESHARD: frees weights that were"),
    (swapped(small("1f1b", gathered=1), "0UNSHARD", "0F0"), "rank 0: 0F0: its weights are not gathered"),
    (changed(small("1f1b", gathered=1), "0RESHARD", kind=Kind.UNSHARD), "rank 0: 0UNSHARD: gathers weights that are"),
    (swapped(small("1f1b", reduces=True), "0REDUCE_GRAD", "0SEND_F3"), "rank 0: 0B2: makes gradients that were"),
])  # fmt: skip
def test_what_is_refused(table: ActionTable, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(message)):
        check(table)


def test_messages_in_another_order_on_the_other_rank_are_refused() -> None:
    """The receiver takes them in the order in which they are sent."""
    table = small("gpipe")
    names = [table.named(row) for row in range(len(table))]
    early = [names.index(each) for each in ("1RECV_F0", "1RECV_F1", "1F0")]
    order = np.arange(len(table))
    order[sorted(early)] = [names.index(each) for each in ("1RECV_F1", "1RECV_F0", "1F0")]
    with pytest.raises(UserError, match=r"rank 0: 0SEND_F0: rank 1 expects 0SEND_F1 first"):
        check(table.taken(order))


def test_buffers() -> None:
    """Two ranks that send each other before they receive need a buffer for one message."""
    table = small("1f1b")
    names = [table.named(row) for row in range(len(table))]
    order = np.arange(len(table))
    at = [names.index(each) for each in ("0RECV_B1", "0SEND_F2")]
    order[at] = at[::-1]
    late = [names.index(each) for each in ("1SEND_B1", "1RECV_F2")]
    check(table.taken(order), buffers=1)
    assert names[late[0] : late[1] + 1] == ["1SEND_B1", "1RECV_F2"]
    with pytest.raises(UserError, match=r"circle: rank 0 at 0SEND_F2 for .*; rank 1 at 1SEND_B1 for "):
        check(table.taken(order), buffers=0)


def test_a_circle_names_its_ranks_and_none_that_waits_for_it() -> None:
    table = swapped(swapped(SCHEDULES["1f1b"].actions(3, 1, 4), "2F0", "2F3"), "2B0", "2B3")
    with pytest.raises(UserError, match=r"in a circle: rank 1 at 1B0 for 2B0; rank 2 at 2F3 for 1F3$"):
        check(table)
