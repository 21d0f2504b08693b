"""The commands above the engine: what a user sees, and that it is what the API returns."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main
from steptime.plan.framework import PARAMETERS, Habits
from steptime.plan.framework_file import framework_names

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ("--cluster", "dgx-b200", "--gpus", "512", "--global-batch", "512")
PLAN = ("plan", "gpt3_1T", *MACHINE)
ESTIMATE = ("estimate", "gpt3_1T", *MACHINE, "--tp", "8", "--pp", "16")
SMALL = {"gpus": 512, "global_batch": 512}
CONFIGS = sorted((ROOT / "tests/data/huggingface").glob("*.json"))


def wide(columns: int, *args: str) -> list[str]:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, list(args))
    assert result.exit_code == 0, result.stderr
    return [line.rstrip() for line in result.stdout.splitlines()]


def document(run: Run, *args: str, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def body(lines: list[str], first: str) -> list[str]:
    """Lines below a heading, up to the next blank one."""
    at = next(i for i, line in enumerate(lines) if line.startswith(first)) + 1
    return lines[at : lines.index("", at) if "" in lines[at:] else None]


@pytest.mark.parametrize("columns", [80, 120])
def test_plan_report_fits_a_screen(columns: int) -> None:
    short = wide(columns, *PLAN)
    assert max(map(len, short)) <= columns and len(short) <= 28 and any("recommended" in line for line in short[:4])
    lines = wide(columns, *PLAN, "--long")
    assert max(map(len, lines)) <= columns
    assert len(lines) <= (60 if columns == 120 else 68)
    text = "\n".join(lines)
    for piece in (
        "mode corrected",
        "candidates",
        "feasible",
        "pruned",
        "less memory for more time",
        "memory: does not",
    ):
        assert piece in " ".join(text.split())
    assert "mode \n" not in text


def test_plan_report_shows_what_the_api_ranks() -> None:
    lines = wide(120, *PLAN, "--top", "5")
    result = api.plan("gpt3_1T", "dgx-b200", **SMALL, top=5)
    head = next(i for i, line in enumerate(lines) if line.split()[-5:-3] == ["step", "MFU"] or "  step  " in line)
    names = lines[head].split()
    rows = [line.split() for line in lines[head + 1 : head + 6]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    same = dict(part.rsplit(" ", 1) for part in lines[head - 1].removeprefix("all: ").split(", "))
    for row, found in zip(rows, result.plans, strict=True):
        for axis in ("tp", "pp", "dp"):
            shown = row[1 + names.index(axis)] if axis in names else same.get(axis, "1")
            assert shown == str(found.plan[axis])
        assert f"{found.step_time_s:.4g}" in row and f"{found.mfu * 100:.1f}" in row


def test_changes_are_sorted_by_gain() -> None:
    lines = wide(120, *ESTIMATE)
    shown = body(lines, "what would change it")
    changes = [float(line.split()[-2]) for line in shown]
    assert changes == sorted(changes)
    assert len(changes) == len(api.estimate("gpt3_1T", "dgx-b200", **SMALL, plan={"tp": 8, "pp": 16}).what_if)


def test_plan_json_is_what_the_api_returns(run: Run) -> None:
    printed = document(run, *PLAN, "--top", "2", "--fix", "tp=8", "--limit", "pp<=16")
    returned = api.plan("gpt3_1T", "dgx-b200", **SMALL, top=2, fix={"tp": 8}, limit=["pp<=16"]).to_json()
    for one in (printed, returned):
        one["stop"].pop("elapsed_cpu_s")
    assert printed == json.loads(json.dumps(returned))
    assert all(plan["plan"]["tp"] == 8 and plan["plan"]["pp"] <= 16 for plan in printed["plans"])


def test_estimate_json_is_what_the_api_returns(run: Run) -> None:
    printed = document(run, *ESTIMATE)
    returned = api.estimate("gpt3_1T", "dgx-b200", **SMALL, plan={"tp": 8, "pp": 16}).to_json()
    assert printed == json.loads(json.dumps(returned))
    assert sum(printed["time"].values()) == pytest.approx(printed["step_time_s"], rel=1e-12)


@pytest.mark.parametrize("columns", [80, 120])
def test_estimate_report(columns: int) -> None:
    lines = wide(columns, *ESTIMATE)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= columns
    order = ["1d tp8 pp16 dp4 mbs1", "step time", "time, exposed", "  backward", "    mlp_in/gemm_s",
             "memory of the fullest device", "overlapped (hidden", "what would change it", "weakest constants: assumed",
             "more constants with --all", "assumed: "]  # fmt: skip
    places = [text.index(piece) for piece in order]
    assert places == sorted(places)


def test_bar_only_where_a_domain_is_shared() -> None:
    assert "| domain tp8" in wide(120, *ESTIMATE)[1]
    assert "|" not in wide(120, "estimate", "gpt3_1T", *MACHINE, "--pp", "128", "--placement", "tp=1")[1]


def test_summa_carries_a_note() -> None:
    note = "no common framework implements"
    summa = wide(120, "plan", "gpt3_1T", *MACHINE, "--strategy", "2d", "--fix", "tp2=2", "--top", "1")
    assert any(note in line for line in summa)
    assert any("tp2 2" in line for line in summa)
    assert not any(note in line for line in wide(120, *PLAN, "--strategy", "1d", "--top", "1"))


def test_idle_devices_are_shown() -> None:
    lines = wide(120, "estimate", "gpt3_1T", "--cluster", "gb200-nvl72", "--gpus", "512", "--global-batch", "512",
                 "--tp", "8", "--pp", "64", "--placement", "tp=8,pp=8")  # fmt: skip
    assert "idle 64" in lines[1]


@pytest.mark.parametrize(
    ("term", "some", "none"),
    [
        ("tp_comm", "tp_comm/forward/qkv/", "compute/"),
        ("compute/forward", "compute/forward/qkv/", "compute/backward"),
        ("mlp_in", "compute/backward/mlp_in/", "/qkv/"),
        ("pipeline_bubble_s", "bubble/pipeline_bubble_s", "compute/"),
        ("collective_s", "tp_comm/forward/qkv/all_gather/collective_s", "roofline_compute_s ="),
    ],
)
def test_explain_takes_a_path_a_row_or_a_function(run: Run, term: str, some: str, none: str) -> None:
    shown = [line for line in wide(120, *ESTIMATE, "--explain", term) if "/" in line and " = " in line]
    assert any(line.startswith(some) for line in shown)
    assert not any(none in line.split(" = ")[0] + " =" for line in shown if not line.startswith(" "))


def test_every_explained_term_has_formula_and_source() -> None:
    lines = wide(120, *ESTIMATE, "--explain")
    terms = [
        line for line in lines if line and not line.startswith(" ") and "/" in line.split(" = ")[0] and " = " in line
    ]
    assert len(terms) > 30
    assert sum(line.startswith("  source: ") for line in lines) == len(terms)
    assert sum(line.startswith("  steptime.cost.") for line in lines) == len(terms)


@pytest.mark.quick(without=["args1-tp 7 does not divide 512 devices"])
@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("plan", "gpt3_1T", "--cluster", "dgx-b200", "--gpus", "8", "--global-batch", "8"), "devices work"),
        ((*PLAN, "--fix", "tp=7"), "tp 7 does not divide 512 devices"),
        ((*PLAN, "--limit", "tp>1000"), "no candidate of the space satisfies the constraints"),
    ],
)
def test_nothing_fits_is_3_with_advice(run: Run, args: tuple[str, ...], advice: str) -> None:
    result = run(*args)
    assert result.exit_code == 3
    assert f"advice: {advice.split()[0]}" in result.stdout or advice in result.stdout
    assert advice in " ".join(result.stdout.split())
    assert document(run, *args, code=3)["feasible"] == 0


@pytest.mark.each("config", CONFIGS, ids=lambda path: path.stem)
def test_ledger_of_every_config(run: Run, config: Path) -> None:
    assert document(run, "estimate", str(config))["parameters_total"] > 5e7


def test_experts_have_a_ledger_and_a_step(run: Run) -> None:
    assert run("estimate", "mixtral-8x7b").exit_code == 0
    machine = ("--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "128", "--seq", "2048")
    printed = document(run, "estimate", "mixtral-8x7b", *machine, "--ep", "8", "--expert-imbalance", "1.1")
    returned = api.estimate("mixtral-8x7b", "dgx-h100", gpus=64, global_batch=128, seq=2048,
                            plan={"ep": 8, "expert_imbalance": 1.1})  # fmt: skip
    assert printed == json.loads(json.dumps(returned.to_json()))
    assert printed["time"]["ep_comm/forward/permute/all_to_all/collective_s"] > 0


def test_a_written_plan_is_a_start(run: Run, tmp_path: Path) -> None:
    best, written = tmp_path / "best.json", tmp_path / "a.json"
    best.write_text(run(*PLAN, "--top", "1", "--json").stdout)
    first = json.loads(best.read_text())["plans"][0]
    same = document(run, "estimate", "gpt3_1T", *MACHINE, "--plan", str(best))
    assert (same["plan"], same["step_time_s"]) == (first["plan"], first["step_time_s"])
    written.write_text(json.dumps(same))
    other = document(run, "estimate", "gpt3_1T", *MACHINE, "--plan", str(written), "--tp", "8", "--recompute", "full")
    assert (other["plan"]["tp"], other["plan"]["recompute"]) == (8, "full")
    assert other["plan"]["pp"] == first["plan"]["pp"]
    written.write_text("{}")
    assert f"{written}: holds no plan" in run("estimate", "gpt3_1T", *MACHINE, "--plan", str(written)).stderr


def test_adapters_and_frameworks_of_a_run_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama2-7b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 64\nframework = "torchtune"\n'
        "[lora]\nrank = 16\n[plan]\nrecompute = 'norm+activation'\nsp = 'off'\ngradient_dtype = 'bf16'\n"
    )
    printed = document(run, "estimate", str(file), "--qlora")
    assert printed["workload"]["lora"] == {"rank": 16, "targets": "linear", "qlora": True}
    assert printed["workload"]["framework"] == "torchtune"
    assert (printed["plan"]["recompute"], printed["plan"]["sp"]) == ("norm+activation", 0)
    ideal = document(run, "estimate", str(file), "--framework", "ideal")
    assert ideal["step_time_band_s"] is None and ideal["workload"]["lora"]["qlora"] is False


def test_sequence_parallelism_is_read_as_json_writes_it(run: Run, tmp_path: Path) -> None:
    job = ("--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--tp", "2")
    off = document(run, "estimate", "llama2-7b", *job, "--sp", "off")
    text = 'model = "llama2-7b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 8\n[plan]\ntp = 2\nsp = 0\n'
    (file := tmp_path / "run.toml").write_text(text)
    for args in (("estimate", "llama2-7b", *job, "--sp", str(off["plan"]["sp"])), ("estimate", str(file))):
        assert document(run, *args)["step_time_s"] == off["step_time_s"]
    assert "sp: 'no' is neither on nor off" in run(*ESTIMATE, "--sp", "no").stderr


def test_bands_are_shown_with_what_dominates_them() -> None:
    band = next(line for line in wide(140, *ESTIMATE) if line.startswith("band"))
    e = api.estimate("gpt3_1T", "dgx-b200", **SMALL, plan={"tp": 8, "pp": 16})
    assert "90 %: " in band and "; most of it from: " in band
    assert e.step_time_band_s is not None and f"{e.step_time_band_s[1]:.4g} s" in band
    assert any("band uncalibrated" in " ".join(line.split()) for line in wide(120, *ESTIMATE, "--framework", "ideal"))
    assert any("band 90 %" in line for line in wide(120, *PLAN))


def test_frameworks_are_listed_with_their_doubts(run: Run) -> None:
    names = framework_names()
    lines = wide(140, "frameworks")
    assert [line.split()[0] for line in lines[1 : 1 + len(names)]] == names
    listed = document(run, "frameworks")["frameworks"]
    assert [one["name"] for one in listed] == names
    assert set(listed[0]["parameters"]) == set(PARAMETERS)
    assert listed[1]["runs"] == document(run, "frameworks")["fit"]["rows"]
    one = document(run, "frameworks", "torchtitan")["framework"]
    assert one["habits"]["gradient_dtype"] == "fp32" and one["parameters"]["matrix"]["doubt"] > 0
    assert all(name in "\n".join(wide(100, "frameworks", "torchtitan")) for name in PARAMETERS)
    assert "did you mean torchtitan" in run("frameworks", "torchtitn").stderr


def test_a_framework_shows_every_habit_with_its_meaning(run: Run) -> None:
    names = [field.name for field in fields(Habits)]
    record = document(run, "frameworks", "megatron-deepspeed-2021")["framework"]["habits"]
    assert list(record) == names
    assert record["single_ring"] is True and record["exchange_once"] is False and record["overlap"] == []
    lines = wide(200, "frameworks", "megatron-deepspeed-2021")
    start = next(i for i, line in enumerate(lines) if line.split() == ["habit", "value", "source", "meaning"])
    shown = {line.split()[0]: line.split()[1:] for line in lines[start + 1 : start + 1 + len(names)]}
    assert list(shown) == names and all(len(words) > 2 for words in shown.values())
    assert shown["single_ring"][0] == "yes" and shown["overlap"][0] == "nothing"


def test_diff_of_a_run_and_a_written_estimate(run: Run, tmp_path: Path) -> None:
    written = tmp_path / "a.json"
    written.write_text(run(*ESTIMATE, "--json").stdout)
    other = tmp_path / "b.toml"
    other.write_text(
        'model = "gpt3_1T"\ncluster = "dgx-b200"\ngpus = 512\nglobal_batch = 512\n[plan]\ntp = 4\npp = 16\n'
    )
    text = "\n".join(wide(80, "diff", str(written), str(other)))
    for piece in ("step_time_s", "peak_memory_bytes", "tp_comm", "activations"):
        assert piece in " ".join(text.split())
    printed = document(run, "diff", str(written), str(other))
    assert printed["plan"]["tp"] == [8, 4]


def test_diff_of_two_searches_is_that_of_their_first_plans(run: Run, tmp_path: Path) -> None:
    files = []
    for name, more in (("a", ()), ("b", ("--fix", "tp=8"))):
        written = run(*PLAN, "--top", "1", *more, "--json").stdout
        files.append((tmp_path / f"{name}.json", json.loads(written)["plans"][0]))
        files[-1][0].write_text(written)
    printed = document(run, "diff", *(str(path) for path, _ in files))
    assert printed["headline"]["step_time_s"] == [first["step_time_s"] for _, first in files]
    assert printed["plan"]["tp"][1] == 8


def test_a_plan_for_another_cluster_is_told_its_placement(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    job = ("llama3-70b", "--gpus", "144", "--global-batch", "288")
    file.write_text(run("plan", *job, "--cluster", "gb200-nvl72", "--top", "1", "--json").stdout)
    there = ("estimate", *job, "--cluster", "dgx-h200", "--plan", str(file))
    refused = run(*there)
    assert refused.exit_code == 2 and "is more than the 8 devices of a fast domain" in refused.stderr
    named = refused.stderr.split("--placement ")[1].split()[0]
    assert document(run, *there, "--placement", named)["plan"]["placement"] == {
        axis: int(inside) for axis, inside in (one.split("=") for one in named.split(","))
    }


@pytest.mark.parametrize("command", [("estimate",), ("plan", *MACHINE), ("fit", "--device", "l4")], ids=lambda c: c[0])
def test_an_onnx_file_is_sent_to_profile(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(b"")
    result = run(command[0], str(file), *command[1:])
    assert result.exit_code == 2 and "is recorded by steptime profile only" in result.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples(run: Run, example: Path) -> None:
    assert document(run, "estimate", str(example))["feasible"] is True


@pytest.mark.each(
    ("args", "message"),
    [
        ((*ESTIMATE, "--dp", "3"), "tp 8 x pp 16 x dp 3 = 384, not 512 GPUs"),
        ((*ESTIMATE, "--dp", "1024"), "not 512 GPUs"),
        (("plan", "gpt3_1t0", *MACHINE), "there is no model"),
        (("plan", "gpt3_1T", "--cluster", "dgx-b20", "--gpus", "8", "--global-batch", "8"), "did you mean dgx-b200"),
        ((*PLAN, "--dtype", "int3"), "there is no dtype 'int3'"),
        ((*PLAN, "--optimizer", "adamx"), "did you mean adam"),
        ((*PLAN, "--limit", "tp<=0"), "from 1 to"),
        ((*PLAN, "--fix", "recompute=some"), "there is no recompute"),
        ((*ESTIMATE, "--recompute", "some"), "there is no recompute"),
        ((*ESTIMATE, "--recompute", "norm+mpl"), "there is no recompute 'mpl'"),
        ((*ESTIMATE, "--sp", "maybe"), "sp: 'maybe' is neither on nor off"),
        ((*ESTIMATE, "--ep", "4"), "ep 4: gpt3_1T has no experts"),
        ((*ESTIMATE, "--expert-imbalance", "0.5"), "the nearest is 1"),
        ((*ESTIMATE, "--context", "rign"), "did you mean ring"),
        ((*ESTIMATE, "--gradient-dtype", "fp8"), "there is no gradient_dtype 'fp8'"),
        ((*ESTIMATE, "--framework", "megatorn"), "did you mean megatron"),
        ((*ESTIMATE, "--lora-targets", "linear"), "lora.rank: missing"),
        ((*PLAN, "--framework", "megatorn"), "did you mean megatron"),
        ((*PLAN, "--mode", "published", "--framework", "generic"), "knows the ideal framework only"),
        ((*PLAN, "--fix", "expert_capacity=much"), "it must be a number"),
        ((*PLAN, "--limit", "sp<=1"), "there is no degree 'sp'"),
        ((*ESTIMATE, "--placement", "tp=3"), "does not divide tp 8"),
        ((*ESTIMATE, "--mode", "published", "--micro-batch", "999"), "more than a replica's share"),
        ((*ESTIMATE, "--explain", "mlp_inx"), "did you mean"),
    ],
)
def test_wrong_jobs(run: Run, args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


FILES = {
    "nan.toml": b'model = "gpt3_1T"\ngpus = nan\n',
    "inf.toml": b"layers = inf\nhidden = 64\nheads = 4\n",
    "broken.toml": b'model = "x\n',
    "broken.json": b'{"a": ',
    "some.yaml": b"a: [b\n",
    "list.json": b"[1, 2]",
    "empty.toml": b"",
    "empty.json": b"",
    "binary.toml": bytes(range(256)),
    "binary.json": bytes(range(256)),
    "cluster.toml": b'base = "dgx-b200"\n',
    "folder.toml/x": b"",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "large.toml").open("wb") as large:
        large.truncate(100 * 2**20)
    return tmp_path


@pytest.mark.each("name", [*(name.split("/")[0] for name in FILES), "large.toml", "absent.toml", "absent.json"])
def test_wrong_files_are_named(run: Run, files: Path, name: str) -> None:
    path = str(files / name)
    commands = [("estimate", path), ("plan", path, *MACHINE), ("models", path)]
    if name.endswith(".toml") and name != "cluster.toml":
        commands += [("clusters", path), ("devices", path), ("diff", path, path)]
        commands.append(("plan", "gpt3_1T", "--cluster", path, "--gpus", "8", "--global-batch", "8"))
    for command in commands:
        result = run(*command)
        assert result.exit_code == 2, command
        assert path in result.stderr, command
        assert len(result.stderr.splitlines()) <= 12
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_a_plan_keeps_the_file_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Also where the command runs in another folder, and options still win over what was written."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    (home / "config.json").write_text((ROOT / "tests/data/huggingface/bloom-176b.json").read_text())
    monkeypatch.chdir(home)
    job = ("--cluster", "dgx-h100", "--gpus", "512", "--global-batch", "512", "--tp", "8", "--pp", "2")
    (home / "plan.json").write_text(run("estimate", "config.json", *job, "--json").stdout)
    for folder, name in ((home, "plan.json"), (away, "../home/plan.json")):
        monkeypatch.chdir(folder)
        again = run("export", name, "--for", "megatron-lm")
        assert again.exit_code == 0 and "--hidden-size 14336" in again.stdout, again.stderr
    fewer = run("export", "../home/plan.json", "--for", "megatron-lm", "--global-batch", "256")
    assert "--global-batch-size 256" in fewer.stdout


@pytest.mark.quick("72")
@pytest.mark.parametrize("columns", [60, 72, 80])
def test_no_number_of_a_plan_is_cut_in_a_narrow_terminal(columns: int) -> None:
    job = ("plan", "gpt3_1T", "--cluster", "dgx-b200", "--gpus", "2048", "--global-batch", "4096")
    lines = wide(columns, *job)
    shown = " ".join(lines)
    assert max(map(len, lines)) <= columns and "…" not in shown
    best = json.loads(CliRunner().invoke(main, [*job, "--json"]).stdout)["plans"]
    degrees = [str(each["plan"]["pp"]) for each in best[:5]]
    assert all(f"pp{pp}" in shown or f" {pp} " in shown for pp in degrees)


@pytest.mark.parametrize("columns", [1, 40, 60])
def test_plans_with_blank_cells_fit_a_narrow_terminal(columns: int) -> None:
    job = ("plan", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "128")
    lines = wide(columns, *job, "--framework", "megatron-core", "--top", "5")
    if columns == 40:
        table = lines[next(i for i, line in enumerate(lines) if line.startswith("   plan")) :]
        assert "…" not in " ".join(table) and max(map(len, table)) <= 40


def test_what_a_written_plan_was_made_for_is_kept_or_refused(tmp_path: Path, run: Run) -> None:
    job = ("gpt3_1T", *MACHINE, "--tp", "8", "--pp", "16")
    file = tmp_path / "e.json"
    file.write_text(run("estimate", *job, "--mode", "published", "--json").stdout)
    again = document(run, "estimate", str(file))
    assert again["step_time_s"] == json.loads(file.read_text())["step_time_s"]
    for change, said in (
        ({"provenance": {"model_source": "PyTorch 2.13.0, fake tensors"}}, "was made for a module"),
        ({"workload": {"lora": []}}, "workload.lora is no table"),
    ):
        found = json.loads(file.read_text())
        for part, values in change.items():
            found[part] |= values
        (tmp_path / "bad.json").write_text(json.dumps(found))
        refused = run("estimate", str(tmp_path / "bad.json"))
        assert refused.exit_code == 2 and said in refused.stderr, refused.stderr


def test_a_plan_of_a_file_stands_alone(tmp_path: Path, run: Run) -> None:
    base = ("llama3-8b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "128", "--tp", "4")
    (tmp_path / "base.json").write_text(run("estimate", *base, "--json").stdout)
    (tmp_path / "run.toml").write_text(
        'model = "llama3-8b"\ncluster = "dgx-h100"\ngpus = 64\nglobal_batch = 128\n'
        '[plan]\ntp = 2\nattention_dtype = "fp8"\n'
    )
    found = document(run, "estimate", str(tmp_path / "run.toml"), "--plan", str(tmp_path / "base.json"))
    assert found["step_time_s"] == json.loads((tmp_path / "base.json").read_text())["step_time_s"]


@pytest.mark.parametrize(("columns", "last"), [(40, "matrix"), (80, "dp"), (140, "gradients")])
def test_names_of_frameworks_stay_whole_at_any_width(columns: int, last: str) -> None:
    lines = wide(columns, "frameworks")
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "framework" and lines[0].endswith(last)
    names = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert {"megatron-core", "megatron-deepspeed-2021", "generic"} <= set(names) == set(framework_names())
    assert (f"not shown at {columns} columns: " in " ".join(lines)) == (last != "gradients")
