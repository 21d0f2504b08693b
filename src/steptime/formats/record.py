"""What every importer reports beside the record that it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What a file said that was not used, and what it did not say that was assumed."""

    source: str
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Key (with its path, ``vision_config``) -> why it was not used."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Key that the file lacks -> the value taken, and why."""
    telling: frozenset[str] = frozenset()
    """Those of both that whoever uses the model's numbers has to know: parts left out, keys that are not known, choices
    between several readings. Not: keys without a cost, defaults of the family."""
