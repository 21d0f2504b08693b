"""Launch files of public projects, rewritten, on which a reading was wrong: what each says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime.launch import read_launch

DATA = Path(__file__).parents[2] / "data" / "launch"


def read_file(name: str, software: str | None = None, model: str | None = None) -> Any:
    return read_launch(str(DATA / name), software, model=model, cluster="dgx-h100")


def test_dense_layers_and_expert_ranks_of_an_own_model() -> None:
    read = read_file("experts.sh")
    assert read.launch.values["ep"] == 8 and "moe_layers = 27" in read.model_text
    assert "ffn_hidden = 10944" in read.model_text and "dropout" not in read.model_text and not read.kept


@pytest.mark.parametrize("pattern", ["([0]*1+[1]*27)", "[0," + ",".join("1" * 27) + "]"])
def test_patterns_of_layers(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text((DATA / "experts.sh").read_text().replace("([0]*1+[1]*27)", pattern))
    assert "moe_layers = 27" in read_launch(str(path)).model_text


def test_a_pattern_that_is_not_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text((DATA / "experts.sh").read_text().replace("([0]*1+[1]*27)", "lambda"))
    read = read_launch(str(path))
    assert "moe_layers" not in read.model_text and any("'lambda'" in note for note in read.notes)


def test_a_tokenizer_in_place_of_a_vocabulary() -> None:
    read = read_file("tokenizer.sh")
    assert any(note.startswith("no vocabulary is given") for note in read.notes) and "vocab" not in read.model_text


def test_the_vocabulary_of_a_tokenizer_and_the_default_of_dropout(tmp_path: Path) -> None:
    text = (DATA / "tokenizer.sh").read_text().replace("HuggingFaceTokenizer", "GPT2BPETokenizer")
    path = tmp_path / "a.sh"
    path.write_text(text.replace("--attention-dropout 0 --hidden-dropout 0", "--attention-dropout 0"))
    read = read_launch(str(path))
    assert "vocab = 50257" in read.model_text and "dropout = true" in read.model_text
    assert "vocabulary 50,257: that of GPT2BPETokenizer" in read.notes


def test_dimensions_of_bare_names_in_arithmetic() -> None:
    assert "layers = 92" in read_file("arithmetic.sh").model_text


def test_a_precision_that_a_function_makes() -> None:
    read = read_file("precision.py", "megatron-bridge", "deepseek-v3")
    assert "dtype" not in read.launch.values and "gradient_dtype" not in read.launch.values
    assert any("_perf_precision('bf16')" in note and "dtype is left open" in note for note in read.notes)
    assert read.launch.values["recompute"] == "up_projection+mlp" and "dtype =" not in read.text.partition("[plan]")[0]


@pytest.mark.parametrize(("line", "told"), [
    ("cfg.mixed_precision = bf16_mixed()", {"dtype": "bf16"}),
    ("cfg.mixed_precision = None", {"dtype": "fp32"}),
    ("cfg.mixed_precision = MixedPrecisionConfig(bf16=True)", {"dtype": "bf16"}),
    ("cfg.model.moe_layer_freq = [0]*3 + [1]*58", {"dtype": "bf16"}),
    ("cfg.model.pipeline_model_parallel_size = 2 * 4", {"pp": 8}),
])  # fmt: skip
def test_values_of_recipes(line: str, told: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(f"{line}\ncfg.train.micro_batch_size = 1\n")
    read = read_launch(str(path), "megatron-bridge", model="deepseek-v3")
    assert {name: read.launch.values[name] for name in told} == told and not read.notes


def test_a_degree_that_is_not_understood_leaves_what_follows_open(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("cfg.model.pipeline_model_parallel_size = stages\ncfg.train.micro_batch_size = 1\n")
    read = read_launch(str(path), "megatron-bridge", model="llama3-8b")
    assert not {"pp", "dp", "gpus"} & read.launch.values.keys() and "pp is left open" in read.notes[0]


def test_maxtext_shards_over_all_devices_by_default(tmp_path: Path) -> None:
    read = read_file("maxtext.yml")
    assert (read.launch.model, read.launch.values["zero"], read.launch.values["seq"]) == ("llama3-70b", 3, 8192)
    path = tmp_path / "a.yml"
    path.write_text((DATA / "maxtext.yml").read_text() + "ici_fsdp_parallelism: 1\nici_data_parallelism: -1\n")
    assert read_launch(str(path)).launch.values["zero"] == 0


def test_axolotl() -> None:
    read = read_file("axolotl.yaml")
    told = {"dtype": "bf16", "lora.rank": 16, "lora.qlora": True, "micro_batch": 2, "tp": 2, "shard": 4, "zero": 3}
    told |= {"optimizer": "adam8bit", "seq": 2048, "recompute": "full"}
    assert {name: read.launch.values.get(name) for name in told} == told
    assert (read.software, read.launch.model, read.launch.framework) == ("axolotl", "llama3-8b", "axolotl")
    assert read.run.settings["lora"] == {"rank": 16, "targets": "linear", "qlora": True} and not read.kept


def test_axolotl_without_adapters(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\nlora_r: 8\n"
                    "optimizer: muon\ndeepspeed: configs/zero3.json\n")  # fmt: skip
    read = read_launch(str(path))
    assert read.launch.model == "qwen3-8b" and "lora" not in read.run.settings
    assert not {"optimizer", "zero"} & read.launch.values.keys()
    assert any("optimizer is left open" in note for note in read.notes)
    assert any("'configs/zero3.json'" in note and "zero is left open" in note for note in read.notes)


def test_llama_factory(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto"}
    deepspeed = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "z3.json").write_text(json.dumps(deepspeed))
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\nstage: sft\nfinetuning_type: lora\n"
                    "lora_target: all\ntemplate: llama3\ncutoff_len: 4096\nper_device_train_batch_size: 1\n"
                    "gradient_accumulation_steps: 8\nbf16: true\ndeepspeed: z3.json\nlearning_rate: 1.0e-4\n"
                    "output_dir: saves\n")  # fmt: skip
    read = read_launch(str(path))
    told = {"dtype": "bf16", "lora.rank": 8, "micro_batch": 1, "seq": 4096, "zero": 3, "recompute": "full"}
    assert {name: read.launch.values.get(name) for name in told} == told
    assert (read.software, read.launch.model, read.launch.framework) == ("llama-factory", "llama3-8b", "llama-factory")


def test_what_deepspeed_takes_from_its_trainer(tmp_path: Path) -> None:
    """Both switches of precision may be left to the trainer; that is no contradiction, and says nothing."""
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto", '
                    '"zero_optimization": {"stage": 2}}')  # fmt: skip
    read = read_launch(str(path), model="llama3-8b")
    assert "dtype" not in read.launch.values and read.launch.values["zero"] == 2
    assert any("dtype is left open" in note for note in read.notes)


def test_sharding_that_only_says_that_it_is_on(tmp_path: Path) -> None:
    """FSDP gathers again for the backward pass unless it is told not to."""
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: out\nper_device_train_batch_size: 1\nlearning_rate: 1e-5\nfsdp: true\n")
    assert read_launch(str(path), model="llama3-8b").launch.values["zero"] == 3


@pytest.mark.parametrize(("line", "left"), [
    ("--normalization Odd", None),
    ("--optimizer odd", "optimizer"),
    ("--cp-comm-type odd --context-parallel-size 2", "context"),
    ("--recompute-granularity odd", "recompute"),
])  # fmt: skip
def test_values_that_are_not_understood(line: str, left: str | None) -> None:
    command = f"pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 {line}"
    read = read_launch(command, "megatron-lm", model="llama3-8b")
    assert left is None or left not in read.launch.values
    assert any("odd" in note.lower() and "not understood" in note for note in read.notes)
