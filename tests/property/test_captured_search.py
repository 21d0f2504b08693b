"""Plans of captured modules: the search finds what trying every plan finds, and one plan is a block of one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from engine_cases import HARSH, close, stacked  # noqa: E402

from captured_modules import captured  # noqa: E402
from explained_terms import differing, explained  # noqa: E402
from steptime.api.models import mode_of, summary_of  # noqa: E402
from steptime.estimate.evaluate import evaluate  # noqa: E402
from steptime.estimate.single import Setting  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.num import divisors  # noqa: E402
from steptime.plan.captured import CAPTURED  # noqa: E402
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job  # noqa: E402
from steptime.plan.plans import (  # noqa: E402
    Plans,
    broken_rules,
)
from steptime.plan.space import micro_batch_choices, virtual_stages  # noqa: E402
from steptime.search.modes import MODES  # noqa: E402
from steptime.search.planner import find  # noqa: E402

CASES = [
    (name, gpus, batch, memory) for name in ("gpt", "llama", "gpt_eager", "resnet", "mlp")
    for gpus, batch, memory in ((8, 16, 8e10), (12, 24, 8e10), (4, 8, 1.5e9))
]  # fmt: skip


def setting_of(name: str, gpus: int, batch: int, memory_bytes: float = 8e10) -> Setting:
    model, cluster = captured(name), load_cluster("dgx-h100")
    levels = (replace(cluster.levels[0], devices=4), *cluster.levels[1:])
    cluster = replace(cluster, levels=levels, device=replace(cluster.device, memory_bytes=memory_bytes))
    job = Job(
        model=summary_of(model), gpus=gpus, global_batch=batch, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
        optimizer=OPTIMIZERS["adam"], captured=model,
    )  # fmt: skip
    return Setting(method=CAPTURED, job=job, cluster=cluster)


def every_plan(setting: Setting) -> list[Plans]:
    """All legal plans by plain loops."""
    job, out = setting.job, []
    every = divisors(job.gpus)
    sp = int(job.captured.sequence_parallel)
    for tp, pp, dp in product(every, every, every):
        if tp * pp * dp != job.gpus:
            continue
        choices = product(
            micro_batch_choices(-(-job.global_batch // dp)), [0, 2], [1, 2, 3], virtual_stages(job.model.layers, pp)
        )
        for micro_batch, recompute, zero, vpp in choices:
            plans = Plans(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, recompute=recompute, zero=zero, vpp=vpp, sp=sp)
            if broken_rules(job, plans, setting.rules):
                continue
            for a, b, c in product(divisors(tp), divisors(pp), divisors(dp)):
                if a * b * c <= 4 and job.gpus // (a * b * c) <= (4 // (a * b * c)) * -(-job.gpus // 4):
                    out.append(plans.with_columns({"in_tp": a, "in_pp": b, "in_dp": c}))
    return out


@pytest.mark.quick(every=3)
@pytest.mark.each(("name", "gpus", "batch", "memory"), CASES)
def test_the_best_is_the_minimum_over_all_plans(name, gpus, batch, memory):
    setting = setting_of(name, gpus, batch, memory)
    mode = mode_of(setting, MODES["corrected"])
    (found,) = find(setting, mode.space, {"1d": ()}, top=5)
    plans = every_plan(setting)
    e = evaluate(CAPTURED, CAPTURED.strategies["1d"], setting.job, setting.machine, stacked(plans))
    times, peaks = (np.broadcast_to(x, len(plans)) for x in (e.step_time_s, e.peak_bytes))
    fits = peaks <= setting.machine.memory_bytes
    assert fits.any() and found.feasible
    assert close(float(found.best_s[0]), float(times[fits].min()))


@pytest.mark.quick("resnet")
@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_one_plan_is_a_block_of_one(name):
    setting = setting_of(name, 8, 16)
    plans = every_plan(setting)[::7]
    strategy = CAPTURED.strategies["1d"]
    together = evaluate(CAPTURED, strategy, setting.job, setting.machine, stacked(plans))
    for n, one in enumerate(plans):
        alone = evaluate(CAPTURED, strategy, setting.job, setting.machine, one)
        assert close(float(alone.step_time_s), float(np.broadcast_to(together.step_time_s, len(plans))[n]))
        assert close(float(alone.peak_bytes), float(np.broadcast_to(together.peak_bytes, len(plans))[n]))


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_every_term_is_what_its_record_says(name):
    setting = setting_of(name, 8, 16)
    job = replace(setting.job, framework=HARSH, overlap=frozenset({"dp", "pp"}))
    for plans in every_plan(setting)[::5]:
        e = evaluate(CAPTURED, CAPTURED.strategies["1d"], job, setting.machine, plans)
        assert differing(explained(e)) == []


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_more_ranks_of_a_kind_never_hold_more(name):
    setting = setting_of(name, 8, 16)
    strategy = CAPTURED.strategies["1d"]
    for axis in ("tp", "pp"):
        peaks = [
            float(evaluate(CAPTURED, strategy, setting.job, setting.machine, Plans(**{axis: n})).peak_bytes)
            for n in (1, 2, 4)
        ]
        assert peaks == sorted(peaks, reverse=True)
