"""Rows of measured training runs: what is read, what is refused and why, and that nothing is lost."""

from __future__ import annotations

import csv
import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest

from steptime.errors import InputFileError
from steptime.measure.runs.canonical import Recomputation, Sharding
from steptime.measure.runs.metrics import (
    MemoryDefinition,
    TflopsDefinition,
    TimeOrigin,
    flops_per_token,
    forward_flops,
    tflops_definition,
)
from steptime.measure.runs.read import METRICS, NEEDED, Flag, Reason, TableRow, read_rows
from steptime.measure.runs.reading import Reading, read_runs, runs_of
from steptime.measure.runs.run import AdapterName, Degrees, MeasuredRun
from steptime_lab.data_root import require_data

FILE = Path(__file__).parents[2] / "data" / "measured_runs.csv"


def row(name: str = "full", line: int = 1, **changes: str) -> TableRow:
    cells = next(dict(r.cells) for r in read_rows(FILE) if r.text("row_id") == name)
    assert not set(changes) - set(cells)
    return TableRow(line, cells | changes)


def one(name: str = "full", **changes: str) -> MeasuredRun:
    reading = runs_of([row(name, **changes)])
    assert not reading.skipped, reading.skipped
    return reading.runs[0]


def refused(name: str = "full", **changes: str) -> tuple[Reason, str]:
    reading = runs_of([row(name, **changes)])
    assert not reading.runs
    return reading.skipped[0].reason, reading.skipped[0].detail


def test_a_row_that_states_everything():
    run = one()
    assert (run.device, run.gpus, run.gpus_per_node, run.precisions) == ("h100-sxm", 8, 8, ("bf16",))
    assert run.degrees == Degrees(tp=2, pp=1, cp=1, dp=4, vpp=1, ep=None)
    assert (run.global_batch, run.micro_batch, run.seq_len) == (128, 1, 4096)
    assert run.sharding == Sharding(stages=(1,))
    assert run.recompute == Recomputation(kind="none")
    assert (run.sequence_parallel, run.attention, run.offload) == (True, "fused", frozenset())
    assert (run.model.family, run.model.layers, run.model.ffn_hidden, run.model_kind) == ("llama", 32, 11008, "dense")
    assert run.time is not None and run.time.origin is TimeOrigin.PRINTED and run.step_time_s == 10.0
    assert run.memory is not None and run.memory.definition is MemoryDefinition.ALLOCATED
    assert run.memory_bytes == 40 * 2**30 == run.memory.least_bytes
    assert not run.flags and run.supports_claim


def test_time_from_tokens_per_second_and_defaults_of_the_family():
    run = one("tokens")
    assert run.step_time_s == 64 * 1024 / (2048 * 16) and run.time and run.time.origin is TimeOrigin.TOKENS
    m = run.model
    assert (m.ffn_hidden, m.kv_heads, m.head_dim, m.vocab, m.gated_mlp) == (8192, 16, 128, 51200, False)
    assert (m.position, m.max_positions, m.norm, m.tied_embeddings) == ("learned", 1024, "layernorm", True)
    assert {Flag.DEVICE_ASSUMED, Flag.DTYPE_ASSUMED, Flag.FFN_ASSUMED, Flag.VOCAB_ASSUMED} == run.flags
    assert run.precisions == () and run.supports_claim


def test_time_from_the_flops_of_sc21():
    b, s, layers, h, v = 4, 2048, 48, 6144, 51200
    flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    run = one("tflops")
    assert run.time and run.time.definition is TflopsDefinition.HARDWARE
    assert run.step_time_s == pytest.approx(flops / (150e12 * 8), rel=1e-9)
    without = one("tflops", recompute="none")
    assert without.step_time_s == pytest.approx(
        72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)) / (150e12 * 8)
    )


def test_time_from_mfu_takes_the_peak_that_the_source_names():
    b, s, layers, h, v = 32, 4096, 32, 4096, 256000
    flops = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    run = one("mfu")
    assert run.time and run.time.origin is TimeOrigin.MFU
    assert run.step_time_s == pytest.approx(flops / (0.4 * 4900e12 * 8))
    assert one("mfu", metric_mfu="40").step_time_s == pytest.approx(run.step_time_s)
    own = one("mfu", tflops_definition="model, full attention")
    assert own.step_time_s == pytest.approx(flops / (0.4 * 5000e12 * 8), rel=0.03)


