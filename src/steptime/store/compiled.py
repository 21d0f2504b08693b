"""The TOML files of the package, parsed when it is built: one file with an index, from which single documents are read.

A document is found by the text that it was parsed from; a file that was edited since is not found, and is parsed.
Documents of other modules, derived from a file and from code, are found by all of these texts.

The first line is the file's seal: the version of steptime that wrote it and a checksum of the rest. A file of another
version, or one that was damaged or edited, is not used: every document is then parsed from its text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.version import __version__

try:
    from _blake2 import blake2b  # the same function without OpenSSL, which takes longer to load than all documents
except ImportError:  # pragma: no cover
    from hashlib import blake2b

FILE: Final = Path(__file__).with_name("compiled.json")
"""Written by ``scripts/catalogue`` and by the build of the package; without it every file is parsed."""
SHORTEST: Final = 40
"""Least number of characters of a text that is looked up."""


def key_of(*texts: str) -> str:
    """Key of the document derived from some texts.

    >>> key_of("a", "b") == key_of("a", "b"), key_of("a", "b") == key_of("ab", "")
    (True, False)
    """
    found = blake2b(digest_size=12)
    for text in texts:
        data = text.encode(errors="surrogatepass")
        found.update(b"%d:" % len(data) + data)
    return found.hexdigest()


def compiled(*texts: str) -> Any:
    """A new copy of the document derived from some texts; None: the file does not have it."""
    index, data = _index()
    place = index.get(key_of(*texts)) if index and len(texts[0]) >= SHORTEST else None
    if place is None:
        return None
    try:
        at, length = place
        return json.loads(data[at : at + length])
    except (TypeError, ValueError):  # the file is broken
        return None


@cache
def _index() -> tuple[Mapping[str, tuple[int, int]], bytes]:
    """Index (key -> offset and length) and data of the documents; read at once, as a job needs fifty of them."""
    try:
        seal, _, rest = FILE.read_bytes().partition(b"\n")
        if seal != _seal(rest):
            return {}, b""
        line, _, data = rest.partition(b"\n")
        index = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return {}, b""
    return (index, data) if isinstance(index, dict) else ({}, b"")


def _seal(rest: bytes) -> bytes:
    """First line of a file: the version that wrote it, and a checksum of the rest."""
    return f"{__version__} {blake2b(rest, digest_size=16).hexdigest()}".encode()


def write(documents: Iterable[tuple[tuple[str, ...], Any]], path: Path = FILE) -> int:
    """Write documents with the texts that each is derived from, without documents that JSON cannot represent.

    Returns:
        Number of documents.
    """
    index, blobs, at = {}, [], 0
    for texts, document in documents:
        blob = _blob(document)
        if blob is not None and len(texts[0]) >= SHORTEST:
            index[key_of(*texts)] = (at, len(blob))
            blobs.append(blob)
            at += len(blob)
    rest = json.dumps(index, separators=(",", ":")).encode() + b"\n" + b"".join(blobs)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(_seal(rest) + b"\n" + rest)
    temporary.replace(path)
    _index.cache_clear()
    return len(index)


def _blob(document: Any) -> bytes | None:
    """A document as JSON; None: it does not survive the round trip (it has dates, or keys that are no texts)."""
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError):
        return None
    return text.encode() if repr(json.loads(text)) == repr(document) else None
