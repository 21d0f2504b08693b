"""The whole training next to its step: lengths, days, device hours, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from steptime import api
from steptime.cost.training import training_s
from steptime.errors import UserError
from steptime.formats.estimate_file import parse_estimate
from steptime.goodput.training import KEYS, check_training

JOB = {"gpus": 8, "global_batch": 64}
#: Days of gpt3_1T, 1e12 tokens, 4,096 GPUs, strategy 1d: arXiv 2410.00273, its notebook plots_overall_perf.
PUBLISHED = {
    "a100": (97.96, 86.88, 85.47),
    "h200": (30.95, 30.15, 29.22),
    "b200": (12.88, 12.47, 12.21),
}


def test_published_training_days() -> None:
    for device, days in PUBLISHED.items():
        for domain, printed in zip((4, 8, 64), days, strict=True):
            found = api.plan(
                "gpt3_1T", f"published-{device}-nvs{domain}", gpus=4096, global_batch=4096, strategy="1d",
                mode="published", top=1, training={"tokens": "1T"},
            )  # fmt: skip
            assert round(found.plans[0].training["training_days"], 2) == printed, (device, domain)


def test_a_run_by_hand() -> None:
    e = api.estimate("llama-3-8b", "dgx-h100", **JOB, training={"tokens": "15T"})
    run, steps = e.training, 15e12 / 8192 / 64
    assert run["steps"] == pytest.approx(steps)
    assert run["training_days"] == pytest.approx(e.step_time_s * steps / 86400)
    assert run["gpu_hours"] == pytest.approx(8 * e.step_time_s * steps / 3600)
    assert run["gpu_days"] == pytest.approx(run["gpu_hours"] / 24)
    low, high = e.step_time_band_s
    assert run["training_band_days"] == pytest.approx([low * steps / 86400, high * steps / 86400])
    assert low < e.step_time_s < high and run["gpu_band_hours"][0] < run["gpu_hours"] < run["gpu_band_hours"][1]


@pytest.mark.each(
    "length",
    [
        {"tokens": 8192 * 1000},
        {"samples": "1k"},
        {"samples": 1000.0},
        {"epochs": 4, "dataset_samples": 250},
        {"epochs": 0.5, "dataset_tokens": "16.384M"},
    ],
)
def test_lengths_that_mean_the_same(length: dict[str, object]) -> None:
    run = api.estimate("llama-3-8b", "dgx-h100", **JOB, training=length).training
    assert run["samples"] == pytest.approx(1000) and run["tokens"] == pytest.approx(8_192_000)


def test_every_plan_of_a_search_has_it_and_a_published_one_has_no_band() -> None:
    found = api.plan("llama-3-8b", "dgx-h100", **JOB, top=4, training={"samples": 640}).to_json()
    assert [p["training"]["training_s"] for p in found["plans"]] == pytest.approx(
        [10 * p["step_time_s"] for p in found["plans"]]
    )
    job = {"gpus": 64, "global_batch": 64, "mode": "published", "training": {"tokens": 1e9}, "plan": {"tp": 8, "pp": 8}}
    run = api.estimate("gpt3_175b", "published-b200-nvs8", **job).training
    assert run["training_band_days"] is None


def test_without_a_length_nothing_is_there_and_a_written_run_is_read() -> None:
    assert "training" not in api.estimate("llama-3-8b", "dgx-h100", **JOB).to_json()
    import json

    e = api.estimate("llama-3-8b", "dgx-h100", **JOB, training={"samples": 640})
    assert parse_estimate(json.dumps(e.to_json()), "a.json").training == e.training


@pytest.mark.each(
    "length, word",
    [
        ({"tokens": 1, "samples": 1}, "already"),
        ({"epochs": 1}, "missing"),
        ({"epochs": 1, "dataset_tokens": 1, "dataset_samples": 1}, "twice"),
        ({"dataset_tokens": 1}, "epochs"),
        ({"tokens": "a lot"}, "amount"),
        ({"tokens": "-3"}, "amount"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": float("nan")}, "tokens"),
        ({"tokens": "1e400"}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"token": 1}, "tokens"),
        ("1T", "table"),
    ],
)
def test_refused(length: object, word: str) -> None:
    with pytest.raises(UserError, match=word):
        check_training(length)


def test_formula_takes_arrays() -> None:
    steps = np.array([1.0, 2.0])
    assert training_s(steps, 1000, 10).tolist() == [training_s(1.0, 1000, 10), training_s(2.0, 1000, 10)]
    assert set(check_training({"epochs": 1, "dataset_tokens": 1})) <= set(KEYS)