def test_every_definition_of_flops_has_its_own_formula():
    parts = forward_flops(one("full").model, 4096)
    n, scores, head = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 4 * 4096 * 4096 * 32, 2 * 32000 * 4096
    assert (parts.layers, parts.scores, parts.head) == (2 * n, scores, head)
    expected = {
        TflopsDefinition.MODEL_FULL: 3 * (2 * n + scores + head),
        TflopsDefinition.MODEL_CAUSAL: 3 * (2 * n + scores / 2 + head),
        TflopsDefinition.HARDWARE: 4 * (2 * n + scores) + 3 * head,
        TflopsDefinition.SIX_N_FULL: 6 * parts.parameters + 3 * scores,
        TflopsDefinition.SIX_N: 6 * parts.parameters,
        TflopsDefinition.TWO_N_PASSES: 8 * parts.parameters,
        TflopsDefinition.LORA: 4 * n + 1.5 * scores + 2 * head,
        TflopsDefinition.NOT_STATED: 3 * (2 * n + scores + head),
    }
    assert {kind: flops_per_token(kind, parts, "full") for kind in TflopsDefinition} == expected
    attention = flops_per_token(TflopsDefinition.HARDWARE, parts, "attention")
    assert attention == 3 * 2 * n + 4 * scores + 3 * head
    assert parts.parameters == 6738415616


@pytest.mark.each(
    ("text", "kind"),
    [
        ("hardware: 4*2*N*s*GBS", "TWO_N_PASSES"),
        ("hardware; old 4*2*N*tokens estimate", "TWO_N_PASSES"),
        ("hardware (x4 fwd recompute incl.); Narayanan SC21 formula", "HARDWARE"),
        ("hardware for TFLOPs (HFU 43.3%); MFU 32.5%", "HARDWARE"),
        ("model, CAUSAL attention (6*s^2), recompute excluded", "MODEL_CAUSAL"),
        ("model; source MFU uses full (non-causal) attention 12*L*h*s/token", "MODEL_FULL"),
        ("LoRA-adjusted model FLOPs", "LORA"),
        ("model; attention convention depends on recipe age (full before Jul 2025)", "NOT_STATED"),
        ("model; peak 312", "MODEL_FULL"),
        ("6N", "SIX_N"),
        ("flops as the vendor counts", "NOT_STATED"),
    ],
)
def test_texts_of_definitions(text: str, kind: str):
    assert tflops_definition(text).name == kind


def test_a_rate_without_a_definition_supports_no_claim():
    run = one("tflops", tflops_definition="")
    assert Flag.FLOPS_UNDEFINED in run.flags and not run.supports_claim


def test_memory_alone_is_a_run_without_a_time():
    run = one("memory")
    assert run.time is None and run.step_time_s is None and run.model_kind == "lora"
    assert run.memory_bytes == 12 * 2**30 and run.memory and run.memory.least_bytes == pytest.approx(12e9)
    assert run.memory.definition is MemoryDefinition.NOT_STATED and Flag.MEMORY_UNIT_ASSUMED in run.flags
    assert run.adapter == AdapterName(rank=8, targets="all", assumed=True) and run.quantised_base
    assert run.accumulation == 8 and run.precisions == ("bf16",)
    assert one("memory", notes="LoRA r=64").adapter == AdapterName(rank=64, targets="all", assumed=False)
    assert one("memory", metric_peak_mem_gb="30").flags >= {Flag.MEMORY_ABOVE_DEVICE}
    assert one("memory", mem_unit="GB").memory_bytes == 12e9


def test_the_catalogue_completes_a_mixture_of_experts():
    run = one("moe")
    m = run.model
    assert m.latent is not None and m.experts is not None and (m.layers, run.model_kind) == (4, "moe")
    assert (m.experts.moe_layers, m.experts.expert_ffn_hidden, m.experts.shared_ffn_hidden) == (3, 2048, 2048)
    assert m.ffn_hidden == 18432 and run.memory and run.memory.definition is MemoryDefinition.RESERVED
    plain = one("moe", model="Some-MoE", moe_experts="16", ep="").model
    assert plain.latent is None and plain.experts and plain.experts.moe_layers == 4
    assert plain.experts.expert_ffn_hidden == 18432 and plain.experts.experts_per_token == 8


