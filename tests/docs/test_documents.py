"""Every code block of README.md and docs/ does what the reader would do with it, and prints what is shown.

What a block is stands in tests/document_blocks.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from document_blocks import DOCUMENTS, BlockError, as_run, prepare, without_measured

#: These show the same commands, which take long and so run once: in one process.
TOGETHER = tuple(path for path in DOCUMENTS if path.name in ("fit.md", "tour.md"))
ALONE = tuple((path,) for path in DOCUMENTS if path not in TOGETHER)


@pytest.mark.quick(
    without=["fit,tour", "captured", "hierarchy", "iterate", "networks", "plots", "rewrite", "score", "sharding"]
)
@pytest.mark.parametrize("documents", [TOGETHER, *ALONE], ids=lambda paths: ",".join(path.stem for path in paths))
def test_blocks_run_and_print_what_is_shown(documents: tuple[Path, ...], tmp_path: Path) -> None:
    for document in documents:
        text = document.read_text(encoding="utf-8")
        now = as_run(text, document.name, prepare(tmp_path / document.stem))
        assert without_measured(now) == without_measured(text), f"scripts/documents {document.name} rewrites it"


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
    ("old", "new", "line"),
    [
        ("grep x", "grep y", 8),
        ("cat a.toml", "cat b.toml", 8),
        ("make test", "make tost", 8),
        ('"a.toml").read', '"b.toml").read', 15),
        ("import pathlib", ">>> 1 + 1\n3\n", 15),
        ("file: a.toml", "file: b.toml", 8),
    ],
)
def test_a_broken_block_is_found(old: str, new: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=rf"^sample\.md:{line}: "):
        as_run(SAMPLE.replace(old, new), "sample.md", prepare(tmp_path / "reader"))


def test_blocks_in_order_share_a_folder(tmp_path: Path) -> None:
    assert as_run(SAMPLE, "sample.md", prepare(tmp_path / "reader")) == SAMPLE


IN_PROCESS = """\
```python
import os, sys, warnings
import mine
os.environ["COLUMNS"], mine.value = "7", 2
sys.path.append("somewhere")
```

```python
import os, sys
import mine
assert mine.value == 1 and os.environ["COLUMNS"] == "100" and "somewhere" not in sys.path
assert __name__ == "__main__" and sys.modules["__main__"].__file__.endswith("block.py")
```

```console
$ STEPTIME_PATH=catalogue steptime models nowhere 2>&1 || true
Error: there is no model 'nowhere'
$ python mine.py "two words" | tr w W
['mine.py', 'tWo Words']
```
"""


def test_nothing_of_a_block_stays_in_this_process(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "reader")
    (folder / "catalogue").mkdir()
    (folder / "mine.py").write_text('import sys\nvalue = 1\nif __name__ == "__main__":\n    print(sys.argv)\n')
    before, main = [*sys.path], sys.modules["__main__"]
    now = as_run(IN_PROCESS, "sample.md", folder)
    assert now.splitlines()[:17] == IN_PROCESS.splitlines()[:17] and "no model 'nowhere'" in now
    assert "['mine.py', 'tWo Words']" in now
    assert sys.path == before and sys.modules["__main__"] is main and "mine" not in sys.modules


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise SystemExit('gone')", "exit code 1"),
        ("assert 1 == 2", "AssertionError"),
        (">>> 1 + 1\n3", "Got:"),
        (">>> 1 / 0\n0", "ZeroDivisionError"),
        ("from steptime.registry import Registry\nregister = Registry", ""),
        ("from steptime.registry import Registry\nRegistry('a', 'b').register('c', 'd')", "TypeError"),
    ],
)
def test_a_block_of_python_fails_as_a_process_of_its_own_would(block: str, why: str, tmp_path: Path) -> None:
    text = f"```python\n{block}\n```\n"
    if why:
        with pytest.raises(BlockError, match=f"(?s)^sample.md:1: .*{why}"):
            as_run(text, "sample.md", prepare(tmp_path / "reader"))
    else:
        assert as_run(text, "sample.md", prepare(tmp_path / "reader")) == text


def test_a_stale_output_is_replaced(tmp_path: Path) -> None:
    stale = SAMPLE.replace("   x = 1\n   $", "   x = 2\n   and more\n   $")
    assert stale != SAMPLE
    assert as_run(stale, "sample.md", prepare(tmp_path / "reader")) == SAMPLE


def test_only_measured_times_may_differ() -> None:
    assert without_measured("found in 1.2 s CPU, 3 plans") == without_measured("found in 34 ms CPU, 3 plans")
    assert without_measured("found in 1.2 s CPU, 3 plans") != without_measured("found in 1.2 s CPU, 4 plans")


def test_every_document_is_read() -> None:
    assert {path.name for path in DOCUMENTS} >= {"README.md", "index.md", "vocabulary.md", "formulas.md"}
