"""Experts that a log states: which model they belong to, and what a dense model makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_logs import arguments, iteration
from steptime.doctor import catalogue_model, held_against, model_contradictions, read_log
from steptime.doctor.records import Log, Stated
from steptime.model.known import load_catalogue_model

MIXTRAL = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336, "num_query_groups": 8,
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": None,
}  # fmt: skip
QWEN3 = {
    "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 768, "num_query_groups": 4,
    "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
}  # fmt: skip


def log_of(tmp_path: Path, text: str) -> Log:
    path = tmp_path / "x.log"
    path.write_text(text)
    return read_log(str(path))


def megatron(tmp_path: Path, flags: dict[str, object]) -> Log:
    return log_of(tmp_path, arguments(**flags) + "".join(iteration(i, 1500.0) for i in range(1, 6)))


@pytest.mark.parametrize(
    ("flags", "experts", "name"),
    [
        (MIXTRAL, (8, 2, 14336), "mixtral-8x7b"),
        (QWEN3, (128, 8, 768), "qwen3-30b-a3b"),
        (MIXTRAL | {"num_experts": None}, (0, None, None), "llama3-8b"),
        (MIXTRAL | {"num_experts": [1]}, (0, None, None), "llama3-8b"),
        (MIXTRAL | {"num_experts": [8]}, (8, 2, 14336), "mixtral-8x7b"),
        (MIXTRAL | {"num_experts": 16}, (16, 2, 14336), None),
        ({key: value for key, value in MIXTRAL.items() if "moe" not in key and "experts" not in key},
         (None, None, None), "llama3-8b"),
    ],
)  # fmt: skip
def test_megatron_states_its_experts(tmp_path, flags, experts, name):
    stated = megatron(tmp_path, flags).stated
    keys = ("experts", "experts_per_token", "expert_ffn_hidden")
    assert tuple(stated.model.get(key) for key in keys) == experts
    assert catalogue_model(stated.model, stated.model_name) == name


@pytest.mark.parametrize(("experts", "name"), [(8, "mixtral-8x7b"), (1, "llama3-8b")])
def test_maxtext_states_its_experts(tmp_path, experts, name):
    sizes = {"base_num_decoder_layers": 32, "base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 8,
             "base_mlp_dim": 14336, "model_name": "default", "num_experts": experts}  # fmt: skip
    steps = "".join(f"completed step: {i}, seconds: 2.5, TFLOP/s/device: 305.1\n" for i in range(4))
    log = log_of(tmp_path, "".join(f"Config param {key}: {value}\n" for key, value in sizes.items()) + steps)
    assert catalogue_model(log.stated.model, log.stated.model_name) == name


def test_the_width_of_a_dense_mlp_counts_only_where_a_layer_has_one():
    stated = {"experts": 128, "expert_ffn_hidden": 768, "ffn_hidden": 1}
    assert model_contradictions(load_catalogue_model("qwen3-30b-a3b"), stated) == ()
    deepseek = load_catalogue_model("deepseek-v3")
    assert deepseek.experts is not None and deepseek.experts.moe_layers < deepseek.layers
    assert model_contradictions(deepseek, {"experts": 256, "ffn_hidden": 1}) != ()


def test_a_dense_model_has_no_expert_ranks():
    dense, mixed = load_catalogue_model("llama3-8b"), load_catalogue_model("mixtral-8x7b")
    stated = Stated(plan={"ep": 8, "etp": 1, "tp": 2})
    told, against = held_against(dense, stated)
    assert told.plan == {"tp": 2}
    assert against == ("llama3-8b has no experts, but the run has ep 8",)
    assert held_against(mixed, stated) == (stated, ())
    alone = Stated(plan={"ep": 1, "tp": 2})
    assert held_against(dense, alone) == (alone, ())
