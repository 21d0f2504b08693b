"""Figures by matplotlib (an optional dependency): checked early, one style, reproducible bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, UserError
from steptime.registry import require
from steptime.store.files import refuse_unwritable

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#555555")
"""Colours that colour-blind readers can distinguish; Okabe and Ito, 2008."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "steptime",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 9.0,
    "savefig.dpi": 150,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "hatch.linewidth": 0.6,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.4,
    "axes.titlesize": 9.0,
}
UNDATED: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata without which a file would differ from one minute to the next."""


def refuse_plot(path: Path) -> None:
    """Check before the work that a picture can be written.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    require("matplotlib", "a picture")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(f"{path}: matplotlib cannot write such a file", hint=f"one of {', '.join(sorted(kinds))}")
    refuse_unwritable(path)


@contextmanager
def drawn(path: Path, width: float = 6.4, height: float = 4.4) -> Iterator[Any]:
    """Context of a figure (sizes in inches) in the common style; it is written to a file at the end.

    Raises:
        UserError: matplotlib is not installed, or does not write this kind of file.
        InputFileError: the file cannot be written.
    """
    require("matplotlib", "a picture")
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    cycle = cycler(color=COLOURS, marker=MARKERS, linestyle=LINES)
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycle}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name from outside in letters that the font lacks
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        try:
            figure.savefig(path, metadata=UNDATED.get(path.suffix.lower().removeprefix(".")))
        except OSError as error:
            raise InputFileError(str(path), f"cannot be written: {error.strerror or error}") from None
        except ValueError as error:
            raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
