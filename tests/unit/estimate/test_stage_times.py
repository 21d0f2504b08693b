"""Times of the passes of a pipeline's stages: what they add up to, and the products that they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machine_without_latencies import machine_of
from steptime.api.models import load_model
from steptime.estimate.evaluate import evaluate
from steptime.estimate.kernels import models_of
from steptime.hardware import load_device
from steptime.measure.runs.stages import mean_stage_s
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans
from steptime.plan.strategies import CORRECTED


@pytest.mark.parametrize("recompute", [0, FULL_RECOMPUTE])
def test_means_over_stages_add_up_to_all_stages(recompute: int) -> None:
    model = replace(load_model("llama2-7b"), layers=14)
    job = Job(model=model, gpus=4, global_batch=16, seq_len=1024, precision=PRECISIONS["bf16"], schedule="zb-h1",
              optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    plans = Plans(pp=4, recompute=recompute)
    e = evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine_of(1e11), plans)
    found, stage_s = mean_stage_s(e), e.step.stage_s
    assert 4 * sum(found[name] for name in ("T_F", "T_B", "T_W")) == pytest.approx(float(stage_s["all_stages_s"]))
    assert 4 * found["T_W"] == pytest.approx(float(stage_s["all_weights_s"])) and found["T_W"] > 0

    assert found["T_B"] > found["T_W"]


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm", "a100-sxm-40gb", "v100-sxm2-32gb"])
def test_both_formats_of_16_bits_take_as_long(device: str) -> None:
    """They run in the same units at one rate; two curves differ in who measured them."""
    shape = {"m": 4096.0, "n": 16384.0, "k": 3072.0, "batch": 1.0, "residual": 0.0}
    found = {name: models_of(load_device(device), PRECISIONS[name]).get("matmul") for name in ("bf16", "fp16")}
    times = {name: model.seconds(shape) for name, model in found.items() if model is not None}
    assert times["fp16"] == pytest.approx(times.get("bf16", times["fp16"]), rel=1e-12)
    assert len(times) == len([n for n in found if n in load_device(device).matrix_flops_per_s])
