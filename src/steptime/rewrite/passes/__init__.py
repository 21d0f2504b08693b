"""Template passes as rows: the pattern, the condition, the replacement, and the source."""

from __future__ import annotations

from typing import Final

from steptime.rewrite.passes import convolutions, fusion, layers, products, tidy
from steptime.rewrite.scene import Pass

STAGES: Final[tuple[tuple[Pass, ...], ...]] = (
    tidy.PASSES,
    layers.PASSES,
    products.PASSES,
    products.LAST,
    tidy.PASSES,
    (fusion.RECOMPUTE,),
    (fusion.EPILOGUE,),
    (fusion.FUSION,),
)
"""Stages of passes in order; each is repeated until nothing changes."""

PASSES: Final[tuple[Pass, ...]] = tuple(dict.fromkeys(each for stage in STAGES for each in stage))
"""Every pass once."""

MOVES: Final[tuple[Pass, ...]] = (*PASSES, *convolutions.PASSES)
"""Moves of searches: the template passes, and passes that may cost more before they gain."""
