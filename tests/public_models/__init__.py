"""More than a hundred architectures of public packages, built from their configurations."""

from __future__ import annotations

from public_models.media import detectors, diffusers, graphs, heard, photographs, seen, with_text
from public_models.rows import Row, loss_of
from public_models.texts import decoders, texts

__all__ = ["ROWS", "Row", "loss_of"]

_PARTS = (decoders, texts, seen, with_text, detectors, heard, diffusers, graphs, photographs)
ROWS: dict[str, Row] = {row.name: row for part in _PARTS for row in part()}
"""Name -> architecture."""
