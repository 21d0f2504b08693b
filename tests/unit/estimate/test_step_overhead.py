"""The fixed time of a step has a cause: ranks that meet once a step, and the tensors that each of them visits."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.api.calls import estimate
from steptime.cost.host import HOOKED
from steptime.plan.framework_file import load_framework

TERM = "overhead/step_overhead_s"
FITTED_S = load_framework("generic", "h100-sxm").step_s
TWO_LAYERS = """
name = "two-layers"
layers = 2
hidden = 256
heads = 4
ffn_hidden = 1024
vocab = 1024
seq_len = 128
"""


def _overhead_s(model: str, gpus: int, framework: str | None = None, pp: int = 1) -> float:
    plan = {"pp": pp, "micro_batch": 8}
    job = {"gpus": gpus, "global_batch": 8 * gpus, "seq": 128}
    return estimate(model, "dgx-h100", framework=framework, plan=plan, **job).time.get(TERM, 0.0)


@pytest.mark.parametrize("framework", ["generic", "torchtune", "megatron-core"])
def test_one_device_meets_no_other(framework: str) -> None:
    """A step of one device has no fixed time, whatever the framework."""
    assert _overhead_s("gpt2", 1, framework=framework) == 0.0


def test_ranks_of_large_models_have_the_fitted_time() -> None:
    """From two devices on, the fitted value holds, however many they are."""
    assert [_overhead_s("gpt2", gpus) for gpus in (2, 8, 64)] == pytest.approx([FITTED_S] * 3)


def test_few_tensors_take_a_part(tmp_path: Path) -> None:
    """A model of two layers has fewer tensors than the runs of the fit, and as much less to visit."""
    file = tmp_path / "two.toml"
    file.write_text(TWO_LAYERS)
    found = _overhead_s(str(file), 8)
    assert 0.0 < found < FITTED_S
    assert found / FITTED_S * HOOKED == pytest.approx(round(found / FITTED_S * HOOKED))


def test_stages_share_the_tensors() -> None:
    """Twelve stages of one layer each visit fewer tensors than a device with all layers."""
    assert _overhead_s("gpt2", 12, pp=12) < _overhead_s("gpt2", 12)
