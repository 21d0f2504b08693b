"""What a deep-learning training step will cost before you run it, why, and how to make it cheaper."""

from __future__ import annotations

__version__ = "0.1.0"
