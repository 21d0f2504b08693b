"""``steptime plan RUN.toml``: the plans of the job that ``steptime estimate RUN.toml`` explains."""

from __future__ import annotations

import json
from pathlib import Path

from fake_api import FakeApi, Run

from steptime.cli.main import EXIT_USER


def test_plans_of_a_run_file_and_options_win(run: Run, api: FakeApi, tmp_path: Path) -> None:
    """`plan` refused a file that `estimate` takes."""
    file = tmp_path / "run.toml"
    head = 'model = "toy"\ncluster = "box"\ngpus = 64\nglobal_batch = 8\nseq = 512\nmode = "published"\n'
    file.write_text(head + "lora = { rank = 8 }\n[plan]\ntp = 4\n")
    done = run("plan", str(file), "--gpus", "128", "--lora-rank", "16", "--fix", "pp=2", "--json")
    assert done.exit_code == 0, done.stderr
    name, args, given = api.calls[0]
    assert callable(given.pop("progress")) and (name, args) == ("plan", ("toy", "box"))
    assert given == {
        "gpus": 128, "global_batch": 8, "seq": 512, "mode": "published", "lora": {"rank": 16}, "top": 10,
        "fix": {"pp": 2}, "limit": [],
    }  # fmt: skip
    assert json.loads(done.stdout)["notes"] == [f"the [plan] of {file} (tp) is not kept: --fix KEY=VALUE keeps one"]
    file.write_text(head)
    assert "is not kept" not in run("plan", str(file)).stdout
    file.write_text('model = "toy"\ncluster = "box"\n')
    lacking = run("plan", str(file))
    assert lacking.exit_code == EXIT_USER and "--gpus, --global-batch: missing; a search needs them" in lacking.stderr
