"""Hugging Face configurations: every family end to end, defaults, aliases, reports, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.api.models import load_model, read_model
from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError
from steptime.formats.huggingface.fields import UNKNOWN_KEY
from steptime.formats.huggingface.reader import FAMILIES, read_huggingface
from steptime.model import load_catalogue_model, parameter_terms

FOLDER = Path(__file__).parents[2] / "data" / "huggingface"
LAYERED = json.loads((FOLDER.parent / "layered_checkpoints.json").read_text(encoding="utf-8"))
FILES = sorted(FOLDER.glob("*.json"))
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 256, "hidden_act": "silu",
}  # fmt: skip

SCAN = """
import torch
from torch import nn


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.decay, self.head = nn.Embedding(64, 16), nn.Parameter(torch.zeros(16)), nn.Linear(16, 64)

    def forward(self, tokens):
        inputs, state, outputs = self.table(tokens), 0.0, []
        for step in range(tokens.shape[1]):
            state = torch.sigmoid(self.decay) * state + inputs[:, step]
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


def scan(batch: int = 4, seq: int = 8):
    return Scan(), torch.zeros(batch, seq, dtype=torch.int64)
"""

COUNTED_BY_HAND = {"dbrx", "ernie4_5", "ernie4_5_moe", "granitemoe", "granitemoeshared"}  # test_huggingface_experts.py
#: Models whose configuration has layers that predict further tokens; the catalogue has the main models alone.
FURTHER_TOKENS = {"deepseek-v3": 1, "glm4.5": 1, "glm4.5-air": 1}


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.each("path", FILES, ids=lambda path: path.stem)
def test_import_equals_the_catalogue(path: Path) -> None:
    spec, report = read_huggingface(path)
    known = replace(load_catalogue_model(path.stem), mtp_depth=FURTHER_TOKENS.get(path.stem, 0))
    assert ("num_nextn_predict_layers" in report.assumed) == (path.stem in FURTHER_TOKENS)
    assert replace(spec, source=known.source, weight_bytes=None) == known
    assert [key for key, reason in report.ignored.items() if reason == UNKNOWN_KEY] == []


def test_fixtures_cover_the_families() -> None:
    known = {read_huggingface(path)[0].family for path in FILES}
    # tests/validation/test_layered_parameters.py
    known |= {row["config"]["model_type"].removesuffix("_text") for row in LAYERED.values()}
    assert known | COUNTED_BY_HAND == set(FAMILIES) and not known & COUNTED_BY_HAND


def test_every_key_is_used_or_reported(tmp_path: Path) -> None:
    config = LLAMA | {"transformers_version": "5", "bos_token_id": 1, "wings": 2, "num_nextn_predict_layers": 1}
    _, report = read_huggingface(write(tmp_path, config))
    assert report.ignored == {
        "transformers_version": "does not change the cost",
        "bos_token_id": "does not change the cost",
        "model_type": "does not change the cost",
        "wings": UNKNOWN_KEY,
        "num_nextn_predict_layers": "multi-token prediction is read for DeepSeek-V3, Kimi K2 and GLM-4.5 only",
    }
    assert "tie_word_embeddings" in report.assumed


def test_name_comes_from_the_folder_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", LLAMA)
    assert load_model(tmp_path / "mine").name == "mine"
    assert load_model(tmp_path / "mine" / "config.json").name == "mine"
    assert load_model(write(tmp_path, LLAMA, "other.json")).name == "other"


@pytest.mark.each(
    ("config", "field", "value"),
    [
        (LLAMA, "kv_heads", 4),
        (LLAMA | {"num_key_value_heads": None}, "kv_heads", 4),
        (LLAMA | {"num_key_value_heads": 2}, "kv_heads", 2),
        (LLAMA | {"head_dim": None}, "head_dim", 16),
        (LLAMA | {"head_dim": 32}, "head_dim", 32),
        (LLAMA | {"attention_bias": True}, "out_bias", True),
        (LLAMA | {"attention_dropout": 0.1}, "dropout", True),
        (LLAMA | {"max_position_embeddings": 131072}, "seq_len", 8192),
        (LLAMA | {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "seq_len", 64),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, "seq_len", 32),
        (LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 128}, "seq_len", 128),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}, "windowed_layers", 2),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}, "windowed_layers", 0),
        (LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 8}, "windowed_layers", 0),
        (
            LLAMA
            | {
                "model_type": "qwen2",
                "num_key_value_heads": 4,
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "windowed_layers",
            1,
        ),
        (
            LLAMA
            | {
                "model_type": "mistral",
                "num_key_value_heads": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "windowed_layers",
            1,
        ),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "weight_bytes", 1.0),
        (
            LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "weight_bytes",
            1 + 4 / 16384,
        ),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weight_bytes", 0.5),
        (LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, "weight_bytes", 0.53125),
        (LLAMA | {"quantization_config": {"quant_method": "new"}}, "weight_bytes", None),
    ],
)
def test_meaning_of_keys(tmp_path: Path, config: dict[str, Any], field: str, value: object) -> None:
    spec, _ = read_huggingface(write(tmp_path, config))
    assert getattr(spec, field) == value


def test_family_is_found_by_architectures(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    spec, _ = read_huggingface(
        write(tmp_path, config | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2})
    )
    assert (spec.family, spec.qkv_bias) == ("qwen2", True)


def test_wrapper_is_read_through_its_text_config(tmp_path: Path) -> None:
    wrapper = {
        "model_type": "mistral3",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 3},
        "torch_dtype": "float16",
    }
    spec, report = read_huggingface(write(tmp_path, wrapper | {"tie_word_embeddings": True}))
    assert spec.family == "llama"
    assert spec.tied_embeddings
    assert report.ignored["vision_config"] == "only the language model is read"
    assert report.ignored["torch_dtype"] == "does not change the cost"


def test_a_tower_is_read_with_its_language_model(tmp_path: Path) -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": tower | {"wings": 2}}
    spec, report = read_huggingface(write(tmp_path, config))
    assert [(kind.name, kind.layers, kind.tokens, kind.block.hidden) for kind in spec.kinds] == [
        ("image", 3, 5, 32), ("text", 2, 0, 64)]  # fmt: skip
    assert report.ignored["vision_config.wings"] == UNKNOWN_KEY
    assert report.assumed["images"] == "one of 28 x 28 per sample, within its sequence"
    bad = config | {"vision_config": tower | {"model_type": "pixtral"}}
    with pytest.raises(UserError, match=r"vision_config.model_type: 'pixtral' is not supported here"):
        read_huggingface(write(tmp_path, bad))


def test_mixed_dense_and_expert_layers(tmp_path: Path) -> None:
    config = LLAMA | {
        "model_type": "qwen2_moe", "num_hidden_layers": 6, "num_key_value_heads": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [1],
    }  # fmt: skip
    spec, _ = read_huggingface(write(tmp_path, config))
    assert spec.experts is not None
    assert (spec.experts.moe_layers, spec.experts.shared_gate) == (2, True)
    config |= {"mlp_only_layers": [1, 3, 5]}
    assert read_huggingface(write(tmp_path, config))[0].experts is None


@pytest.mark.each(
    ("config", "says"),
    [
        ("{", "is not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("", "is not valid JSON"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
        ({}, "model_type: is missing"),
        ({"model_type": 3}, "model_type: is 3"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        (LLAMA | {"hidden_size": -1}, "hidden_size: is -1"),
        (LLAMA | {"hidden_size": 0}, "hidden_size: is 0"),
        (LLAMA | {"hidden_size": 10**12}, "hidden_size: is 1000000000000"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size: is '64'"),
        (LLAMA | {"hidden_size": 64.0}, "hidden_size: is 64.0"),
        (LLAMA | {"hidden_size": True}, "hidden_size: is True"),
        (LLAMA | {"hidden_size": None}, "hidden_size: is missing"),
        (LLAMA | {"num_attention_heads": 5}, "5 does not divide hidden_size 64"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 4 heads"),
        (LLAMA | {"hidden_act": "wiggle"}, "unknown activation 'wiggle'"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings: is 'yes'"),
        (LLAMA | {"attention_dropout": -0.1}, "attention_dropout"),
        ('{"model_type": "llama", "attention_dropout": 1e999}', "is missing"),
        (LLAMA | {"rope_scaling": 3}, "rope_scaling: is 3"),
        (LLAMA | {"quantization_config": []}, "quantization_config"),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["full_attention"]},
            "1 entries for 2 layers",
        ),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["linear_attention"] * 2},
            "layer_types[0]",
        ),
        ({"model_type": "llava", "text_config": 3}, "text_config: is 3"),
        ({"model_type": "llava", "text_config": LLAMA | {"hidden_size": -1}}, "text_config.hidden_size: is -1"),
        ({"model_type": "vit", "patch_size": 300}, "patch_size: 300 is larger than image_size 224"),
        (
            LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 1},
            "num_experts_per_tok: is 2, with 1 experts",
        ),
        (LLAMA | {"model_type": "deepseek_v3"}, "q_lora_rank: is missing"),
    ],
)
def test_bad_files_name_the_field(tmp_path: Path, config: Any, says: str) -> None:
    path = write(tmp_path, config)
    with pytest.raises(UserError) as caught:
        read_huggingface(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", ["rwkv", "zamba", "bert", "glm_moe_dsa"])
def test_known_but_unsupported_kinds_are_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="not supported yet") as caught:
        read_huggingface(write(tmp_path, LLAMA | {"model_type": kind}))
    assert "supported: bamba, " in str(caught.value)


@pytest.mark.parametrize(("kind", "toml"), [("bert", True), ("modernbert", True), ("rwkv", False)])
def test_refused_kinds_are_told_what_works(tmp_path: Path, kind: str, toml: bool) -> None:
    with pytest.raises(UserError) as caught:
        read_huggingface(write(tmp_path, LLAMA | {"model_type": kind}))
    assert ("TOML file with causal = false" in str(caught.value)) == toml
    assert "steptime profile pkg.module:factory" in str(caught.value)


def test_a_text_encoder_as_a_toml_file_is_estimated(tmp_path: Path) -> None:
    file = tmp_path / "bert.toml"
    file.write_text('layers = 12\nhidden = 768\nheads = 12\nvocab = 30522\nposition = "learned"\nseq_len = 512\n'
                    "causal = false\n", encoding="utf-8")  # fmt: skip
    assert api.estimate(str(file), "dgx-a100", gpus=8, global_batch=64).feasible


def test_a_state_space_module_is_captured(tmp_path: Path) -> None:
    """A scan in plain PyTorch: what the refusal of such configurations proposes."""
    (tmp_path / "scan.py").write_text(SCAN, encoding="utf-8")
    assert api.estimate(f"{tmp_path}/scan.py:scan", "dgx-a100", gpus=1, global_batch=4).step_time_s > 0


def test_unknown_model_type_without_a_near_one_lists_them_all(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_huggingface(write(tmp_path, LLAMA | {"model_type": "quixotic"}))
    assert "did you mean" not in str(caught.value) and "steptime profile pkg.module:factory" in str(caught.value)
    assert set(FAMILIES) <= set(str(caught.value).partition("supported: ")[2].split(", "))


def test_unknown_model_type_has_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean llama"):
        read_huggingface(write(tmp_path, LLAMA | {"model_type": "lama"}))


def test_bad_paths(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(17 * 2**20)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    for path, says in (
        (big, "larger than 16 MiB"),
        (tmp_path / "binary.json", "not UTF-8"),
        (tmp_path / "none.json", "the file does not exist"),
        (tmp_path / "folder.json", "the file does not exist"),
        (tmp_path, "the file does not exist"),
    ):
        with pytest.raises(InputFileError, match=says):
            read_huggingface(path)


def test_opt_with_another_embedding_width_is_refused(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "opt-125m.json").read_text(encoding="utf-8")) | {"word_embed_proj_dim": 512}
    with pytest.raises(FieldError, match="512 differs from hidden_size 768"):
        read_huggingface(write(tmp_path, config))


def edited(name: str, folder: Path, **changes: Any) -> Path:
    return write(folder, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) | changes)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm: is true, which is not supported yet"),
        ("minimax-m2", {"attn_type_list": [0] * 62}, "attn_type_list: has layers with linear attention"),
        ("dinov2-base", {"mlp_ratio": 1000}, "mlp_ratio: is 1000"),
        ("command-r7b", {"sliding_window_pattern": 0}, "sliding_window_pattern: is 0"),
    ],
)
def test_what_a_family_cannot_have(tmp_path: Path, name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_huggingface(edited(name, tmp_path, **changes))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # Of 36 layers every fourth has no rotary positions, and those have the window.
        ("smollm3-3b", {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}, 9),
        ("smollm3-3b", {"sliding_window": 64, "layer_types": None}, 0),
        ("command-r7b", {"sliding_window_pattern": 8}, 28),
        ("command-r7b", {"layer_types": ["full_attention"] * 32}, 0),
    ],
)
def test_layers_with_a_window(tmp_path: Path, name: str, changes: dict[str, Any], expected: int) -> None:
    assert read_huggingface(edited(name, tmp_path, **changes))[0].windowed_layers == expected


def test_layer_switch_is_the_older_name_of_the_pattern(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "command-r7b.json").read_text(encoding="utf-8"))
    del config["sliding_window_pattern"]
    assert read_huggingface(write(tmp_path, config | {"layer_switch": 2}))[0].windowed_layers == 16


@pytest.mark.each(
    ("name", "changes", "field", "value"),
    [
        ("command-r", {"use_qk_norm": True}, "qk_norm", "full"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm", "head"),
        ("minimax-m2", {"use_qk_norm": False}, "qk_norm", "none"),
        ("minitron-4b", {"attention_bias": True}, "qkv_bias", True),
        ("minitron-4b", {"head_dim": None, "kv_channels": 64}, "head_dim", 64),
        ("phi3.5-moe", {"lm_head_bias": False}, "head_bias", False),
        ("dinov2-base", {"mlp_ratio": 2}, "ffn_hidden", 1536),
        ("dinov2-base", {"use_swiglu_ffn": True}, "ffn_hidden", 2048),
        ("dinov2-base", {"use_swiglu_ffn": True, "hidden_size": 100, "num_attention_heads": 4}, "ffn_hidden", 272),
        ("dinov2-base", {"image_size": 224}, "max_positions", 257),
    ],
)
def test_keys_of_later_families(tmp_path: Path, name: str, changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read_huggingface(edited(name, tmp_path, **changes))[0], field) == value


def test_the_mask_token_and_the_classifier_of_dinov2(tmp_path: Path) -> None:
    bare = parameter_terms(read_huggingface(edited("dinov2-base", tmp_path, use_mask_token=False))[0]).total
    assert parameter_terms(load_catalogue_model("dinov2-base")).total == bare + 768
    _, report = read_huggingface(edited("dinov2-base", tmp_path, architectures=["Dinov2ForImageClassification"]))
    assert report.assumed["num_labels"].startswith("no head")


def test_clip_projection_counts(tmp_path: Path) -> None:
    inner = json.loads((FOLDER / "clip-vit-l14.json").read_text(encoding="utf-8"))["vision_config"]
    inner |= {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 768}
    bare = parameter_terms(load_catalogue_model("clip-vit-l14")).total
    assert parameter_terms(read_huggingface(write(tmp_path, inner))[0]).total == bare + 1024 * 768


@pytest.mark.parametrize(
    ("given", "depth"),
    [
        ({"num_nextn_predict_layers": 2}, 2),
        ({"num_mtp_layers": 3}, 3),
        ({"num_nextn_predict_layers": None}, 0),
        ({}, 0),
    ],
)
def test_layers_that_predict_further_tokens(tmp_path: Path, given: dict[str, Any], depth: int) -> None:
    config = json.loads((FOLDER / "deepseek-v3.json").read_text(encoding="utf-8"))
    del config["num_nextn_predict_layers"]
    spec, report = read_huggingface(write(tmp_path, config | given))
    assert spec.mtp_depth == depth
    assert report.assumed.get("num_nextn_predict_layers", "").startswith(f"mtp_depth = {depth}") == (depth > 0)
    assert not {"num_nextn_predict_layers", "num_mtp_layers"} & report.ignored.keys()


def test_no_negative_number_of_further_tokens(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "deepseek-v3.json").read_text(encoding="utf-8"))
    with pytest.raises(FieldError, match="num_nextn_predict_layers: is -1"):
        read_huggingface(write(tmp_path, config | {"num_nextn_predict_layers": -1}))


def test_report_of_a_catalogue_name_is_empty() -> None:
    spec, report = read_model("LLAMA2-7B")
    assert spec.name == "llama2-7b"
    assert (dict(report.ignored), dict(report.assumed)) == ({}, {})
