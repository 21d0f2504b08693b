"""The release script: package, changelog and citation have one version, and a tag that differs is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from steptime import __version__

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/release"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_package_changelog_and_citation_have_one_version() -> None:
    done = run("--check", f"v{__version__}")
    assert (done.returncode, done.stdout) == (0, f"release: v{__version__}\n")


def test_a_tag_of_another_version_is_refused_by_file() -> None:
    done = run("--check", "v9.9.9")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "src/steptime/version.py", "CHANGELOG.md", "CITATION.cff",
    ]  # fmt: skip


def test_notes_are_the_section_of_the_changelog() -> None:
    notes = run("--notes", f"v{__version__}").stdout
    assert "### Plans and estimates" in notes and "## [" not in notes
    assert run("--notes", "v9.9.9").returncode == 2


def test_locked_files_are_of_the_versions_of_the_constraints() -> None:
    pins = re.compile(r"^([\w.-]+)==([^\s;]+)", re.M)
    locked, constrained = (
        {name.lower(): version for name, version in pins.findall((ROOT / name).read_text())}
        for name in ("locked.txt", "constraints.txt")
    )
    assert {"numpy", "rich", "argcomplete", "hatchling", "duckdb", "highspy"} <= set(locked)
    assert not {name for name, version in locked.items() if constrained.get(name, version) != version}
