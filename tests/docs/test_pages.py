"""Pages name every command, key and habit that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from steptime.cli.main import COMMANDS
from steptime.hardware.load import DEVICE, LEVEL, RATES
from steptime.model.spec import Experts, LatentAttention, ModelSpec, Vision
from steptime.options import KEYS, SETTINGS
from steptime.plan.framework import MODEL_AXES
from steptime.plan.framework_file import framework_names, habits_of

MODELS = (ModelSpec, Experts, LatentAttention, Vision)
DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def unnamed(names: set[str], text: str) -> set[str]:
    return {name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)}


def test_every_command_is_on_a_page() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert not unnamed({f"steptime {name}" for name in COMMANDS}, text)


def test_the_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+)\.md\)", page("index")))
    assert linked == {path.stem for path in DOCS.glob("*.md")} - {"index"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("estimate", {*KEYS, *SETTINGS, "model", "lora", "plan"}),
        ("hardware", {*DEVICE, *LEVEL, *RATES}),
        ("models", {field.name for record in MODELS for field in fields(record)}),
    ],
)
def test_a_page_has_every_key_of_its_file(name: str, keys: set[str]) -> None:
    assert not unnamed(keys, page(name))


def test_the_page_of_frameworks_has_their_stages_and_axes() -> None:
    table = re.findall(r"^\| (`.*`) \| (\d) \| ([\d, ]+) \| (.*) \|$", page("frameworks"), re.M)
    shown = {
        name: (int(stage), {int(one) for one in stages.split(", ")}, axes.replace("`", ""))
        for names, stage, stages, axes in table for name in names.replace("`", "").split(", ")
    }  # fmt: skip
    assert set(shown) == set(framework_names()) - {"ideal"}
    for name, (stage, stages, axes) in shown.items():
        habits = habits_of(name)
        all_of = {"all": set(MODEL_AXES), "none": set()}
        own = all_of.get(axes, set(axes.split(", ")))
        assert (habits.zero, set(habits.zero_stages), set(habits.axes)) == (stage, stages, own), name


def test_the_page_of_benchmarks_is_of_the_results_that_are_kept() -> None:
    done = subprocess.run([sys.executable, str(DOCS.parent / "scripts/benchmarks"), "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("shown", "row"),
    [
        ("with `--framework`", "source not known"),
        ("without", "source not known, framework not told"),
        ("a model that the fit has not seen, on a machine that it has", "source known, model not"),
    ],
)
def test_the_errors_of_the_front_page_are_those_of_the_scoreboard(shown: str, row: str) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    _, error, covered = re.findall(rf"^\| ({re.escape(shown)}) \| (\S+ %) \| (\S+ %) \|$", readme, re.M)[0]
    cells = re.findall(rf"^\| {re.escape(row)} \|(.+)\|$", page("scoreboard"), re.M)[0].split("|")
    assert (covered, error) == (cells[5].strip(), cells[7].strip())


def test_links_of_the_pages_at_the_top_lead_somewhere() -> None:
    pages = [*DOCS.parent.glob("*.md"), DOCS / "tour.md", DOCS / "scope.md", DOCS / "benchmarks.md"]
    links = [(path, link) for path in pages for link in re.findall(r"\]\(([^)#\s:]+)[)#]", path.read_text("utf-8"))]
    assert len(links) > 60
    assert not [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()]
