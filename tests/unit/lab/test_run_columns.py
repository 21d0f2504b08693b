"""Tables of training runs in other words: column names, separators, units; and what is wrong in them is told."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from steptime import api
from steptime.api.frameworks import framework_record, renamed
from steptime.api.models import load_model
from steptime.errors import InputFileError, UnknownNameError
from steptime.measure.runs.meaning import framework_of
from steptime.measure.runs.metrics import TimeOrigin
from steptime.measure.runs.read import METRICS, NEEDED, OTHER_NAMES, SCALED, UNITS, Flag, Reason, TableRow, own_names
from steptime.measure.runs.reading import Reading, read_runs
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.scoring import FAR_OFF, read_any, score_reading, write_rows
from steptime.model.known import catalogue_names, hub_model
from steptime.plan.framework_file import framework_called, why_called
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.plan.recompute import OTHER_WORDS, recompute_code
from steptime.report.catalogue import print_framework
from steptime.store.tables import write_table

ROOT = Path(__file__).resolve().parents[3]
OWN = {
    "model": "llama2-7b", "gpu": "h100", "n_gpus": "8", "global_batch_sequences": "64", "seq_len": "4096",
    "metric_step_time_s": "2.3", "micro_batch": "1", "zero_stage_or_fsdp": "1", "recompute": "none",
    "framework": "megatron-core", "dtype": "bf16", "tp": "1", "pp": "1",
}  # fmt: skip
PER_GPU = 64 * 4096 / 2.3 / 8
"""Tokens per second and device of that run."""


def read(tmp_path: Path, *rows: dict[str, str], separator: str = ",") -> Reading:
    names = list({name: None for row in rows for name in row})
    lines = [separator.join(names), *(separator.join(row.get(name, "") for name in names) for row in rows)]
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    return read_runs(tmp_path / "runs.csv")


def run_of(tmp_path: Path, **changes: str) -> MeasuredRun:
    reading = read(tmp_path, OWN | changes)
    assert not reading.skipped, reading.skipped
    return reading.runs[0]


def reason_of(tmp_path: Path, **changes: str) -> tuple[Reason, str]:
    reading = read(tmp_path, OWN | changes)
    return reading.skipped[0].reason, reading.skipped[0].detail


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_words_of_the_command_line_are_columns(tmp_path: Path, separator: str) -> None:
    words = {
        "model": "model", "gpu": "device", "n_gpus": "gpus", "global_batch_sequences": "global_batch",
        "seq_len": "seq", "metric_step_time_s": "step_time_s", "zero_stage_or_fsdp": "zero",
    }  # fmt: skip
    given = {words.get(name, name): text for name, text in OWN.items()}
    assert read(tmp_path, given, separator=separator) == read(tmp_path, OWN)
    assert read(tmp_path, OWN).runs[0].step_time_s == 2.3


def test_a_record_of_an_estimate_is_a_row(tmp_path: Path) -> None:
    record = api.estimate("llama2-7b", "dgx-h100", gpus=8, global_batch=64).to_json()
    cells = {**record["workload"], **record["plan"], "model": "llama2-7b", "cluster": "dgx-h100"}
    cells |= {name: record[name] for name in ("step_time_s", "peak_memory_bytes", "mfu", "tokens_per_s_per_gpu")}
    plain = {name: str(value) for name, value in cells.items() if isinstance(value, (str, int, float))}
    run = read(tmp_path, plain).runs[0]
    assert (run.device, run.gpus, run.global_batch, run.seq_len) == ("h100-sxm", 8, 64, 4096)
    assert run.degrees is not None and run.degrees.dp == 8 and run.precisions == ("bf16",)
    assert run.step_time_s == record["step_time_s"] and run.supports_claim
    assert run.memory_bytes == pytest.approx(record["peak_memory_bytes"], rel=1e-12)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep", "dp"])
def test_degrees_may_be_called_sizes(axis: str) -> None:
    long = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "dp": "data"}[axis]
    for name in (f"{axis.upper()} size", f"{long}_parallel_size"):
        assert own_names([name]) == [(axis, "")]


def test_own_names_win() -> None:
    assert own_names(["gpus", "n_gpus"]) == [("gpus", ""), ("n_gpus", "")]
    assert own_names(["cluster", "Device"]) == [("cluster", ""), ("gpu", "")]
    assert own_names(["step_time_ms", "step_time_s"]) == [("step_time_ms", ""), ("metric_step_time_s", "")]
    others = [name for names in OTHER_NAMES.values() for name in names]
    assert len(set(others)) == len(others) and not set(others) & (set(OTHER_NAMES) | set(SCALED))
    for own, unit in SCALED.values():
        assert unit.lower() in UNITS[own]


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "Llama2-7B", "llama-2-7b"])
def test_a_known_model_needs_no_shape(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path, model=name)
    assert (run.model.layers, run.model.hidden, run.model.heads) == (32, 4096, 32)


def test_an_unknown_model_without_a_shape_is_counted(tmp_path: Path) -> None:
    assert reason_of(tmp_path, model="mystery") == (Reason.NO_ARCHITECTURE, "mystery")
    with pytest.raises(InputFileError, match="lacks the columns model, seq_len, gpu, n_gpus, global_batch_sequences"):
        read(tmp_path, {"metric_step_time_s": "1"})
    assert not {"layers", "hidden", "heads"} & set(NEEDED)


def test_parquet_takes_the_same_names(tmp_path: Path) -> None:
    cells = {
        "model": "llama2-7b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq": 4096,
        "step_time_ms": 2300.0,
    }
    write_table(tmp_path / "runs.parquet", [cells])
    run = read_any(tmp_path / "runs.parquet").runs[0]
    assert (run.device, run.gpus, run.step_time_s, run.line) == ("h100-sxm", 8, 2.3, 1)
    write_table(tmp_path / "other.parquet", [{"a": 1}])
    with pytest.raises(InputFileError, match="lacks the columns"):
        read_any(tmp_path / "other.parquet")


@pytest.mark.each(
    ("text", "seconds"),
    [("2.3 s", 2.3), ("2300 ms", 2.3), ("2300ms", 2.3), ("2.3 sec", 2.3), ("2.3 seconds", 2.3), ("1,800 ms", 1.8),
     ("1 min", 60.0), ("2.3e6 us", 2.3)],
)  # fmt: skip
def test_units_of_times(tmp_path: Path, text: str, seconds: float) -> None:
    row = OWN | {"metric_step_time_s": f'"{text}"'}
    assert read(tmp_path, row).runs[0].step_time_s == pytest.approx(seconds, rel=1e-12)


def test_units_of_rates_and_memory(tmp_path: Path) -> None:
    none = {"metric_step_time_s": ""}
    half, percent, ratio = (
        run_of(tmp_path, **none, metric_mfu=text, tflops_definition="model") for text in ("0.45", "45%", "45")
    )
    assert half.step_time_s == percent.step_time_s == ratio.step_time_s
    assert percent.time is not None and percent.time.origin is TimeOrigin.MFU
    small = run_of(tmp_path, **none, metric_mfu="0.9 %", tflops_definition="model")
    assert small.step_time_s == pytest.approx(50 * (half.step_time_s or 0), rel=1e-9), "a percent below 1.5 is one too"
    tokens = [
        run_of(tmp_path, **none, metric_tokens_per_s_per_gpu=t).step_time_s for t in ("14000", "14k tok/s", "14 k")
    ]
    assert tokens == [64 * 4096 / 14000 / 8] * 3
    memories = [run_of(tmp_path, metric_peak_mem_gb=t).memory_bytes for t in ("40 GiB", "40 GB", "40960 MiB", "40")]
    assert memories == [40 * 2**30, 40e9, 40 * 2**30, 40 * 2**30]
    assert Flag.MEMORY_UNIT_ASSUMED not in run_of(tmp_path, metric_peak_mem_gb="40 GB").flags


@pytest.mark.each("text", ["-1", "0", "fast", "OOM", "3 parsecs", "1e999", "nan s", "2.3.4", "45%"])
def test_a_time_that_cannot_be_read_is_not_replaced_by_a_rate(tmp_path: Path, text: str) -> None:
    found = reason_of(tmp_path, metric_step_time_s=text, metric_tokens_per_s_per_gpu=f"{PER_GPU:.1f}")
    assert found == (Reason.BAD_MEASUREMENT, f"metric_step_time_s: {text!r}")


def test_a_memory_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, metric_peak_mem_gb="-3")
    assert run.memory is None and Flag.MEMORY_UNREAD in run.flags and run.supports_claim
    assert Flag.CELL_UNREAD not in run.flags
    found = reason_of(tmp_path, metric_step_time_s="", metric_peak_mem_gb="lots")
    assert found == (Reason.BAD_MEASUREMENT, "metric_peak_mem_gb: 'lots'")
    assert reason_of(tmp_path, metric_step_time_s="n/a")[0] is Reason.NO_MEASUREMENT


@pytest.mark.parametrize("rate", [{"metric_tokens_per_s_per_gpu": f"{PER_GPU:.1f}"}, {"metric_tflops_per_gpu": "610"}])
def test_a_time_a_thousandfold_off_is_doubted(tmp_path: Path, rate: dict[str, str]) -> None:
    run = run_of(tmp_path, metric_step_time_s="2300", **rate)
    assert Flag.TIME_UNITS in run.flags and not run.supports_claim
    assert Flag.TIME_UNITS not in run_of(tmp_path, metric_step_time_s="2.9", **rate).flags
    found = score_reading(read(tmp_path, OWN | {"metric_step_time_s": "2300"} | rate)).to_json()
    assert found["doubts"][str(Flag.TIME_UNITS)] == found["doubts"][FAR_OFF] == 1
    assert score_reading(read(tmp_path, OWN)).to_json()["doubts"] == {}


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    rows = [OWN, {}, OWN | {"framework": '"NeMo\nof today"'}, OWN | {"gpu": "abacus"}, OWN | {"tp": "2"}]
    names = list(OWN)
    (tmp_path / "runs.csv").write_text(
        "\n".join([",".join(names), *(",".join(r.get(n, "") for n in names) for r in rows)])
    )
    reading = read_runs(tmp_path / "runs.csv")
    assert [run.line for run in reading.runs] == [2, 4, 7] and [row.line for row in reading.skipped] == [6]
    assert reading.runs[0].row_id == "line-2"
    write_rows(score_reading(reading), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["line"] for row in csv.DictReader(file)] == ["2", "4", "6", "7"]


@pytest.mark.parametrize(
    ("leave_out", "sources", "note"),
    [("each", "aa", "all rows are of one source"), ("a", "aa", "the table has no other source"),
     ("model", "ab", "all rows are of one model"), ("each", "ab", ""), ("a", "ab", "")],
)  # fmt: skip
def test_a_fit_to_nothing_is_told(tmp_path: Path, leave_out: str, sources: str, note: str) -> None:
    times = ("2.3", "2.5")
    rows = [OWN | {"source_key": key, "metric_step_time_s": t} for key, t in zip(sources, times, strict=True)]
    found = score_reading(read(tmp_path, *rows), leave_out=leave_out).to_json()
    assert found.get("note", "").startswith(note) and bool(found.get("note")) == bool(note)
    assert (found["time"]["coverage90"] is None) == ("no band" in found.get("note", "")) == (len(set(sources)) == 1)


def test_every_metric_has_units() -> None:
    assert set(UNITS) == {name for name in METRICS if name.startswith("metric_")}


OPEN = ("accelerate", "HF Accelerate")


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("given", "name"),
    [("NeMo", "megatron-core"), ("Megatron-LM", "megatron-core"), ("mcore", "megatron-core"), ("megatron", "megatron"),
     ("Megatron-DeepSpeed", "megatron-deepspeed"), ("axolotl", "axolotl"), ("LLaMA-Factory", "llama-factory"),
     ("PaddleNLP", "paddlenlp"), ("MaxText", "maxtext")],
)  # fmt: skip
def test_frameworks_by_their_usual_names(given: str, name: str) -> None:
    assert framework_called(given) == name and framework_record(given).name == name
    job = {"gpus": 8, "global_batch": 64}
    one, other = (api.estimate("llama2-7b", "dgx-h100", framework=f, **job) for f in (given, name))
    assert one.step_time_s == other.step_time_s and one.to_json()["workload"]["framework"] == name


@pytest.mark.parametrize(
    ("given", "name"),
    [("fsdp2", "torchtitan"), ("FSDP-2", "torchtitan"), ("PyTorch FSDP", "fms-fsdp"),
     ("torch ddp", "ddp")],
)  # fmt: skip
def test_software_without_runs_is_taken_as_the_nearest_and_told(given: str, name: str) -> None:
    assert framework_called(given) == name == framework_of(TableRow(1, {"framework": given}))
    assert renamed(given)[0].startswith(f"framework {given} was taken as {name}, fitted to ")


@pytest.mark.parametrize("given", ["HF Trainer", "NeMo", "fsdp2", "Megatron-LM"])
def test_the_page_of_a_framework_says_for_which_name_it_stands_and_why(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = framework_record(given)
    assert record.notes == renamed(given) and why_called(given) and why_called(given) in record.notes[0]
    assert record.to_json()["notes"] == list(record.notes) and framework_record(record.name).notes == ()
    print_framework(record)
    assert f"note: framework {given} was taken as {record.name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.each(
    ("given", "told"),
    [("pytorch", "ddp; with FSDP2 torchtitan"), ("Lightning", "deepspeed"), ("jax", "maxtext"),
     *((name, "ddp, deepspeed, with FSDP fms-fsdp") for name in OPEN)],
)  # fmt: skip
def test_names_that_leave_the_framework_open_are_told_which_there_are(given: str, told: str) -> None:
    for use in (framework_record, lambda name: api.estimate("gpt2", "dgx-a100", framework=name, gpus=8)):
        with pytest.raises(UnknownNameError, match=told):
            use(given)


@pytest.mark.parametrize("given", OPEN)
def test_runs_of_software_that_leaves_the_framework_open_have_the_common_values(given: str) -> None:
    assert framework_of(TableRow(1, {"framework": given})) == "generic"


def test_names_near_a_framework_are_refused() -> None:
    for given in ("megatron-cor", "my nemo", "transformer", ""):
        assert framework_called(given) is None
    with pytest.raises(UnknownNameError, match="did you mean megatron-core"):
        framework_record("megatron-cor")


def test_recomputation_in_the_words_of_megatron_core() -> None:
    assert recompute_code("selective", "megatron-core") == RECOMPUTE_CODES["attention"] == recompute_code("core_attn")
    assert set(OTHER_WORDS.values()) <= set(RECOMPUTE_CODES) and not set(OTHER_WORDS) & set(RECOMPUTE_CODES)
    with pytest.raises(UnknownNameError, match="selective"):
        recompute_code("selectiv")


def test_models_by_the_path_of_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    config = (ROOT / "tests/data/huggingface/llama2-7b.json").read_text()
    (tmp_path / "mine" / "config.json").write_text(config)
    (tmp_path / "torn.json").write_text("{")
    names = ["llama2-7b", "mine/config.json", "./mine", "no.json", "./nowhere", "torn.json"]
    rows = [OWN | {"model": name, "row_id": str(n)} for n, name in enumerate(names)]
    rows.append(OWN | {"model": "./mine", "hidden": "1024"})
    read(tmp_path, *rows)
    score = score_reading(read_any(tmp_path / "runs.csv"))
    times = [s.step_time_s for s in score.scored]
    assert len(times) == 3 and times == [times[0]] * 3
    assert [row.reason for row in score.missing] == [Reason.MODEL_FILE] * 3 + [Reason.BAD_ARCHITECTURE]
    assert all("\n" not in row.detail for row in score.missing)
    assert "no.json" in score.missing[0].detail and "torn.json" in score.missing[2].detail
    assert "./mine is of another model" in score.missing[3].detail


def test_models_by_a_hyphen_more_or_less() -> None:
    pairs = {"Llama-3.1-8B": "llama3.1-8b", "llama_3.1-70b": "llama3.1-70b", "qwen-2.5-7b": "qwen2.5-7b",
             "gemma-2-9b": "gemma2-9b", "deepseek-v3": "deepseek-v3", "DeepSeekV3": "deepseek-v3"}  # fmt: skip
    for given, name in pairs.items():
        assert load_model(given) == load_model(name)
    with pytest.raises(UnknownNameError, match="did you mean llama3"):
        load_model("llama-3-18b")


def test_models_by_the_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_model("Meta-Llama/llama-2-7b-hf") == load_model("llama2-7b")
    assert hub_model("someone/llama-2-7b-hf") is None and hub_model("llama2-7b") is None
    assert sum(hub_model(name) is not None for name in catalogue_names()) == 0
    pairs = {
        "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b", "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
        "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b", "google/gemma-2-9b-it": "gemma2-9b",
        "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3", "Qwen/Qwen3-8B-Base": "qwen3-8b",
    }  # fmt: skip
    for given, name in pairs.items():
        assert load_model(given) == load_model(name)
    (tmp_path / "meta-llama" / "Llama-2-7b-hf").mkdir(parents=True)
    with pytest.raises(InputFileError, match=r"config\.json"):
        load_model("meta-llama/Llama-2-7b-hf")  # a folder of that name comes first


@pytest.mark.each(
    ("column", "cell"),
    [("step_time_us", "2300000"), ("Step time (ms)", "2300"), ("iter_time_s", "2.3"), ("ms_per_step", "2300"),
     ("sec_per_iter", "2.3"), ("iteration time [us]", "2.3e6"), ("tokens_per_sec_per_gpu", f"{PER_GPU}"),
     ("tok/s/GPU", f"{PER_GPU}")],
)  # fmt: skip
def test_usual_spellings_and_units_of_measurements_are_read(tmp_path: Path, column: str, cell: str) -> None:
    """A table whose only measurement was in microseconds or of tok/s/GPU had none."""
    row = {name: text for name, text in OWN.items() if name != "metric_step_time_s"}
    assert read(tmp_path, row | {column: cell}).runs[0].step_time_s == pytest.approx(2.3, rel=1e-9)
    assert read(tmp_path, OWN | {column: "77"}).runs[0].step_time_s == 2.3, "the column's own name wins"


def test_peak_memory_has_units_of_columns(tmp_path: Path) -> None:
    row = {name: text for name, text in OWN.items() if name != "metric_step_time_s"}
    columns = {"peak_memory_mb": "40000", "peak_mem_mib": "40960", "Peak memory (GiB)": "40"}
    found = [read(tmp_path, row | {name: cell}).runs[0].memory_bytes for name, cell in columns.items()]
    assert found == [40e9, 40 * 2**30, 40 * 2**30]


@pytest.mark.parametrize(
    ("column", "wanted"),
    [("tokens_per_sec", "tokens_per_s_per_gpu"), ("tgs", "tokens_per_s_per_gpu"), ("samples_per_sec", "step_time_s"),
     ("step_time_ns", "step_time_s"), ("elapsed_ms", "step_time_s"), ("PFLOPS", "tflops_per_gpu"),
     ("max_memory_allocated", "peak_memory_gb")],
)  # fmt: skip
def test_a_near_miss_is_told_the_column_that_is_wanted(tmp_path: Path, column: str, wanted: str) -> None:
    row = {name: text for name, text in OWN.items() if name != "metric_step_time_s"}
    with pytest.raises(InputFileError, match=f"'{column}' is not read: .*{wanted}"):
        read(tmp_path, row | {column: "5", "loss": "1"})
    with pytest.raises(InputFileError, match="it needs one of metric_step_time_s"):
        read(tmp_path, row | {"loss": "1"})
