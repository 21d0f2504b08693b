"""Options of a plan for packed documents, attention in a format of its own and CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import Run

JOB = ("--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--dtype", "fp8-te")
ESTIMATE, PLAN = ("estimate", "llama-3.1-8b", *JOB), ("plan", "llama-3.1-8b", *JOB)
CHOICES = ("--graphs", "step", "--attention-dtype", "fp8", "--document-length", "200")
IN_JSON = {"graphs": "step", "attention_dtype": "fp8", "document_length": 200.0}


def test_the_line_of_a_plan_names_what_is_unusual(run: Run) -> None:
    line = run(*ESTIMATE, *CHOICES).stdout.splitlines()[2]
    assert line == "plan: 1d dp8 mbs1 attention in fp8 documents of 200 graphs step | domain dp8"
    assert run(*ESTIMATE).stdout.splitlines()[2] == "plan: 1d dp8 mbs1 | domain dp8"


def test_an_estimate_and_a_search_record_them(run: Run) -> None:
    plan = json.loads(run(*ESTIMATE, *CHOICES, "--json").stdout)["plan"]
    assert {name: plan[name] for name in IN_JSON} == IN_JSON
    found = json.loads(run(*PLAN, *CHOICES, "--top", "2", "--json").stdout)["plans"]
    assert all({name: one["plan"][name] for name in IN_JSON} == IN_JSON for one in found)
    fixed = [f"{name}={value}" for name, value in IN_JSON.items()]
    arguments = [word for one in fixed for word in ("--fix", one)]
    assert json.loads(run(*PLAN, *arguments, "--top", "2", "--json").stdout)["plans"] == found


def test_a_file_may_say_what_an_option_may(run: Run, tmp_path: Path) -> None:
    text = 'model = "llama-3.1-8b"\ncluster = "dgx-h100"\ngpus = 8\nglobal_batch = 16\nseq = 65536\n[plan]\ncp = 2\n'
    (tmp_path / "run.toml").write_text(text + "document_length = 16384\n")
    plan = json.loads(run("estimate", str(tmp_path / "run.toml"), "--json").stdout)["plan"]
    assert plan["document_length"] == 16384
    (tmp_path / "run.toml").write_text(text + "document_length = 1e9\n")
    assert "is not a number from 1 to 1e+08" in run("estimate", str(tmp_path / "run.toml")).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ESTIMATE, "--graphs", "stpe"), "did you mean step"),
        ((*ESTIMATE, "--attention-dtype", "int8"), "there is no attention_dtype 'int8'"),
        ((*ESTIMATE, "--attention-dtype", "fp8", "--attention", "unfused"), "attention unfused has no kernel for it"),
        ((*PLAN, "--document-length", "0"), "the nearest is 1"),
        ((*ESTIMATE, "--document-length", "many"), "--document-length"),
    ],
)
def test_what_has_no_meaning_is_refused(run: Run, arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout
