"""What a configuration leaves out or open reaches the reports; types whose layers are those of another family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.api.models import import_notes
from steptime.errors import UnknownNameError
from steptime.formats.huggingface import read_huggingface
from steptime.model import load_catalogue_model, parameter_terms

FOLDER = Path(__file__).parents[2] / "data" / "huggingface"
TEXT = {
    "model_type": "qwen3_vl_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 65536,
    "hidden_act": "silu", "wings": 2, "tail": None, "use_beak": False,
}  # fmt: skip
WRAPPER = {"model_type": "internvl", "text_config": TEXT, "vision_config": {"depth": 27}, "image_token_id": 5}
LENGTH = "seq was not given: 8192 was taken (the limit of the positions is 65536, not a training length)"
LEFT_OUT = ("vision_config of my.json: only the language model is read",
            "text_config.wings of my.json: unknown to steptime, and not counted")  # fmt: skip


def write(folder: Path, config: Any) -> str:
    (folder / "my.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "my.json")


def test_estimates_plans_and_ledgers_say_what_a_file_left_out_or_open(tmp_path: Path) -> None:
    file = write(tmp_path, WRAPPER)
    job: dict[str, Any] = {"gpus": 8, "global_batch": 8, "framework": "ideal"}
    assert api.estimate(file, "dgx-h100", **job, plan={"micro_batch": 1}).notes == (LENGTH, *LEFT_OUT)
    assert api.estimate(file, "dgx-h100", **job, seq=512, plan={"micro_batch": 1}).notes == LEFT_OUT
    assert api.plan(file, "dgx-h100", **job, top=1).notes[:3] == (LENGTH, *LEFT_OUT)
    assert api.ledger(file).notes[-3:] == (LENGTH, *LEFT_OUT)
    assert {LENGTH, *LEFT_OUT} <= set(api.fit(file, "h100-sxm", batch=8).notes)


def test_keys_that_say_what_the_family_has_are_not_unknown(tmp_path: Path) -> None:
    """Attention of Qwen3.5 has a gate whether the file says so or not; without it the query projection is half."""
    row = json.loads((FOLDER.parent / "layered_checkpoints.json").read_text(encoding="utf-8"))["qwen3.5-27b"]["config"]
    text = row["text_config"] | {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    assert text["attn_output_gate"] and text["mlp_only_layers"] == []
    spec, report = read_huggingface(write(tmp_path, row | {"text_config": text}))
    assert {reason for key, reason in report.ignored.items() if key in report.telling} == {
        "multi-token prediction is read for DeepSeek-V3, Kimi K2 and GLM-4.5 only"
    }
    without = read_huggingface(write(tmp_path, row | {"text_config": text | {"attn_output_gate": False}}))[0]
    assert parameter_terms(spec).total - parameter_terms(without).total == 16 * 5120 * 24 * 256


def test_many_keys_are_one_note(tmp_path: Path) -> None:
    names = [f"wing_{number}" for number in range(9)]
    (note,) = import_notes(write(tmp_path, TEXT | dict.fromkeys(["wings", *names], 1)), seq=1)
    assert (
        note
        == "wings, wing_0, wing_1, wing_2, wing_3, wing_4 and 4 more of my.json: unknown to steptime, and not counted"
    )


def test_defaults_and_keys_without_a_cost_are_not_worth_a_note(tmp_path: Path) -> None:
    file = write(
        tmp_path, {key: value for key, value in TEXT.items() if key not in ("wings", "hidden_act", "vocab_size")}
    )
    report = read_huggingface(file)[1]
    assert {"hidden_act", "vocab_size"} <= set(report.assumed) and {"tail", "use_beak"} <= set(report.ignored)
    assert import_notes(file, seq=4096) == ()
    assert import_notes("llama3-8b", seq=None) == ()


def test_a_reading_among_several_is_told(tmp_path: Path) -> None:
    note = import_notes(str(FOLDER / "deepseek-v3.json"), seq=4096)[-2]
    assert note.startswith("num_nextn_predict_layers of deepseek-v3.json: mtp_depth = 1")


def test_the_format_of_a_checkpoint_is_not_that_of_training(tmp_path: Path) -> None:
    """The ledger's states are those of an estimate: weights in the dtype of the run."""
    file = write(tmp_path, TEXT | {"wings": None, "quantization_config": {"quant_method": "mxfp4"}})
    stored = (
        "0.531 bytes per weight of my.json are those of the checkpoint: training holds weights in the dtype of the run"
    )
    ledger = api.ledger(file, seq=512)
    assert ledger.bytes["weights/parameter_bytes"] == 2 * ledger.parameters.total
    assert ledger.notes[-1] == stored
    assert api.estimate(file, "h100-sxm", gpus=1, global_batch=1, seq=512, framework="ideal").notes == (stored,)
    (tmp_path / "my.toml").write_text("layers = 2\nhidden = 64\nheads = 4\nweight_bytes = 0.5\n")
    assert import_notes(str(tmp_path / "my.toml"), seq=None)[0].startswith("0.5 bytes per weight of my.toml")


@pytest.mark.each(
    ("model_type", "known"),
    [
        ("granite", "llama3-8b"), ("seed_oss", "llama3-8b"), ("olmo3", "olmo2-7b"), ("qwen2_5_vl", "qwen2-7b"),
        ("qwen2_vl", "qwen2-7b"), ("qwen3_vl_text", "qwen3-8b"), ("qwen3_vl_moe_text", "qwen3-30b-a3b"),
        ("ministral", "mistral-7b"),
    ],
)  # fmt: skip
def test_types_with_the_layers_of_another_one(tmp_path: Path, model_type: str, known: str) -> None:
    config = json.loads((FOLDER / f"{known}.json").read_text()) | {"model_type": model_type}
    spec, told = read_huggingface(write(tmp_path, config))[0], load_catalogue_model(known)
    assert parameter_terms(spec) == parameter_terms(told)
    assert (spec.window, spec.windowed_layers) == (told.window, told.windowed_layers)


def test_olmo_3_has_windows_and_seed_a_bias_of_its_own(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "olmo2-7b.json").read_text()) | {"model_type": "olmo3", "sliding_window": 4096}
    assert read_huggingface(write(tmp_path, config))[0].windowed_layers == 24
    types = ["full_attention"] * 31 + ["sliding_attention"]
    assert read_huggingface(write(tmp_path, config | {"layer_types": types}))[0].windowed_layers == 1
    bias = {"model_type": "seed_oss", "attention_bias": True}
    config = json.loads((FOLDER / "llama3-8b.json").read_text()) | bias
    assert read_huggingface(write(tmp_path, config))[0].out_bias
    spec = read_huggingface(write(tmp_path, config | {"attention_out_bias": False}))[0]
    assert spec.qkv_bias and not spec.out_bias


def test_an_unknown_model_type_with_a_near_one_has_the_other_ways_too(tmp_path: Path) -> None:
    """What a file says of itself is seldom a typing error."""
    with pytest.raises(UnknownNameError, match="no supported model_type 'olmo4'") as caught:
        read_huggingface(write(tmp_path, TEXT | {"model_type": "olmo4"}))
    assert "did you mean" in str(caught.value) and "steptime profile pkg.module:factory" in str(caught.value)
