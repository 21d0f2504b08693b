"""Distributions of sequence lengths: from a file or by name, drawn, packed."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, isfinite, log
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from steptime.errors import InputFileError, UserError
from steptime.num import Array
from steptime.store.files import read_text

MAX_BYTES: Final = 1 << 24
MOST_LENGTHS: Final = 100_000
LONGEST: Final = 10**7
POINTS: Final = 512
"""Number of lengths that represent a log-normal distribution."""
FILES: Final = (".csv", ".json")
USAGE: Final = "lognormal:MEAN,SIGMA, LENGTH=SHARE,..., or a .csv or .json with lengths and counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of tokens of documents, cut at the longest sequence."""

    name: str
    shares: tuple[tuple[float, float], ...]
    """Length and share of the documents, in rising order."""
    longest: int
    cut_share: float
    """Tokens beyond the longest sequence over all tokens."""
    written: float = 1.0
    """Sum of the given shares; 1 for counts, which are whole numbers."""

    def drawn(self, count: int, seed: int = 0) -> Array:
        """Lengths of ``count`` random documents."""
        values, weights = (np.array(column) for column in zip(*self.shares, strict=True))
        return np.random.default_rng(seed).choice(values, size=count, p=weights / weights.sum())


def lengths_of(text: str, longest: int) -> Lengths:
    """A distribution of lengths, cut at the tokens of a sequence.

    Raises:
        UserError: the notation is unknown, a number is out of range, or the file is no histogram.
    """
    counts = _counts(text)
    whole = fsum(counts.values())
    if not whole > 0:
        raise UserError(f"lengths {text[:80]}: no length has a share", hint=USAGE)
    tokens = fsum(length * count for length, count in counts.items())
    merged: dict[float, float] = {}
    for length in sorted(counts):
        merged[min(length, longest)] = merged.get(min(length, longest), 0.0) + counts[length] / whole
    kept = fsum(length * share for length, share in merged.items()) * whole
    shares = tuple((float(length), share) for length, share in merged.items() if share)
    shared = not text.endswith(FILES) and any(count != int(count) for count in counts.values())
    return Lengths(
        name=text,
        shares=shares,
        longest=longest,
        cut_share=max(1 - kept / tokens, 0.0),
        written=whole if shared else 1.0,
    )


def _counts(text: str) -> dict[int, float]:
    kind, _, numbers = text.partition(":")
    if kind == "lognormal":
        return _lognormal(text, numbers)
    if text.endswith(FILES):
        return _of_file(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return _checked([(length, share or "1") for length, _, share in pairs], f"lengths {text[:80]}")


def _lognormal(text: str, numbers: str) -> dict[int, float]:
    mean, sigma = (_number(part) for part in [*numbers.split(","), "", ""][:2])
    if not (1 <= mean <= LONGEST and 0 <= sigma <= 5):
        raise UserError(f"lengths {text}: the mean is 1 to {LONGEST:,} tokens, sigma 0 to 5", hint=USAGE)
    normal, out = NormalDist(log(mean) - sigma**2 / 2, max(sigma, 1e-9)), dict[int, float]()
    for n in range(POINTS):
        length = max(round(min(exp(normal.inv_cdf((n + 0.5) / POINTS)), float(LONGEST))), 1)
        out[length] = out.get(length, 0.0) + 1.0
    return out


def _of_file(path: str) -> dict[int, float]:
    written = read_text(path, MAX_BYTES, "a histogram of lengths")
    if path.endswith(".json"):
        try:
            found: Any = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise InputFileError(path, f"is not valid JSON: {str(error)[:200]}") from None
        if isinstance(found, Mapping):
            return _checked([(str(length), str(count)) for length, count in found.items()], path)
        if isinstance(found, list):
            return _checked([(str(each), "1") for each in found], path)
        raise InputFileError(path, "is neither a list of lengths nor a table of length and count")
    rows = [row for row in csv.reader(written.splitlines()) if row and not row[0].startswith("#")]
    if rows and not isfinite(_number(rows[0][0])):
        rows = rows[1:]
    return _checked([(row[0], row[1] if len(row) > 1 else "1") for row in rows], path)


def _checked(pairs: Sequence[tuple[str, str]], where: str) -> dict[int, float]:
    out: dict[int, float] = {}
    for length, count in pairs:
        size, weight = _number(length), _number(count)
        if not (1 <= size <= LONGEST and size == int(size)):
            raise UserError(f"{where}: {length[:40]!r} is no length", hint=f"whole numbers from 1 to {LONGEST:,}")
        if not (isfinite(weight) and weight >= 0):
            raise UserError(f"{where}: {count[:40]!r} of length {length[:40]} is no count", hint="numbers, 0 or more")
        out[int(size)] = out.get(int(size), 0.0) + weight
    if not out or len(out) > MOST_LENGTHS:
        raise UserError(f"{where}: it has {len(out):,} lengths", hint=f"1 to {MOST_LENGTHS:,}")
    return out


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def packed(lengths: Array, capacity: int) -> list[list[float]]:
    """Pack documents into sequences: longest first, each into the first sequence that has room (first-fit decreasing).

    >>> packed(np.array([6.0, 5.0, 4.0, 3.0]), 10)
    [[6.0, 4.0], [5.0, 3.0]]
    """
    room, out = np.zeros(len(lengths)), list[list[float]]()
    for length in np.sort(lengths)[::-1]:
        fits = room[: len(out)] >= length
        at = int(fits.argmax()) if fits.any() else len(out)
        if at == len(out):
            out.append([])
            room[at] = capacity
        out[at].append(float(length))
        room[at] -= length
    return out


def context_load(documents: Sequence[float], ranks: int, *, zigzag: bool = True) -> float:
    """Attention of the fullest context rank over the mean, in one sequence of causal documents.

    Each rank has two pieces of the sequence, one from either end (``zigzag``), or one contiguous piece.

    >>> context_load([8.0], 2), round(context_load([8.0], 2, zigzag=False), 3)
    (1.0, 1.444)
    """
    seen = np.concatenate([np.arange(1, int(each) + 1, dtype=float) for each in documents])
    parts = [float(part.sum()) for part in np.array_split(seen, 2 * ranks if zigzag else ranks)]
    own = [parts[n] + parts[-1 - n] for n in range(ranks)] if zigzag else parts
    return max(own) * ranks / sum(own)
