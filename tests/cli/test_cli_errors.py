"""Wrong input: exit 2, a message that names the option or the field, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi, Run, make_estimate
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steptime.cli.job import parse_fix, parse_limits, parse_placement
from steptime.cli.main import EXIT_INTERRUPTED, EXIT_USER
from steptime.errors import UserError
from steptime.formats.estimate_file import parse_estimate
from steptime.formats.run_spec import RunSpec, parse_run
from steptime.store.files import parse_toml
from suites import examples

JOB = ("--cluster", "box", "--gpus", "2048", "--global-batch", "4096")
PLAN = ("plan", "toy", *JOB)
ESTIMATE = ("estimate", "toy", *JOB)

BAD = [
    (("bogus",), "bogus"),
    (("plna",), "did you mean plan?"),
    (("plan",), "MODEL"),
    (("plan", "toy"), "--cluster"),
    (("plan", "toy", "--cluster", "box", "--gpus", "8"), "--global-batch"),
    ((*PLAN, "--gpus", "0"), "--gpus"),
    ((*PLAN, "--gpus", "-8"), "--gpus"),
    ((*PLAN, "--gpus", "10000001"), "from 1 to 10000000"),
    ((*PLAN, "--gpus", "9" * 5000), "--gpus"),
    ((*PLAN, "--gpus", "1e3"), "--gpus"),
    ((*PLAN, "--gpus", "٣"), "--gpus"),
    ((*PLAN, "--gpus", ""), "--gpus"),
    ((*PLAN, "--global-batch", "1000000001"), "--global-batch"),
    ((*PLAN, "--seq", "100000001"), "--seq"),
    ((*PLAN, "--top", "0"), "--top"),
    ((*PLAN, "--strategy", "3d"), "--strategy"),
    ((*PLAN, "--mode", "wishful"), "--mode"),
    ((*PLAN, "--nonsense"), "--nonsense"),
    ((*PLAN, "--fix", "tp"), "--fix"),
    ((*PLAN, "--fix", "tp="), "--fix"),
    ((*PLAN, "--fix", "=8"), "--fix"),
    ((*PLAN, "--fix", "tp=zero"), "--fix: tp is 'zero'"),
    ((*PLAN, "--fix", "tp=0"), "from 1 to"),
    ((*PLAN, "--fix", "zero=4"), "from 0 to 3"),
    ((*PLAN, "--fix", "micro_bach=1"), "micro_batch"),
    ((*PLAN, "--fix", "tp=8", "--fix", "tp=4"), "tp is given twice"),
    ((*PLAN, "--limit", "pp"), "--limit"),
    ((*PLAN, "--limit", "pp<=many"), "--limit: pp is 'many'"),
    ((*PLAN, "--limit", "pp<=1<=2"), "--limit"),
    ((*PLAN, "--limit", "recompute<=2"), "--limit"),
    ((*PLAN, "--limit", "<=2"), "--limit"),
    ((*ESTIMATE, "--zero", "4"), "--zero"),
    ((*ESTIMATE, "--tp", "7"), "tp 7 does not divide"),
    ((*ESTIMATE, "--placement", "tp"), "--placement"),
    ((*ESTIMATE, "--placement", "tq=4"), "--placement: there is no axis 'tq'"),
    ((*ESTIMATE, "--placement", "tp=4,tp=2"), "tp is given twice"),
    ((*ESTIMATE, "--explain", "nonsens"), "--explain"),
    ((*ESTIMATE, "--explain", "mfu"), "terms are the lines below time and memory; --all shows them"),
    ((*ESTIMATE, "--explain", "tp_com/"), "tp_comm"),
    ((*ESTIMATE, "extra"), "extra"),
    (("estimate",), "MODEL"),
    (("estimate", "toy", "--cluster", "box"), "--gpus"),
    (("estimate", "toy", "--cluster", "box", "--gpus", "8"), "--global-batch"),
    (("estimate", "toy", "--tp", "8"), "--tp: means nothing without --cluster"),
    (("estimate", "toy", "--micro-batch", "8"), "--micro-batch"),
    (("estimate", "toy", "--lora-rank", "16"), "--lora-rank: means nothing without --cluster"),
    (("estimate", "toy", "--qlora"), "--qlora: means nothing without --cluster"),
    (("estimate", "toy", "--explain"), "--explain"),
    (("estimate", "absent.toml"), "absent.toml: the file does not exist"),
    (("diff", "absent.json", "absent.json"), "absent.json: the file does not exist"),
    (("diff", "a\0b", "a\0b"), "not a path"),
    (("diff", "x" * 5000, "y"), "cannot be read"),
    (("diff", "/", "/"), "/: is a folder"),
    (("diff", "only-one"), "B"),
    (("devices", "h10"), "did you mean"),
    (("clusters", "dgx-h10"), "dgx-h100"),
    (("models", "gpt3-1"), "gpt3"),
    (("devices", "absent.toml"), "absent.toml"),
]


@pytest.mark.each(("args", "named"), BAD, ids=lambda value: " ".join(value)[:40].replace("\0", "NUL"))
def test_wrong_arguments(run: Run, api: FakeApi, args: tuple[str, ...], named: str) -> None:
    for more in ((), ("--json",)):
        result = run(*args, *more)
        assert result.exit_code == 2
        assert named in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


RUN_FILES = [
    ("model = 3", "neither a RUN.toml"),
    ("model = ''", "model"),
    ("[plan]\ntp = 8", "model: is missing"),
    ('model = "toy"\ngpu = 8', "did you mean gpus"),
    ('model = "toy"\ngpus = "8"', "gpus: '8'"),
    ('model = "toy"\ngpus = 8.0', "gpus"),
    ('model = "toy"\ngpus = true', "gpus"),
    ('model = "toy"\ngpus = 0', "gpus: 0"),
    ('model = "toy"\ngpus = 10000001', "gpus"),
    ('model = "toy"\nseq = nan', "seq"),
    ('model = "toy"\nmode = "wishful"', "mode"),
    ('model = "toy"\nstrategy = "3d"', "strategy"),
    ('model = "toy"\nplan = 8', "plan"),
    ('model = "toy"\n[plan]\nmicro-batch = 8', "did you mean micro_batch"),
    ('model = "toy"\n[plan]\nzero = 4', "plan.zero"),
    ('model = "toy"\n[plan.placement]\ntq = 4', "plan.placement.tq"),
    ('model = "toy"\n[plan.placement]\ntp = 0', "plan.placement.tp"),
    ('model = "toy"\ngpu = 8\nseq = 0', "2 fields are wrong"),
    ("\n".join(['model = "toy"', *(f"key{n} = {n}" for n in range(15))]), "\n  and 5 more"),
    ('model = "toy"\n[plan]\nquux = 8', "schedule, attention, attention_dtype, document_length"),
    ('model = "toy"\nmodel = "toy"', "not valid TOML"),
    ("model = " + "9" * 5000, "not valid TOML"),
    ("model = " + "[" * 5000, "nested too deeply"),
    ('model = "toy"', "cluster, gpus, global_batch: missing"),
    ('model = "toy"\ncluster = "box"\ngpus = 8', "global_batch: missing"),
    ("", "neither a RUN.toml"),
]


@pytest.mark.each(("text", "named"), RUN_FILES, ids=lambda value: value[:40])
def test_wrong_run_files(run: Run, api: FakeApi, tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    result = run("diff", str(file), str(file))
    assert result.exit_code == 2
    assert named in result.stderr
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr


ESTIMATE_FILES = [
    ("{", "not valid JSON"),
    ("[]", "not an estimate"),
    ('{"plans": []}', "a `steptime plan` that found none"),
    ('{"step_time_s": NaN}', "NaN is not a JSON number"),
    (f'{{"step_time_s": 1, "plan": {{"tp": 1{"0" * 400}}}}}', "a whole number of 401 digits"),
    ('{"plans": [1]}', "not an estimate"),
    ('{"step_time_s": 1}', "schema_version"),
    ('{"step_time_s": 1, "schema_version": 99}', "99"),
    ('{"step_time_s": "fast", "schema_version": 1}', "step_time_s: 'fast'"),
    ("{" * 100_000, "not valid JSON"),
    ('{"a":' * 100_000, "nested too deeply"),
]


@pytest.mark.each(("text", "named"), ESTIMATE_FILES, ids=lambda value: value[:40])
def test_wrong_estimate_files(run: Run, api: FakeApi, tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "estimate.json"
    file.write_text(text)
    result = run("diff", str(file), str(file))
    assert result.exit_code == 2
    assert named in result.stderr
    assert str(file) in result.stderr


def written(**changes: object) -> str:
    return json.dumps(make_estimate().to_json() | changes)


IMPOSSIBLE = [
    ({"step_time_s": -5}, "step_time_s: -5 is not above 0"), ({"mfu": 7}, "mfu: 7 is not a number from 0 to 1"),
    ({"step_time_bracket_s": [3, 2]}, "step_time_bracket_s: [3.0, 2.0]: the lower bound has to come first"),
    ({"step_time_band_s": [-1, 2]}, "step_time_band_s[0]: -1 is not a number of 0 or more"),
    ({"time": {"compute/x_s": -1}}, "time.compute/x_s: -1 is not a number of 0 or more"),
    ({"memory_capacity_bytes": 0}, "memory_capacity_bytes: 0 is not above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), IMPOSSIBLE, ids=str)
def test_impossible_values_of_an_estimate(run: Run, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    file = tmp_path / "estimate.json"
    file.write_text(written(**changes))
    result = run("diff", str(file), str(file))
    assert (result.exit_code, result.stderr) == (2, f"Error: {file}: {named}\n")


def test_a_misspelt_key_in_a_list_is_told_the_right_one(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    document = make_estimate().to_json(explain=True)
    document["details"][0]["valu"] = 1.0
    file.write_text(json.dumps(document))
    said = run("diff", str(file), str(file)).stderr
    assert said == f"Error: {file}: details[0].valu: unknown key\n  did you mean value?\n"


@pytest.mark.parametrize("fabric", [{}, {"domain": 8}, {"domain": [1], "start_s": 3, "hop_s": None}])
def test_a_fabric_without_what_a_formula_needs_is_named(run: Run, tmp_path: Path, fabric: dict[str, object]) -> None:
    file = tmp_path / "estimate.json"
    document = make_estimate().to_json(explain=True)
    document["details"][0]["arguments"]["fabric"] = fabric
    file.write_text(json.dumps(document))
    done = run("diff", str(file), str(file))
    assert done.exit_code == EXIT_USER and "details[0].arguments.fabric." in done.stderr, done.stderr
    assert done.stderr.endswith(": is missing\n")


def test_what_an_estimate_leaves_open_is_a_dash(run: Run, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    whole.write_text(written())
    part.write_text(written(step_time_s=None, mfu=None, step_time_bracket_s=[None, 2], time={"compute/x_s": None}))
    shown = run("diff", str(whole), str(part))
    assert shown.exit_code == 0, shown.stderr
    assert "nan" not in shown.stdout and "unknown" not in shown.stdout
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines() if line.strip()}
    assert rows["mfu"][-1] == rows["step_time_s"][-1] == rows["compute/x_s"][-1] == "-"
    assert rows["step_time_bracket_s"][-4:] == ["-", "to", "2", "s"]


def test_file_that_is_not_utf8(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b'model = "\xff"')
    assert "not UTF-8 text (byte 9)" in run("estimate", str(file)).stderr


def test_control_characters_of_the_input_stay_harmless(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "toy"\n"\\u001b[2J" = 1')
    result = run("estimate", str(file))
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr


def test_estimate_survives_writing_and_reading(tmp_path: Path) -> None:
    for estimate in (
        make_estimate(),
        make_estimate(step_time_band_s=(1.0, 2.0), reasons=("memory",), published={"a": 1}),
        make_estimate(run={"goodput": {"share": 0.9}}, notes=("rounded up",)),
    ):
        file = tmp_path / "a.json"
        file.write_text(json.dumps(estimate.to_json(explain=True)))
        assert parse_estimate(file.read_text(), str(file)) == estimate


def test_paths_of_a_run_are_relative_to_its_file(tmp_path: Path) -> None:
    def read(path: Path) -> RunSpec:
        return parse_run(parse_toml(path.read_text(), str(path)), str(path))

    file = tmp_path / "run.toml"
    file.write_text('model = "model/config.json"\ncluster = "box"')
    run = read(file)
    assert (run.model, run.cluster) == (str(tmp_path / "model" / "config.json"), "box")
    file.write_text('model = "org/name"\ncluster = "pkg.module:factory"')
    run = read(file)
    assert (run.model, run.cluster) == ("org/name", "pkg.module:factory")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert read(file).model == str(tmp_path / "org" / "name")


KEYS = st.sampled_from(
    ["model", "cluster", "gpus", "global_batch", "seq", "dtype", "mode", "plan", "tp", "placement", "?"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=6))
@example({"model": "a\0/b"})
@example({"model": "/" * 5000})
@example({"model": "./" + "b" * 300})
def test_any_run_document_is_read_or_refused(document: dict[str, object]) -> None:
    try:
        run = parse_run(document, "run.toml")
    except UserError as error:
        assert str(error).startswith("run.toml")
    else:
        assert run.model


@given(st.text(max_size=60) | st.text(alphabet='model="a\n[]{}.,1-', max_size=60))
def test_any_text_is_toml_or_refused(text: str) -> None:
    try:
        parse_toml(text, "run.toml")
    except UserError as error:
        assert str(error).startswith(("run.toml: is not valid TOML", "run.toml: is nested too deeply"))


@given(st.text(max_size=30) | VALUES.map(lambda value: json.dumps({"step_time_s": value, "schema_version": 1})))
def test_any_text_is_an_estimate_or_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^a\.json: "):
        parse_estimate(text, "a.json")


WORDS = st.text(max_size=20) | st.text(alphabet="tpdcz2_-=<>,0189 ", max_size=12)


@given(WORDS)
def test_any_constraint_is_parsed_or_refused(text: str) -> None:
    for parse, option in (
        (lambda: parse_fix([text]), "--fix"),
        (lambda: parse_limits([text]), "--limit"),
        (lambda: parse_placement(text), "--placement"),
    ):
        try:
            assert parse()
        except UserError as error:
            assert str(error).startswith(option)


OPTIONS = st.sampled_from(["--gpus", "--global-batch", "--seq", "--tp", "--zero", "--placement", "--explain", "--mode"])
ARGS = st.lists(st.tuples(OPTIONS, st.text(max_size=6) | st.integers(-2, 9).map(str)), max_size=4)


@settings(max_examples=examples(60))
@given(ARGS, st.text(min_size=1, max_size=8))
def test_any_arguments_end_in_0_or_2(run: Run, api: FakeApi, args: list[tuple[str, str]], model: str) -> None:
    result = run("estimate", *JOB, *(word for pair in args for word in pair), "--json", "--", model)
    assert result.exit_code in (0, 2), result.stderr
    assert "Traceback" not in result.stderr
    assert (result.exit_code == 0) == bool(result.stdout)


HUGE = "0x" + "f" * 5000


@pytest.mark.parametrize(
    ("text", "args"),
    [
        (f'model = "llama3-8b"\ngpus = {HUGE}', ("estimate",)),
        (f"layers = {HUGE}\nhidden = 8\nheads = 1", ("estimate",)),
        (
            f'title = {HUGE}\nbase = "dgx-h100"',
            ("plan", "llama3-8b", "--gpus", "8", "--global-batch", "8", "--cluster"),
        ),
    ],
)
def test_whole_numbers_longer_than_python_writes(run: Run, tmp_path: Path, text: str, args: tuple[str, ...]) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(text)
    done = run(*args, str(file))
    assert (done.exit_code, "a huge number" in done.stderr) == (EXIT_USER, True), done.stderr


def test_an_interrupt_while_the_command_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loading:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "steptime.cli.main", Loading())
    from steptime.__main__ import run as run_process

    with pytest.raises(SystemExit) as end:
        run_process()
    assert (end.value.code, capsys.readouterr().err) == (EXIT_INTERRUPTED, "Interrupted.\n")
