"""Parameter counts of released checkpoints: we see, expected, match.

Every expected number was published by somebody else: the sizes of the presets of keras-hub 0.32.0,
``safetensors.total`` of the Hugging Face Hub, ``num_params`` of torchvision, a model card. None was computed
with steptime.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.formats.huggingface import read_huggingface
from steptime.model import active_parameter_terms, load_catalogue_model, parameter_terms

CONFIGS = Path(__file__).parent.parent / "data" / "huggingface"
KERAS = "keras-hub 0.32.0, preset"
HUB = "Hub safetensors.total of"

#: model, published count, where it was published.
EXACT = [
    ("gpt2", 124_439_808, f"{KERAS} gpt2_base_en"),
    ("gpt2-medium", 354_823_168, f"{KERAS} gpt2_medium_en"),
    ("gpt2-large", 774_030_080, f"{KERAS} gpt2_large_en"),
    ("gpt2-xl", 1_557_611_200, f"{KERAS} gpt2_extra_large_en"),
    ("llama2-7b", 6_738_415_616, f"{KERAS} llama2_7b_en"),
    ("llama2-13b", 13_015_864_320, f"{HUB} cais/HarmBench-Llama-2-13b-cls"),
    ("llama3-8b", 8_030_261_248, f"{KERAS} llama3_8b_en"),
    ("llama3-70b", 70_553_706_496, f"{HUB} NousResearch/Meta-Llama-3-70B"),
    ("llama3.1-8b", 8_030_261_248, f"{KERAS} llama3.1_8b"),
    ("llama3.1-70b", 70_553_706_496, f"{HUB} meta-llama/Llama-3.1-70B"),
    ("llama3.1-405b", 405_853_388_800, f"{HUB} meta-llama/Llama-3.1-405B"),
    ("llama3.2-3b", 3_212_749_824, f"{HUB} unsloth/Llama-3.2-3B-Instruct"),
    ("mistral-7b", 7_241_732_096, f"{KERAS} mistral_7b_en"),
    ("mixtral-8x7b", 46_702_792_704, f"{KERAS} mixtral_8_7b_en"),
    ("mixtral-8x22b", 140_620_634_112, f"{HUB} mistral-community/Mixtral-8x22B-v0.1"),
    ("qwen2.5-0.5b", 494_032_768, f"{KERAS} qwen2.5_0.5b_en"),
    ("qwen2.5-7b", 7_615_616_512, f"{HUB} Qwen/Qwen2.5-7B-Instruct; {KERAS} qwen2.5_math_7b_en"),
    ("qwen2.5-32b", 32_763_876_352, f"{KERAS} qwen2.5_coder_32b"),
    ("qwen2.5-72b", 72_706_203_648, f"{HUB} Qwen/Qwen2.5-72B-Instruct"),
    ("qwen3-0.6b", 596_049_920, f"{KERAS} qwen3_0.6b_en"),
    ("qwen3-8b", 8_190_735_360, f"{KERAS} qwen3_8b_en"),
    ("qwen3-32b", 32_762_123_264, f"{KERAS} qwen3_32b_en"),
    ("qwen3-30b-a3b", 30_532_122_624, f"{KERAS} qwen3_moe_30b_a3b_en"),
    ("qwen3-235b-a22b", 235_093_634_560, f"{KERAS} qwen3_moe_235b_a22b_en"),
    ("qwen1.5-moe-a2.7b", 14_315_784_192, f"{KERAS} qwen1.5_moe_2.7b_en"),
    ("gemma-2b", 2_506_172_416, f"{KERAS} gemma_2b_en"),
    ("gemma-7b", 8_537_680_896, f"{KERAS} gemma_7b_en"),
    ("gemma2-2b", 2_614_341_888, f"{KERAS} gemma2_2b_en"),
    ("gemma2-9b", 9_241_705_984, f"{KERAS} gemma2_9b_en"),
    ("gemma2-27b", 27_227_128_320, f"{KERAS} gemma2_27b_en"),
    ("gemma3-1b", 999_885_952, f"{KERAS} gemma3_1b"),
    ("phi3-mini", 3_821_079_552, f"{HUB} microsoft/Phi-3-mini-4k-instruct"),
    ("phi-1.5", 1_418_270_720, f"{HUB} microsoft/phi-1_5"),
    ("phi-2", 2_779_683_840, f"{HUB} microsoft/phi-2"),
    ("command-r7b", 8_028_033_024, f"{HUB} CohereForAI/aya-expanse-8b, which has its dimensions"),
    ("olmoe-1b-7b", 6_919_161_856, f"{HUB} allenai/OLMoE-1B-7B-0924"),
    ("smollm3-3b", 3_075_098_624, f"{HUB} HuggingFaceTB/SmolLM3-3B"),
    ("glm4-9b", 9_400_279_040, "n_params of llama.cpp for GLM-4-9B-0414"),
    ("dinov2-base", 86_580_480, "parameters of Dinov2Model facebook/dinov2-base as counted by PyTorch"),
    ("dinov2-giant", 1_136_480_768, "parameters of Dinov2Model facebook/dinov2-giant as counted by PyTorch"),
    ("olmo2-7b", 7_298_617_344, f"{HUB} allenai/OLMo-2-1124-7B"),
    ("olmo2-13b", 13_716_198_400, f"{HUB} allenai/OLMo-2-1124-13B"),
    ("gpt-oss-20b", 20_914_757_184, f"{KERAS} gpt_oss_20b_en"),
    ("gpt-oss-120b", 116_829_156_672, f"{KERAS} gpt_oss_120b_en"),
    ("deepseek-v2", 235_741_434_880, f"{HUB} deepseek-ai/DeepSeek-V2"),
    ("deepseek-v2-lite", 15_706_484_224, f"{HUB} deepseek-ai/DeepSeek-V2-Lite"),
    ("deepseek-v3", 671_026_419_200, "Hub, tensors of the main model of deepseek-ai/DeepSeek-V3 without FP8 scales"),
    ("kimi-k2", 1_026_408_232_448, "Hub, tensors of moonshotai/Kimi-K2-Instruct without FP8 scales"),
    ("pythia-6.9b", 6_857_302_016, "model card EleutherAI/pythia-6.9b, total params"),
    ("pythia-12b", 11_846_072_320, "model card EleutherAI/pythia-12b, total params"),
    ("gpt-neox-20b", 20_554_567_680, "model card EleutherAI/gpt-neox-20b, n_parameters"),
    ("gpt-j-6b", 6_050_882_784, "parameters of EleutherAI/gpt-j-6B as counted by PyTorch"),
    ("bloom-176b", 176_247_271_424, "model card bigscience/bloom"),
    ("falcon-rw-1b", 1_311_625_216, f"{KERAS} falcon_refinedweb_1b_en"),
    ("starcoder2-15b", 15_957_889_024, f"{HUB} bigcode/starcoder2-15b"),
    ("vit-b16", 86_567_656, "torchvision vit_b_16, num_params"),
    ("vit-l16", 304_326_632, "torchvision vit_l_16, num_params"),
    ("vit-h14", 632_045_800, "torchvision vit_h_14, num_params of the linear head"),
    ("clip-vit-l14", 303_179_776, "parameters of CLIPVisionModel openai/clip-vit-large-patch14 as counted by PyTorch"),
]

#: model, published count, what that holds beyond the model itself, where and why.
WITH_EXTRAS = [
    ("llama2-70b", 68_976_653_312, 80 * 64, f"{HUB} meta-llama/Llama-2-70b-hf; 80 rotary buffers of 64"),
    ("llama3.2-1b", 1_498_482_688, 128_256 * 2048, f"{KERAS} llama3.2_1b, which counts the tied table twice"),
    ("opt-125m", 125_237_760, -2 * 768, f"{KERAS} opt_125m_en, without the two first rows of the position table"),
    ("gemma3-27b", 27_432_406_640, 423_060_336, f"{HUB} unsloth/gemma-3-27b-it; vision: {KERAS} 27b less 27b_text"),
    # Scales of FP8: one for 128 x 128 weights of attention and experts.
    (
        "minimax-m2",
        228_703_644_928,
        62 * (2 * 3072 * (6144 + 1024) + 256 * 3 * 3072 * 1536) // 128**2,
        f"{HUB} MiniMaxAI/MiniMax-M2",
    ),
    # The multi-token layer: one more block, embedding, head, three norms and the 2 hidden -> hidden projection.
    ("glm4.5", 358_337_791_296, 3_935_625_632 + 2 * 151_552 * 5120 + 3 * 5120 + 2 * 5120**2, f"{HUB} zai-org/GLM-4.5"),
    (
        "glm4.5-air",
        110_468_824_832,
        2_341_492_864 + 2 * 151_552 * 4096 + 3 * 4096 + 2 * 4096**2,
        f"{HUB} zai-org/GLM-4.5-Air",
    ),
]


def test_parameter_counts_match_the_published_ones() -> None:
    rows = [(name, int(parameter_terms(load_catalogue_model(name)).total), count) for name, count, _ in EXACT]
    print(f"\n{'model':20}{'we see':>22}{'expected':>22}  match")
    for name, seen, expected in rows:
        print(f"{name:20}{seen:>22,}{expected:>22,}  {'yes' if seen == expected else 'NO'}")
    assert [row for row in rows if row[1] != row[2]] == []


def test_enough_checkpoints_of_enough_families() -> None:
    assert len(EXACT) >= 25
    assert len({load_catalogue_model(name).family for name, _, _ in EXACT}) >= 12


@pytest.mark.parametrize(("name", "published", "extra", "why"), WITH_EXTRAS)
def test_published_counts_that_hold_more_than_the_model(name: str, published: int, extra: int, why: str) -> None:
    assert int(parameter_terms(load_catalogue_model(name)).total) == published - extra, why


def test_extra_block_of_glm_is_one_more_layer_with_experts() -> None:
    """The 3 935 625 632 and 2 341 492 864 above, from shapes: attention, norms, router, 160 or 128 experts, shared."""
    for name, block in (("glm4.5", 3_935_625_632), ("glm4.5-air", 2_341_492_864)):
        spec = load_catalogue_model(name)
        terms = parameter_terms(spec)
        assert spec.experts is not None
        moe = terms.group("layers/experts") / spec.experts.moe_layers
        rest = (terms.group("layers/attention") + terms.group("layers/norms")) / spec.layers
        assert int(moe + rest) == block


@pytest.mark.parametrize("name", ["glm4.5", "glm4.5-air"])
def test_checkpoints_with_their_multi_token_layer(name: str) -> None:
    """The published total is that of the imported model and the layer's own copies of embedding and head."""
    spec, _ = read_huggingface(CONFIGS / f"{name}.json")
    published = {row[0]: row[1] for row in WITH_EXTRAS}[name]
    assert int(parameter_terms(spec).total) + 2 * spec.vocab * spec.hidden == published


