"""Plans that are given back to ``steptime estimate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_api import Run


def document(run: Run, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def test_what_a_written_plan_does_not_hold_is_named(run: Run, tmp_path: Path) -> None:
    """The plan was taken, and the framework, the precision and the adapters that it was for went without a word."""
    job = ("estimate", "gpt2", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64")
    own = ("--dtype", "fp8", "--framework", "megatron-core", "--lora-rank", "8")
    file = tmp_path / "e.json"
    file.write_text(json.dumps(document(run, *job, "--tp", "2", *own)))
    (note,) = (n for n in document(run, *job, "--plan", str(file))["notes"] if "was written for" in n)
    assert "for --dtype fp8, --framework megatron-core, --lora-rank 8, which a plan does not hold" in note
    assert note.endswith("this estimate has bf16, generic, none")
    same = document(run, *job, *own, "--plan", str(file))
    assert not [n for n in same["notes"] if "was written for" in n]
    chosen = document(run, *job, *own[2:], "--dtype", "bf16", "--plan", str(file))
    assert not [n for n in chosen["notes"] if "was written for" in n]
