"""Reading a user's text file with all the ways in which that can fail named."""

from __future__ import annotations

import os
from pathlib import Path

from steptime.errors import InputFileError

MAX_FILE_BYTES = 16 * 2**20


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular UTF-8 file of at most 16 MiB.

    Raises:
        InputFileError: the file is missing, a directory, no regular file, unreadable, too large or not UTF-8.
    """
    where = os.fspath(path)
    try:
        file = Path(path)
        if file.is_dir():
            raise InputFileError(where, "is a directory, not a file")
        if not file.exists():
            raise InputFileError(where, "there is no such file")
        if not file.is_file():
            raise InputFileError(where, "is not a regular file")
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise InputFileError(where, f"has {size} bytes; a model file has at most {MAX_FILE_BYTES}")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(where, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InputFileError(where, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputFileError(repr(where), f"is not a path: {error}") from None
