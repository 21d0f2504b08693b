"""Models of text: decoders, encoders, mixtures of experts, state-space models."""

from __future__ import annotations

from dataclasses import replace

from public_models.rows import DEEP, HEADS, NARROW, SHORT, Row, hf, masked_text, pairs, text

EXPERTS = HEADS | {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = NARROW | {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                   "v_head_dim": 32,
                   "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                   "num_key_value_heads": 8, "moe_intermediate_size": 128, "first_k_dense_replace": 1}  # fmt: skip
HYBRID = ["linear_attention", "linear_attention", "full_attention"]
MASKED = {"decoder_layers": 4, "encoder_layers": 4}

#: Decoders of text: name, class, narrow settings; settings of their own where the default will not do.
DECODERS = (
    ("Llama 7B", "Llama", HEADS), ("Mistral 7B", "Mistral", HEADS), ("Qwen2 7B", "Qwen2", NARROW),
    ("Qwen3 8B", "Qwen3", HEADS), ("Gemma 2 2B", "Gemma2", HEADS), ("Gemma 3", "Gemma3", HEADS),
    ("Phi-3 mini", "Phi3", NARROW), ("GPT-NeoX 20B", "GPTNeoX", NARROW), ("OPT 125M", "OPT", SHORT),
    ("Falcon 7B", "Falcon", NARROW), ("OLMo 2 7B", "Olmo2", NARROW), ("Cohere Command", "Cohere", NARROW),
    ("StableLM 3B", "StableLm", NARROW), ("Mixtral 8x7B", "Mixtral", EXPERTS), ("Qwen2-MoE", "Qwen2Moe", EXPERTS | {
        "shared_expert_intermediate_size": 256}),
    ("Qwen3-MoE", "Qwen3Moe", EXPERTS), ("OLMoE 7B", "Olmoe", EXPERTS), ("GPT-OSS 120B", "GptOss", EXPERTS),
    ("DeepSeek-V2", "DeepseekV2", LATENT), ("DeepSeek-V3", "DeepseekV3", LATENT),
    ("GLM-4-MoE", "Glm4Moe", EXPERTS | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1,
                                        "first_k_dense_replace": 1}),
    ("MiniMax", "MiniMax", EXPERTS), ("Jamba", "Jamba", EXPERTS | {"num_hidden_layers": 8, "mamba_d_state": 8}),
    ("Qwen3-Next", "Qwen3Next", EXPERTS | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 128,
                                           "linear_num_value_heads": 4, "linear_num_key_heads": 2}),
    ("Granite-MoE-hybrid", "GraniteMoeHybrid", NARROW | {"num_local_experts": 8, "num_experts_per_tok": 2,
     "shared_intermediate_size": 256, "mamba_n_heads": 16, "mamba_d_head": "auto", "mamba_d_state": 32,
     "layer_types": HYBRID[1:]}),
    ("Bamba 9B", "Bamba", NARROW | {
        "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": "auto", "mamba_d_state": 32}),
    ("Mamba 130M", "Mamba", SHORT), ("Falcon-Mamba", "FalconMamba", SHORT),
    ("Mamba-2", "Mamba2", SHORT | {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 32}),
    ("RecurrentGemma 2B", "RecurrentGemma", HEADS | {"num_hidden_layers": 3, "lru_width": 256}),
    ("RWKV-4", "Rwkv", SHORT | {"hidden_size": 256, "attention_hidden_size": 256, "intermediate_size": 512}),
    ("xLSTM 7B", "xLSTM", {"num_hidden_layers": 2, "num_blocks": 2, "hidden_size": 256, "embedding_dim": 256,
                           "num_heads": 4, "vocab_size": 1000}),
    ("LFM2", "Lfm2", NARROW),
)  # fmt: skip
_OWN = {"Jamba": {"num_hidden_layers": 8}, "xLSTM": {"num_hidden_layers": 6, "num_blocks": 6},
        "Mamba": {"num_hidden_layers": 8, "use_mambapy": False},
        "DeepseekV2": DEEP | {"num_experts_per_tok": 6}, "Qwen3Next": {"num_hidden_layers": 4},
        "Bamba": DEEP | {"attn_layer_indices": [2]}, "GraniteMoeHybrid": DEEP | {"layer_types": HYBRID}}  # fmt: skip


