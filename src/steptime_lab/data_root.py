"""The folder of the bulk measurements, which are too large for the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from steptime.errors import UserError, first_few, shorten

#: Environment variable that names the folder.
VARIABLE: Final = "STEPTIME_DATA"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]


def data_root() -> Path | None:
    """The folder of measurements, or None if there is none.

    The environment variable ``STEPTIME_DATA`` names it; without it, it is the folder ``shared/data`` next to the
    checkout that steptime runs from.

    Raises:
        UserError: ``STEPTIME_DATA`` names something that is not a folder.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise UserError(f"{VARIABLE}: {shorten(given)!r} is not a folder", hint="give the folder of measurements")
        return folder
    shared = _CHECKOUT.parent / "shared" / "data"
    return shared if (_CHECKOUT / "pyproject.toml").is_file() and shared.is_dir() else None


def require_data(name: str) -> Path:
    """Path of one file of measurements, for example ``"kernels.parquet"``.

    Raises:
        UserError: there is no folder of measurements, or no such file in it.
    """
    root = data_root()
    if root is None:
        raise UserError(
            f"the measurements {shorten(name)!r} are not here",
            hint=f"set the environment variable {VARIABLE} to the folder that has them",
        )
    path = root / name
    if not path.is_file():
        present = first_few(sorted(p.name for p in root.iterdir() if p.is_file()), 12)
        raise UserError(f"there is no {shorten(name)!r} in {root}", hint=f"it has: {present or 'no files'}")
    return path
