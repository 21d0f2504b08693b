"""Every code block of README.md and docs/ does what the reader would do with it, and prints what is shown.

What a block is stands in tests/document_blocks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from document_blocks import DOCUMENTS, BlockError, as_run, prepare, without_measured

#: These show the same commands, which take long and so run once: in one process.
TOGETHER = tuple(path for path in DOCUMENTS if path.name in ("README.md", "tour.md", "fit.md"))
ALONE = tuple((path,) for path in DOCUMENTS if path not in TOGETHER)


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


def test_a_stale_output_is_replaced(tmp_path: Path) -> None:
    stale = SAMPLE.replace("   x = 1\n   $", "   x = 2\n   and more\n   $")
    assert stale != SAMPLE
    assert as_run(stale, "sample.md", prepare(tmp_path / "reader")) == SAMPLE


def test_only_measured_times_may_differ() -> None:
    assert without_measured("found in 1.2 s CPU, 3 plans") == without_measured("found in 34 ms CPU, 3 plans")
    assert without_measured("found in 1.2 s CPU, 3 plans") != without_measured("found in 1.2 s CPU, 4 plans")


def test_every_document_is_read() -> None:
    assert {path.name for path in DOCUMENTS} >= {"README.md", "index.md", "vocabulary.md", "formulas.md"}
