"""Pictures by matplotlib, which an extra brings: asked for early, saved with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steptime.errors import InputFileError, UserError
from steptime.store.files import refuse_unwritable


def refuse_plot(path: Path) -> None:
    """Find out before the work that a picture cannot be written.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    kinds = new_figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(
            f"--plot {path}: matplotlib cannot write such a file", hint=f"one of {', '.join(sorted(kinds))}"
        )
    refuse_unwritable(path)


def new_figure(width: float = 6, height: float = 6) -> Any:
    """An empty figure, in inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a picture needs matplotlib", hint="pip install 'steptime[calibrate]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        UserError: matplotlib does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputFileError(str(path), f"cannot be written: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"--plot {path}: {str(error).splitlines()[0]}") from None
