"""Settings that tables of published results leave out and the scripts behind them state."""

from __future__ import annotations

import re
from functools import partial

import pytest

from steptime.measure.runs import reading
from steptime.measure.runs.canonical import dtype_name, recomputation, sharding
from steptime.measure.runs.meaning import (
    attention_dtype_called,
    choice_called,
    graphs_called,
    precision_called,
)
from steptime.measure.runs.read import FURTHER, OTHER_NAMES, Flag, TableRow, table
from steptime.measure.runs.reading import runs_of
from steptime.plan.job import PRECISIONS

TABLE = table("recipes")["recipe"]
MEANT = {
    "recompute": recomputation,
    "zero_stage_or_fsdp": sharding,
    "graphs": graphs_called,
    "context": partial(choice_called, "context"),
    "attention_dtype": attention_dtype_called,
    "gradient_dtype": partial(choice_called, "gradient_dtype"),
    "dtype": lambda text: dtype_name(text).precisions,
}


def _filled(**cells: str) -> TableRow:
    return reading.with_recipe(TableRow(1, cells))


@pytest.mark.each("recipe", TABLE, ids=lambda r: " ".join(r.get(k, "") for k in ("source", "model", "gpu")))
def test_every_entry_names_columns_and_says_what_is_understood(recipe):
    conditions = {name: pattern for name, pattern in recipe.items() if name not in reading.MEANT}
    columns = {*OTHER_NAMES, *FURTHER}
    assert conditions.keys() <= columns and all(re.compile(pattern) for pattern in conditions.values())
    given = {**recipe.get("fill", {}), **recipe.get("instead", {})}
    assert given and given.keys() <= columns
    for column, text in given.items():
        assert MEANT[column](text) if column in MEANT else True, (column, text)
        assert column not in ("tp", "pp", "cp", "ep", "vpp", "micro_batch") or int(text) >= 1


def test_no_entry_gives_a_measurement_or_the_size_of_a_job():
    given = {name for recipe in TABLE for part in ("fill", "instead") for name in recipe.get(part, {})}
    assert not {name for name in given if name.startswith(("metric", "derived"))}
    assert not given & {"gpu", "n_gpus", "seq_len", "global_batch_sequences", "layers", "hidden"}


def test_what_a_row_says_stays():
    said = _filled(source_key="mlperf", model="Llama2-70B LoRA", gpu="H100", recompute="full", dtype="BF16")
    assert (said.text("recompute"), said.text("dtype")) == ("full", "BF16")
    assert said.text("attention_dtype") == "fp8"


def test_of_entries_that_hold_the_first_that_has_a_cell_counts():
    newest = _filled(source_key="mlperf", model="LoRA", gpu="H100", source="training_results_v5.0 X")
    older = _filled(source_key="mlperf", model="LoRA", gpu="H100", source="training_results_v4.0 X")
    assert (newest.text("context"), newest.text("graphs"), older.text("context")) == ("ulysses", "step", "")
    assert newest.text("dtype") == older.text("dtype") == "FP8", "from an entry further down"
    again = {gpu: _filled(source_key="mlperf", model="LoRA", gpu=gpu).text("recompute") for gpu in ("MI300X", "MI325X")}
    assert again == {"MI300X": "full, every 4th layer", "MI325X": "none"}


def test_a_script_takes_the_place_of_what_its_table_says_wrongly():
    cells = {"source_key": "tpu-recipes", "model": "GPT3-175B", "dtype": "BF16"}
    assert _filled(**cells, gpu="TPU v5p").text("dtype") == "int8"
    assert _filled(**cells, gpu="TPU v6e").text("dtype") == "BF16"


def test_other_frameworks_and_other_sources_are_left_alone():
    assert _filled(framework="PaxML", model="GPT3-175B").text("recompute") == "full"
    assert _filled(framework="Megatron-LM", model="GPT3-175B").text("recompute") == ""
    row = TableRow(1, {"source_key": "mine", "model": "Llama2-70B LoRA", "gpu": "H100"})
    assert reading.with_recipe(row) is row


