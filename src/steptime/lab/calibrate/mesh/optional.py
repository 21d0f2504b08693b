"""SciPy, loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from steptime.errors import UserError


def scipy_module(name: str) -> Any:
    """A module of SciPy.

    Raises:
        UserError: SciPy is not installed; the message names the extra that brings it.
    """
    try:
        return import_module(name)
    except ImportError:
        raise UserError("finding a mesh needs SciPy", hint="pip install 'steptime[calibrate]'") from None
