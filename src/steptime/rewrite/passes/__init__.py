"""Template passes: each a row that says what it matches, when, what it makes, and from where it is known."""

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
"""Passes in the order in which they are tried, each stage until nothing changes."""

PASSES: Final[tuple[Pass, ...]] = tuple(dict.fromkeys(each for stage in STAGES for each in stage))
"""Every pass once."""

MOVES: Final[tuple[Pass, ...]] = (*PASSES, *convolutions.PASSES)
"""What searches try: the template passes, and moves that may cost more before they gain."""