def test_a_known_name_stands_for_a_shape_that_is_not_printed():
    run = one("quiet")
    assert (run.model.layers, run.model.hidden, run.model.kv_heads, run.model.vocab) == (80, 8192, 8, 128256)
    assert run.degrees is None and run.micro_batch is None and run.workload == "pretrain"
    assert run.internode_Bps == 50e9
    reason, _ = refused("quiet", notes="layer-reduced PROXY")
    assert reason is Reason.NO_ARCHITECTURE


def test_a_shape_guessed_from_the_number_of_parameters():
    run = one("guess")
    assert (run.model.layers, run.model.hidden) == (64, 8192)
    assert Flag.ARCHITECTURE_GUESSED in run.flags and Flag.LOW_TRUST in run.flags and not run.supports_claim
    assert one("guess", hidden="8192").model.layers == 64
    assert Flag.LAYERS_DERIVED in one("guess", hidden="8192").flags
    assert one("guess", pp="16", dp="4").model.layers % 16 == 0
    assert refused("guess", n_params="")[0] is Reason.NO_ARCHITECTURE
    assert refused("guess", n_params="7")[0] is Reason.NO_ARCHITECTURE


@pytest.mark.each(
    ("changes", "reason"),
    [
        ({"gpu": ""}, Reason.NO_DEVICE),
        ({"gpu": "?"}, Reason.NO_DEVICE),
        ({"gpu": "Abacus 3000"}, Reason.UNKNOWN_DEVICE),
        ({"gpu": "../../etc/passwd"}, Reason.UNKNOWN_DEVICE),
        ({"gpu": "evil.toml"}, Reason.UNKNOWN_DEVICE),
        ({"gpu": "A100/H100"}, Reason.AMBIGUOUS_DEVICE),
        ({"n_gpus": ""}, Reason.NO_GPUS),
        ({"n_gpus": "eight"}, Reason.BAD_NUMBER),
        ({"n_gpus": "-8"}, Reason.BAD_NUMBER),
        ({"n_gpus": "8.5"}, Reason.BAD_NUMBER),
        ({"n_gpus": "1e300"}, Reason.BAD_NUMBER),
        ({"n_gpus": "99999999999"}, Reason.BAD_NUMBER),
        ({"seq_len": ""}, Reason.NO_SEQUENCE),
        ({"seq_len": "nan"}, Reason.NO_SEQUENCE),
        ({"seq_len": "inf"}, Reason.BAD_NUMBER),
        ({"layers": "many"}, Reason.BAD_NUMBER),
        ({"layers": "1e15", "model": "GPT"}, Reason.BAD_ARCHITECTURE),
        ({"kv_heads": "7", "model": "GPT"}, Reason.BAD_ARCHITECTURE),
        ({"model": "Nemotron-H-56B (hybrid Mamba)"}, Reason.UNSUPPORTED_ARCHITECTURE),
        ({"global_batch_sequences": "", "micro_batch": ""}, Reason.NO_BATCH),
        ({"global_batch_sequences": "0"}, Reason.BAD_NUMBER),
        ({"global_batch_sequences": "130"}, Reason.BATCH_CONTRADICTS),
        ({"global_batch_sequences": "2"}, Reason.BATCH_CONTRADICTS),
        ({"tp": "3"}, Reason.DEGREES_CONTRADICT),
        ({"tp": "8", "pp": "2"}, Reason.DEGREES_CONTRADICT),
        ({"ep": "3"}, Reason.DEGREES_CONTRADICT),
        (dict.fromkeys(METRICS[:4], "") | {"metric_peak_mem_gb": ""}, Reason.NO_MEASUREMENT),
        (
            {"metric_step_time_s": "fast", "metric_tokens_per_s_per_gpu": "", "metric_peak_mem_gb": ""},
            Reason.BAD_MEASUREMENT,
        ),
    ],
)
def test_rows_that_are_refused(changes: dict[str, str], reason: Reason):
    changes = {name: text for name, text in changes.items() if name != "derived_step_time_s"}
    assert refused(**changes)[0] is reason


