"""A chart as plain data: axes with units, named series, notes; independent of the drawing library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steptime.estimate.result import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a panel.

    >>> Axis(label="step time", unit="s", log=True).unit
    's'
    """

    label: str
    unit: str = ""
    """SI unit of the values (``s``, ``B``, ``FLOP/s``); the drawing may add a prefix. Empty: none."""
    log: bool = False
    ticks: tuple[str, ...] = ()
    """Names of the places 0, 1, 2 ... of a categorical axis; empty: a numeric axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values that belong together; all columns have the same length."""

    name: str
    style: str
    """Kind of drawing: ``line``, ``step`` (each value holds until the next one), ``rule`` (a line that bounds
    the others), ``points``, ``bar`` (stacked in
    the order of the series), ``cap`` (a limit on one bar), ``box`` (from x on, ``size`` long, in row y), ``cell``
    (a place of a grid; ``size`` is its value)."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    size: tuple[float, ...] = ()
    """Third value of each entry: the area share of points, the length of boxes, the value of cells."""
    labels: tuple[str, ...] = ()
    """Text at each value; empty texts are left out."""
    faint: bool = False
    """True: drawn fainter than other series, such as overlapped time or plans off the front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes with its series."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    value: Axis = Axis(label="")
    """Axis of ``size``, for styles that draw it as a scale of its own (``cell``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels side by side, under one title.

    >>> series = Series(name="a", style="line", x=(1.0, 2.0), y=(3.0, 4.0))
    >>> panel = Panel(x=Axis(label="GPUs"), y=Axis(label="step time", unit="s"), series=(series,))
    >>> chart = Chart(kind="scaling", title="", panels=(panel,))
    >>> chart.to_json()["panels"][0]["series"][0]["y"]
    (3.0, 4.0)
    """

    kind: str
    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    """Sentences below the panels, on omissions and common properties."""

    def to_json(self) -> Mapping[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}