def decoders() -> list[Row]:
    """Decoders at their real width with eight layers."""
    rows = [
        hf("experts" if "Moe" in kind or kind in MOE else "text", name, f"{kind}ForCausalLM", text(),
            _OWN.get(kind, DEEP), narrow)
        for name, kind, narrow in DECODERS
    ]  # fmt: skip
    rows = [replace(row, area="state space") if row.name in STATE else row for row in rows]
    # Its cell updates a state in place that the backward pass needs: PyTorch runs the forward pass only.
    return [replace(row, options={"training": False}) if row.name == "xLSTM 7B" else row for row in rows]


MOE = ("Mixtral", "GptOss", "DeepseekV2", "DeepseekV3", "MiniMax", "Jamba", "Qwen3Next")
STATE = ("Mamba 130M", "Falcon-Mamba", "Mamba-2", "RecurrentGemma 2B", "RWKV-4", "xLSTM 7B", "Bamba 9B", "LFM2")


def texts() -> list[Row]:
    """Encoders, and encoders with decoders."""
    plain = [
        ("GPT-2", "GPT2LMHeadModel", {"n_layer": 8}, {"n_layer": 2}),
        ("GPT-J", "GPTJForCausalLM", {"n_layer": 8}, {"n_layer": 2, "n_embd": 256, "n_head": 8, "rotary_dim": 16,
                                                      "vocab_size": 1000}),
        ("BLOOM", "BloomForCausalLM", {"n_layer": 8, "hidden_size": 1024, "n_head": 16},
         {"n_layer": 2, "hidden_size": 256, "n_head": 8, "vocab_size": 1000}),
        ("XLNet", "XLNetLMHeadModel", {"n_layer": 8}, {"n_layer": 2}),
        ("DistilBERT", "DistilBertForMaskedLM", {}, {"n_layers": 2}),
        ("ALBERT xxlarge", "AlbertForMaskedLM", {}, {"hidden_size": 256, "intermediate_size": 512,
                                                     "num_attention_heads": 8, "num_hidden_layers": 2}),
    ]  # fmt: skip
    out = [hf("text", name, kind, text(), own, narrow) for name, kind, own, narrow in plain]
    for name, kind in (("BERT", "BertForMaskedLM"), ("RoBERTa", "RobertaForMaskedLM"), ("FNet", "FNetForMaskedLM"),
                       ("BERT classifier", "BertForSequenceClassification"), ("ConvBERT", "ConvBertForMaskedLM"),
                       ("ModernBERT", "ModernBertForMaskedLM")):  # fmt: skip
        out.append(hf("text", name, kind, text(length=128), DEEP, SHORT))
    out.append(hf("text", "ELECTRA", "ElectraForMaskedLM", masked_text, DEEP, SHORT))
    out.append(hf("text", "DeBERTa-v2", "DebertaV2ForMaskedLM", masked_text, DEEP | {"hidden_size": 768,
               "num_attention_heads": 12, "intermediate_size": 3072}, {"num_hidden_layers": 2}))  # fmt: skip
    out.append(hf("text", "Longformer", "LongformerForMaskedLM", text(length=128),
                   {"num_hidden_layers": 8, "attention_window": 32}, SHORT | {"attention_window": 32}))  # fmt: skip
    for name, kind, own, narrow in (
        ("T5 small", "T5ForConditionalGeneration", {}, {"num_layers": 2}),
        ("BART large", "BartForConditionalGeneration", {}, MASKED), ("LED", "LEDForConditionalGeneration", {}, MASKED),
        ("Marian", "MarianMTModel", {}, MASKED), ("Pegasus", "PegasusForConditionalGeneration", {}, MASKED),
        ("Switch Transformers", "SwitchTransformersForConditionalGeneration", {}, {"num_layers": 2,
         "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "d_model": 128}),
    ):  # fmt: skip
        out.append(hf("experts" if "Switch" in name else "text", name, kind, pairs, own, narrow))
    return out
