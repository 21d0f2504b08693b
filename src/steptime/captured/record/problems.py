"""Errors of captures, in one message with the line of the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from steptime.captured import torch_parts as parts
from steptime.errors import UserError, shorten

_OURS = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent


class CaptureError(UserError):
    """The module could not be run under fake tensors."""


def is_of_user(filename: str) -> bool:
    """True if a file of a traceback belongs neither to PyTorch nor to steptime."""
    path = Path(filename)
    return _TORCH not in path.parents and _OURS not in path.parents and not filename.startswith("<")


def user_line(error: BaseException) -> str:
    """The last line of a traceback that belongs neither to PyTorch nor to steptime, as ``file:line: code``."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_of_user(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line or ''}".rstrip(": ")
    return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in _text(error).splitlines() if line.strip()]
    return shorten(lines[0], 300) if lines else ""


def explained(error: BaseException, what: str) -> CaptureError:
    """The error of a capture, with a hint."""
    place = user_line(error)
    at = f"\n  at {place}" if place else ""
    if isinstance(error, (parts.DynamicOutputShapeException, parts.GuardOnDataDependentSymNode)):
        problem = "the shape of a result depends on the data" + at
        hint = "say how much of a mask is true with --nonzero-share (experts: experts per token / experts), or use a \
formulation with static shapes"
        return CaptureError(f"{what}: {problem}", hint=hint)
    if isinstance(error, parts.DataDependentOutputException):
        problem = "Python code reads the value of a tensor (.item(), .tolist(), int(), if tensor: ...)" + at
        hint = (
            "capture runs without data; take that branch by a Python value, or capture the part that has no such line"
        )
        return CaptureError(f"{what}: {problem}", hint=hint)
    words = _text(error).lower()
    found = next((advice for marks, advice in ADVICE if all(mark in words for mark in marks)), None)
    last = _innermost(error)
    cause = "" if last is error else f"\n  caused by {type(last).__name__}: {_first_line(last)}"
    return CaptureError(f"{what}: {type(error).__name__}: {_first_line(error)}{at}{cause}", hint=found)


def _innermost(error: BaseException) -> BaseException:
    """The first error of a chain of causes."""
    seen = {id(error)}
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(before) in seen:
            break
        seen.add(id(before))
        error = before
    return error


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn any error of the user's code into one message with its line.

    Raises:
        CaptureError: the code raised an error, or called ``sys.exit``.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        raise CaptureError(f"{what}: the code called sys.exit({error.code!r})") from None
    except BaseException as error:
        raise explained(error, what) from None


#: Words in an error -> advice.
ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("cuda",), "capture runs on the CPU whatever the target: create tensors on the device of the inputs, no .cuda()"),
    (("fake", "device"), "create tensors on the device of the inputs, and pass tensors as arguments of forward"),
    (("process group",), "return the module without DistributedDataParallel or FSDP; `steptime plan` splits it"),
    (("sparse", "tensorimpl"), "sparse tensors cannot be captured: take dense ones, for an embedding sparse=False"),
    (("sparse", "strides"), "sparse tensors cannot be captured: take dense ones"),
)
