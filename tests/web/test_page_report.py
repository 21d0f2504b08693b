"""A report is one file: the page, its answers, a policy that allows these and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.web.report_file import filled

JOB = ["--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="steptime-data">(.*?)</script>', page.read_text())
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_a_report_of_a_plan_and_its_ranking(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = run("report", "llama3-8b", *JOB, "--tp", "2", "--pp", "4", "--top", "3", "--tokens", "1T", "-o", str(page))
    assert (done.exit_code, done.output.startswith(f"wrote {page}")) == (0, True), done.output
    answers = data_of(page)["answers"]
    assert (answers["estimate"]["plan"]["pp"], len(answers["plan"]["plans"])) == (4, 3)
    assert answers["simulate"]["ranks"] == 4
    assert all(one["training"]["training_days"] > 10 for one in (answers["estimate"], *answers["plan"]["plans"]))
    assert {one["name"] for one in answers["roofline"]["panels"][0]["series"]} > {"matrix units", "vector units"}
    functions = {call["function"] for detail in answers["estimate"]["details"] for call in (detail, *detail["further"])}
    assert set(answers["formulas.json"]) <= functions
    assert "gemm.gemm_s" in answers["formulas.json"]


def test_without_a_plan_it_is_about_the_best(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert run("report", "llama3-8b", *JOB, "--top", "2", "-o", str(page)).exit_code == 0
    answers = data_of(page)["answers"]
    assert answers["estimate"]["step_time_s"] == pytest.approx(answers["plan"]["plans"][0]["step_time_s"], rel=1e-9)


@pytest.mark.each("command", [("estimate", "--tp", "2"), ("plan", "--top", "2")])
def test_what_json_wrote_is_reported_as_it_is(tmp_path: Path, command: tuple[str, ...]) -> None:
    written = tmp_path / "a.json"
    written.write_text(run(command[0], "llama3-8b", *JOB, *command[1:], "--json").stdout)
    page = tmp_path / "r.html"
    assert run("report", str(written), "-o", str(page)).exit_code == 0
    document, answers = json.loads(written.read_text()), data_of(page)["answers"]
    first = document["plans"][0] if command[0] == "plan" else document
    assert answers["estimate"]["time"] == first["time"]
    assert answers.get("plan") == (document if command[0] == "plan" else None)


def test_its_policy_allows_its_own_script_and_style_alone(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    run("report", "llama3-8b", *JOB, "--top", "0", "--tp", "2", "-o", str(page))
    text = page.read_text()
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]*)"', text)
    assert policy is not None
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert (len(scripts), len(styles)) == (1, 1)
    for kind, content in (("script-src", scripts[0]), ("style-src", styles[0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "connect-src" not in policy[1]
    assert not re.findall(r'(?:src|href)="(?!data:)', text.replace(scripts[0], ""))


def test_data_cannot_end_its_element() -> None:
    files = {"index.html": b"<body></body>", "page.js": b"1", "page.css": b""}
    text = filled(files, {"model": "</script><script>alert(1)</script>"})
    assert text.count("</script>") == 2
    assert "alert(1)<" not in text


def test_a_file_that_was_cut_off_is_said_to_be(tmp_path: Path) -> None:
    written = tmp_path / "a.json"
    written.write_text(run("estimate", "llama3-8b", *JOB, "--json").stdout[:300])
    done = run("report", str(written), "-o", str(tmp_path / "r.html"))
    assert done.exit_code == 2 and "a.json: not JSON" in done.output


def test_what_cannot_be_reported_is_said(tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    other.write_text('{"schema_version": 1}')
    for arguments in (["no-such-model", *JOB], [str(other)], ["llama3-8b"], ["llama3-8b", *JOB, "--tp", "3"]):
        done = run("report", *arguments, "-o", str(tmp_path / "r.html"))
        assert (done.exit_code, "Error: " in done.output) == (2, True), done.output
    assert not (tmp_path / "r.html").exists()


def test_an_address_that_cannot_be_had_is_said() -> None:
    for options in (("--host", "192.0.2.1"), ("--host", "no such host")):
        done = run("serve", *options, "--port", "0")
        assert (done.exit_code, "Error: " in done.output) == (2, True), done.output
