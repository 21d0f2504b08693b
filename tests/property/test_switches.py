"""Settings that software can switch: the one that a search takes is never slower than any other, in any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime import api
from steptime.api.jobs import Request, with_choices
from steptime.api.searches import Search
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting
from steptime.plan.plans import as_float
from steptime.plan.switches import fastest, may_capture, settings_of, switched_names
from steptime.search.modes import MODES
from steptime.search.ranking import placed

JOBS = [
    ("mixtral-8x7b", "dgx-h100", 16, 64, {}),
    ("mixtral-8x7b", "gb200-nvl72", 64, 64, {"expert_capacity": 1.25}),
    ("deepseek-v3", "dgx-h100", 64, 128, {"dispatcher": "all_to_all"}),
    ("llama3-8b", "dgx-h100", 16, 64, {}),
]


def setting_of(model: str, cluster: str, gpus: int, batch: int, framework: str, choices: dict[str, object]) -> Setting:
    request = Request(
        model=model, cluster=cluster, seq=2048, dtype="bf16", optimizer="adam", mode=MODES["corrected"],
        framework=framework, lora=None,
    )  # fmt: skip
    return request.setting(gpus, batch, choices)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("framework", ["automodel", "megatron-core", "torchtitan"])
@pytest.mark.parametrize("job", JOBS, ids=[f"{job[0]}-{job[1]}-{n}" for n, job in enumerate(JOBS)])
def test_the_fastest_setting_is_never_slower_and_takes_no_more_memory(framework: str, job: tuple) -> None:
    model, cluster, gpus, batch, choices = job
    setting = setting_of(model, cluster, gpus, batch, framework, choices)
    space = MODES["corrected"].space
    strategy = setting.method.strategy("context")
    listing = space.list(setting.job, strategy, setting.machine.fast_domain, setting.rules)
    chosen = np.random.default_rng(0).choice(len(listing.mesh_of), min(len(listing.mesh_of), 2000), replace=False)
    start = listing.placement_start[listing.mesh_of[chosen]]
    plans = as_float(placed(listing.configurations.take(chosen), listing.placements.take(start)))
    first = evaluate(setting.method, strategy, fastest(setting.job, choices), setting.machine, plans)
    others = list(settings_of(setting.job, choices))
    assert len(others) > 1 or not switched_names(setting.job, choices)
    for other in others:
        e = evaluate(setting.method, strategy, other, setting.machine, plans)
        slower = np.asarray(first.step_time_s) - np.asarray(e.step_time_s)
        assert np.max(slower / np.asarray(e.step_time_s)) <= 1e-12, other.graphs
        assert np.all(np.asarray(first.peak_bytes) <= np.asarray(e.peak_bytes))


@pytest.mark.quick("automodel")
@pytest.mark.parametrize("framework", ["automodel", "megatron-core", "torchtitan"])
def test_a_search_finds_what_a_search_of_every_setting_finds(framework: str) -> None:
    asked = {"gpus": 16, "global_batch": 64, "framework": framework, "top": 1}
    found = api.plan("mixtral-8x7b", "dgx-h100", **asked).plans[0]
    setting = setting_of("mixtral-8x7b", "dgx-h100", 16, 64, framework, {})
    every = [
        {"graphs": other.graphs, "dispatcher": other.dispatcher, "overlap": sorted(other.overlap)}
        for other in settings_of(setting.job, ())
    ]
    times = [api.plan("mixtral-8x7b", "dgx-h100", **asked, fix=fix).plans[0].step_time_s for fix in every]
    assert found.step_time_s == pytest.approx(min(times), rel=1e-12)
    assert found.step_time_s < times[0] or framework != "megatron-core"


def test_what_the_user_fixes_stays_and_software_without_switches_is_as_it_was() -> None:
    options = {"gpus": 16, "global_batch": 64, "top": 1}
    fixed = api.plan("mixtral-8x7b", "dgx-h100", **options, framework="megatron-core",
                     fix={"graphs": "none", "dispatcher": "all_to_all"})  # fmt: skip
    assert "graphs" not in fixed.plans[0].plan
    assert fixed.plans[0].plan["dispatcher"] == "all_to_all"
    assert "too)" not in fixed.stop.proof
    plain = api.plan("mixtral-8x7b", "dgx-h100", **options)
    assert "graphs" not in plain.plans[0].plan
    assert {"graphs", "dispatcher"} <= set(plain.unsearched.names)


def test_a_whole_step_is_captured_only_where_the_host_reads_no_size() -> None:
    job = setting_of("mixtral-8x7b", "dgx-h100", 16, 64, "megatron-core", {"graphs": "step"}).job
    assert not may_capture(job)
    assert may_capture(with_choices(job, {"graphs": "step", "dispatcher": "hybridep"}))
    assert may_capture(with_choices(job, {"graphs": "step", "expert_capacity": 1.0}))
    assert fastest(replace(job, graphs="none"), {"dispatcher"}).graphs == "attention+router+preprocess"


def test_the_line_of_what_was_not_searched_is_what_a_search_of_it_gives_at_least() -> None:
    options = {"gpus": 64, "global_batch": 128, "top": 1}
    found = api.plan("llama3-70b", "dgx-h100", **options)
    assert "schedule" in found.unsearched.names
    assert found.unsearched.faster
    for one in found.unsearched.faster:
        name, _, value = one.change.partition("=")
        again = api.plan(
            "llama3-70b", "dgx-h100", **options, fix={name: value.split(",") if name == "overlap" else value}
        )
        assert again.plans[0].step_time_s <= one.step_time_s * (1 + 1e-9) < found.plans[0].step_time_s
        assert name not in again.unsearched.names


def test_the_search_of_a_job_is_prepared_with_its_fastest_settings() -> None:
    request = Request(
        model="llama3-8b", cluster="dgx-h100", seq=None, dtype="bf16", optimizer="adam", mode=MODES["corrected"],
        framework="megatron-core", lora=None,
    )  # fmt: skip
    setting, _ = Search(
        request=request, gpus=8, global_batch=8, choices={}, columns={}, limit=(), strategy="auto"
    ).prepared()
    assert (setting.job.graphs, setting.switched) == ("step", ("graphs",))
