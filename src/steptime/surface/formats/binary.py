"""Write a file of bytes whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from steptime.errors import InputFileError


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
        target = target.resolve()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            mask = os.umask(0o077)
            os.umask(mask)
            Path(name).chmod(target.stat().st_mode if target.exists() else 0o666 & ~mask)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputFileError(str(path), f"cannot be written: {error.strerror or error}") from None
    except ValueError as error:
        raise InputFileError(repr(str(path)), f"not a path: {error}") from None
