"""What ``fit`` says of a combination is the estimate of that job under that framework, in time and in memory."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.api.calls import estimate
from steptime.captured.fit.choice import Point
from steptime.captured.fit.driver import FitResult
from steptime.captured.fit.estimated import OFFLOADS, RECOMPUTE
from steptime.captured.fitting import fit

QLORA = {"rank": 16, "targets": "linear", "qlora": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("rtx-3090", {"batch": 48}),
    "qwen3-8b, any change": ("rtx-4090", {"model": "qwen3-8b", "seq": 2048, "allow": "training"}),
    "qwen3-8b, adapters": ("rtx-4090", {"model": "qwen3-8b", "seq": 1024, "lora": {"rank": 8}, "framework": "peft"}),
    "qwen3-8b, QLoRA": ("rtx-4090", {"model": "qwen3-8b", "seq": 2048, "lora": QLORA, "framework": "transformers"}),
    "llama3.2-1b, torchtune": ("l4", {"model": "llama3.2-1b", "seq": 2048, "framework": "torchtune"}),
}


def _fitted(case: str) -> tuple[str, dict[str, Any], FitResult]:
    device, asked = CASES[case]
    more = dict(asked)
    model = more.pop("model", "gpt2")
    return model, asked, fit(model, device, **more)


def _estimated(model: str, device: str, found: FitResult, asked: dict[str, Any], point: Point) -> Any:
    choice = point.choice
    part, every = RECOMPUTE[choice.checkpoints]
    offload = [OFFLOADS[choice.optimizer]] if choice.optimizer in OFFLOADS else []
    offload += ["activations"] if choice.swapped else []
    lora = None
    if choice.weights != "trained":
        lora = {"rank": 16} | dict(asked.get("lora") or {}) | {"qlora": choice.weights == "qlora"}
    plan = {"micro_batch": choice.micro_batch, "recompute": part, "recompute_every": every}
    return estimate(
        model, device, gpus=1, global_batch=found.batch, seq=found.seq, dtype=choice.precision, lora=lora,
        optimizer="adam8bit" if choice.optimizer == "8bit" else "adamw", framework=point.framework,
        plan=plan | ({"offload": ",".join(offload)} if offload else {}),
    )  # fmt: skip


@pytest.mark.quick("llama3.2-1b, torchtune")
@pytest.mark.parametrize("case", CASES)
def test_points_are_estimates(case: str) -> None:
    """The answer, the front, and the answer under the stacks whose settings are named."""
    model, asked, found = _fitted(case)
    points = [found.baseline, found.least, *found.front[:3], *found.stacks]
    for point in [*points, *([found.cheapest] if found.cheapest else [])]:
        one = _estimated(model, CASES[case][0], found, asked, point)
        assert point.step_s == pytest.approx(one.step_time_s, rel=1e-6)
        assert point.memory_bytes == pytest.approx(one.peak_memory_bytes, rel=1e-6)
        assert point.device_bytes == pytest.approx(one.memory_by_definition["device"], rel=1e-6)
        assert point.oom_probability == pytest.approx(one.oom_probability, abs=1e-6)


def test_adapters_on_narrow_weights_are_those_of_the_stack_that_has_them() -> None:
    """Nobody but Hugging Face's stack is named for them, so its memory decides whether they fit."""
    _, _, found = _fitted("qwen3-8b, any change")
    narrow = [point for point in (*found.front, found.least) if point.choice.weights == "qlora"]
    assert narrow
    assert {point.framework for point in narrow} == {"transformers"}


def test_a_combination_names_the_memory_of_every_stack() -> None:
    """Settings for a stack stand next to what its estimate says."""
    _, _, found = _fitted("gpt2")
    assert {str(point.framework) for point in found.stacks} >= {"transformers"}
