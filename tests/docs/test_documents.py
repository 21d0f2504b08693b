"""Every code block of README.md and docs/ does what the reader would do with it.

What a block is stands in tests/document_blocks.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from document_blocks import DOCUMENTS, FENCE, NOT_RUN, ROOT, body_of, commands, prepare, write_named


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    where: str
    language: str
    text: str


def blocks(text: str, name: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        yield Block(f"{name}:{text[: found.start()].count(chr(10)) + 1}", found["language"], body_of(found))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def run(arguments: list[str], folder: Path, where: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONWARNINGS": "error", "COLUMNS": "120"}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        pytest.fail(f"{where}: {arguments[-1]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)


def run_shell(command: str, folder: Path, where: str) -> None:
    if command.startswith("make"):
        targets = [word for word in command.split()[1:] if "=" not in word and not word.startswith("-")]
        unknown = set(targets) - make_targets()
        assert not unknown, f"{where}: the Makefile has no target {unknown}"
    elif not command.startswith(NOT_RUN):
        run(["bash", "-euo", "pipefail", "-c", command], folder, where)


def run_block(block: Block, folder: Path) -> None:
    if block.language in ("console", "shell-session"):
        for command in commands(block.text):
            run_shell(command, folder, block.where)
    elif block.language in ("bash", "sh", "shell"):
        lines = [line for line in block.text.splitlines() if line.strip()]
        if any(line.startswith(("make", *NOT_RUN)) for line in lines):
            for line in lines:
                run_shell(line, folder, block.where)
        else:
            run_shell(block.text, folder, block.where)
    elif block.language in ("python", "py", "pycon"):
        script = folder / "block.py"
        script.write_text(block.text if ">>> " not in block.text else f"r'''\n{block.text}\n'''\n")
        doctest = ["-m", "doctest", "-o", "NORMALIZE_WHITESPACE", "-o", "ELLIPSIS"] if ">>> " in block.text else []
        run([sys.executable, *doctest, str(script)], folder, block.where)
    elif block.language == "toml":
        write_named(block.text, folder)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "reader")
    for block in blocks(document.read_text(encoding="utf-8"), document.name):
        run_block(block, folder)


def test_outputs_are_current() -> None:
    """What the documents show is what the commands print."""
    done = subprocess.run([sys.executable, ROOT / "scripts/documents", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; scripts/documents rewrites them"


SAMPLE = """\
```toml
# file: a.toml
x = 1
```

1. in a list:

   ```console
   $ cat a.toml | \\
       grep x
   x = 1
   $ make test
   ```

```python
import pathlib
pathlib.Path("a.toml").read_text()
```
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("grep x", "grep y"),
        ("cat a.toml", "cat b.toml"),
        ("make test", "make tost"),
        ('"a.toml").read', '"b.toml").read'),
        ("import pathlib", ">>> 1 + 1\n3\n"),
        ("file: a.toml", "file: b.toml"),
    ],
)
def test_a_broken_block_is_found(old: str, new: str, tmp_path: Path) -> None:
    found = list(blocks(SAMPLE.replace(old, new) if old else SAMPLE, "sample.md"))
    assert [block.language for block in found] == ["toml", "console", "python"]
    assert [block.where for block in found] == ["sample.md:1", "sample.md:8", "sample.md:15"]
    folder = prepare(tmp_path / "reader")
    if not old:
        for block in found:
            run_block(block, folder)
        return
    with pytest.raises((AssertionError, pytest.fail.Exception), match=r"sample\.md"):
        for block in found:
            run_block(block, folder)


def test_every_document_is_read() -> None:
    assert {path.name for path in DOCUMENTS} >= {"README.md", "index.md", "vocabulary.md", "formulas.md"}
