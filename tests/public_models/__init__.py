"""More than a hundred architectures of public packages, built from their configurations."""

from __future__ import annotations

from public_models.media import diffusers, graphs, heard, photographs, seen
from public_models.rows import Row, loss_of
from public_models.texts import decoders, texts

__all__ = ["ROWS", "Row", "loss_of"]

ROWS: dict[str, Row] = {
    row.name: row for row in (*decoders(), *texts(), *seen(), *heard(), *diffusers(), *graphs(), *photographs())
}
"""Name -> architecture."""
