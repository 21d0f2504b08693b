"""What rows of measured runs say of memory, and the band of what is predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime.measure.runs.candidates import candidates, profile_of
from steptime.measure.runs.read import TableRow
from steptime.measure.runs.run import MeasuredRun, run_of
from steptime.measure.runs.samples import deviation_of, memory_band, modelled, predicted_bytes, settings_of

ROW = {
    "model": "llama2-7b", "seq_len": "2048", "gpu": "A100-80GB", "n_gpus": "8", "global_batch_sequences": "64",
    "micro_batch": "1", "tp": "1", "pp": "1", "cp": "1", "dp": "8", "dtype": "BF16", "zero_stage_or_fsdp": "ZeRO-1",
    "recompute": "full", "attention_impl": "flash", "metric_peak_mem_gb": "40", "mem_unit": "GiB",
    "mem_definition": "reserved peak", "framework": "megatron-core",
}  # fmt: skip


def run(**cells: str) -> MeasuredRun:
    return run_of(TableRow(2, ROW | cells))


def predicted(one: MeasuredRun) -> float:
    return float(modelled([one]).memory_bytes[0])


def test_gradients_and_weights_beside_the_dtype():
    assert run(dtype="BF16 (fp32 grad accumulation)").gradient_dtype == "fp32"
    assert run(dtype="BF16").gradient_dtype is None
    assert run(dtype="BF16 (fp32 grads)", gradient_dtype="bf16").gradient_dtype == "bf16"
    narrow, wide = (run(dtype=text, gpu="H100") for text in ("FP8 (fp8 params)", "FP8"))
    assert narrow.precisions == wide.precisions and predicted(wide) - predicted(narrow) > 5e9


def test_gradients_that_software_has_twice_are_not_counted_three_times():
    """DeepSpeed's BF16 optimiser has gradients in bf16 and in fp32, stated or not."""
    each = [predicted(run(framework="megatron-deepspeed", dtype=text)) for text in ("BF16", "BF16 (fp32 grads)")]
    assert each[0] == pytest.approx(each[1])


def test_notes_count_where_the_cell_of_recomputation_is_empty():
    said = run(recompute="", notes="no activation recomputation")
    assert said.recompute is not None and said.recompute.kind == "none"
    assert run(recompute="", notes="recompute not stated").recompute is None
    assert run(recompute="full", notes="no recomputation").recompute.kind == "full"  # type: ignore[union-attr]


def test_zb_v_holds_what_zb_1p_holds():
    table = {"n_gpus": "16", "dp": "2", "pp": "8", "zero_stage_or_fsdp": "0", "recompute": "none", "framework": ""}
    v = run(**table, vpp="2", schedule="ZB-V")
    assert v.degrees is not None and v.degrees.vpp == 1
    assert predicted(v) == pytest.approx(predicted(run(**table, vpp="1", schedule="ZB-1p")))


def test_offload_in_the_notes_of_a_sharded_run():
    sharded = {"framework": "torchtune", "workload": "SFT", "zero_stage_or_fsdp": "FSDP"}
    away, here = (run(**sharded, notes=notes) for notes in ("CPU offload + fused optimizer", ""))
    assert away.offload == {"optimizer", "weights"} and profile_of(away).offloads_weights
    assert predicted(away) < predicted(here) - 6.7e9 * 8 / 8 + 1e9
    assert not run(framework="deepspeed", notes="cpu offload").offload


def test_an_optimiser_that_leaves_a_full_device():
    """8 bytes a parameter in bf16 would be 54 GB; with 8-bit states and no gradients 27, of which half can leave."""
    one = {"n_gpus": "1", "dp": "1", "framework": "torchtune", "workload": "SFT", "zero_stage_or_fsdp": "none"}
    large, small = run(**one, gpu="A100-80GB"), run(**one, gpu="RTX 4090")
    assert 27e9 < predicted(large) < 33e9 and 13e9 < predicted(small) < 20e9
    assert max(candidates(small), key=lambda c: c.weight).offload == {"optimizer"}
    assert not any(c.offload for c in candidates(run(**one | {"workload": "pretrain"})))


def test_a_run_that_ran_needs_no_more_than_the_device():
    full = run(micro_batch="8", recompute="none")
    (setting,) = settings_of(full)
    assert (
        float(setting.evaluate().peak_bytes) > 85.9e9 == pytest.approx(predicted_bytes(full, setting.evaluate()), 1e-3)
    )


def test_software_by_its_source():
    swift = run(framework="", source="ModelScope SWIFT docs", notes="(mean 1024 tokens)", workload="SFT")
    assert swift.framework == "hf-trainer" and settings_of(swift)[0].job.evaluated_share == 0.5
    alone = run(framework="", source="Aleph Alpha", notes="kernel=flash_attention2 + RMS kernel")
    assert profile_of(alone).norm_bytes == 0.0 and profile_of(alone).score_bytes == 4.0
    assert profile_of(replace(alone, notes="kernel=fused")).score_bytes == 0.0
    assert run(framework="HF Trainer").framework == "transformers"


def test_the_band_widens_with_what_is_not_stated():
    def width(**cells: str) -> float:
        one = run(**cells)
        low, high = memory_band(one, [(s.weight, s.evaluate()) for s in settings_of(one)])
        assert low < predicted(one) < high
        return high / low

    stated = width()
    assert stated < width(mem_definition="") and stated < width(mem_unit="") and stated < width(framework="")
    assert deviation_of(run(framework=""), "plain") > 0.2 > deviation_of(run(), "megatron-core")