#: model, its parameters written out from its dimensions: tables and head, then layers with each matrix.
BY_HAND = [
    ("phi3.5-moe", (2 * 4096 + 1) * 32_064 + 2 * 4096
     + 32 * (2 * (4096 + 1) * 4096 + 2 * (4096 + 1) * 1024 + 16 * 4096 + 16 * 3 * 4096 * 6400 + 2 * 2 * 4096)),
    ("command-r", 8192 * 256_000 + 8192 + 40 * (4 * 8192**2 + 3 * 8192 * 22_528 + 8192)),
    ("command-r-plus", 12_288 * 256_000 + 12_288
     + 64 * (2 * 12_288**2 + 2 * 12_288 * 1024 + 3 * 12_288 * 33_792 + 12_288 + (96 + 8) * 128)),
    ("minitron-4b", 2 * 3072 * 256_000 + 2 * 3072 + 32 * (2 * 3072**2 + 2 * 3072 * 1024 + 2 * 3072 * 9216 + 4 * 3072)),
    ("minitron-8b", 2 * 4096 * 256_000 + 2 * 4096
     + 32 * (2 * 4096 * 6144 + 2 * 4096 * 1024 + 2 * 4096 * 16_384 + 4 * 4096)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "count"), BY_HAND)
def test_counts_by_hand(name: str, count: int) -> None:
    assert int(parameter_terms(load_catalogue_model(name)).total) == count


