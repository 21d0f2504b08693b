"""Launch files read by the software's own parser, where it is installed; 500 of each: ``benchmarks/launch.md``."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path

import pytest

import launch_parsers
from launch_plans import legal_launches


@pytest.mark.parametrize("name", sorted(launch_parsers.PARSERS))
def test_the_software_reads_the_plan(name: str, tmp_path: Path) -> None:
    if package := launch_parsers.missing(name):
        pytest.skip(f"{package} is not installed")
    for _, launch, exported in islice(legal_launches(name, seed=4), 5):
        path = tmp_path / exported.file
        path.write_text(exported.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = launch_parsers.parsed(name, path, launch.values)
        assert found == launch_parsers.wanted(name, launch.values, launch.node_devices)
