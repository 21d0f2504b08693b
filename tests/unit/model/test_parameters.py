"""The ledger of parameters against hand-made numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime.model import (
    Experts,
    LatentAttention,
    ModelSpec,
    active_parameter_terms,
    load_catalogue_model,
    parameter_terms,
)

PLAIN = ModelSpec(
    name="plain", family="test", source="test", layers=3, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn_hidden=16,
    gated_mlp=True, activation="silu", norm="rmsnorm", causal=True, seq_len=32, vocab=10,
)  # fmt: skip


def test_every_term_of_a_small_model() -> None:
    assert dict(parameter_terms(PLAIN)) == {
        "embedding/token": 10 * 8,
        "layers/attention/qkv": 3 * 8 * (8 + 2 * 4),
        "layers/attention/out": 3 * 8 * 8,
        "layers/mlp/up": 3 * 2 * 8 * 16,
        "layers/mlp/down": 3 * 16 * 8,
        "layers/norms": 3 * 2 * 8,
        "final_norm": 8,
        "head": 10 * 8,
    }


@pytest.mark.each(
    ("change", "more"),
    [
        ({"tied_embeddings": True}, -80),
        ({"qkv_bias": True}, 3 * 16),
        ({"out_bias": True}, 3 * 8),
        ({"mlp_bias": True}, 3 * (2 * 16 + 8)),
        ({"norm_bias": True}, 3 * 2 * 8 + 8),
        ({"head_bias": True}, 10),
        ({"attention_sinks": True}, 3 * 2),
        ({"qk_norm": "head"}, 3 * 2 * 4),
        ({"qk_norm": "full"}, 3 * (8 + 4)),
        ({"norms_per_layer": 4}, 3 * 2 * 8),
        ({"final_norm": False}, -8),
        ({"embedding_norm": True}, 8),
        ({"layer_scale": True}, 3 * 2 * 8),
        ({"position": "learned", "max_positions": 32}, 32 * 8),
        ({"max_positions": 32}, 0),
        ({"gated_mlp": False}, -3 * 8 * 16),
        ({"vocab": 0}, -160),
        ({"dropout": True, "window": 4, "windowed_layers": 3, "parallel_block": True, "seq_len": 64}, 0),
    ],
)
def test_each_option_adds_its_own_parameters(change: dict[str, object], more: int) -> None:
    assert parameter_terms(replace(PLAIN, **change)).total - parameter_terms(PLAIN).total == more


def test_experts_replace_the_mlp_of_their_layers() -> None:
    experts = Experts(
        experts=4, experts_per_token=2, expert_ffn_hidden=5, shared_ffn_hidden=6, moe_layers=2,
        router_bias=True, shared_gate=True, expert_bias=True,
    )  # fmt: skip
    terms = parameter_terms(replace(PLAIN, experts=experts))
    assert terms["layers/mlp/up"] == 2 * 8 * 16
    assert terms["layers/experts/router"] == 2 * 4 * 9
    assert terms["layers/experts/up"] == 2 * 4 * 2 * 5 * 9
    assert terms["layers/experts/down"] == 2 * 4 * 8 * 6
    assert terms["layers/experts/shared_up"] == 2 * 2 * 8 * 6
    assert terms["layers/experts/shared_down"] == 2 * 6 * 8
    assert terms["layers/experts/shared_gate"] == 2 * 8
    active = active_parameter_terms(replace(PLAIN, experts=experts))
    assert active["layers/experts/up"] == 2 * 2 * 2 * 5 * 9
    assert terms.total - active.total == (720 + 384) / 2


def test_a_token_meets_some_experts_of_every_part_of_the_model() -> None:
    """DeepSeek-V3: 37.55 billion, and with the layer that predicts a further token its attention (187.1 million), eight
    experts and the shared one of 3 x 7168 x 2048 each, the projection of 2 x 7168^2, the router and five norms."""
    main = load_catalogue_model("deepseek-v3")
    alone, further = (active_parameter_terms(replace(main, mtp_depth=depth)) for depth in (0, 1))
    assert alone.total == pytest.approx(37.55e9, rel=1e-3)
    attention = 7168 * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    expected = attention + 9 * 3 * 7168 * 2048 + 256 * 7169 + 2 * 7168**2 + 5 * 7168
    assert further.total - alone.total == expected
    assert further.total == pytest.approx(38.2e9, rel=2e-3)
    assert parameter_terms(replace(main, mtp_depth=1)).total > further.total + 10e9


def test_a_dense_model_is_wholly_active() -> None:
    assert dict(active_parameter_terms(PLAIN)) == dict(parameter_terms(PLAIN))


def test_latent_attention() -> None:
    latent = LatentAttention(q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=7)
    spec = replace(PLAIN, latent=latent, kv_heads=2, head_dim=6)
    terms = parameter_terms(spec)
    assert terms["layers/attention/q_down"] == 3 * 8 * 3
    assert terms["layers/attention/q_up"] == 3 * 3 * 2 * 6
    assert terms["layers/attention/kv_down"] == 3 * 8 * (5 + 2)
    assert terms["layers/attention/kv_up"] == 3 * 5 * 2 * (4 + 7)
    assert terms["layers/attention/out"] == 3 * 2 * 7 * 8
    assert terms["layers/attention/q_norm"] + terms["layers/attention/kv_norm"] == 3 * (3 + 5)
    direct = parameter_terms(replace(spec, latent=replace(latent, q_lora_rank=None)))
    assert direct["layers/attention/q"] == 3 * 8 * 2 * 6


def test_blocks_of_the_published_models() -> None:
    """12 e^2 in matrices, 6 e in biases (out, fc1, fc2) and 4 e in norms per layer."""
    from steptime.model import load_catalogue_model

    for name in ("gpt3_1T", "vit_era5", "gpt3"):
        spec = load_catalogue_model(name)
        e = spec.hidden
        assert parameter_terms(spec).total == spec.layers * (12 * e * e + 6 * e + 4 * e)
