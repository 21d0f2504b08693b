"""``steptime doctor`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_api import Run

from cli_runner import CliRunner
from doctor_logs import arguments, iteration
from steptime.cli import estimate, options
from steptime.cli.main import main
from steptime.doctor import cli as doctor
from steptime.options import KEYS

DATA = Path(__file__).resolve().parents[1] / "data/doctor"
MEGATRON, DEEPSPEED, TITAN = (str(DATA / f"{name}.log") for name in ("megatron", "deepspeed", "torchtitan"))
TRACE = str(DATA / "trace.json.gz")


def document(run: Run, *args: str) -> Any:
    result = run("doctor", *args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_log_alone_says_what_the_job_is(run):
    d = document(run, MEGATRON, "--cluster", "dgx-h100")
    assert d["schema_version"] == 1
    assert d["source"]["framework"] == "megatron"
    assert d["predicted"]["model"] == "llama2-7b"
    assert d["predicted"]["workload"]["gpus"] == 64
    assert d["predicted"]["plan"]["tp"] == 2
    assert d["predicted"]["plan"]["overlap"] == []
    assert [row["name"] for row in d["comparison"]][:2] == ["step time", "MFU"]
    assert any("tp 2" in warning for warning in d["warnings"])


def test_a_log_with_experts_is_no_run_of_a_dense_model_of_its_sizes(run, tmp_path):
    """What the run has of experts is held against the model, and expert ranks do not stop a dense one."""
    log = tmp_path / "moe.log"
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336,
             "num_query_groups": 8, "world_size": 64, "seq_length": 4096, "expert_model_parallel_size": 8}  # fmt: skip
    steps = "".join(iteration(i, 2500.0) for i in range(1, 9))
    log.write_text(arguments(**sizes, num_experts=8, moe_router_topk=2) + steps)
    d = document(run, str(log), "--cluster", "dgx-h100")
    assert (d["predicted"]["model"], d["predicted"]["plan"]["ep"]) == ("mixtral-8x7b", 8)
    d = document(run, str(log), "--cluster", "dgx-h100", "--model", "llama3-8b")
    assert d["findings"][0]["evidence"] == ["llama3-8b has experts 0, but the run says 8"]
    log.write_text(arguments(**sizes, num_experts=12) + steps)
    wanted = "no model of the catalogue has the sizes of the log's (layers 32, hidden 4096, heads 32, ffn_hidden 14336"
    assert any(text.startswith(wanted) for text in document(run, str(log), "--cluster", "dgx-h100")["warnings"])


@pytest.mark.parametrize(("padded", "model"), [(128256, "llama3-70b"), (32768, "llama2-70b"), (99999, "llama2-70b")])
def test_the_vocabulary_tells_models_of_equal_sizes_apart(run, tmp_path, padded, model):
    """A run of Llama 3 70B was predicted as Llama 2, which differs by its vocabulary alone."""
    sizes = {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672,
             "num_query_groups": 8, "world_size": 64, "seq_length": 4096, "tensor_model_parallel_size": 8}  # fmt: skip
    log = tmp_path / "llama.log"
    log.write_text(arguments(**sizes, padded_vocab_size=padded) + "".join(iteration(i, 9e3) for i in range(1, 9)))
    d = document(run, str(log), "--cluster", "dgx-h100")
    assert d["predicted"]["model"] == model
    assert not any("vocab" in text for finding in d["findings"] for text in finding["evidence"])


def test_the_framework_of_the_log_is_that_of_the_prediction(run):
    """Without --framework the fit of the software that wrote the log, and the report says so."""
    job = (MEGATRON, "--cluster", "dgx-h100")
    own, named, generic = (document(run, *job, *more) for more in (
        (), ("--framework", "megatron-core"), ("--framework", "generic")))  # fmt: skip
    assert own["predicted"]["workload"]["framework"] == "megatron-core"
    assert own["predicted"]["step_time_s"] == named["predicted"]["step_time_s"] != generic["predicted"]["step_time_s"]
    note = "framework megatron-core: that of the run; --framework names another"
    assert note in own["warnings"] and note not in named["warnings"]
    assert not any(f["code"] == "inputs" for f in generic["findings"])
    assert (
        note
        in document(run, TRACE, "--model", "llama2_7b", "--cluster", "dgx-h100", "--global-batch", "32")["warnings"]
    )


def test_memory_that_is_off_comes_with_what_would_explain_it(run, tmp_path):
    """The peak of the same plan without sharded optimiser states, in a log that does not say whether they are."""
    plan = ("--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "256", "--seq", "4096",
            "--tp", "2", "--framework", "megatron-core")  # fmt: skip
    unshared = json.loads(run("estimate", *plan[1:], "--zero", "0", "--json").stdout)["memory_by_definition"][
        "allocated"
    ]
    text = Path(MEGATRON).read_text().replace("max allocated: 24100.25", f"max allocated: {unshared / 2**20}")
    path = tmp_path / "m.log"

    def evidence(text: str) -> list[str]:
        path.write_text(text)
        (found,) = [
            f for f in document(run, str(path), "--cluster", "dgx-h100")["findings"] if f["code"] == "memory_off"
        ]
        return found["evidence"]

    silent = text.replace("  use_distributed_optimizer ..................... True\n", "")
    assert any("nothing shared out over data-parallel ranks it would be" in line for line in evidence(silent))
    assert not any("nothing shared out" in line for line in evidence(text))


def test_what_is_given_wins_and_is_held_against_the_log(run):
    d = document(run, MEGATRON, "--model", "llama2_13b", "--cluster", "dgx-h100", "--gpus", "32", "--tp", "4")
    assert d["predicted"]["workload"]["gpus"] == 32
    assert d["predicted"]["plan"]["tp"] == 4
    first = d["findings"][0]
    assert first["code"] == "inputs"
    assert "tp is given as 4, but the run says 2" in first["evidence"]
    assert "llama2-13b has layers 40, but the run says 32" in first["evidence"]


def test_doctor_takes_every_option_of_a_job_that_estimate_takes():
    """One set for both; each of its members is read."""
    assert all(set(options.JOB) <= set(module.command.rows) for module in (doctor, estimate))
    read = {*options.SETTINGS, *KEYS, "cluster", "placement", "lora_rank", "lora_targets", "qlora", "dora", "plan"}
    assert read == set(options.JOB)


def test_newer_options_reach_the_prediction(run, tmp_path):
    job = ("--cluster", "dgx-h100", "--framework", "ideal", "--gradient-dtype", "bf16", "--offload", "optimizer",
           "--lora-rank", "16", "--qlora")  # fmt: skip
    predicted = document(run, MEGATRON, *job)["predicted"]
    assert predicted["workload"]["framework"] == "ideal" and predicted["workload"]["lora"]["qlora"] is True
    assert (predicted["plan"]["gradient_dtype"], predicted["plan"]["offload"]) == ("bf16", ["optimizer"])
    path = tmp_path / "plan.json"
    path.write_text(run("estimate", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64",
                        "--zero", "3", "--recompute", "full", "--json").stdout)  # fmt: skip
    plan = document(run, MEGATRON, "--cluster", "dgx-h100", "--plan", str(path))["predicted"]["plan"]
    assert plan["recompute"] == "full"


def test_a_run_toml_is_taken_as_the_job(run, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "llama2_7b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 64\n[plan]\nzero = 2\n')
    d = document(run, DEEPSPEED, "--model", str(path), "--seq", "4096")
    assert d["predicted"]["plan"]["zero"] == 2
    assert d["findings"][0]["evidence"] == ["zero is given as 2, but the run says 3"]


def test_recomputation_that_nobody_states_is_a_note(run):
    note = "what is recomputed is neither given nor stated: predicted as nothing"
    assert note in document(run, TITAN, "--cluster", "dgx-h100")["warnings"]
    assert note not in document(run, TITAN, "--cluster", "dgx-h100", "--recompute", "full")["warnings"]
    assert note not in document(run, MEGATRON, "--cluster", "dgx-h100")["warnings"]


def test_torchtitan_needs_no_more_than_the_cluster(run):
    d = document(run, TITAN, "--cluster", "dgx-h100")
    assert d["predicted"]["model"] == "llama3-8b"
    assert d["predicted"]["workload"]["framework"] == "torchtitan"
    assert "model llama3-8b: the log calls it llama3 8B" in d["warnings"]
    assert d["measured"]["step_time_s"] == pytest.approx(1.45, abs=0.01)
    assert d["measured"]["step_time_basis"] == "from throughput"


def test_the_device_of_the_log_is_held_against_that_of_the_cluster(run, tmp_path):
    def first(text: str, cluster: str) -> str:
        path = tmp_path / "t.log"
        path.write_text(text)
        found = document(run, str(path), "--cluster", cluster)["findings"][0]
        return found["evidence"][0] if found["code"] == "inputs" else ""

    text = Path(TITAN).read_text()
    assert first(text, "dgx-h100") == ""
    blackwell = text.replace("NVIDIA H100 80GB HBM3 with 79.10GiB", "NVIDIA B200 with 178.36GiB")
    assert first(blackwell, "dgx-h100") == "dgx-h100 has h100-sxm, but the run names NVIDIA B200 (b200-sxm)"
    assert first(text, "dgx-b200").endswith("but the run names NVIDIA H100 80GB HBM3 (h100-sxm)")


def test_a_recipe_that_the_given_device_has_not_names_the_device_of_the_run(run, tmp_path):
    path = tmp_path / "t.log"
    head, rest = Path(TITAN).read_text().split("CUDA capacity", 1)
    path.write_text(f"{head}Swapped to MXLinear layers\n[rank0]: CUDA capacity{rest}")
    result = run("doctor", str(path), "--cluster", "dgx-a100")
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "dgx-a100 has a100-sxm-40gb, but the run names NVIDIA H100 80GB HBM3 (h100-sxm)" in text
    assert "no matrix rate for fp8" in text


def test_the_device_of_a_trace_is_held_against_that_of_the_cluster(run):
    job = (TRACE, "--model", "llama2_7b", "--global-batch", "32", "--tp", "2")
    (found,) = [f for f in document(run, *job, "--cluster", "dgx-b200")["findings"] if f["code"] == "inputs"]
    assert found["evidence"] == ["dgx-b200 has b200-sxm, but the run names NVIDIA H100 80GB HBM3 (h100-sxm)"]
    assert "the run names its device: NVIDIA H100 80GB HBM3" in document(run, TRACE)["warnings"]


def test_what_the_log_states_rules_out_other_explanations(run, tmp_path):
    """A step as long as with full recomputation, of a run that says that it recomputes nothing."""
    job = ("--cluster", "dgx-h100")
    full_s = document(run, MEGATRON, *job, "--recompute", "full")["predicted"]["step_time_s"]
    steps = "".join(iteration(i, full_s * 1e3, 256) for i in range(1, 30))
    head = Path(MEGATRON).read_text().split(" [2026", 1)[0]

    def variants(head: str) -> list[str]:
        path = tmp_path / "m.log"
        path.write_text(head + steps)
        return [f["title"] for f in document(run, str(path), *job)["findings"] if f["code"] == "variant"]

    silent = "".join(line for line in head.splitlines(keepends=True) if "recompute_granularity" not in line)
    full = "the run costs what full recomputation would"
    assert full in variants(silent) and full not in variants(head)


def test_fp8_that_is_given_is_not_the_fp8_of_the_run(run, tmp_path):
    """The plain recipe is the user's choice, and no contradiction; what it leaves out is said."""
    path = tmp_path / "m.log"
    line = f"fp8 {43 * '.'} "
    path.write_text(Path(MEGATRON).read_text().replace(f"{line}None", f"{line}hybrid"))
    own, given = (document(run, str(path), "--cluster", "dgx-h100", *more) for more in ((), ("--dtype", "fp8")))
    assert own["predicted"]["workload"]["dtype"] == "fp8-te"
    assert own["predicted"]["step_time_s"] != given["predicted"]["step_time_s"]
    note = "dtype fp8 is the rate of products alone; the run's own, fp8-te, also casts, copies and gathers in 8 bits"
    assert note in given["warnings"] and note not in own["warnings"]
    assert not any(f["code"] == "inputs" and "dtype" in f["evidence"][0] for f in given["findings"])