def test_a_run_has_the_settings_of_its_script():
    cells = {
        "source_key": "mlperf", "source": "training_results_v5.0 NVIDIA", "model": "Llama2-70B LoRA (MLPerf)",
        "gpu": "H100-SXM-80GB", "n_gpus": "8", "framework": "Megatron-Core", "workload": "LoRA", "seq_len": "8192",
        "layers": "80", "hidden": "8192", "ffn_hidden": "28672", "heads": "64", "kv_heads": "8", "vocab": "32000",
        "gated_mlp": "True", "global_batch_sequences": "8", "metric_step_time_s": "3.0",
    }  # fmt: skip
    (run,) = runs_of([TableRow(2, cells)]).runs
    assert (run.attention_dtype, run.context, run.graphs) == ("fp8", "ulysses", "step")
    assert run.precisions == ("fp8",) and run.recompute is not None and run.recompute.kind == "none"
    assert Flag.SCRIPT in run.flags and run.supports_claim
    (printed,) = runs_of([TableRow(2, cells)], scripts=False).runs
    assert (printed.attention_dtype, printed.recompute) == (None, None) and Flag.SCRIPT not in printed.flags
    (own,) = runs_of([TableRow(2, {**cells, "source_key": "mine"})]).runs
    assert Flag.SCRIPT not in own.flags


@pytest.mark.each(
    ("column", "text", "flag"),
    [
        ("attention_dtype", "int8", Flag.TEXT_UNREAD), ("attention_dtype", "bf16", None),
        ("context", "zigzag", Flag.TEXT_UNREAD), ("context", "p2p", None), ("gradient_dtype", "fp64", Flag.TEXT_UNREAD),
        ("graphs", "true", Flag.TEXT_UNREAD), ("graphs", "no full iteration graphs", None),
        ("graphs", "attn, moe_router", None), ("graphs", "full", None),
        ("document_length", "-5", Flag.CELL_UNREAD), ("document_length", "0.2", Flag.CELL_UNREAD),
        ("document_length", "200", None), ("expert_capacity", "1.25", Flag.CELL_UNREAD),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_read_are_doubts_of_the_row(column, text, flag):
    cells = {
        "model": "llama2-7b", "gpu": "H100", "n_gpus": "8", "seq_len": "4096", "global_batch_sequences": "64",
        "dtype": "bf16", "metric_step_time_s": "3.0", column: text,
    }  # fmt: skip
    (run,) = runs_of([TableRow(2, cells)]).runs
    assert run.flags & {Flag.TEXT_UNREAD, Flag.CELL_UNREAD} == (set() if flag is None else {flag})
    assert (run.graphs == "step") == (text == "full")


def test_a_format_that_the_device_or_the_training_has_not_is_not_taken():
    cells = {
        "model": "llama2-7b", "n_gpus": "8", "seq_len": "4096", "global_batch_sequences": "64",
        "metric_step_time_s": "3.0", "attention_dtype": "fp8",
    }  # fmt: skip
    old, new = (runs_of([TableRow(2, {**cells, "gpu": gpu, "dtype": "bf16"})]).runs[0] for gpu in ("A100", "H100"))
    assert (old.attention_dtype, Flag.CELL_UNREAD in old.flags) == (None, True)
    assert (new.attention_dtype, Flag.CELL_UNREAD in new.flags) == ("fp8", False)
    assert precision_called("fp32", "", "fp8") == PRECISIONS["fp32"]


@pytest.mark.parametrize(("release", "gpu", "model", "dtype", "graphs"), [
    ("26.06", "GB300", "Qwen3 235B A22B", "MXFP8", "step"),
    ("26.08", "GB200", "Qwen3 30B A3B", "MXFP8", "step"),
    ("26.06", "B300", "Qwen3 30B A3B", "MXFP8", "step"),
    ("26.06", "GB200", "Qwen3 235B A22B", "BF16", "attn+moe_router+moe_preprocess"),
    ("26.04", "GB200", "Qwen3 235B A22B", "MXFP8", "attn+moe_router+moe_preprocess"),
])  # fmt: skip
def test_later_recipes_of_qwen3_capture_whole_steps_in_mxfp8_alone(release, gpu, model, dtype, graphs):
    cells = {"source_key": "megatron-bridge", "source": f"[{release} NeMo Container]", "gpu": gpu, "n_gpus": "256"}
    row = _filled(**cells, model=model, dtype=dtype)
    assert (row.text("graphs"), row.text("dispatcher")) == (graphs, "hybridep")
