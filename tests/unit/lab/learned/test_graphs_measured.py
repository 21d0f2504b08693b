"""Graphs made from their names, their sketches, and the journal of measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.captured.cost import Timer, cost_table
from steptime.captured.record import capture
from steptime.errors import InputFileError, UserError
from steptime.hardware import load_device
from steptime.store.journal import read_journal
from steptime_lab.learned import measuring
from steptime_lab.learned.data import rows_here, rows_of
from steptime_lab.learned.graphs import ALL, FAMILIES, SINGLE, case
from steptime_lab.learned.sketch import sketch, sketch_from

DEVICE = load_device("a100-sxm-80gb")


@pytest.mark.parametrize("family", ALL)
def test_a_graph_is_made_from_its_name_alone(family: str) -> None:
    one, same, other = case(family, 3), case(family, 3), case(family, 4)
    assert repr(one.module) == repr(same.module) and one.optimizer == same.optimizer and one.loss == same.loss
    assert [x.shape for x in one.inputs] == [x.shape for x in same.inputs]
    assert (repr(one.module), [x.shape for x in one.inputs]) != (repr(other.module), [x.shape for x in other.inputs])


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(UserError, match="family of graphs"):
        case("resnet", 1)


@pytest.fixture(scope="module")
def recurrent():  # type: ignore[no-untyped-def]
    made = case("recurrent", 5)  # a GRU: many operators of one call
    return capture(made.module, made.inputs, loss=made.loss, optimizer=made.optimizer, target="cpu", name=made.key)


def test_a_sketch_costs_what_its_program_costs(recurrent) -> None:  # type: ignore[no-untyped-def]
    timer = Timer(device=DEVICE)
    table, drawn = cost_table(recurrent, timer), sketch(recurrent)
    rows = rows_of([(drawn, timer, 1.0, "recurrent")])
    assert float((rows.device_s * rows.count).sum()) == pytest.approx(table.totals.device_s)
    assert float((rows.host_s * rows.count).sum()) == pytest.approx(table.totals.host_s)
    assert rows.analytic_s[0] == pytest.approx(table.totals.step_s)
    assert len(drawn.calls) + drawn.views == len(recurrent.calls)


def test_operators_of_a_loop_over_tokens_are_issued_from_the_inside(recurrent) -> None:  # type: ignore[no-untyped-def]
    table = cost_table(recurrent, Timer(device=DEVICE))
    inside = np.array(table.issued) == 3
    assert inside.sum() > 50
    first = next(n for n, call in enumerate(recurrent.calls) if inside[n] and table.works[n])
    assert table.host_s[first] <= table.launches[first] * table.timer.host_more_s


def test_edges_lead_from_earlier_to_later_calls_through_views(recurrent) -> None:  # type: ignore[no-untyped-def]
    drawn = sketch(recurrent)
    assert drawn.edges and all(source < target for source, target, _ in drawn.edges)
    assert max(target for _, target, _ in drawn.edges) < len(drawn.calls)


def test_a_sketch_is_read_as_it_was_written(recurrent) -> None:  # type: ignore[no-untyped-def]
    drawn = sketch(recurrent)
    back = sketch_from(drawn.to_json())
    assert (back.calls, back.edges, back.held_bytes, back.counts) == (
        drawn.calls, drawn.edges, drawn.held_bytes, drawn.counts,
    )  # fmt: skip
    timer = Timer(device=DEVICE)
    assert rows_of([(back, timer, 1.0, "")]).analytic_s == pytest.approx(rows_of([(drawn, timer, 1.0, "")]).analytic_s)


@pytest.mark.slow
def test_measuring_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    path, wanted = tmp_path / "g.jsonl", {"graphs": 2, "singles": 2, "families": ("mlp", SINGLE)}
    told: list[tuple[int, int]] = []

    def stopped(done: int, of: int) -> None:
        told.append((done, of))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring.measure(path, told=stopped, **wanted)  # type: ignore[arg-type]
    first = read_journal(path).records
    assert len(first) == 2
    assert measuring.measure(path, **wanted) == 6  # type: ignore[arg-type]
    assert read_journal(path).records[:2] == first
    graphs, header = measuring.read_graphs(path)
    assert header["threads"] == 1
    assert [graph.key for graph in graphs] == ["mlp:0", "single:0", "mlp:1", "single:1"]
    assert graphs[1].again_s is not None and graphs[2].again_s is None
    assert all(graph.seconds > 0 and graph.allocated_bytes > graph.sketch.static_bytes for graph in graphs)
    rows = rows_here(graphs, Timer(device=DEVICE))
    assert rows.only(np.array([2, 0])).measured_s.tolist() == [graphs[2].seconds, graphs[0].seconds]


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text('{"journal":1,"of":"graphs","torch":"0.1"}\n')
    with pytest.raises(InputFileError, match="another measurement"):
        measuring.measure(path, graphs=1, singles=0)
    with pytest.raises(UserError, match="holds no measured graph"):
        measuring.read_graphs(path)


def test_the_peak_is_what_a_step_takes_beyond_what_was_there() -> None:
    import torch

    kept = torch.zeros(1000)
    assert measuring.grown_bytes(lambda: (kept + 1).add_(1)) == pytest.approx(4000, abs=64)
    assert measuring.grown_bytes(lambda: (kept + 1) * (kept + 2)) == pytest.approx(12000, abs=64)


def test_a_profile_adds_what_kernels_were_learned_to_take(recurrent) -> None:  # type: ignore[no-untyped-def]
    from steptime.captured.graph.liveness import Liveness
    from steptime.captured.profiling import with_workspaces
    from steptime.estimate.learned import FOLDER, read_correction

    correction = read_correction(FOLDER / "processor.json")
    assert with_workspaces(recurrent, None) is recurrent
    one = replace(correction, workspaces={"mm": (0.0, 1.0)})
    more = with_workspaces(recurrent, one)
    number = next(n for n, call in enumerate(recurrent.calls) if call.node.op == "mm")
    before, after = Liveness(recurrent).in_use_bytes, Liveness(more).in_use_bytes
    assert after[number + 1] - before[number + 1] == recurrent.calls[number].node.outputs[0].size_bytes


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("graphs") / "g.jsonl"
    measuring.measure(path, graphs=1, singles=0, families=("mlp",))
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0}, {"seconds": -1.0}, {"seconds": float("nan")}, {"seconds": "1"}, {"seconds": None},
        {"seconds": 1e300}, {"seconds": 10**400}, {"grown_bytes": "x"}, {"sketch": 3}, {"sketch": {}},
        {"sketch": {"calls": []}}, {"sketch": {"calls": [99]}}, {"sketch": {"issuers": [9]}},
        {"sketch": {"edges": [[0, 10**6, 1.0]]}}, {"sketch": {"pieces": [["mm"]]}},
    ],
)  # fmt: skip
def test_damaged_records_are_named(journal: list[dict[str, Any]], tmp_path: Path, change: dict[str, Any]) -> None:
    header, first, again = journal
    inner = change.get("sketch")
    if isinstance(inner, dict) and inner:
        change = {"sketch": {**first["sketch"], **inner}}
    path = tmp_path / "g.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (header, {**first, **change}, again)))
    with pytest.raises(InputFileError, match="mlp:0"):
        measuring.read_graphs(path)


def test_every_family_is_measured_twice() -> None:
    for families, singles in ((tuple(FAMILIES), 0), (tuple(ALL), 60), (("mlp", "unet"), 0)):
        twice = [key for key in measuring.keys(200, singles, families, SINGLE) if key.endswith(measuring.TWICE)]
        assert {key.partition(":")[0] for key in twice} == {f for f in families if f != SINGLE or singles}


def test_training_never_writes_over_what_is_no_correction(journal: list[dict[str, Any]], tmp_path: Path) -> None:
    from steptime_lab.cli.predict import train

    path = tmp_path / "g.jsonl"
    text = "".join(json.dumps(each) + "\n" for each in journal)
    path.write_text(text)
    with pytest.raises(InputFileError, match="no correction"):
        train(path, "h100-sxm", out=path)
    assert path.read_text() == text
