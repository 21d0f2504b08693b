"""The learned correction as a file and as factors on the terms of estimates and profiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.api import estimate
from steptime.errors import InputFileError, UserError
from steptime.estimate.learned import (
    FOLDER,
    LIMIT,
    NUMBERS,
    Correction,
    correction_from,
    correction_named,
    described,
    read_correction,
)
from steptime.hardware import load_device

SIZE = len(NUMBERS)
WORK = {"matrix_flops": 2e9, "vector_flops": 0.0, "moved_bytes": 1e6, "launches": 1.0}


def flat(log_factor: float, operators: tuple[str, ...] = ("matmul",), reach: float = 30.0) -> Correction:
    """A correction by the same factor for all known operators."""
    return Correction(
        name="flat",
        operators=operators,
        centre=np.zeros(SIZE),
        spread=np.ones(SIZE),
        low=np.full(SIZE, -reach),
        high=np.full(SIZE, reach),
        layers=((np.zeros((SIZE + len(operators), 1)), np.zeros(1)),),
        offsets=np.full(len(operators), log_factor),
        host=np.zeros(4),
        machines={},
        workspaces={},
        of_processor=False,
        band=(0.8, 1.3),
        error=0.1,
        provenance={"unseen": "nothing"},
    )


def numbers(**changes: Any) -> tuple[Any, ...]:
    """Features of a product that takes 1 ms."""
    given = {"backward": False, "peak_flops_per_s": 1e13, "memory_Bps": 1e12, **changes}
    return described({"m": 100.0, "n": 200.0, "k": 300.0}, WORK, 1e-3, **given)


def test_features_are_logarithms_in_order() -> None:
    found = dict(zip(NUMBERS, numbers(), strict=True))
    assert found["seconds"] == pytest.approx(3)  # 1,000 us
    assert found["matrix_flops"] == pytest.approx(math.log10(2000))
    assert found["rows"] == pytest.approx(math.log10(101))
    assert found["depth"] == pytest.approx(math.log10(301))
    assert found["share_of_peak"] == pytest.approx(math.log10(0.2 + 1e-3))


def test_known_operators_have_their_offset_and_others_none() -> None:
    one = flat(0.2)
    assert one.factor("matmul", numbers()) == pytest.approx(math.exp(LIMIT * math.tanh(0.2 / LIMIT)))
    assert one.factor("softmax", numbers()) == 1.0
    assert one.knows("matmul") and not one.knows("softmax")


def test_no_factor_is_beyond_the_limit() -> None:
    assert flat(50.0).factor("matmul", numbers()) == pytest.approx(math.exp(LIMIT))


def test_factors_fade_far_from_what_was_seen() -> None:
    near, far = flat(0.2), flat(0.2, reach=0.5)
    assert 1.0 < far.factor("matmul", numbers()) < 1.05 < near.factor("matmul", numbers())


def test_arrays_are_corrected_element_by_element() -> None:
    one = flat(0.2)
    work = {**WORK, "moved_bytes": np.array([1e6, 2e6])}
    found = one.factor(
        "matmul", described({"m": 100.0}, work, 1e-3, backward=False, peak_flops_per_s=1e13, memory_Bps=1e12)
    )
    assert isinstance(found, np.ndarray) and found.shape == (2,)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    one = replace(flat(0.2), machines={"card": (0.1, -0.2)}, workspaces={"upsample": (2.0, 0.0)})
    path.write_text(json.dumps(one.to_json()))
    back = read_correction(path)
    assert back.factor("matmul", numbers()) == pytest.approx(one.factor("matmul", numbers()), rel=1e-3)
    assert (back.band, back.machines, back.workspaces, back.provenance) == (
        one.band, one.machines, one.workspaces, one.provenance,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"steptime_correction": 99},
        {"numbers": ["other"]},
        {"layers": [[[[1.0]], [0.0]]]},
        {"offsets": []},
        {"spread": [0.0] * SIZE},
        {"centre": [1.0]},
        {"centre": ["x"] * SIZE},
        {"centre": [math.inf] * SIZE},
        {"band": [1.0]},
        {"machines": []},
        {"workspaces": {"a": [1.0]}},
        {"operators": 5},
        {"operators": ["matmul", "matmul"]},
        {"host": []},
        {"host": [1e300] * 4},
        {"host": [[0.0] * 4]},
        {"centre": [[0.0] * SIZE]},
        {"low": [31.0] * SIZE},
        {"offsets": [10**400]},
        {"band": [-5.0, -1.0]},
        {"band": [1.3, 0.8]},
        {"error": math.nan},
        {"machines": {"card": [math.nan, 0.0]}},
        {"workspaces": {"mm": [-1.0, 0.0]}},
        {"layers": [[[[1.0]] * (SIZE + 1), [0.0]], *[[[[1.0]], [0.0]]] * 20]},
    ],
)
def test_damaged_files_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputFileError):
        correction_from({**flat(0.2).to_json(), **change}, "c.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\x00"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InputFileError, match="is not a learned correction"):
        read_correction(path)


def test_an_unknown_name_says_what_to_give() -> None:
    with pytest.raises(UserError, match="neither 'learned' nor a file"):
        correction_named("nosuch", load_device("h100-sxm"))


@pytest.mark.parametrize("name", ["gpu", "processor"])
def test_shipped_corrections_are_read_and_say_what_they_rest_on(name: str) -> None:
    found = read_correction(FOLDER / f"{name}.json")
    assert found.provenance["graphs"] > 100 and found.provenance["unseen"]
    assert found.band[0] < 1 < found.band[1] and 0 < found.error < 0.2
    assert "matmul" in found.operators


def written(tmp_path: Path, one: Correction) -> str:
    """The file of a correction."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps(one.to_json()))
    return str(path)


def test_an_estimate_multiplies_the_terms_of_known_operators(tmp_path: Path) -> None:
    job: dict[str, Any] = {"gpus": 1, "global_batch": 8, "framework": "ideal", "plan": {"micro_batch": 8}}
    plain = estimate("gpt2-xl", "dgx-h100", **job)
    other = estimate("gpt2-xl", "dgx-h100", predictor=written(tmp_path, flat(0.1)), **job)
    factor = math.exp(LIMIT * math.tanh(0.1 / LIMIT))
    before, after = ({d.path: d for d in e.details} for e in (plain, other))
    path = next(p for p in before if p.startswith("compute/forward/qkv"))
    assert after[path].value == pytest.approx(before[path].value * factor, rel=1e-3)
    assert after[path].factors["learned_factor"] == pytest.approx(factor, rel=1e-3)
    norm = next(p for p in before if "norm" in p and p.startswith("memory_bound/forward"))
    assert after[norm].value == before[norm].value
    assert any("learned factors (flat)" in note for note in other.notes)
    assert other.step_time_s > plain.step_time_s


def test_a_correction_by_one_changes_nothing(tmp_path: Path) -> None:
    job: dict[str, Any] = {"gpus": 1, "global_batch": 8}
    plain = estimate("gpt2-xl", "dgx-h100", **job)
    assert estimate("gpt2-xl", "dgx-h100", predictor=written(tmp_path, flat(0.0)), **job).time == plain.time


def test_factors_of_processors_are_refused_on_a_gpu(tmp_path: Path) -> None:
    path = written(tmp_path, replace(flat(0.1), of_processor=True))
    with pytest.raises(UserError, match="fitted on processors"):
        correction_named(path, load_device("h100-sxm"))
