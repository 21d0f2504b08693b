"""``--tokens`` and its like on ``plan`` and ``estimate``."""

from __future__ import annotations

import json

from cli_runner import CliRunner
from steptime.cli.main import main

JOB = ["llama-3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "64"]


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, args)
    return done.exit_code, done.output


def test_report_and_json() -> None:
    code, text = run("estimate", *JOB, "--tokens", "1T")
    assert code == 0 and "days (" in text and "GPU-days), 1 T tokens" in " ".join(text.split())
    code, text = run("plan", *JOB, "--epochs", "2", "--dataset-samples", "350k", "--top", "2")
    assert code == 0 and "  days" in text and "GPU-hours" in text
    code, text = run("plan", *JOB, "--samples", "640", "--top", "1", "--json")
    assert code == 0 and json.loads(text)["plans"][0]["training"]["steps"] == 10


def test_refused() -> None:
    for args, word in (
        (["estimate", *JOB, "--tokens", "x"], "amount"),
        (["plan", *JOB, "--epochs", "2"], "dataset"),
        (["estimate", "llama-3-8b", "--tokens", "1T"], "--cluster"),
    ):
        code, text = run(*args)
        assert code == 2 and word in text and "Traceback" not in text, args