@pytest.mark.each(
    ("name", "billions", "source"),
    [
        ("phi3.5-moe", 42.0, "model card microsoft/Phi-3.5-MoE-instruct, 42B"),
        ("command-r", 35.0, "model card CohereForAI/c4ai-command-r-v01, 35B"),
        ("command-r-plus", 104.0, "model card CohereForAI/c4ai-command-r-plus, 104B"),
        ("minimax-m2", 229.0, "model card MiniMaxAI/MiniMax-M2, 229B"),
        ("minitron-4b", 4.2, "arXiv 2407.14679, 4.2B"),
        ("minitron-8b", 8.3, "arXiv 2407.14679, 8.3B"),
        ("gpt3-175b", 174.6, "arXiv 2005.14165, table D.1: 174,600M"),
        ("megatron-gpt-22b", 22.0, "arXiv 2205.05198, table 3"),
        ("megatron-gpt-175b", 175.0, "arXiv 2205.05198, table 3"),
        ("megatron-gpt-530b", 530.0, "arXiv 2205.05198, table 3"),
        ("megatron-gpt-1008b", 1008.0, "arXiv 2205.05198, table 3"),
        ("nemotron4-340b", 341.0, "arXiv 2406.11704: 9.4B embedding and 331.6B other parameters"),
        ("falcon-7b", 6.92, "arXiv 2311.16867, 7B"),
        ("falcon-40b", 41.3, "arXiv 2311.16867, 40B"),
        ("opt-6.7b", 6.66, "arXiv 2205.01068, 6.7B"),
    ],
)
def test_rounded_counts(name: str, billions: float, source: str) -> None:
    seen = parameter_terms(load_catalogue_model(name)).total / 1e9
    assert seen == pytest.approx(billions, rel=5e-3), source


@pytest.mark.parametrize(
    ("name", "billions", "source"),
    [
        ("mixtral-8x7b", 12.9, "arXiv 2401.04088: 13B active"),
        ("deepseek-v2", 21.4, "arXiv 2405.04434: 21B active"),
        ("deepseek-v3", 37.6, "arXiv 2412.19437: 37B active"),
        ("qwen3-235b-a22b", 22.2, "arXiv 2505.09388: 22B active"),
        ("phi3.5-moe", 6.6, "model card microsoft/Phi-3.5-MoE-instruct: 6.6B active"),
        ("olmoe-1b-7b", 1.3, "arXiv 2409.02060: 1.3B active"),
        ("kimi-k2", 32.9, "arXiv 2507.20534: 32.6B active"),
    ],
)
def test_active_counts(name: str, billions: float, source: str) -> None:
    seen = active_parameter_terms(load_catalogue_model(name)).total / 1e9
    assert seen == pytest.approx(billions, abs=0.06), source
