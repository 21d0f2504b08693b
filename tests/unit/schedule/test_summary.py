"""The table of all schedules."""

from __future__ import annotations

import pytest

from steptime.schedule import SCHEDULES, Schedule
from steptime.schedule.schedules import registered
from steptime.simulation.summary import summary, text_of


def test_one_row_for_each_schedule() -> None:
    rows = {row.name: row for row in summary(8, 32)}
    assert list(rows) == list(SCHEDULES) and not any(row.refused for row in rows.values())
    assert rows["1f1b"].bubble_fraction == pytest.approx(7 / 39) and rows["interleaved"].chunks == 2
    assert (rows["gpipe"].in_flight, rows["1f1b"].in_flight, rows["zb-h2"].in_flight) == (32, 8, 15)
    assert (rows["pipedream"].weight_versions, rows["pipedream-2bw"].weight_versions) == (8, 2)
    assert (rows["pipedream"].staleness, rows["ampnet"].staleness, rows["1f1b"].staleness) == (7, None, 0)
    assert {row.copies for row in rows.values()} == {1, 2} and rows["chimera"].copies == 2
    assert rows["zb-1p"].bubble_fraction is None


def test_what_is_not_served_says_why() -> None:
    rows = {row.name: row for row in summary(3, 7)}
    assert (
        rows["chimera"].refused
        == "schedule chimera requires an even number of ranks; got 3 ranks, 1 chunk, 7 micro-batches"
    )
    assert rows["chimera"].in_flight is None and rows["1f1b"].refused is None
    lines = text_of(list(rows.values())).splitlines()
    assert len(lines) == 1 + len(SCHEDULES) and len({len(line) for line in lines}) == 1
    assert next(line for line in lines if line.startswith("chimera")).split()[3:7] == ["-", "-", "-", "-"]


def test_a_schedule_of_ones_own_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULES, "_plugins", dict(SCHEDULES._plugins))
    registered(Schedule(name="mine", source="a test", order=SCHEDULES["gpipe"].order))
    assert SCHEDULES["mine"].actions(2, 1, 3).of_rank(0)[:3] == ["0F0", "0F1", "0F2"]
    assert summary(2, 4)[-1].name == "mine"