def test_a_trace_beside_the_prediction(run):
    job = ("--model", "llama2_7b", "--cluster", "dgx-h100", "--global-batch", "32", "--tp", "2")
    d = document(run, TRACE, *job)
    assert d["source"]["kind"] == "trace"
    assert d["predicted"]["workload"]["gpus"] == 64
    assert set(d["measured"]["traffic"]) == {"tp", "dp"}
    rows = {row["name"]: row for row in d["comparison"]}
    assert rows["tp_comm"]["measured"] == pytest.approx(0.0288)
    assert rows["tp_comm"]["predicted"] > 0
    text = run("doctor", TRACE, *job).stdout
    assert "largest kernels, per step" in text
    assert "findings, by seconds lost per step" in text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", [(MEGATRON, "--cluster", "dgx-h100"), (TRACE,), (DEEPSPEED, "--global-batch", "64")])
def test_the_report_fits_the_screen(columns, args):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["doctor", *args])
    assert result.exit_code == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= columns
    assert not result.stderr


def test_a_model_that_the_catalogue_has_not_is_named(run, tmp_path):
    path = tmp_path / "t.log"
    path.write_text(Path(TITAN).read_text().replace("llama3 8B", "llama3 debugmodel"))
    warnings = document(run, str(path), "--cluster", "dgx-h100")["warnings"]
    assert "no model of the catalogue has name and sizes of the log's llama3 debugmodel: give --model" in warnings


