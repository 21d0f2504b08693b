"""Directories in which files of the user and of the package are looked for.

The directories of ``$STEPTIME_PATH``, then ``~/.config/steptime`` (or ``$XDG_CONFIG_HOME/steptime``), then the
catalogue of the package. Each has a folder per kind of file: ``devices``, ``clusters``, ``links``, ``profiles``,
``fabrics``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

CATALOGUE: Final = Path(__file__).parent / "catalogue"
"""The folder that comes with the package."""


def user_roots() -> Iterator[Path]:
    """Directories of the user, the most specific first."""
    for part in os.environ.get("STEPTIME_PATH", "").split(os.pathsep):
        if part:
            yield Path(part).expanduser()
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    yield Path(config) / "steptime"


def search_roots() -> Iterator[Path]:
    """Directories to search: those of the user, then the catalogue."""
    yield from user_roots()
    yield CATALOGUE


def is_path(name: str) -> bool:
    """True if a text is the path of a file and no name of the catalogue.

    >>> is_path("./my.toml"), is_path("h100-sxm")
    (True, False)
    """
    separators = {os.sep, os.altsep or os.sep, "/"}
    return name.endswith(".toml") or any(separator in name for separator in separators)


def named_files(folder: str) -> dict[str, Path]:
    """Name to TOML file in such a folder of the directories; the first directory that has a name wins.

    >>> named_files("clusters")["dgx-h100"].name
    'dgx-h100.toml'
    """
    found: dict[str, Path] = {}
    for root in user_roots():
        found = {**_files(root / folder), **found}
    return {**_packaged(folder), **found}


@cache
def _packaged(folder: str) -> dict[str, Path]:
    return _files(CATALOGUE / folder)


def _files(folder: Path) -> dict[str, Path]:
    try:
        return {path.stem: path for path in folder.iterdir() if path.suffix == ".toml"}
    except (OSError, ValueError):
        return {}
