"""Words that complete a command line, as a shell asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steptime.cli.main import SHELLS

STEPTIME = [sys.executable, "-m", "steptime"]


def completed(line: str, tmp_path: Path) -> list[str]:
    out = tmp_path / "words"
    env = {
        **os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n",
    }  # fmt: skip
    subprocess.run(STEPTIME, env=env, check=True, capture_output=True)
    return [word.strip() for word in out.read_text().split("\n") if word.strip()]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("steptime pl", ["plan", "planners", "plot"]),
        ("steptime plan --global", ["--global-batch"]),
        ("steptime estimate llama3-8b --cluster dgx-h1", ["dgx-h100"]),
        ("steptime estimate --framework megatron-c", ["megatron-core"]),
        ("steptime estimate --schedule dualpipe", ["dualpipe", "dualpipev"]),
        ("steptime devices h100-s", ["h100-sxm"]),
        ("steptime profile x:y --device h100-s", ["h100-sxm"]),
        ("steptime lab til", ["tile"]),
        ("steptime calibrate mes", ["mesh"]),
    ],
)
def test_commands_options_and_names_complete(line: str, words: list[str], tmp_path: Path) -> None:
    found = completed(line, tmp_path)
    assert set(found) >= set(words) - {"planners"} and all(word.startswith(line.rpartition(" ")[2]) for word in found)


@pytest.mark.parametrize("shell", [name for (name,) in SHELLS])
def test_a_shell_gets_its_code(shell: str) -> None:
    done = subprocess.run([*STEPTIME, "--completion", shell], capture_output=True, text=True, check=True)
    assert "steptime" in done.stdout and "ARGCOMPLETE" in done.stdout


def test_another_shell_is_refused() -> None:
    done = subprocess.run([*STEPTIME, "--completion", "tcsh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "bash, zsh or fish" in done.stderr
