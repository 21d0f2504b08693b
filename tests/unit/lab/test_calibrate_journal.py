"""Records of a calibration's journal that are damaged, or of another version, are measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calibrate_machine import HOST, small, torch_needed

from steptime.estimate.measured import CONVOLVED, LOOPED
from steptime.measure.machine import cluster_file, collectives, runner, session
from steptime.measure.machine.collectives import Mesh
from steptime.measure.machine.torch_ops import CpuTimer
from steptime.measure.machine.work import Task
from steptime.store.journal import read_journal

__all__ = ["small"]

TASK, OTHER = (Task(kind="matmul", dtype="fp32", shape={"m": 8, "n": n, "k": 8}) for n in (8, 16))


def record_of(task: Task, seconds: list[float]) -> dict[str, Any]:
    return {
        "key": runner.visit_key(task, 0), "of": "operator", "kind": task.kind, "dtype": task.dtype,
        "shape": dict(task.shape), "layout": task.layout, "round": 0, "clock": "thread", "seconds": seconds,
    }  # fmt: skip


@pytest.mark.each(
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


IMAGES = {"batch": 2, "channels_in": 8, "channels_out": 8, "side": 9, "kernel": 3, "stride": 1, "groups": 1}


@pytest.mark.parametrize("damage", [{"groups": 0}, {"stride": 0}, {"side": "x"}, {"kernel": None}], ids=str)
def test_a_damaged_record_of_a_convolution_is_measured_again(damage: dict[str, Any]) -> None:
    task = Task(kind="conv_fwd", dtype="fp32", shape=IMAGES)
    assert runner.done_keys([record_of(task, [1.0])]) == {runner.visit_key(task, 0)}
    assert runner.done_keys([{**record_of(task, [1.0]), "shape": {**IMAGES, **damage}}]) == set()


@pytest.mark.slow
@torch_needed
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("new", "kinds"), [(("conv",), CONVOLVED), (("_norm", "_pool"), LOOPED)])
def test_a_journal_of_before_operators_on_images_is_resumed(
    tmp_path: Path, new: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    request = session.Request(out=tmp_path / "m.toml")
    first = session.calibrate(request, lambda done, total: None)
    journal = cluster_file.journal_path(request.out)
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(line for line in lines if not any(name in line for name in new)) + "\n")
    again = session.calibrate(replace(request, resume=True), lambda done, total: None)
    assert first is not None and again is not None
    for fitted in (first, again):
        made = [curve for curve in fitted.curves if curve.family.partition("/")[2] in kinds]
        assert [curve.dtype for curve in made] == ["fp32"] * len(kinds)
    assert len(read_journal(journal).records) == len(lines) - 1, "without the header"


def test_dtypes_are_those_in_which_nothing_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is a hundred times slower in one of the gradients; this torch has no products of it in bf16."""

    def samples_s(self: runner.Bench, task: Task, visit_s: float) -> list[float]:
        if task.dtype == "bf16" and task.kind == "matmul":
            raise RuntimeError("not implemented")
        return [1e-2 if (task.dtype, task.kind) == ("fp16", "conv_bwd_weight") else 1e-4]

    monkeypatch.setattr(runner.Bench, "samples_s", samples_s)
    bench = runner.Bench(None, HOST, CpuTimer(), None)  # type: ignore[arg-type]
    assert bench.dtypes() == ("fp32", "fp16")
    assert bench.dtypes(runner.CONVOLUTION) == ("fp32", "bf16")
