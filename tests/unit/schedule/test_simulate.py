"""The simulator against a naive player, closed forms, and cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_player import Player

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable
from steptime.schedule.actions import Kind
from steptime.schedule.graph import Transport
from steptime.schedule.messages import with_messages
from steptime.schedule.simulate import (
    Durations,
    longest,
    seconds_of_rows,
    simulate,
    total,
)

EQUAL = Durations(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)
TOGETHER = (longest, total, lambda most, every: 0.7 * every)


def random_durations(random: np.random.Generator, table: ActionTable, together: int) -> Durations:
    shape = (table.stages, table.micro_batches, table.slices)
    return Durations(
        forward_s=random.random(shape), input_gradient_s=random.random(shape[:2]),
        weight_gradient_s=random.random(shape[:1]), unshard_s=random.random(table.stages),
        reduce_s=random.random(table.stages), update_s=float(random.random()),
        message_s=random.random((table.ranks, table.ranks)), slowdown=1 + random.random(table.ranks),
        together=TOGETHER[together],
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
        table = with_messages(table, gathered=draw(st.integers(0, 2)), reduces=draw(st.booleans()),
                              updates=draw(st.booleans()))  # fmt: skip
    return table, random


@given(
    drawn=tables(), together=st.integers(0, 2), overlap=st.booleans(), buffers=st.sampled_from([None, 2, 4]),
    shared=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_as_the_naive_player(
    drawn: tuple[ActionTable, np.random.Generator], together: int, overlap: bool, buffers: int | None, shared: bool
) -> None:
    table, random = drawn
    durations = random_durations(random, table, together)
    number = random.integers(3, size=(table.ranks, table.ranks))
    transport = Transport(overlap=overlap, buffers=buffers, link=(lambda a, b: number[a, b]) if shared else None)
    player = Player(
        table, seconds_of_rows(table, durations).tolist(), durations.together, lambda a, b: durations.message_s[a, b],
        overlap, buffers, (lambda a, b: number[a, b]) if shared else None,
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
