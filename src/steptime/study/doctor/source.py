"""Opens a log or a trace, plain or gzip, and says which of the two it is."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from steptime.errors import InputFileError

#: Longest line of a log that is looked at; a longer one is cut (progress bars, dumped tensors).
MAX_LINE: Final = 20_000
#: Characters in which a trace must show itself.
_HEAD_BYTES: Final = 4096
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"


def open_bytes(path: str) -> IO[bytes]:
    """The bytes of a file, decompressed.

    Raises:
        InputFileError: it does not exist, cannot be read, or is a folder.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115 the caller closes it
        magic = file.read(2)
        file.seek(0)
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputFileError(path, f"not a path: {error}") from None
    return gzip.open(file, "rb") if magic == _GZIP else file  # type: ignore[return-value]


def kind_of(path: str) -> str:
    """``trace`` for JSON, ``log`` for text.

    Raises:
        InputFileError: it is empty, binary, or cannot be read.
    """
    try:
        with open_bytes(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise InputFileError(path, f"cannot be decompressed: {error}") from None
    text = head.removeprefix(_BOM).strip()
    if not text:
        raise InputFileError(path, "is empty")
    if b"\x00" in text:
        raise InputFileError(path, "is binary: neither a training log nor a trace", hint=HINT)
    if text[:1] == b"{" or (text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"]", b"")):
        return "trace"
    return "log"


HINT: Final = (
    "give a log of Megatron-LM, DeepSpeed or torchtitan, or a Chrome trace of torch.profiler (.json, .json.gz)"
)


def lines_of(path: str) -> Iterator[str]:
    """Lines of a log; what a progress bar overwrote counts as lines, and overlong ones are cut.

    Raises:
        InputFileError: it cannot be read or decompressed at all.
    """
    with open_bytes(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline=None)
        read = 0
        try:
            while line := text.readline(MAX_LINE):
                read += 1
                yield line.rstrip("\n")
        except (OSError, EOFError) as error:
            if not read:
                raise InputFileError(path, f"cannot be decompressed: {error}") from None