def test_what_is_not_needed_does_not_cost_the_row():
    run = one(micro_batch="1-2", recompute="sometimes", dtype="posit8", metric_peak_mem_gb="lots", head_dim="-1")
    assert run.micro_batch is None and run.recompute is None and run.precisions == () and run.memory is None
    assert {Flag.CELL_UNREAD, Flag.TEXT_UNREAD, Flag.DTYPE_UNREAD} <= run.flags and run.step_time_s == 10


def test_doubts_become_flags():
    assert Flag.TIME_INCONSISTENT in one(metric_tokens_per_s_per_gpu="7000").flags
    assert Flag.TIME_INCONSISTENT not in one(metric_tokens_per_s_per_gpu="6600").flags
    assert Flag.TIME_IMPLAUSIBLE in one(metric_step_time_s="0.5", metric_tokens_per_s_per_gpu="").flags
    assert Flag.FROM_MEMORY in one(provenance="MEM").flags
    assert Flag.FROM_MEMORY not in one(provenance="IMG+MEM").flags
    assert Flag.OUTLIER in one(qc_flags="outlier vs siblings").flags
    rederived = one(dp="8")
    assert rederived.degrees and rederived.degrees.dp == 4 and Flag.DP_REDERIVED in rederived.flags
    replaced = one(micro_batch="12", global_batch_sequences="32")
    assert replaced.micro_batch == 8 and Flag.MICRO_BATCH_REPLACED in replaced.flags


def test_numbers_that_are_no_batch_and_no_number_of_layers_are_not_counted_through():
    changes = {"global_batch_sequences": "4000000004", "micro_batch": "", "metric_tokens_per_s_per_gpu": ""}
    assert refused(**changes)[0] is Reason.BAD_NUMBER
    largest = one(**changes | {"global_batch_sequences": "999999996", "micro_batch": "200000000"})
    assert largest.micro_batch == 83333333 and Flag.MICRO_BATCH_REPLACED in largest.flags
    assert one(model="DeepSeek-V3", hidden="7168", heads="128", notes="9" * 5000 + " dense layers").model.experts


