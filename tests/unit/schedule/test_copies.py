"""Activations that go to the host and come back: where copies stand, what waits for them, and what ranks hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pipelines import SERVED, table_of

from steptime.cost.host import exposed_copies_s
from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable
from steptime.schedule.actions import COPIES, Kind
from steptime.simulation.graph import Transport
from steptime.simulation.idle import spent
from steptime.simulation.legality import check
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.messages import with_copies, with_messages
from steptime.simulation.pytorch_csv import csv_text
from steptime.simulation.simulate import Durations, Simulation, simulate
from steptime.simulation.waits import first_of_groups


def played(table: ActionTable, copy_s: float, ahead: int = 1) -> Simulation:
    durations = Durations(forward_s=1.0, backward_s=2.0, offload_s=copy_s, reload_s=copy_s)
    return simulate(with_copies(table, ahead=ahead), durations, Transport(copies_ahead=ahead))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_takes_copies(name: str) -> None:
    for pipeline in SERVED[name][:: max(len(SERVED[name]) // 12, 1)]:
        table = table_of(name, pipeline)
        for ahead in (0, 1, 2):
            both = with_copies(with_messages(table), ahead=ahead)
            check(both)
            check(with_messages(with_copies(table, ahead=ahead)))
            assert (with_copies(both, ahead=ahead).identity == both.identity).all()
            assert (first_of_groups(both.taken(both.kind < COPIES[0])) == first_of_groups(with_messages(table))).all()
            out, back = (np.sort(both.identity[both.kind == kind]) for kind in COPIES)
            assert (out - out[:1] == back - back[:1]).all()


def test_by_hand() -> None:
    """One rank, passes of 1 s forward and 2 s backward, copies of 1.5 s.

    F0 0-1, F1 1-2; F2 waits for F0's copy out (1-2.5): 2.5-3.5. F1's copy out 2.5-4, F0's copy back 2.5-4: B0 4-6. F2's
    copy out 4-5.5, F1's back 4-5.5: B1 6-8, F2's back 6-7.5: B2 8-10.
    """
    found = played(SCHEDULES["gpipe"].actions(1, 1, 3), 1.5)
    at = {found.table.named(row): (found.start_s[row], found.end_s[row]) for row in range(len(found.table))}
    assert at == {
        "0F0": (0, 1), "0F1": (1, 2), "0F2": (2.5, 3.5), "0B0": (4, 6), "0B1": (6, 8), "0B2": (8, 10),
        "0OFFLOAD0": (1, 2.5), "0OFFLOAD1": (2.5, 4), "0OFFLOAD2": (4, 5.5),
        "0RELOAD0": (2.5, 4), "0RELOAD1": (4, 5.5), "0RELOAD2": (6, 7.5),
    }  # fmt: skip
    assert spent(found).copy_s.tolist() == [1.0] and spent(found).total_s.tolist() == [10.0]
    assert not (played(SCHEDULES["1f1b"].actions(1, 1, 4), 1.5).table.kind >= COPIES[0]).any()


@pytest.mark.parametrize(("copy_s", "ahead"), [(0.5, 1), (1.5, 1), (2.0, 1), (3.0, 1), (1.0, 0), (3.0, 0)])
def test_waits_of_a_long_pipeline_are_those_of_the_estimate(copy_s: float, ahead: int) -> None:
    """A micro-batch lasts max(F, copy) + max(B, copy); a copy out that is longer than B overlaps with one back too."""
    step_s = [played(SCHEDULES["1f1b"].actions(4, 1, m), copy_s, ahead).step_s for m in (32, 96)]
    found, expected = (step_s[1] - step_s[0]) / 64, 3.0 + float(exposed_copies_s(copy_s, 1.0, 2.0, float(ahead > 0)))
    assert found == pytest.approx(expected if copy_s <= 2 or not ahead else max(1.0, copy_s) + 2.0, rel=1e-9)
    assert found <= expected


def test_memory_falls_when_a_copy_out_has_ended_and_rises_when_one_back_starts() -> None:
    table, held = SCHEDULES["gpipe"].actions(1, 1, 8), Footprint(activation_bytes=1.0)
    assert memory_replay(played(table, 0.5), held).peak_bytes.tolist() == [3.0]
    assert memory_replay(simulate(table, Durations(forward_s=1.0, backward_s=2.0)), held).peak_bytes.tolist() == [8.0]
    found = played(table, 0.5)
    replay = memory_replay(found, held)
    row = int(np.flatnonzero(found.table.kind == Kind.OFFLOAD)[0])
    fall = np.flatnonzero(np.diff(replay.in_use_bytes) < 0)[0] + 1
    assert replay.time_s[fall] == found.end_s[row] == 1.5
    # Three are held whole, of the five on the host a quarter each stays.
    assert memory_replay(found, replace(held, copied_bytes=0.75)).peak_bytes.tolist() == [3.0 + 5 * 0.25]


def test_tables_whose_copies_cannot_run() -> None:
    table = with_copies(SCHEDULES["gpipe"].actions(2, 1, 4))
    kind = table.kind
    first_back, last_back = np.flatnonzero(kind == Kind.RELOAD)[[0, -1]]
    for broken, words in (
        (table.taken(np.arange(len(table)) != first_back), "do not come back from the host"),
        (table.taken(np.arange(len(table)) != last_back), "do not come back from the host"),
        (table.taken(kind != Kind.OFFLOAD), "what it needs is not in the schedule"),
        (table.taken(np.append(np.arange(2), np.arange(1, len(table)))), "twice"),
        (replace(table, micro_batch=np.where(kind == Kind.OFFLOAD, -1, table.micro_batch)), "micro-batches are 0 to 3"),
    ):
        with pytest.raises(UserError, match=words):
            check(broken)
        with pytest.raises(UserError, match=words):
            simulate(broken, Durations(forward_s=1.0))
    with pytest.raises(UserError, match="has no copies to the host"):
        csv_text(table)
    with pytest.raises(UserError, match="-1 passes ahead of copies"):
        simulate(table, Durations(forward_s=1.0), Transport(copies_ahead=-1))
