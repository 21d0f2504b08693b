"""Measurements in processes of their own, in turn with the same measurements of another checkout (`--before FOLDER`).

What else runs on a machine, and how fast it is today, makes both larger; the change holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ONE = "--one"
"""Option of a benchmark that measures one case and prints it as JSON."""


def before(each: Sequence[Path]) -> str:
    """What the further columns of a table are."""
    if len(each) == 1:
        return ""
    log = ["git", "-C", str(each[1]), "log", "-1", "--format=%h of %ad", "--date=short"]
    commit = subprocess.run(log, check=True, capture_output=True, text=True).stdout.strip()
    return (
        f"Before: commit {commit}, its runs in turn with those of this one; the change is the median of the ratios\n"
        "of runs that followed each other. What else runs on the machine, and how fast it is that day, makes both\n"
        "larger; the change holds.\n"
    )


def checkouts() -> list[Path]:
    """This one, and the one that is named."""
    words = sys.argv[1:]
    found = [HERE, *([Path(words[words.index("--before") + 1]).resolve()] if "--before" in words else [])]
    for checkout in found:
        subprocess.run([sys.executable, checkout / "scripts" / "catalogue"], check=True, stdout=subprocess.DEVNULL)
    return found


def heads(each: Sequence[Path]) -> tuple[str, str]:
    """Further columns of a table where another checkout is measured too: their names and their rule."""
    return (" before | change |", "---:|---:|") if len(each) > 1 else ("", "")


def asked() -> str | None:
    """The case that this process is to measure."""
    words = sys.argv[1:]
    return words[words.index(ONE) + 1] if ONE in words else None


def alternating(script: str, case: str, each: Sequence[Path], runs: int) -> list[list[Any]]:
    """What a benchmark prints of a case, run by run, for each checkout."""
    return [
        list(found) for found in zip(*[[_run(script, case, one) for one in each] for _ in range(runs)], strict=True)
    ]


def _run(script: str, case: str, checkout: Path) -> Any:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, script, ONE, case], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {case}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def change(now: Sequence[float], then: Sequence[float]) -> str:
    """Median of the ratios of runs that followed each other, as a change."""
    return f"{median(a / b for a, b in zip(now, then, strict=True)) - 1:+.0%}"
