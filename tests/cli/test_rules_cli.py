"""``steptime rules``: the list, one rule, a user's file that is checked, a small run of the generator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime_lab.rules import pipeline, store
from steptime_lab.rules.universes import universe_of

GOOD = """
[[rule]]
name = "qkv"
variables = "x[m, k] w![k, n] v![k, l]"
source = "concat[-1](matmul(x, w), matmul(x, v))"
target = "matmul(x, concat[-1](w, v))"
"""
BAD = """
[[rule]]
name = "grouped"
variables = "x[n, g*c, h, w] u[g*o, c, r, s] v[g*q, c, r, s]"
source = "concat[-3](conv[1, 0, 1, g](x, u), conv[1, 0, 1, g](x, v))"
target = "conv[1, 0, 1, g](x, concat[-4](u, v))"
"""
AXIOMS = store.axioms()[:4]
SIZES = [{"n": 3, "m": 2, "a": 1}, {"n": 4, "m": 3, "a": 2}]
SMALL = tuple(
    universe_of(dict(zip(("name", "variables", "templates", "types"), texts, strict=True), operators=2, sizes=SIZES))
    for texts in (
        ("small", "x[n,n] y[n,n] z[n,n]", "matmul add transpose[-1,-2]", "n,n"),
        ("parts", "x[n,n] y[n,n]", "relu concat[-1]", "n,n n,2*n n,3*n"),
    )
)


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["rules", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_the_list_has_every_rule_with_its_proofs() -> None:
    found = json.loads(run("--json"))
    assert found["schema_version"] and found["provenance"]["seed"]
    assert len(found["rules"]) == len(store.shipped().rules)
    assert all(each["certificate"]["random"] >= 50 for each in found["rules"])
    assert "proved for all sizes" in run()


def test_one_rule_is_shown_and_drawn(tmp_path: Path) -> None:
    text = run("matmul-columns", "--svg", tmp_path / "rule.svg")
    assert "=>" in text and "certificate: 50 assignments" in text and "leading dims: any" in text
    assert (tmp_path / "rule.svg").read_text().startswith("<svg")
    (only,) = json.loads(run("matmul-columns", "--json"))["rules"]
    assert only["source"] == ["matmul(x, concat[-1](y, z))"]


@pytest.mark.slow
def test_a_sound_file_is_proved(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert "proved" in run("--check", path)


@pytest.mark.slow
def test_an_unsound_rule_is_rejected_with_its_counterexample(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + BAD)
    text = run("--check", path, code=2)
    assert "grouped" in text and "unsound" in text and "shapes" in text and "values" in text
    found = json.loads(CliRunner().invoke(main, ["rules", "--check", str(path), "--json"]).stdout)
    assert [each["verdict"] for each in found["rules"]] == ["proved", "unsound"]
    example = found["rules"][1]["counterexample"]
    assert example["sizes"]["g"] > 1 and example["values"]["x"] and example["source"] != example["target"]


@pytest.mark.each(
    "text, message",
    [
        ("", "no tables"),
        ("[[rule]]\n", "missing"),
        ("x = 3\n[[rule]]\n", "no tables"),
        (GOOD.replace("source", "sauce"), "sauce"),
        (GOOD.replace("matmul(x, w)", "matmull(x, w)"), "matmul"),
        (GOOD.replace("w![k, n]", "w![k n]"), "no size"),
        (GOOD.replace("x[m, k]", "x[m]"), "dims"),
        (GOOD.replace("x[m, k]", "x[3, 4]").replace("w![k", "w![5"), "do not fit"),
        (GOOD + 'where = "a is b"', "condition"),
        ("[[rule]", "TOML"),
        (GOOD.replace("m, k]", "90000, k]"), "more than"),
        (GOOD.replace("m, k]", "99999999, k]"), "no size"),
        (GOOD.replace("m, k]", "n**9, k]"), "no size"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert message in run("--check", path, code=2)


@pytest.mark.each(
    "args, message",
    [
        (["no-such-rule"], "steptime rules lists them"),
        (["--svg", "a.svg"], "give its NAME"),
        (["--generate"], "go together"),
        (["-o", "a.tsv"], "go together"),
        (["x", "--check", "y"], "one of"),
        (["--check", "/does/not/exist.toml"], "exist"),
        (["--generate", "-o", "/does/not/exist/a.tsv"], "written"),
    ],
)
def test_wrong_options_are_told(args: list[str], message: str) -> None:
    assert message in run(*args, code=2)


@pytest.mark.slow
def test_a_small_run_finds_what_there_is_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    whole = pipeline.generated(
        pipeline.Job(out=tmp_path / "a.tsv", operators=2, universes=SMALL, axioms=AXIOMS), lambda _: None
    )
    generated = {rule.equation() for rule in whole.rules if rule.origin in ("small", "parts")}
    assert "add(x, y) = add(y, x)" in generated and "matmul(matmul(x, y), z) = matmul(x, matmul(y, z))" in generated
    assert "concat[-1](concat[-1](x, y), z) = concat[-1](x, concat[-1](y, z))" in generated
    assert all(rule.certificate.complete for rule in whole.rules)

    job = pipeline.Job(out=tmp_path / "b.tsv", operators=2, universes=SMALL, axioms=AXIOMS)
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("parts"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.generated(job, stop)
    assert job.partial.exists() and not job.out.exists()
    again = pipeline.generated(job, lines.append)
    assert "going on after 1 universes" in " ".join(lines)
    assert not any(line.startswith("small") for line in lines[lines.index(next(x for x in lines if "going on" in x)) :])
    assert [str(rule) for rule in again.rules] == [str(rule) for rule in whole.rules]
    assert store.loaded(job.out).rules == again.rules and not job.partial.exists()
