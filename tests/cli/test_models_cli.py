"""``steptime models`` of a file: what was read of it, and what was not."""

from __future__ import annotations

import json
from pathlib import Path

from fake_api import Run

FILE = Path(__file__).resolve().parents[1] / "data/huggingface/llama3-8b.json"


def test_a_configuration_is_shown_with_what_was_assumed_and_not_used(run: Run, tmp_path: Path) -> None:
    config = json.loads(FILE.read_text()) | {"wings": 2}
    del config["tie_word_embeddings"]
    (tmp_path / "mine.json").write_text(json.dumps(config))
    shown = " ".join(run("models", str(tmp_path / "mine.json")).stdout.split())
    assert "assumed tie_word_embeddings False (default of the family)" in shown
    assert "wings unknown to steptime, and not counted" in shown
    model = json.loads(run("models", str(tmp_path / "mine.json"), "--json").stdout)["model"]
    assert model["ignored"]["wings"] == "unknown to steptime, and not counted"
    assert model["assumed"]["tie_word_embeddings"] == "False (default of the family)"


def test_a_model_of_the_catalogue_leaves_nothing_open(run: Run) -> None:
    assert "assumed" not in run("models", "llama3-8b").stdout
    model = json.loads(run("models", "llama3-8b", "--json").stdout)["model"]
    assert model["assumed"] == model["ignored"] == {}
