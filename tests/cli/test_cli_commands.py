from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_api import GIB, PLAN, FakeApi, Run, make_estimate, make_plan_result

from steptime import __version__
from steptime.cli import output
from steptime.cli.main import COMMANDS, EXIT_DEFECT, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USER, exit_code
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.terms import Terms

JOB = ("--cluster", "box", "--gpus", "2048", "--global-batch", "4096")


def parsed(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.each("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"steptime {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_lists_every_command(run: Run) -> None:
    text = run("--help").stdout + run("lab", "--help").stdout
    assert all(name in text and summary.split()[0] in text for name, (_, summary, _) in COMMANDS.items())
    assert len(run("--help").stdout.splitlines()) <= 48


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"steptime {__version__}\n")


def test_help_and_pages_name_every_part_that_recompute_takes(run: Run) -> None:
    shown = " ".join(run("estimate", "--help").stdout.split())
    words = shown[shown.index("What backward recomputes") : shown.index("--recompute-every")]
    page = (Path(__file__).parents[2] / "docs/estimate.md").read_text()
    for part in RECOMPUTE_CODES:
        assert part in words and f"`{part}`" in page, part


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "steptime"]
    shown = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"steptime {__version__}\n"
    usage = subprocess.run([*words, "devices", "--help"], capture_output=True, text=True, check=True)
    assert usage.stdout.startswith("Usage: steptime devices")
    assert subprocess.run([*words, "devices", "h1oo"], capture_output=True, check=False).returncode == EXIT_USER


@pytest.mark.parametrize(("loaded", "frozen"), [("duckdb", False), ("json", True)])
def test_a_command_ends_without_a_word_of_the_libraries_that_it_loaded(loaded: str, frozen: bool) -> None:
    code = f"""
import atexit, gc, sys, {loaded}
from steptime.__main__ import run
atexit.register(lambda: print(gc.get_freeze_count() > 0))
sys.argv = ["steptime", "--version"]
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == (str(frozen), "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom steptime.cli.main import main\n"
        "main(['--help'])\n"
        "print(sorted({'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_plan_passes_its_options_to_the_api(run: Run, api: FakeApi) -> None:
    result = run(
        "plan", "toy", *JOB, "--seq", "4096", "--strategy", "2d", "--mode", "published", "--top", "3",
        "--fix", "tp=8", "--fix", "micro-batch=1", "--limit", "pp <= 16",
    )  # fmt: skip
    assert result.exit_code == 0
    name, args, given = api.calls[0]
    assert (name, args) == ("plan", ("toy", "box"))
    assert callable(given.pop("progress"))
    assert given == {
        "gpus": 2048, "global_batch": 4096, "seq": 4096, "strategy": "2d", "mode": "published", "top": 3,
        "fix": {"tp": 8, "micro_batch": 1}, "limit": ["pp<=16"],
    }  # fmt: skip
    assert type(given["strategy"]) is str


def test_plans_that_differ_in_nothing_shown_are_one_row(run: Run, api: FakeApi) -> None:
    plans = (make_estimate(), make_estimate(step_time_s=10.0 + 1e-9), make_estimate(step_time_s=11.0))
    api.plan_result = make_plan_result(plans=plans)
    rows = [
        line.split() for line in run("plan", "toy", *JOB).stdout.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ")
    ]
    assert [row[0] for row in rows] == ["1", "3"]
    assert "(+1 alike)" in " ".join(run("plan", "toy", *JOB).stdout.split())
    assert len(parsed(run("plan", "toy", *JOB, "--json").stdout)["plans"]) == 3


def test_plan_that_finds_nothing_exits_3_and_still_prints(run: Run, api: FakeApi) -> None:
    nearest = make_estimate(feasible=False, reasons=("memory",), peak_memory_bytes=100 * 2.0**30)
    api.plan_result = make_plan_result(feasible=0, plans=(), pareto=(), nearest=nearest, advice=("use 4096 GPUs",))
    as_json = run("plan", "toy", *JOB, "--json")
    assert as_json.exit_code == 3
    assert parsed(as_json.stdout)["nearest"]["feasible"] is False
    as_text = run("plan", "toy", *JOB)
    assert as_text.exit_code == 3
    assert "20 GiB too much" in as_text.stdout
    assert "use 4096 GPUs" in as_text.stdout


def test_estimate_passes_degrees_to_the_api(run: Run, api: FakeApi) -> None:
    result = run(
        "estimate", "toy", *JOB, "--dp", "4", "--tp", "8", "--tp2", "2", "--cp", "2", "--pp", "16", "--vpp", "2",
        "--ep", "4", "--micro-batch", "2", "--recompute", "full", "--zero", "0", "--schedule", "1f1b",
        "--overlap", "dp",
        "--attention", "fused", "--panels", "4", "--placement", "tp=4,dp=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert api.calls[0][2]["plan"] == {
        "dp": 4, "tp": 8, "tp2": 2, "cp": 2, "pp": 16, "vpp": 2, "ep": 4, "micro_batch": 2, "recompute": "full",
        "zero": 0, "schedule": "1f1b", "overlap": "dp", "attention": "fused", "panels": 4,
        "placement": {"tp": 4, "dp": 2},
    }  # fmt: skip


def test_estimate_of_a_run_file_and_options_win(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "toy"\ncluster = "box"\ngpus = 64\nglobal_batch = 8\n[plan]\ntp = 4\npp = 2\n')
    assert run("estimate", str(file), "--tp", "8").exit_code == 0
    assert api.calls == [("estimate", ("toy", "box"), {"gpus": 64, "global_batch": 8, "plan": {"tp": 8, "pp": 2}})]


def test_model_toml_is_no_run(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text("layers = 2\nhidden = 64\nheads = 4\n")
    assert run("estimate", str(file)).exit_code == 0
    assert api.calls == [("ledger", (str(file),), {})]


def test_infeasible_estimate_is_no_failure(run: Run, api: FakeApi) -> None:
    api.estimate_result = make_estimate(feasible=False, reasons=("memory",))
    result = run("estimate", "toy", *JOB)
    assert result.exit_code == 0
    assert "no: memory" in result.stdout


def test_estimate_report(run: Run, api: FakeApi) -> None:
    text = run("estimate", "toy", *JOB).stdout
    for piece in (
        "10 s", "8 s (all overlapped) to 12.5 s", "uncalibrated", "45.7 %, 50.0 %", "60 GiB of 80 GiB (75.0 %)",
        "compute 60 %", "(2 smaller)", "ring_all_gather_s", "matrix flops x2", "-30.0 %", "a guess [sic]",
        "routing is balanced", "1 more constants",
    ):  # fmt: skip
        assert piece in text, piece
    assert "tiny_s" not in text
    assert "tiny_s" in run("estimate", "toy", *JOB, "--all").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("args", "functions"),
    [
        (("--explain",), ("collective.ring_all_gather_s", "matmul.matmul_flops")),
        (("--explain", "tp_comm"), ("collective.ring_all_gather_s",)),
        (("--explain=compute",), ("matmul.matmul_flops",)),
    ],
)
def test_explain_selects_terms(run: Run, api: FakeApi, args: tuple[str, ...], functions: tuple[str, ...]) -> None:
    result = run("estimate", "toy", *JOB, *args)
    assert result.exit_code == 0, result.stderr
    shown = [name for name in ("collective.ring_all_gather_s", "matmul.matmul_flops") if name in result.stdout]
    assert tuple(shown) == functions
    details = parsed(run("estimate", "toy", *JOB, *args, "--json").stdout)["details"]
    assert tuple(sorted(detail["function"] for detail in details)) == tuple(sorted(functions))


def test_explain_may_stand_before_the_model(run: Run, api: FakeApi) -> None:
    assert run("estimate", "--explain", "toy", *JOB).exit_code == 0
    assert api.calls[0][1] == ("toy", "box")
    assert run("estimate", "--json", "--explain", "tp_comm", "toy", *JOB).exit_code == 0
    assert api.calls[1][1] == ("toy", "box")
    assert run("estimate", "--json", "toy", "--explain", "tp_comm", *JOB).exit_code == 0
    assert api.calls[2][1] == ("toy", "box")


def test_explain_shows_formula_numbers_and_source(run: Run, api: FakeApi) -> None:
    text = run("estimate", "toy", *JOB, "--explain", "compute").stdout
    assert "F = m n (2 k - 1 + a)" in text
    assert "F = 2 · 3 · (2 · 4 - 1 + 1)" in text
    assert "a = accumulate = 1" in text
    assert "source: definition" in text


def test_ledger_without_a_cluster(run: Run, api: FakeApi) -> None:
    result = run("estimate", "toy", "--seq", "128")
    assert result.exit_code == 0
    assert api.calls == [("ledger", ("toy",), {"seq": 128})]
    assert "4 M" in result.stdout
    assert parsed(run("estimate", "toy", "--json").stdout)["name"] == "toy"


def test_diff_reads_runs_and_written_estimates(run: Run, api: FakeApi, tmp_path: Path) -> None:
    old, new = tmp_path / "a.json", tmp_path / "b.toml"
    old.write_text(run("estimate", "toy", *JOB, "--explain", "--json").stdout)
    new.write_text('model = "toy"\ncluster = "box"\ngpus = 64\nglobal_batch = 8\n')
    first = api.estimate_result
    api.estimate_result = make_estimate(step_time_s=5.0, time=Terms({"bubble/bubble_s": 5.0}), plan={"tp": 4})
    result = run("diff", str(old), str(new))
    assert result.exit_code == 0, result.stderr
    assert api.calls[-1][1] == (first, api.estimate_result)
    assert "-5 s" in result.stdout
    lines = [line.split()[0] for line in result.stdout.splitlines() if "_s " in line or "flops " in line]
    assert lines.index("compute/forward/fc1/matmul_flops") < lines.index("bubble/bubble_s")
    assert parsed(run("diff", str(old), str(new), "--json").stdout)["headline"]["step_time_s"] == [10.0, 5.0]


@pytest.mark.parametrize("args", [("plan", "toy", *JOB), ("estimate", "toy", *JOB), ("estimate", "toy")])
def test_json_is_one_document_and_nothing_else(run: Run, api: FakeApi, args: tuple[str, ...]) -> None:
    api.estimate_result = make_estimate(mfu=float("nan"), step_time_bracket_s=(1.0, float("inf")))
    result = run(*args, "--json")
    assert parsed(result.stdout)["schema_version"] == 1
    assert result.stderr == ""


def test_not_finite_becomes_null(run: Run, api: FakeApi) -> None:
    api.estimate_result = make_estimate(mfu=float("nan"), step_time_bracket_s=(1.0, float("inf")))
    document = parsed(run("estimate", "toy", *JOB, "--json").stdout)
    assert (document["mfu"], document["step_time_bracket_s"]) == (None, [1.0, None])


def test_defect_is_one_line_and_exit_1(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.raises = KeyError("boom")
    result = run("estimate", "toy", *JOB)
    assert result.exit_code == EXIT_DEFECT
    assert len(result.stderr.splitlines()) == 1
    assert "defect of steptime" in result.stderr
    assert "STEPTIME_DEBUG=1" in result.stderr


def test_debug_shows_the_traceback(api: FakeApi) -> None:
    from cli_runner import CliRunner
    from steptime.cli.main import main

    api.raises = KeyError("boom")
    result = CliRunner(env={"STEPTIME_DEBUG": "1"}).invoke(main, ["estimate", "toy", *JOB])
    assert "Traceback" in result.stderr


def test_interrupt_is_one_line_and_130(run: Run, api: FakeApi) -> None:
    api.raises = KeyboardInterrupt()
    result = run("plan", "toy", *JOB)
    assert (result.exit_code, result.stderr) == (EXIT_INTERRUPTED, "Interrupted.\n")


def test_interrupt_outside_a_command_is_130_too() -> None:
    assert exit_code(KeyboardInterrupt()) == EXIT_INTERRUPTED


def test_broken_pipe_is_silent(run: Run, api: FakeApi) -> None:
    api.raises = BrokenPipeError()
    result = run("plan", "toy", *JOB)
    assert (result.exit_code, result.stderr) == (EXIT_PIPE, "")


def test_pipe_that_closes_early_is_silent() -> None:
    steptime = [sys.executable, "-c", "from steptime.__main__ import run; run()", "devices", "--json"]
    process = subprocess.Popen(steptime, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (EXIT_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_reported() -> None:
    steptime = [sys.executable, "-c", "from steptime.__main__ import run; run()", "--version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(steptime, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_USER
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("terminal", "delay_s", "drawn"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_progress_is_for_terminals_and_long_work(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, delay_s: float, drawn: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "DELAY_S", delay_s)
    with output.Progress("plans") as bar:
        bar(1, 2)
    assert bool(stream.getvalue()) == drawn


@pytest.mark.parametrize(
    ("columns", "missing"),
    [("30", "band 90 %, main loss"), ("45", "main loss"), ("80", None)],
)
def test_columns_without_room_are_named(api: FakeApi, columns: str, missing: str | None) -> None:
    from cli_runner import CliRunner
    from steptime.cli.main import main

    api.plan_result = make_plan_result(plans=(make_estimate(step_time_band_s=(9.0, 12.0)),))
    text = CliRunner(env={"COLUMNS": columns}).invoke(main, ["plan", "toy", *JOB, "--long"]).stdout
    told = f"not shown at {columns} columns: {missing} (--json)"
    assert (told if missing else "not shown") in " ".join(text.split()) or (missing is None and "not shown" not in text)


def test_notes_stand_in_both_reports(run: Run, api: FakeApi) -> None:
    api.estimate_result = make_estimate(notes=("1 was taken",))
    assert "\nnote: 1 was taken\n" in run("estimate", "toy", *JOB).stdout
    assert parsed(run("estimate", "toy", *JOB, "--json").stdout)["notes"] == ["1 was taken"]
    api.plan_result = make_plan_result(plans=(make_estimate(notes=("128 are charged",)),))
    assert "\nnote: 128 are charged\n" in run("plan", "toy", *JOB).stdout
    api.plan_result = make_plan_result(notes=("toy: only ZeRO-3",))
    assert "\nnote: toy: only ZeRO-3\n" in run("plan", "toy", *JOB).stdout
    assert parsed(run("plan", "toy", *JOB, "--json").stdout)["notes"] == ["toy: only ZeRO-3"]


def risky(**changes: Any) -> Any:
    memory = {"allocated": 60 * GIB, "reserved": 70 * GIB, "device": 81 * GIB}
    return make_estimate(**{"memory_by_definition": memory, "oom_probability": 0.81, **changes})


def test_estimate_prints_the_chance_of_running_out(run: Run, api: FakeApi) -> None:
    assert "P(oom)" not in run("estimate", "toy", *JOB).stdout  # a reproduced paper has no such chance
    api.estimate_result = risky(oom_probability=0.05)
    text = run("estimate", "toy", *JOB).stdout
    assert "P(oom)          5.0 % to run out (81 GiB" in text and "warning" not in text
    api.estimate_result = risky(oom_probability=0.5)
    assert "warning: may run out of memory" in run("estimate", "toy", *JOB).stdout
    api.estimate_result = risky()
    text = " ".join(run("estimate", "toy", *JOB).stdout.split())
    assert "likely runs out of memory on real devices (81.0 %)" in text
    assert "need 21 GiB more than live tensors; try --recompute full" in text
    assert "--zero 3" not in text and "--micro-batch" not in text  # pp 64, micro-batch 1
    api.estimate_result = risky(feasible=False, reasons=("memory",))
    assert "warning" not in run("estimate", "toy", *JOB).stdout


def test_warnings_name_what_the_plan_has_not_yet(run: Run, api: FakeApi) -> None:
    full = {**PLAN, "pp": 1, "dp": 256, "zero": 1, "recompute": "full", "micro_batch": 4}
    api.estimate_result = risky(plan=full)
    text = " ".join(run("estimate", "toy", *JOB).stdout.split())
    assert "try --zero 3 or --micro-batch 2" in text
    api.estimate_result = risky(plan={**full, "zero": 3, "micro_batch": 1})
    assert "try more ranks of tp or pp" in " ".join(run("estimate", "toy", *JOB).stdout.split())


def test_plan_has_a_column_of_the_chance_and_warns_about_its_first(run: Run, api: FakeApi) -> None:
    assert "P(oom)" not in run("plan", "toy", *JOB).stdout
    plan = {**PLAN, "micro_batch": 8}
    safe = risky(oom_probability=0.05, step_time_s=10.26, plan={**PLAN, "tp": 16})
    api.plan_result = make_plan_result(plans=(risky(plan=plan), risky(), safe), likely_to_fit=safe)
    text = run("plan", "toy", *JOB).stdout
    assert "P(oom)" in text and "81.0 %" in text and "5.0 %" in text
    words = " ".join(text.split())
    assert "the fastest that likely fits is plan 3: 10.26 s (+2.6 %), P(oom) 5.0 % (--limit 'oom_proba" in words
    api.plan_result = make_plan_result(plans=(risky(plan=plan),), likely_to_fit=safe)
    assert "likely fits is 1d tp16 pp64" in " ".join(run("plan", "toy", *JOB).stdout.split())
    api.plan_result = make_plan_result(plans=(risky(plan=plan),))
    words = " ".join(run("plan", "toy", *JOB).stdout.split())
    assert "try --fix recompute=full or --limit 'micro_batch<=4'; no plan of this space likely fits" in words
    api.plan_result = make_plan_result(plans=(risky(oom_probability=0.05), risky()))
    assert "warning" not in run("plan", "toy", *JOB).stdout


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_reports_survive_any_width(api: FakeApi, columns: str) -> None:
    from cli_runner import CliRunner
    from steptime.cli.main import main

    for args in (("plan", "toy", *JOB), ("estimate", "toy", *JOB), ("estimate", "toy", *JOB, "--explain")):
        result = CliRunner(env={"COLUMNS": columns}).invoke(main, list(args))
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= int(columns)


@pytest.mark.parametrize("kind", ["device", "cluster", "model"])
def test_catalogue_lists_and_shows_every_record(run: Run, kind: str) -> None:
    listed = parsed(run(f"{kind}s", "--json").stdout)[f"{kind}s"]
    assert len(listed) > 10
    name = listed[0]["name"]
    text = run(f"{kind}s", name)
    assert text.exit_code == 0
    assert text.stdout.startswith(name)
    assert parsed(run(f"{kind}s", name, "--json").stdout)[kind]["name"] == name
    assert name in run(f"{kind}s").stdout


def test_device_shows_kind_and_source_of_a_number(run: Run) -> None:
    text = run("devices", "h100-sxm").stdout
    line = next(line for line in text.splitlines() if line.startswith("memory_Bps"))
    assert "TB/s" in line
    assert "datasheet" in line
    note = line.split()[-1]
    assert f"\n{note} " in text
