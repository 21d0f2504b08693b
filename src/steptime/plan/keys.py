"""Keys of a plan, the same as options, in RUN.toml, in Python and in JSON; and the ranges of what a job is given.

It imports nothing, so that the command line can read it before it knows what it will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

MAX_DEVICES: Final = 10**7
MAX_GLOBAL_BATCH: Final = 10**9
MAX_SEQ: Final = 10**8
MAX_FIT_BATCH: Final = 10**6
"""Samples of a step on one device, for ``fit``."""
MAX_FIT_SEQ: Final = 10**7


class Count(NamedTuple):
    """A whole number, and its range."""

    low: int = 1
    high: int = MAX_DEVICES


class Ratio(NamedTuple):
    """A number, its range, and what it means."""

    low: float
    high: float
    meaning: str


#: Key -> its range; of what is given in words, None (what is allowed follows from what is modelled).
KEYS: Final[Mapping[str, Count | Ratio | None]] = {
    "dp": Count(),
    "tp": Count(),
    "tp2": Count(),
    "cp": Count(),
    "pp": Count(),
    "vpp": Count(high=10**5),
    "ep": Count(),
    "etp": Count(),
    "sp": None,
    "micro_batch": Count(high=MAX_GLOBAL_BATCH),
    "recompute": None,
    "recompute_every": Count(),
    "zero": Count(0, 3),
    "shard": Count(0),
    "schedule": None,
    "overlap": None,
    "offload": None,
    "attention": None,
    "attention_dtype": None,
    "context": None,
    "gradient_dtype": None,
    "graphs": None,
    "dispatcher": None,
    "document_length": Ratio(1.0, float(MAX_SEQ), "tokens of a document of a packed sequence"),
    "expert_imbalance": Ratio(1.0, 1e4, "tokens of the fullest expert rank over the mean"),
    "expert_capacity": Ratio(0.01, 1e4, "slots of an expert over its mean tokens"),
    "panels": Count(high=10**6),
}
COUNTS: Final = {name: key for name, key in KEYS.items() if isinstance(key, Count)}
RATIOS: Final = {name: key for name, key in KEYS.items() if isinstance(key, Ratio)}
SHOWN: Final[Mapping[str, str]] = {"mbs": "micro_batch", "p(oom)": "oom_probability"}
"""What a report writes for a key -> the key."""
CHANCE: Final = "oom_probability"
"""What a search can bound in addition to degrees: the chance of running out of memory."""
WORDS: Final = ("sp", "recompute")
"""Keys in words of which each candidate of a search has its own value; they have no order."""
SEVERAL: Final = ("overlap", "offload")
"""Keys in words of which several may hold: joined by commas, or a list."""
CONSTRAINED: Final = (*COUNTS, *WORDS)
"""Keys that a search can keep at a value or, where they are counts, bound."""
JOB_KEYS: Final = tuple(name for name in KEYS if name not in CONSTRAINED)
"""Keys whose value is the same for all candidates of a search."""
AXES: Final = ("dp", "tp", "tp2", "cp", "pp")
"""Axes of the mesh, which a placement lays into fast domains."""
LAUNCHED: Final = "default"
"""Word for the order of launchers in which ranks lie on the devices; below for the fastest of all."""
SEARCHED: Final = "search"
