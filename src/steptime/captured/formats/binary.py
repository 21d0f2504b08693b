"""Write a file of bytes whole or not at all."""

from __future__ import annotations

from pathlib import Path

from steptime.errors import InputFileError
from steptime.store.files import replace_file, unwritable


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file; a device or a pipe is written to directly.

    Raises:
        InputFileError: it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        replace_file(target.resolve(), data)
    except OSError as error:
        raise unwritable(path, error) from None
    except ValueError as error:
        raise InputFileError(repr(str(path)), f"not a path: {error}") from None
