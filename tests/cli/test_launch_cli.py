"""``steptime export`` and ``steptime import``, and ``steptime doctor`` with the file that launched the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from doctor_logs import arguments, iteration
from steptime.cli.main import main
from steptime.launch import SOFTWARE

RUN = """model = "llama2-7b"
cluster = "dgx-h100"
gpus = 64
global_batch = 128
seq = 4096
framework = "megatron-core"
[plan]
tp = 2
pp = 2
micro_batch = 1
overlap = ["dp"]
"""


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, args)
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def test_there_and_back(file: str, tmp_path: Path) -> None:
    script, again = tmp_path / "launch.sh", tmp_path / "again.toml"
    code, text = run("export", file, "--for", "megatron-lm", "-o", str(script))
    assert code == 0 and "start it with: torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py" in text
    code, text = run("import", str(script), "-o", str(again))
    assert code == 0 and "a run of Megatron-LM" in text and "next: steptime estimate" in text
    first, second = (
        json.loads(CliRunner().invoke(main, ["estimate", each, "--json"]).stdout) for each in (file, str(again))
    )
    assert second["step_time_s"] == pytest.approx(first["step_time_s"], rel=1e-12)
    assert second["plan"] == first["plan"]


def test_printed_and_json(file: str, tmp_path: Path) -> None:
    printed = CliRunner().invoke(main, ["export", file, "--for", "deepspeed"])
    assert printed.exit_code == 0 and json.loads(printed.stdout)["zero_optimization"]["stage"] == 1
    document = json.loads(CliRunner().invoke(main, ["export", file, "--for", "nemo", "--json"]).stdout)
    assert document["schema_version"] == 1 and document["options"]["trainer.num_nodes"] == 8
    assert document["software"] == "nemo" and document["text"].startswith("# Written by steptime")
    (tmp_path / "recipe.py").write_text(document["text"])
    found = json.loads(CliRunner().invoke(main, ["import", str(tmp_path / "recipe.py"), "--json"]).stdout)
    assert found["software"] == "nemo" and found["kept"] == {} and 'model = "llama2-7b"' in found["run"]
    code, text = run("import", str(tmp_path / "recipe.py"))
    assert code == 0 and "tp = 2" in text


def test_a_folder_and_a_written_plan(file: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(CliRunner().invoke(main, ["estimate", file, "--zero", "1", "--json"]).stdout)
    code, text = run("export", str(plan), "--for", "megatron-bridge", "-o", str(tmp_path / "out"))
    assert code == 0 and (tmp_path / "out" / "recipe.py").exists(), text
    text = (tmp_path / "out" / "recipe.py").read_text()
    assert "cfg.model.tensor_model_parallel_size = 2" in text and "cfg.train.global_batch_size = 128" in text


def test_what_is_kept_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "foo": 1}, "steps_per_print": 5}'
    )
    out = tmp_path / "run.toml"
    code, text = run("import", str(path), "--model", "llama3-8b", "-o", str(out))
    assert code == 0 and "kept, a run has no key for: steps_per_print" in text
    assert "unknown to DeepSpeed 0.19.8, kept: zero_optimization.foo" in text
    assert "# kept: zero_optimization.foo = 1" in out.read_text()
    code, text = run("estimate", str(out), "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "64")
    assert code == 0 and "deepspeed" in text


def test_a_model_is_written_next_to_the_run(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers 10 --hidden-size 1000 "
        "--num-attention-heads 10 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --bf16\n"
    )
    code, text = run("import", str(path))
    assert code == 2 and "give -o RUN.toml" in text
    code, text = run("import", str(path), "--cluster", "dgx-h100", "-o", str(tmp_path / "mine.toml"))
    assert code == 0 and "layers = 10" in (tmp_path / "mine.model.toml").read_text()
    assert run("estimate", str(tmp_path / "mine.toml"))[0] == 0


@pytest.mark.parametrize(("args", "words"), [
    (["export", "FILE", "--for", "megatron"], "did you mean megatron-lm"),
    (["export", "FILE", "--for", "fsdp2"], "has no pipeline: pp 2"),
    (["export", "FILE"], "--for"),
    (["export", "nothing.toml", "--for", "nemo"], "does not exist"),
    (["export", "llama3-8b", "--cluster", "dgx-h100", "--for", "nemo"], "missing"),
    (["import", "nothing.sh"], "does not exist"),
    (["import", "FILE"], "which software"),
    (["import", "pretrain_gpt.py --bf16 --fp16", "--from", "megatron-lm"], "contradict"),
    (["import", "pretrain_gpt.py --micro-batch-size 1", "--from", "megatron-lm"], "does not say which model"),
])  # fmt: skip
def test_refused(args: list[str], words: str, file: str) -> None:
    code, text = run(*(file if arg == "FILE" else arg for arg in args))
    assert code == 2 and words in text and "Traceback" not in text, text


def test_help_names_every_software() -> None:
    code, text = run("export", "--help")
    assert code == 0 and all(name in text.replace("- ", "-") for name in SOFTWARE)


def test_doctor_takes_the_launch_file(file: str, tmp_path: Path) -> None:
    """Measured against predicted is one command from the file that launched the run."""
    script, log = tmp_path / "launch.sh", tmp_path / "train.log"
    run("export", file, "--for", "megatron-lm", "-o", str(script))
    estimate = json.loads(CliRunner().invoke(main, ["estimate", file, "--json"]).stdout)
    sizes = {"world_size": 64, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "seq_length": 4096}
    lines = "".join(iteration(n, 1e3 * estimate["step_time_s"]) for n in range(1, 12))
    log.write_text(arguments(**sizes, micro_batch_size=1, global_batch_size=128) + lines)
    found = json.loads(CliRunner().invoke(main, ["doctor", str(log), "--plan", str(script), "--json"]).stdout)
    assert found["predicted"]["model"] == "llama2-7b" and found["predicted"]["plan"]["pp"] == 2
    assert found["comparison"][0]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert any("reference" in text and "Megatron-LM" in text for text in found["warnings"])
    code, text = run("doctor", str(log), "--plan", str(script), "--tp", "4")
    assert code == 0 and "tp is given as 4, but the run says 2" in text
    other = tmp_path / "plan.json"
    other.write_text(json.dumps(estimate))
    found = json.loads(CliRunner().invoke(main, ["doctor", str(log), "--plan", str(other), "--json"]).stdout)
    assert found["predicted"]["model"] == "llama2-7b"
    job = ["llama2-7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "128", "--tp", "2", "--pp", "2"]
    other.write_text(CliRunner().invoke(main, ["estimate", *job, "--json"]).stdout)
    found = json.loads(CliRunner().invoke(main, ["doctor", str(log), "--plan", str(other), "--json"]).stdout)
    assert found["predicted"]["workload"]["framework"] == "megatron-core"  # the log's, where the plan names none
