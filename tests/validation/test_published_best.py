"""Published optima that need no bulk data: the best plans of gpt3_1T, days of training, where models start to fit."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import published_cases as cases
import pytest

from steptime import api

BEST = Path(__file__).parents[1] / "data" / "published_best.csv"
TOLERANCE = 1e-9
IDENTITY = ("dp", "tp1", "tp2", "pp", "mbs", "nb", "nv_dp", "nv_tp1", "nv_tp2", "nv_pp")


def _best() -> list[dict[str, str]]:
    lines = [line for line in BEST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.each("name", list(cases.STRATEGIES))
@pytest.mark.each("gpu", cases.GPUS)
def test_best_plan(name, gpu):
    rows = [row for row in _best() if (row["strategy"], row["gpu"]) == (name, gpu)]
    assert len(rows) == 6
    settings = [cases.setting("gpt3_1T", gpu, int(row["domain"]), int(row["gpus"])) for row in rows]
    for row, found in zip(rows, cases.best(settings, name, top=1), strict=True):
        assert cases.relative(cases.BATCH / found.best_s[0], float(row["throughput"])) <= TOLERANCE
        assert cases.configuration(name, found.best.row(0)) == tuple(int(row[key]) for key in IDENTITY)


@pytest.mark.parametrize("row", _best()[::9], ids=lambda row: f"{row['strategy']}-{row['gpu']}-{row['domain']}")
def test_best_plan_through_the_api(row):
    result = api.plan(
        "gpt3_1T", f"published-{row['gpu']}-nvs{row['domain']}", gpus=int(row["gpus"]), global_batch=cases.BATCH,
        strategy=cases.STRATEGIES[row["strategy"]], mode="published", top=1,
    )  # fmt: skip
    (best,) = result.plans
    assert cases.relative(best.samples_per_s, float(row["throughput"])) <= TOLERANCE
    assert cases.relative(best.peak_memory_bytes, float(row["memory_gb"]) * 1e9) <= TOLERANCE
    assert best.published is not None
    assert [best.published["config"][key] for key in IDENTITY] == [int(row[key]) for key in IDENTITY]


def _days(model: str, name: str, gpu: str, gpus: int, sequences: float) -> list[float]:
    found = cases.best([cases.setting(model, gpu, domain, gpus) for domain in cases.DOMAINS], name, top=1)
    return [sequences / cases.BATCH * f.best_s[0] / cases.DAY_S for f in found]


TOKENS_GPT3 = 1e12 / 2048
IMAGES_VIT = 80 * 350_000
#: arXiv 2410.00273, notebook plots_overall_perf of its repository: model, strategy, GPU, devices, sequences, days on
#: domains of 4, 8 and 64.
DAYS = [
    ("gpt3_1T", "1d", "a100", 4096, TOKENS_GPT3, ("97.96", "86.88", "85.47")),
    ("gpt3_1T", "1d", "h200", 4096, TOKENS_GPT3, ("30.95", "30.15", "29.22")),
    ("gpt3_1T", "1d", "b200", 4096, TOKENS_GPT3, ("12.88", "12.47", "12.21")),
    ("gpt3_1T", "1d", "a100", 16384, TOKENS_GPT3, ("33.0", "28.2", "25.5")),
    ("gpt3_1T", "1d", "h200", 16384, TOKENS_GPT3, ("11.8", "10.3", "9.5")),
    ("gpt3_1T", "1d", "b200", 16384, TOKENS_GPT3, ("5.24", "4.46", "3.99")),
    ("vit_era5", "2d-seqp", "a100", 16384, IMAGES_VIT, ("9.13", "8.05", "6.70")),
    ("vit_era5", "2d-seqp", "b200", 16384, IMAGES_VIT, ("1.29", "1.08", "0.89")),
]


@pytest.mark.each(("model", "name", "gpu", "gpus", "sequences", "days"), DAYS)
def test_days_of_training(model, name, gpu, gpus, sequences, days):
    ours = _days(model, name, gpu, gpus, sequences)
    assert tuple(f"{day:.{len(text.split('.')[1])}f}" for day, text in zip(ours, days, strict=True)) == days


#: Fewest devices on which anything fits, on A100, H200 and B200.
FEWEST = [
    ("gpt3_1T", "1d", (512, 256, 128)), ("gpt3_1T", "2d", (256, 128, 128)), ("gpt3_1T", "2d-seqp", (512, 256, 128)),
    ("vit_era5", "1d", (None, None, None)), ("vit_era5", "2d", (64, 32, 32)), ("vit_era5", "2d-seqp", (256, 64, 32)),
]  # fmt: skip


@pytest.mark.quick("vit_era5-1d-fewest3")
@pytest.mark.parametrize(("model", "name", "fewest"), FEWEST)
def test_fewest_devices_on_which_a_model_fits(model, name, fewest):
    ours = []
    for gpu in cases.GPUS:
        settings = [cases.setting(model, gpu, domain, n) for n in cases.COUNTS for domain in cases.DOMAINS]
        fits = [s.job.gpus for s, f in zip(settings, cases.best(settings, name, top=1), strict=True) if f.feasible]
        ours.append(min(fits, default=None))
    assert tuple(ours) == fewest


def test_validation_plan_of_gpt3_175b_ranks_first():
    """On 512 A100 with domains of 4 the measured optimum (tp 4, pp 16, dp 8, mbs 1) is the predicted one."""
    setting = cases.setting("gpt3", "a100", 4, 512)
    for batch, step_s in ((1024, "22.47"), (1536, "32.34"), (2048, "42.21")):
        (found,) = cases.best([replace(setting, job=replace(setting.job, global_batch=batch))], "1d", top=1)
        plans = found.best.row(0)
        assert (plans.tp, plans.pp, plans.dp, plans.micro_batch) == (4, 16, 8, 1)
        assert f"{found.best_s[0]:.2f}" == step_s
