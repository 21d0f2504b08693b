"""PyTorch, loaded when something is captured."""

from __future__ import annotations

from importlib.util import find_spec

from steptime.errors import UserError


def require_torch() -> None:
    """Say how to install PyTorch where it is missing.

    Raises:
        UserError: PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise UserError("capturing a module needs PyTorch", hint="pip install 'steptime[torch]'")
