"""The file of frameworks that a user brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import FieldError
from steptime.plan.framework_file import PACKAGED
from steptime.plan.framework_library import load_framework


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
