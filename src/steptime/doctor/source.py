"""Opening of a log or a trace, plain or gzip, and detection of its kind."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from steptime.errors import InputFileError
from steptime.store.files import BROKEN, SPECIAL, unreadable

#: Longest line of a log; a longer one is cut (progress bars, dumped tensors).
MAX_LINE: Final = 20_000
#: Bytes at the start of a file that decide its kind.
_HEAD_BYTES: Final = 4096
#: Characters read at a time.
CHUNK: Final = 2**20
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
#: Objects that a Trainer prints step by step: in Python's quotes, or one to a line.
_OF_LOG: Final = re.compile(rb"\{\s*'|\{[^{}\n]*\}\s*\n\s*[^\s,]")
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def open_bytes(path: str) -> IO[bytes]:
    """The bytes of a file, decompressed.

    Raises:
        InputFileError: it does not exist, cannot be read, or is a folder.
    """
    try:
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise InputFileError(path, f"{SPECIAL}: it is read more than once", hint="write it to a file first")
        with Path(path).open("rb") as file:
            packed = file.read(2) == _GZIP
        return gzip.open(path, "rb") if packed else Path(path).open("rb")  # type: ignore[return-value]
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def kind_of(path: str) -> str:
    """``trace`` for JSON, ``log`` for text.

    Raises:
        InputFileError: it is empty, binary, or cannot be read.
    """
    try:
        with open_bytes(path) as file:
            head: bytes = file.read1(_HEAD_BYTES)  # type: ignore[attr-defined]
    except BROKEN as error:
        raise InputFileError(path, f"cannot be decompressed: {error}") from None
    if head.startswith(_UTF16) and b"\x00" in head:
        raise InputFileError(path, "is UTF-16 text", hint="save it as UTF-8")
    text = head.removeprefix(_BOM).strip()
    if not text:
        raise InputFileError(path, "is empty")
    if b"\x00" in text:
        raise InputFileError(path, "is binary: neither a training log nor a trace", hint=HINT)
    if (text[:1] == b"{" and not _OF_LOG.match(text)) or (
        text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"]", b"")
    ):
        return "trace"
    return "log"


HINT: Final = (
    "give a log of Megatron-LM, NeMo, DeepSpeed, torchtitan, MaxText or a Trainer, or a Chrome trace of torch.profiler "
    "(.json, .json.gz)"
)


class Text:
    """Text of a compressed or plain file, up to the point where the file is cut off."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self.cut: str | None = None
        """Reason why the file ended early."""

    def read(self, wanted: int) -> str:
        """At least ``wanted`` characters, unless the file ends."""
        parts: list[str] = []
        have = 0
        while have < wanted and self.cut is None:
            try:
                data = self._file.read1(wanted)  # type: ignore[attr-defined]
            except BROKEN as error:
                self.cut = str(error)
                break
            if not data:
                break
            parts.append(self._decoder.decode(data))
            have += len(parts[-1])
        return "".join(parts)


class Lines:
    """Lines of a log; overwritten states of a progress bar are lines too, and overlong lines are cut."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut: str | None = None
        """Reason why the file ended early, set once all lines are read."""

    def __iter__(self) -> Iterator[str]:
        with open_bytes(self.path) as file:
            text = Text(file)
            rest = ""
            while more := text.read(CHUNK):
                lines = (rest + more).splitlines()
                rest = "" if more.endswith(("\n", "\r")) else lines.pop()[:MAX_LINE]
                yield from (line[:MAX_LINE] for line in lines)
            if rest:
                yield rest
        self.cut = text.cut
