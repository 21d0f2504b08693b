"""Parts of the TOML files that a calibration writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from steptime.errors import InputFileError
from steptime.hardware.profiles import toml_text
from steptime.store.files import is_file


def refuse_foreign(path: str | Path, mark: str) -> None:
    """Refuses to overwrite a file that no calibration has written.

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


def with_table(text: str, name: str, lines: Sequence[str], comment: str) -> str:
    r"""The text of a TOML file with a table and the tables below it replaced by ``lines`` at the end of the file.

    >>> print(with_table("[a]\nx = 1\n\n[a.b]\ny = 1\n\n[c]\nz = 1\n", "a", ["x = 2"], "by hand"), end="")
    [c]
    z = 1
    <BLANKLINE>
    [a]  # by hand
    x = 2
    """
    kept = without_table(text, name).rstrip()
    return "\n".join([*([kept, ""] if kept else []), f"[{name}]  # {comment}", *lines]).rstrip() + "\n"


def without_table(text: str, name: str) -> str:
    """The text of a TOML file without a table and the tables below it."""
    parts = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not re.match(rf"\[{re.escape(name)}(?=[.\]])", part))


def text_of(value: str) -> str:
    """A TOML basic string on one line, without what cannot be printed."""
    return toml_text("".join(c if c.isprintable() else " " for c in value))


def quantity_of(value: float, unit: str) -> str:
    """A number with its unit.

    >>> quantity_of(4e11, "B/s")
    '"4e+11 B/s"'
    """
    return f'"{value:.6g} {unit}"'
