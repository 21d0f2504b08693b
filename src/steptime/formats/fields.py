"""What the readers of user files share: a bound on what is read, and validation errors in our own words."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ValidationError

from steptime.errors import FieldError, UserError, did_you_mean, shorten, shown
from steptime.store.files import read_text
from steptime.store.schema import keys_at

#: Largest file that is read as a description; a real one is a few kB, an estimate with details some MB.
MAX_FILE_BYTES: Final = 64 * 2**20
MAX_PROBLEMS: Final = 10


def read_description(path: str) -> str:
    """Text of a file that describes a run or an estimate.

    Raises:
        InputFileError: as :func:`steptime.store.files.read_text`.
    """
    return read_text(path, MAX_FILE_BYTES, "a description of a run")


def as_user_error(error: ValidationError, where: str, root: type[BaseModel]) -> UserError:
    """All problems of one file as one error; each names its field."""
    problems = error.errors(include_url=False, include_context=True)
    first = [_problem(p, root) for p in problems[:MAX_PROBLEMS]]
    if len(problems) == 1:
        field, text, hint = first[0]
        return FieldError(where, field, text, hint=hint)
    lines = [f"{where}: {len(problems)} fields are wrong"]
    for field, text, hint in first:
        lines.append(f"  {field}: {text}" + (f" ({hint})" if hint else ""))
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    return UserError("\n".join(lines))


def _problem(problem: Any, root: type[BaseModel]) -> tuple[str, str, str | None]:
    loc = tuple(part for part in problem["loc"] if isinstance(part, (str, int)))
    field = shorten(".".join(str(part) for part in loc)) or "document"
    if problem["type"] == "extra_forbidden":
        return field, "unknown key", did_you_mean(str(loc[-1]), keys_at(root, loc[:-1]))
    if problem["type"] == "missing":
        return field, "missing", None
    given = shown(problem["input"], 60)
    return field, f"{given}: {problem['msg'][:1].lower()}{problem['msg'][1:]}", None
