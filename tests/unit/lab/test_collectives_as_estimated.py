"""Rows of collectives on machines that were not measured: the model of an estimate times them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptime.cost.collective_algorithms import least_s
from steptime.estimate.communication import collective_over, message_time_s
from steptime.estimate.machine import Machine, machine_of
from steptime.hardware import load_cluster
from steptime.hardware.profiles import load_fabric_profiles
from steptime.measure.residuals import Predicted
from steptime.measure.table import Table
from steptime.plan.job import PRECISIONS
from steptime_lab.calibrate.collectives import KINDS, predict_rows
from steptime_lab.scoring.kernels import score_collectives

SIZE = 2.0**30


def rows(gpu: str, ranks: int = 8, kind: str = "allreduce", source: str = "mine", node: int = 8) -> Predicted:
    texts = {"gpu": gpu, "collective": kind, "source": source}
    texts |= dict.fromkeys(("method", "notes", "interconnect", "dtype"), "")
    numbers = {"n_gpus": float(ranks), "gpus_per_node": float(node), "bytes": SIZE, "time_us": 1.0}
    columns = {name: np.array([value], dtype=object) for name, value in texts.items()}
    return predict_rows(Table({**columns, **{k: np.array([v]) for k, v in numbers.items()}}), load_fabric_profiles())


def estimate(device: str, gpus: int) -> Machine:
    return machine_of(load_cluster(device), gpus, PRECISIONS["bf16"], lone_rank_has_all_links=True, calibrated=True)


@pytest.mark.parametrize("device", ["mi300x", "mi355x", "gaudi3", "l40s", "tpu-v5p"])
def test_no_collective_beats_the_links_that_estimates_know(device: str) -> None:
    found = rows(device)
    seconds, inner = float(found.seconds[0]), load_cluster(device).levels[0]
    assert found.origin is not None and found.origin[0] == "textbook"
    assert 2 * 7 / 8 * SIZE / seconds < inner.link_Bps * inner.links_per_device
    assert seconds == pytest.approx(float(collective_over("all_reduce", estimate(device, 8), SIZE, 8, 8)))


@pytest.mark.quick(every=3)
@pytest.mark.each("kind", sorted(set(KINDS.values())))
def test_every_collective_has_a_textbook_time(kind: str) -> None:
    seconds = {ranks: float(rows("mi300x", ranks, kind).seconds[0]) for ranks in (8, 16)}
    assert 0 < seconds[8] < seconds[16]
    if kind == "p2p":
        assert (seconds[8], seconds[16]) == message(16)


def message(gpus: int) -> tuple[float, float]:
    near, far = message_time_s(estimate("mi300x", gpus), SIZE)
    return float(near), float(far)


def test_nodes_of_nvlink_take_the_fabric_of_estimates() -> None:
    found, model = rows("h100", 64), estimate("h100", 64).fabric
    assert model is not None and found.origin is not None and found.origin[0] == "transferred"
    assert found.seconds[0] == pytest.approx(least_s("all_reduce", SIZE, 64, 8, model.fabric))
    own = rows("h100")
    assert own.origin is not None and own.origin[0] == "own"


def test_a_broken_machine_is_the_model_of_its_own_rows_alone() -> None:
    theirs, mine = rows("L40S", source="aiconfigurator_nccl"), rows("L40S")
    assert theirs.origin is not None and theirs.origin[0] == "own"
    assert mine.seconds[0] < theirs.seconds[0] / 2


def test_every_row_says_what_it_rests_on(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        "gpu,n_gpus,gpus_per_node,collective,bytes,time_us\nh100,8,8,allreduce,1e8,500\nmi300x,8,8,allreduce,1e8,900\n"
    )
    found = score_collectives(table)
    assert set(found.to_json()["by_curve"]) == {"own", "textbook"}
    found.write(tmp_path / "out.csv")
    head, *lines = (line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines())
    assert [line[head.index("curve")] for line in lines] == ["own", "textbook"]
