"""Published runs that report failures, restarts or effective training time, against the predicted bands.

Inputs of a run are from its own publication, except its failure rate: that is the geometric mean of the other
publications (failures.toml), with the spread between them.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import pytest

from steptime.goodput.operations import SPREAD, Operations, names, published
from steptime.goodput.run import Goodput, Load, goodput_of

DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run."""

    source: str
    name: str
    devices: int
    days: float
    interruptions: tuple[float, float]
    effective: tuple[float, float] | None
    step_s: float
    saved_bytes: float
    operations: dict[str, float | str]


RUNS = (
    Run(
        source="arXiv 2407.21783, sections 3.3.1 and 3.3.4, tables 4 and 5: 54 days, 419 unexpected interruptions, "
        "higher than 90 % effective; 16 M tokens a step at 400 TFLOP/s a GPU; Tectonic sustains 2 TB/s",
        name="llama3-h100", devices=16384, days=54.0, interruptions=(419, 419), effective=(0.90, 1.0), step_s=6.45,
        saved_bytes=14 * 405e9, operations={"store_Bps": 2e12},
    ),
    Run(
        source="arXiv 2402.15627, section 6.3: more than 10,000 GPUs, several weeks (3 to 6), over 100 restarts, over "
        "90 % effective; detection and diagnosis take less than 10 minutes; checkpoints in two stages",
        name="megascale", devices=12288, days=28.0, interruptions=(100, 200), effective=(0.90, 1.0), step_s=6.34,
        saved_bytes=14 * 175e9, operations={"restart_s": 600.0},
    ),
    Run(
        source="Hugging Face, The Technology Behind BLOOM Training: 1 to 2 GPU failures a week, a checkpoint every 3 h "
        "(100 steps), 1.5 h lost on a failure, spare nodes at hand",
        name="bloom", devices=384, days=105.0, interruptions=(15, 30), effective=None, step_s=108.0,
        saved_bytes=2.3 * 2**40, operations={"interval_s": 3 * 3600.0, "spares": 4, "kind": "sync"},
    ),
    Run(
        source="arXiv 2205.01068, sections 2.4 and 2.5: at least 35 manual and an estimated 70 automatic restarts in "
        "about 2 months on 992 GPUs",
        name="opt-175b", devices=992, days=60.0, interruptions=(105, 105), effective=None, step_s=15.0,
        saved_bytes=14 * 175e9, operations={},
    ),
)  # fmt: skip


def run_of(row: Run, ops: Operations) -> Goodput:
    load = Load(
        step_s=row.step_s, steps=row.days * DAY / row.step_s, devices=row.devices, node=8, saved_bytes=row.saved_bytes,
        host_Bps=2e10, network_Bps=2e11,
    )  # fmt: skip
    return goodput_of(load, replace(ops, **row.operations))


def of_others(row: Run) -> Operations:
    logs = [math.log(published(name).job_mtbf_s(1, 8)) for name in names() if name != row.name]
    mtbf = math.exp(statistics.mean(logs))
    return Operations(name="others", source="others", date="2024-12-01", mtbf_s={"any": mtbf}, spread=SPREAD)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row.name)
def test_interruptions_and_effective_time_are_inside_the_band(row: Run) -> None:
    run = run_of(row, of_others(row))
    low, high = run.failures_band
    assert low <= row.interruptions[1] and row.interruptions[0] <= high
    if row.effective is not None:
        assert run.effective_band[0] <= row.effective[1] and row.effective[0] <= run.effective_band[1]


def test_llama_3_is_over_90_percent_effective_with_its_own_failures() -> None:
    run = run_of(RUNS[0], published("llama3-h100"))
    assert 0.90 < run.effective_ratio < 0.96
    assert run.failures == pytest.approx(419, rel=0.1)


def test_megascale_is_over_90_percent_effective_with_its_own_restarts() -> None:
    assert run_of(RUNS[1], published("megascale")).effective_ratio > 0.90


def test_bloom_loses_an_hour_and_a_half_on_a_failure() -> None:
    run = run_of(RUNS[2], published("bloom"))
    assert run.losses_s["lost work"] / run.failures == pytest.approx(1.5 * 3600, rel=0.05)
    assert run.effective_ratio > 0.97
