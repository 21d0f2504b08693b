"""The code blocks of README.md, CONTRIBUTING.md and docs/, as `scripts/documents` rewrites them and the tests run them.

console   lines that start with ``$ `` are commands; the other lines are output
bash      the whole block is one script
python    a script of its own, or a doctest if it has ``>>>``
toml      with a first line ``# file: name.toml`` (or ``# name.toml``): written before the commands that follow

The blocks of one document share a folder that has copies of ``examples/`` and ``studies/`` and the fixtures below. What
is ``steptime`` or Python runs in this process, which has loaded the libraries; what a shell does with the output, in a
shell. A block that registers something is a process of its own, so that nothing of it stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from cli_runner import CliRunner, Result
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
#: A command of steptime or a script, alone or with its output joined with its errors, piped or written to a file.
_COMMAND: Final = re.compile(
    r"(?P<variables>(?:[A-Z_]+=\S+ )*)(?P<program>steptime|python (?=[\w/]+\.py\b)) ?"
    r"""(?P<arguments>(?:'[^']*'|"[^"$`\\]*"|[^'"|<>&;$`\\\n])*)(?P<errors>2>&1 ?)?(?P<rest>(?:\|\|?|>) .*)?""", re.S
)  # fmt: skip
#: Command and the files that it names -> result, for commands that write no file of their own.
_ANSWERS: dict[tuple[object, ...], Result] = {}
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


@contextlib.contextmanager
def _as_a_process(folder: Path) -> Iterator[None]:
    """The folder is the current one, warnings are errors; modules loaded from it and changes of paths do not stay."""
    path, started, environment = sys.path[:], sys.modules["__main__"], os.environ.copy()
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:], sys.modules["__main__"] = path, started
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                    del sys.modules[name]


def _run_python(arguments: Sequence[str]) -> int:
    """Run a script as ``python FILE ...`` does; its exit code."""
    script = Path(arguments[0]).resolve()
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"], before = module, sys.argv
    sys.argv = list(arguments)
    sys.path.insert(0, str(script.parent))
    try:
        exec(compile(script.read_text(encoding="utf-8"), script, "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv = before
    return 0


def _run_doctest(arguments: Sequence[str]) -> int:
    """Run the examples of a file as ``python -m doctest`` does; 1 if one of them fails."""
    import doctest

    text = Path(arguments[0]).read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, arguments[0], arguments[0], 0)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    return int(runner.run(test, out=sys.stdout.write).failed > 0)


def _result(run: Callable[[Sequence[str]], int], words: list[str], folder: Path, variables: dict[str, str]) -> Result:
    """What a program does with arguments in a folder; once where the files that they name are the same."""
    files = [folder / word.partition(":")[0] for word in words]
    key = (run, *words, *variables.items(), *(file.read_bytes() for file in files if file.is_file()))
    if key not in _ANSWERS or variables or "--out" in words or run is not main:
        with _as_a_process(folder):
            _ANSWERS[key] = CliRunner(env={"COLUMNS": "100", **variables}).invoke(run, words)
    return _ANSWERS[key]


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
    if found := _COMMAND.fullmatch(command.replace("\\\n", "")):
        variables = dict(word.split("=", 1) for word in found["variables"].split())
        run = main if found["program"] == "steptime" else _run_python
        done = _result(run, shlex.split(found["arguments"]), folder, variables)
        if not found["errors"]:
            sys.stderr.write(done.stderr)
        given = done.output if found["errors"] else done.stdout
        command = f"(cat; exit {done.exit_code}) {found['rest'] or ''}"
    return _printed(["bash", "-euo", "pipefail", "-c", command], folder, where, given)


def _script(body: str, folder: Path, where: str) -> None:
    lines = [line for line in body.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]
    apart = any(line.startswith(("make", *NOT_RUN)) for line in lines) or all(map(_COMMAND.fullmatch, lines))
    for part in lines if apart else [body]:
        _shell(part, folder, where)


def _python(body: str, folder: Path, where: str) -> None:
    script = folder / "block.py"
    script.write_text(body, encoding="utf-8")
    if re.search(r"\bregister", body):
        _printed([sys.executable, str(script)], folder, where)
        return
    done = _result(_run_doctest if ">>> " in body else _run_python, [str(script)], folder, {})
    if done.exit_code:
        raise BlockError(f"{where}: {script.name}\nexit code {done.exit_code}\n{done.output}")


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
