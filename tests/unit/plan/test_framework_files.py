"""The file of frameworks that a user brings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steptime.errors import FieldError
from steptime.plan.framework_file import PACKAGED, SLOWED, load_framework


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("[common]", "[common]\nmatirx = 9.0", "common.matirx: is unknown\n  did you mean matrix?"),
        ("unknown_sources", "unknown_sorces", "band.model.unknown_sorces: is unknown\n  did you mean unknown_sources"),
        ("[doubts]", "[doubt]\nx = 1\n[doubts]", "doubt: is unknown\n  did you mean doubts?"),
        ('[device."a10"]', '[device."a10"]\nsource = 3', "device.a10.source: is unknown\n  did you mean sources?"),
        ('[framework."torchtitan".doubts]', '[framework."torchtitan".doubts]\nmatric = 1.0',
         "framework.torchtitan.doubts.matric: is unknown\n  did you mean matrix?"),
        ('[framework."torchtitan"]', '[framework."torchtitan"]\nrun = 1', "framework.torchtitan.run: is unknown"),
    ],
)  # fmt: skip
def test_keys_of_the_file_that_nothing_reads_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, problem: str
) -> None:
    """They were without effect, and without a word."""
    (tmp_path / "frameworks.toml").write_text(PACKAGED.read_text().replace(before, after, 1))
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    with pytest.raises(FieldError) as caught:
        load_framework("torchtitan", "h100-sxm")
    assert problem in str(caught.value)


def test_a_framework_that_nobody_named_is_as_much_slower_as_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\[generic\]\nslower = [\d.]+\n", "", PACKAGED.read_text())
    plain, slower = tmp_path / "older", tmp_path / "newer"
    for folder, more in ((plain, ""), (slower, "[generic]\nslower = 1.25\n\n")):
        folder.mkdir()
        (folder / "frameworks.toml").write_text(text.replace("[common]", f"{more}[common]", 1))
    found = []
    for folder in (plain, slower):
        monkeypatch.setenv("STEPTIME_PATH", str(folder))
        found.append([load_framework(name, "h100-sxm") for name in ("generic", "torchtitan")])
    (generic, named), (slow, same) = found
    assert [getattr(slow, name) / getattr(generic, name) for name in SLOWED] == pytest.approx([1.25] * len(SLOWED))
    assert slow.data_links == generic.data_links and named == same
