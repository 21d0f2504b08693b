"""Measured links: one or several quantities for every ordered pair of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime.errors import UserError
from steptime.num import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number per ordered pair of devices."""

    kind: str
    """``seconds``: time of a message of ``size_bytes``; ``latency``: seconds of an empty one; ``bandwidth``."""
    size_bytes: float | None = None
    values: Array
    """Matrix in SI units, from row to column; NaN where nothing was measured and on the diagonal."""

    def log_cost(self) -> Array:
        """Logarithm of the cost of a link; larger is slower. NaN where nothing was measured and on the diagonal.

        Raises:
            UserError: a value that is not positive and finite.
        """
        values = self.values.astype(np.float64)
        np.fill_diagonal(values, np.nan)
        if bool((values <= 0).any()) or bool(np.isinf(values).any()):
            raise UserError(f"a measured {self.kind} is not positive and finite", hint="put NaN where there is none")
        logs: Array = np.log(values, out=values)
        return -logs if self.kind == "bandwidth" else logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured between devices."""

    names: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    origin: str = ""
    """File that they come from, for messages."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.names)
