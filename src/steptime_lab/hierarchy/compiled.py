"""Kernels over single accesses: compiled by numba where it is installed, else interpreted up to a length.

A kernel only indexes flat sequences of whole numbers, so that both ways give the same numbers. Interpreted, the
sequences are lists, because Python indexes a list faster than an array.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, util
from typing import Any, Final, TypeVar

from steptime.errors import UserError
from steptime.num import Array

F = TypeVar("F", bound=Callable[..., Any])
COMPILED: Final = util.find_spec("numba") is not None
"""Whether numba is installed."""
MOST_INTERPRETED: Final = 4_000_000
"""Largest number of accesses that are simulated without numba: about ten seconds."""
EXTRA: Final = "pip install 'steptime[hierarchy]'"


def jit(kernel: F) -> F:
    """The kernel compiled by numba on its first call, or as it is where numba is missing."""
    return import_module("numba").njit(cache=True)(kernel) if COMPILED else kernel


def sequence(values: Array) -> Any:
    """Values as a kernel indexes them: an array where kernels are compiled, else a list."""
    return values if COMPILED else values.tolist()


def refuse_long(accesses: int) -> None:
    """Refuse a trace that would take minutes without numba.

    Raises:
        UserError: the trace is longer than `MOST_INTERPRETED`, and numba is not installed.
    """
    if not COMPILED and accesses > MOST_INTERPRETED:
        raise UserError(
            f"{accesses:,} accesses need numba, which is not installed; without it at most {MOST_INTERPRETED:,}",
            hint=f"{EXTRA}, or a smaller size",
        )