def test_each_row_is_put_to_its_source_once():
    looked: list[str] = []

    class Key(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            looked.append(self)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    run = one()
    runs = tuple(replace(run, source_key=Key(f"source {i}")) for i in range(100))
    assert Reading(runs=runs, skipped=()).to_json()["by_source"]["source 7"]["rows"] == 1
    assert len(looked) < 1000


def test_batch_from_micro_batch_replicas_and_accumulation():
    run = one(global_batch_sequences="", schedule="grad-accum 16", micro_batch="2", metric_tokens_per_s_per_gpu="")
    assert run.global_batch == 128 and Flag.BATCH_DERIVED in run.flags


def test_repeated_lines_and_repeated_names():
    reading = runs_of([row(line=1), row(line=2), row(line=3, metric_step_time_s="10.1")])
    assert [r.row_id for r in reading.runs] == ["full", "full#2"]
    assert reading.runs[1].flags == {Flag.ROW_ID_REPEATED}
    assert [(s.line, s.reason) for s in reading.skipped] == [(2, Reason.DUPLICATE)]


def test_counts_of_the_whole_file():
    reading = read_runs(FILE)
    found = reading.to_json()
    assert (found["rows"], found["runs"], found["timed"], found["with_memory"]) == (9, 8, 7, 3)
    assert found["skipped"] == {str(Reason.NO_DEVICE): 1} and found["measured_but_skipped"] == 1
    assert found["by_source"]["made-up"] == {"rows": 8, "runs": 8, "timed": 7, "skipped": {}}
    assert found["by_source"]["other"]["runs"] == 0


def test_gzip_byte_order_mark_and_missing_optional_columns(tmp_path: Path):
    names = [*NEEDED, "layers", "hidden", "heads", "metric_step_time_s"]
    text = "\ufeff" + ",".join(names) + "\nGPT,1024,H100,8,64,24,1024,16,0.5\n\n"
    packed = tmp_path / "runs.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    reading = read_runs(packed)
    assert [(r.row_id, r.source_key, r.framework, r.step_time_s) for r in reading.runs] == [
        ("line-2", "unnamed", "generic", 0.5)
    ]


@pytest.mark.each(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xef\xbb\xbf\r\n# runs\r\n", "is empty"),
        ("model,gpu".encode("utf-16"), "save it as UTF-8"),
        (b"a,b\n1,2\n", "lacks the columns model"),
        (",".join(NEEDED).encode(), "has no measurement"),
        (",".join([*NEEDED, METRICS[0]]).encode(), "has no rows"),
        (",".join([*NEEDED, METRICS[0]]).encode() + b"\n,,,,,,,,\n", "has no rows"),
        (",".join([*NEEDED, "gpu", METRICS[0]]).encode() + b"\n1\n", "has the column 'gpu' twice"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8"),
        (b"\x1f\x8b\x08damaged", "cannot be read"),
        (b"a,b\0c\n", "zero bytes"),
        (",".join([*NEEDED, METRICS[0]]).encode() + b'\n"open,1', "is no CSV"),
    ],
)
def test_files_that_are_no_table_of_runs(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as error:
        read_runs(path)
    assert str(path) in str(error.value)


def test_no_file_and_a_folder(tmp_path: Path):
    with pytest.raises(InputFileError, match="the file does not exist"):
        read_runs(tmp_path / "none.csv")
    with pytest.raises(InputFileError, match="is a folder"):
        read_runs(tmp_path)


@pytest.mark.slow
def test_no_text_makes_reading_fail():
    """Every cell of every row replaced by junk in turn: each row stays accounted for."""
    junk = ("", "x", "-1", "0", "1e400", "nan", "1e17", "99999", "a/b", "(", "FP8 or", "\\", "[x", "3.5", "é" * 500)
    rows = read_rows(FILE)
    chosen = random.Random(1)
    made = []
    for original in rows:
        for column in original.cells:
            made += [TableRow(len(made) + 1, dict(original.cells) | {column: text}) for text in chosen.sample(junk, 3)]
    reading = runs_of(made)
    assert reading.rows == len(made)
    assert not [s for s in reading.skipped if s.reason is Reason.INTERNAL]
    assert sorted(r.line for r in (*reading.runs, *reading.skipped)) == [r.line for r in made]


def test_the_hand_made_table_is_regular():
    with FILE.open(newline="") as file:
        widths = {len(cells) for cells in csv.reader(file)}
    assert len(widths) == 1


@pytest.fixture(scope="module")
def everything() -> Reading:
    return read_runs(require_data("measured_training.csv.gz"))


@pytest.mark.slow
@pytest.mark.shared
def test_nine_of_ten_shared_rows_are_read(everything: Reading):
    usable, lost = len(everything.timed), sum(s.measured for s in everything.skipped)
    assert usable >= 0.9 * everything.rows
    assert usable / (usable + lost) > 0.95
    assert not [s for s in everything.skipped if s.reason in (Reason.INTERNAL, Reason.UNKNOWN_DEVICE)]


@pytest.mark.slow
@pytest.mark.shared
def test_printed_tflops_follow_from_shape_and_definition(everything: Reading):
    """Sources whose convention was verified: rate from our shape, definition and the step time."""
    rows = {r.line: r for r in read_rows(require_data("measured_training.csv.gz"))}
    ratios: dict[str, list[float]] = {"mosaic": [], "bigscience": [], "nemo-24.07": [], "megatron-bridge": []}
    for run in everything.timed:
        printed = rows[run.line].number("metric_tflops_per_gpu")
        if run.source_key in ratios and printed and run.model_kind == "dense" and run.step_time_s:
            kind = tflops_definition(rows[run.line].text("tflops_definition"))
            parts = forward_flops(run.model, run.seq_len, rows[run.line].number("n_params"))
            flops = flops_per_token(kind, parts, run.recompute.kind if run.recompute else "none")
            made = flops * run.seq_len * run.global_batch / (run.gpus * run.step_time_s)
            ratios[run.source_key].append(made / printed / 1e12)
    for source, values in ratios.items():
        assert len(values) > 40, source
        assert sorted(values)[len(values) // 2] == pytest.approx(1, abs=0.01), source
