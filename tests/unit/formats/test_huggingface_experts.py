"""Families whose layers are those of known ones: parameters counted by hand from the shapes of their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import FieldError, UserError
from steptime.formats.huggingface import read_huggingface
from steptime.model import active_parameter_terms, parameter_terms
from steptime.model.spec import ModelSpec

ERNIE = {"model_type": "ernie4_5", "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16,
         "intermediate_size": 3072}  # fmt: skip
ERNIE_MOE = {"model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
             "intermediate_size": 12288}  # fmt: skip
GRANITE = {"model_type": "granitemoe", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
           "num_key_value_heads": 8, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 8,
           "vocab_size": 49155, "tie_word_embeddings": True, "max_position_embeddings": 4096}  # fmt: skip
DBRX: dict[str, Any] = {
    "model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "max_seq_len": 32768, "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "ffn_act_fn": {"name": "silu"}},
}  # fmt: skip


def read(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_huggingface(tmp_path / "config.json")[0]


def ernie_moe_layer(experts: int) -> int:
    attention = 2560 * (2 * 2560 + 2 * 4 * 128)
    return attention + 2 * 2560 + 3 * 2560 * 1536 * (experts + 2) + 64 * 2560 + 64


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (ERNIE, 103424 * 1024 + 18 * (1024 * (2 * 2048 + 2 * 256) + 3 * 1024 * 3072 + 2 * 1024) + 1024),
        (ERNIE_MOE, 103424 * 2560 + 27 * ernie_moe_layer(64) + 2560
         + 2560 * (2 * 2560 + 2 * 512) + 3 * 2560 * 12288 + 2 * 2560),
        (GRANITE, 49155 * 1024 + 24 * (1024 * (2 * 1024 + 2 * 512) + 32 * (3 * 1024 * 512 + 1024) + 2 * 1024) + 1024),
        (GRANITE | {"model_type": "granitemoeshared", "shared_intermediate_size": 256},
         49155 * 1024 + 24 * (1024 * 3072 + 32 * (3 * 1024 * 512 + 1024) + 3 * 1024 * 256 + 2 * 1024) + 1024),
        (DBRX, 2 * 100352 * 6144 + 40 * (6144 * (2 * 6144 + 2 * 8 * 128) + 16 * (3 * 6144 * 10752 + 6144) + 2 * 6144)
         + 6144),
    ],
    ids=["ernie4_5", "ernie4_5_moe", "granitemoe", "granitemoeshared", "dbrx"],
)  # fmt: skip
def test_parameters_are_those_of_the_weights(tmp_path: Path, config: dict[str, Any], total: int) -> None:
    assert parameter_terms(read(tmp_path, config)).total == total


def test_active_parameters_are_as_their_makers_say(tmp_path: Path) -> None:
    for config, stated in ((DBRX, 36e9), (ERNIE_MOE, 3e9), (GRANITE, 400e6)):
        assert active_parameter_terms(read(tmp_path, config)).total == pytest.approx(stated, rel=0.15)  # they round


def test_experts_of_ernie_lie_between_two_layers(tmp_path: Path) -> None:
    config = ERNIE_MOE | {"moe_layer_start_index": 2, "moe_layer_end_index": 9, "moe_layer_interval": 2}
    experts = read(tmp_path, config).experts
    assert experts is not None and experts.moe_layers == 4  # layers 3, 5, 7 and 9, counted from 0
    biased = read(tmp_path, ERNIE_MOE | {"use_bias": True})
    assert biased.qkv_bias and biased.out_bias and biased.experts is not None and biased.experts.expert_bias


def test_what_is_wrong_in_a_table_of_dbrx_is_told_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"ffn_config\.moe_top_k"):
        read(tmp_path, DBRX | {"ffn_config": {"moe_top_k": "four"}})
    with pytest.raises(FieldError, match=r"ffn_config\.ffn_act_fn\.name"):
        read(tmp_path, DBRX | {"ffn_config": {"ffn_act_fn": {"name": "maxout"}}})


def test_the_first_olmo_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="norms without weights"):
        read(tmp_path, GRANITE | {"model_type": "olmo"})