def test_without_a_cluster_it_says_what_is_missing(run):
    text = run("doctor", TRACE).stdout
    assert "without --model and --cluster there is no prediction" in " ".join(text.split())
    assert document(run, MEGATRON)["predicted"] is None


def test_a_trace_without_steps_is_split_by_the_option(run, tmp_path):
    path = tmp_path / "t.json"
    events = [{"cat": "kernel", "name": "gemm", "ts": i * 10, "dur": 10, "args": {"stream": 7}} for i in range(10)]
    path.write_text(json.dumps(events))
    assert document(run, str(path))["measured"]["step_time_s"] == pytest.approx(100e-6)
    assert document(run, str(path), "--steps", "5")["measured"]["step_time_s"] == pytest.approx(20e-6)


@pytest.mark.each(
    ("args", "message"),
    [
        (("missing.log",), "the file does not exist"),
        ((str(DATA),), "is a folder, not a file"),
        ((__file__,), "none with the time of a step"),
        ((MEGATRON, "--model", "nope", "--cluster", "dgx-h100"), "there is no model 'nope'"),
        ((MEGATRON, "--cluster", "nope"), "there is no cluster 'nope'"),
        ((TRACE, "--model", "llama2_7b", "--cluster", "dgx-h100"), "--global-batch"),
        ((MEGATRON, "--cluster", "dgx-h100", "--tp", "7"), "7"),
        ((TRACE, "--steps", "0"), "not a whole number from 1"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, args, message):
    result = run("doctor", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
