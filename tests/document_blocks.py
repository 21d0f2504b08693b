"""The code blocks of README.md, CONTRIBUTING.md and docs/, as `scripts/documents` rewrites them and the tests run them.

console   lines that start with ``$ `` are commands; the other lines are output
bash      the whole block is one script
python    a script of its own, or a doctest if it has ``>>>``
toml      with a first line ``# file: name.toml`` (or ``# name.toml``): written before the commands that follow

The blocks of one document share a folder that has copies of ``examples/`` and ``studies/`` and the fixtures below. A
command that begins with ``steptime`` runs in this process, and what a shell does with its output in a shell; others are
processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Final

from cli_runner import CliRunner
from steptime.cli.main import main

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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
#: What differs from run to run in what commands print.
_MEASURED: Final = re.compile(r"in [\d.]+ m?s CPU")
#: A command of steptime alone, or with its output piped or written to a file.
_STEPTIME: Final = re.compile(r"steptime (?P<arguments>(?:'[^']*'|[^'\"|<>&;$`\\])*)(?P<rest>(?:\||>) .*)?", re.S)
#: Arguments and the files that they name -> exit code and output of commands that write no file of their own.
_ANSWERS: dict[tuple[str, ...], tuple[int, str]] = {}
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
    for name in ("examples", "studies"):
        shutil.copytree(ROOT / name, folder / name)
    for name, source in FIXTURES.items():
        shutil.copyfile(source, folder / name)
    return folder


class BlockError(Exception):
    """A block does not do what the document says; where, and what it printed."""


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def _printed(arguments: list[str], folder: Path, where: str, given: str = "") -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONWARNINGS": "error", "COLUMNS": "100"}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, input=given
    )
    if done.returncode:
        raise BlockError(f"{where}: {arguments[-1]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def _answer(arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of ``steptime`` with arguments; once where the files that they name are the same."""
    words = shlex.split(arguments)
    files = [folder / word.partition(":")[0] for word in words]
    key = (arguments, *(file.read_bytes() for file in files if file.is_file()))
    if key in _ANSWERS:
        return _ANSWERS[key]
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner(env={"COLUMNS": "100"}).invoke(main, words)
    sys.stderr.write(done.stderr)
    if "--out" not in words:
        _ANSWERS[key] = done.exit_code, done.stdout
    return done.exit_code, done.stdout


def _shell(command: str, folder: Path, where: str) -> str:
    """What a command prints; nothing for those of `make`, whose targets must exist, and of :data:`NOT_RUN`."""
    if command.startswith("make"):
        targets = [word for word in command.split()[1:] if "=" not in word and not word.startswith("-")]
        if unknown := set(targets) - _make_targets():
            raise BlockError(f"{where}: the Makefile has no target {unknown}")
        return ""
    if command.startswith(NOT_RUN):
        return ""
    given = ""
    if found := _STEPTIME.fullmatch(command):
        code, given = _answer(found["arguments"], folder)
        command = f"(cat; exit {code}) {found['rest'] or ''}"
    return _printed(["bash", "-euo", "pipefail", "-c", command], folder, where, given)


def _script(body: str, folder: Path, where: str) -> None:
    lines = [line for line in body.splitlines() if line.strip()]
    for part in lines if any(line.startswith(("make", *NOT_RUN)) for line in lines) else [body]:
        _shell(part, folder, where)


def _python(body: str, folder: Path, where: str) -> None:
    script = folder / "block.py"
    script.write_text(f"r'''\n{body}\n'''\n" if ">>> " in body else body, encoding="utf-8")
    doctest = ["-m", "doctest", "-o", "NORMALIZE_WHITESPACE", "-o", "ELLIPSIS"] if ">>> " in body else []
    _printed([sys.executable, *doctest, str(script)], folder, where)


def _console(found: re.Match[str], folder: Path, where: str) -> str:
    """The block with the outputs of today; a block without any output keeps none."""
    body = body_of(found)
    typed = commands(body)
    outputs = len(body.splitlines()) > sum(command.count("\n") + 1 for command in typed)
    lines = []
    for command in typed:
        printed = _shell(command, folder, where)
        lines += [f"$ {command}", *([printed] if printed and outputs else [])]
    opening = found[0].splitlines()[0].strip()
    return re.sub(r"^(?=.)", found["indent"], "\n".join([opening, *lines, found["ticks"]]), flags=re.M)


def as_run(text: str, name: str, folder: Path) -> str:
    """The text of a document after its blocks ran in a folder, one after the other: outputs are those of today.

    Raises
    ------
    BlockError
        A command or script fails, or names a target of `make` that does not exist.
    """

    def block(found: re.Match[str]) -> str:
        where = f"{name}:{text[: found.start()].count(chr(10)) + 1}"
        if found["language"] in ("console", "shell-session"):
            return _console(found, folder, where)
        if found["language"] in ("bash", "sh", "shell"):
            _script(body_of(found), folder, where)
        elif found["language"] in ("python", "py", "pycon"):
            _python(body_of(found), folder, where)
        elif found["language"] == "toml":
            write_named(body_of(found), folder)
        return found[0]

    return FENCE.sub(block, text)


def without_measured(text: str) -> str:
    """A text without the CPU times in it, which differ from run to run."""
    return _MEASURED.sub("", text)
