"""Distribution of tokens over the experts of a model: from a file, or by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from typing import Final

from steptime.cost.experts import drawn_shares, lognormal_shares, zipf_shares
from steptime.errors import InputFileError, PlanError
from steptime.model.spec import ModelSpec
from steptime.plan.job import ExpertLoad
from steptime.store.files import read_text

MAX_BYTES: Final = 1 << 20
DRAWN: Final[dict[str, tuple[Callable[[int, float], list[float]], float]]] = {
    "zipf": (zipf_shares, 10.0),
    "lognormal": (lognormal_shares, 10.0),
}
"""Distribution -> function for the shares of experts by popularity, and its largest parameter."""
USAGE: Final = "uniform, zipf:EXPONENT, lognormal:SIGMA, or a file with the tokens of each expert (.csv or .json)"


def expert_load_of(text: str | None, model: ModelSpec) -> ExpertLoad | None:
    """Shares of the tokens by expert, in the order in which ranks hold the experts.

    ``zipf`` and ``lognormal`` are laid over the experts in an order drawn once, as popularity does not follow the
    numbers of experts; a file keeps its own order.

    Raises:
        UserError: the distribution is unknown, its number is out of range, or the file does not match the model.
    """
    if text is None or text == "uniform" or model.experts is None:
        return None
    count, (kind, _, value) = model.experts.experts, text.partition(":")
    if kind in DRAWN and value:
        make, most = DRAWN[kind]
        number = _number(value)
        if not 0 <= number <= most:
            raise PlanError(f"expert_load {text}: the number of {kind} is 0 to {most:g}", hint=USAGE)
        return ExpertLoad(name=text, shares=tuple(drawn_shares(make(count, number))))
    if not text.endswith((".csv", ".json")):
        raise PlanError(f"expert_load {text!r} is no distribution and no file", hint=USAGE)
    tokens = _tokens(text)
    if len(tokens) != count:
        raise InputFileError(text, f"has {len(tokens)} experts, and {model.name} has {count}")
    whole = sum(tokens)
    if not (whole > 0 and isfinite(whole)):
        raise InputFileError(text, "no expert has a token")
    return ExpertLoad(name=text, shares=tuple(each / whole for each in tokens))


def _tokens(path: str) -> list[float]:
    written = read_text(path, MAX_BYTES, "a load of experts")
    found: object
    if path.endswith(".json"):
        try:
            found = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise InputFileError(path, f"is not valid JSON: {str(error)[:200]}") from None
        if not isinstance(found, list):
            raise InputFileError(path, "is no list of numbers, one for each expert")
        cells = [str(each) if type(each) in (int, float) else "?" for each in found]
    else:
        import csv

        rows = [row for row in csv.reader(written.splitlines()) if row and not row[0].startswith("#")]
        header = rows[0] if rows else []
        column = header.index("tokens") if "tokens" in header else None
        cells = [row[-1 if column is None else column % len(row)] for row in rows[column is not None :]]
    tokens = [_number(cell) for cell in cells]
    for number, (each, cell) in enumerate(zip(tokens, cells, strict=True)):
        if not (isfinite(each) and each >= 0):
            raise InputFileError(path, f"expert {number} has {cell.strip()[:40]!r} tokens", hint="numbers, 0 or more")
    return tokens


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
