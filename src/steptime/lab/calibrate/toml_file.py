"""Parts of the TOML files that a calibration writes."""

from __future__ import annotations

from pathlib import Path

from steptime.errors import InputFileError
from steptime.hardware.profiles import toml_text
from steptime.store.files import is_file


def refuse_foreign(path: str | Path, mark: str) -> None:
    """Do not overwrite what a calibration has not written.

    Raises:
        InputFileError: the file exists and its first line is not ``mark``.
    """
    target = Path(path)
    if not is_file(target) or target.stat().st_size == 0:
        return
    try:
        with target.open(encoding="utf-8", errors="replace") as file:
            first = file.readline().rstrip("\n")
    except OSError as error:
        raise InputFileError(str(path), f"cannot be read: {error.strerror or error}") from None
    if first != mark:
        raise InputFileError(
            str(path), "exists and was not written by a calibration", hint="give another file with --out, or move it"
        )


def text_of(value: str) -> str:
    """A TOML basic string on one line, without what cannot be printed."""
    return toml_text("".join(c if c.isprintable() else " " for c in value))


def quantity_of(value: float, unit: str) -> str:
    """A number with its unit.

    >>> quantity_of(4e11, "B/s")
    '"4e+11 B/s"'
    """
    return f'"{value:.6g} {unit}"'
