"""docs/scope.md and the product agree: what the page calls modelled is answered, what it does not is refused."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest

from cli_runner import CliRunner, Result
from document_blocks import FENCE, ROOT, body_of, prepare, write_named
from steptime.cli.main import main

PAGE = (ROOT / "docs/scope.md").read_text(encoding="utf-8")
JOB = re.findall(r"`JOB` stands for `(.+?)`", PAGE)[0]


def table(title: str) -> list[list[str]]:
    """Rows of the first table below a heading."""
    text = re.split(rf"^#+ {title}\n", PAGE, maxsplit=1, flags=re.M)[1]
    rows = re.findall(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (row.strip() for row in rows)]


AREAS = {row[0].strip(): (row[1].strip(), row[2].strip()) for row in table("What is modelled, and what is not")}
ANSWERED = [(area, typed) for area, cell in table("Answered") for typed in re.findall(r"`(.+?)`", cell)]
REFUSED = [(area, typed.strip("`"), said) for area, typed, said in table("Refused")]
WORDS = [(row[0].strip("`"), set(re.findall(r"`(.+?)`", row[1]))) for row in table("Words that options take")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the page has: the examples and the files that it shows."""
    made = prepare(tmp_path_factory.mktemp("scope"))
    for found in FENCE.finditer(PAGE):
        write_named(body_of(found), made)
    return made


def ask(typed: str, folder: Path) -> Result:
    """The answer to a command as the page writes it."""
    if "examples/" in typed:
        pytest.importorskip("torch")
    with contextlib.chdir(folder):
        return CliRunner(env={"COLUMNS": "200"}).invoke(main, shlex.split(typed.replace("JOB", JOB)))


def test_every_area_has_commands_for_both_sides() -> None:
    assert {area for area, _ in ANSWERED} == {area for area, sides in AREAS.items() if sides[0]}
    assert {area for area, *_ in REFUSED} == {area for area, sides in AREAS.items() if sides[1]}


@pytest.mark.parametrize(("area", "typed"), ANSWERED, ids=[typed for _, typed in ANSWERED])
def test_what_is_modelled_is_answered(area: str, typed: str, folder: Path) -> None:
    done = ask(typed, folder)
    assert done.exit_code == 0, f"{area}: {done.stderr}"


@pytest.mark.parametrize(("area", "typed", "said"), [pytest.param(*row, id=row[1]) for row in REFUSED])
def test_what_is_not_modelled_is_refused(area: str, typed: str, said: str, folder: Path) -> None:
    done = ask(typed, folder)
    assert done.exit_code in (2, 3), f"{area} is on the page as not modelled, but {typed} is answered"
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(("option", "listed"), WORDS, ids=[option for option, _ in WORDS])
def test_options_take_the_words_of_the_page_and_no_others(option: str, listed: set[str], folder: Path) -> None:
    refusal = ask(f"estimate llama3-8b JOB --{option} xxxxxx", folder)
    assert refusal.exit_code == 2
    assert set(re.findall(r"[\w-]+", refusal.stderr.partition("valid: ")[2])) == listed


#: Together their steps have every term.
TERMS = (
    "estimate mixtral-8x7b JOB --tp 2 --cp 2 --pp 2 --ep 2 --micro-batch 1 --framework megatron-core",
    "estimate llama3-8b JOB --cp 2 --overlap none",
    "estimate llama3-8b JOB --offload optimizer,activations --overlap none",
    "estimate gpt2 --cluster dgx-h100 --gpus 8 --global-batch 8 --pp 2 --micro-batch 1",
)


def test_a_step_has_the_terms_of_the_page_and_no_others(folder: Path) -> None:
    sentence = re.findall(r"sum of these terms, and of no other: (.+?)\.\n", PAGE, re.S)[0]
    found: set[str] = set()
    for typed in TERMS:
        found |= {path.partition("/")[0] for path in json.loads(ask(f"{typed} --json", folder).stdout)["time"]}
    assert found == set(re.findall(r"`(.+?)`", sentence))
