"""Records of a calibration's journal that are damaged, or of another version, are measured again."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.calibrate.machine import collectives, runner
from steptime.calibrate.machine.collectives import Mesh
from steptime.calibrate.machine.work import Task

TASK, OTHER = (Task(kind="matmul", dtype="fp32", shape={"m": 8, "n": n, "k": 8}) for n in (8, 16))


def record_of(task: Task, seconds: list[float]) -> dict[str, Any]:
    return {
        "key": runner.visit_key(task, 0), "of": "operator", "kind": task.kind, "dtype": task.dtype,
        "shape": dict(task.shape), "layout": task.layout, "round": 0, "clock": "thread", "seconds": seconds,
    }  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [{"seconds": None}, {"seconds": "x"}, {"seconds": ["a"]}, {"kind": "foo"}, {"kind": [1]}, {"dtype": "fp99"},
     {"shape": [1]}, {"shape": {"m": "x"}}, {"round": 9}, {"layout": 3}, {"of": None}],
    ids=str,
)  # fmt: skip
def test_a_damaged_record_is_measured_again(damage: dict[str, Any]) -> None:
    records = [{**record_of(TASK, [1.0]), **damage}, record_of(OTHER, [2.0])]
    assert runner.done_keys(records) == {runner.visit_key(OTHER, 0)}
    assert [m.task.key for m in runner.results(records)] == [OTHER.key]
    lacking = [{k: v for k, v in records[0].items() if k not in damage}, records[1]]
    assert [m.task.key for m in runner.results(lacking)] == [OTHER.key]


def test_damaged_records_of_collectives_are_measured_again() -> None:
    visits = collectives.visits(mesh := Mesh(nodes=1, local=2), [4096], 1)
    good = [{**visit, "seconds": [1e-3]} for visit in visits]
    assert runner.done_keys(good) == {visit["key"] for visit in visits}
    for damage in ({"seconds": None}, {"shape": {"ranks": 2}}, {"kind": "x"}, {"axis": None}):
        records = [{**good[0], **damage}, *good[1:]]
        assert visits[0]["key"] not in runner.done_keys(records)
        assert len(collectives.results(records, mesh)) == len(good) - 1
