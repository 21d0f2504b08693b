"""Keys of points follow the content of every file that a job reads, within one process too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fits import fit_text
from steptime import api, study

MODEL = """
name = "small"
family = "dense"
source = "made for this test"
layers = {layers}
hidden = 512
heads = 8
ffn_hidden = 2048
vocab = 1000
seq_len = 512
"""
STUDY = """
what = "estimate"
[job]
model = "{model}"
cluster = "dgx-h100"
gpus = 8
global_batch = 64
[job.plan]
micro_batch = 1
{more}
"""


def step_times(file: Path, store: Path) -> list[float]:
    found = study.read_study(file)
    study.run(found, store, workers=1)
    return [row["step_time_s"] for row in study.results(found, store).rows("plans")]


def test_an_edited_load_of_experts_is_another_point(tmp_path: Path) -> None:
    load, file = tmp_path / "load.csv", tmp_path / "study.toml"
    file.write_text(STUDY.format(model="mixtral-8x7b", more=f'ep = 8\nexpert_load = "{load}"'))
    load.write_text("tokens\n" + "1\n" * 8)
    even = step_times(file, tmp_path / "store")
    load.write_text("tokens\n" + "1\n" * 7 + "99\n")
    assert step_times(file, tmp_path / "store")[0] > 1.5 * even[0]
    load.write_text("tokens\n" + "1\n" * 8)
    assert step_times(file, tmp_path / "store") == even


def test_an_edited_model_is_read_again(tmp_path: Path) -> None:
    model, file = tmp_path / "small.toml", tmp_path / "study.toml"
    file.write_text(STUDY.format(model="small.toml", more=""))
    model.write_text(MODEL.format(layers=4))
    first = step_times(file, tmp_path / "store")
    model.write_text(MODEL.format(layers=40))
    second = step_times(file, tmp_path / "store")
    given = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 64, "plan": {"micro_batch": 1}}
    assert second[0] == api.estimate(str(model), **given).step_time_s != first[0]


def test_edited_frameworks_are_other_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, own = tmp_path / "study.toml", tmp_path / "own"
    file.write_text(STUDY.format(model="gpt2", more=""))
    first = step_times(file, tmp_path / "store")
    own.mkdir()
    monkeypatch.setenv("STEPTIME_PATH", str(own))
    text = fit_text()
    assert "[common]" in text
    head, _, tail = text.partition("[common]")
    name, _, rest = tail.lstrip().partition(" = ")
    value, _, rest = rest.partition("\n")
    (own / "frameworks.toml").write_text(f"{head}[common]\n{name} = {2 * float(value)}\n{rest}")
    changed = step_times(file, tmp_path / "store")
    given = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 64, "plan": {"micro_batch": 1}}
    assert changed[0] == api.estimate("gpt2", **given).step_time_s != first[0]
