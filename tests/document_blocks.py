"""The code blocks of README.md and docs/, as `scripts/documents` rewrites them and the tests run them.

console   lines that start with ``$ `` are commands; the other lines are output
bash      the whole block is one script
python    a script of its own, or a doctest if it has ``>>>``
toml      with a first line ``# file: name.toml`` (or ``# name.toml``): written before the commands that follow

The blocks of one document share a folder that has a copy of ``examples/`` and the fixtures below.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Files that a reader is assumed to have: name in the document's folder -> where it comes from.
FIXTURES: Final = {
    "config.json": ROOT / "tests/data/huggingface/llama3-8b.json",
    "published_runs.csv": ROOT / "tests/data/published_runs.csv",
}
#: Commands that get steptime in the first place; running them would change the machine.
NOT_RUN: Final = ("git clone ", "cd steptime", "pip install ", "python3 -m venv ")
FENCE: Final = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)[^\n`]*\n(?P<body>.*?)^ *(?P=ticks) *$", re.M | re.S
)
_FILE: Final = re.compile(r"# (?:file: *)?(?P<name>[\w.-]+\.toml) *\n")


def body_of(found: re.Match[str]) -> str:
    """The text of a block that :data:`FENCE` found, without its indentation."""
    return re.sub(rf"^{found['indent']}", "", found["body"], flags=re.M)


def commands(console: str) -> list[str]:
    """The commands of a console block, as they stand; a backslash at the end of a line continues them."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", console, re.M)


def write_named(body: str, folder: Path) -> None:
    """Writes a block of TOML that names its file."""
    if named := _FILE.match(body):
        (folder / named["name"]).write_text(body, encoding="utf-8")


def prepare(folder: Path) -> Path:
    """Puts what a reader is assumed to have into a folder."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, source in FIXTURES.items():
        shutil.copyfile(source, folder / name)
    return folder
