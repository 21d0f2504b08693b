"""The mode of the published model: its method, its space, its statistics."""

from __future__ import annotations

from typing import Final

from steptime.lab.published.method import PUBLISHED
from steptime.lab.published.space import PublishedSpace
from steptime.lab.published.statistics import statistics
from steptime.search.modes import Mode

MODE: Final = Mode(
    method=PUBLISHED,
    space=PublishedSpace(),
    attentions=("fused", "unfused", "summa"),
    statistics=statistics,
    auto={"1d": (), "context": (), "2d": ()},
)
