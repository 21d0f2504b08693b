"""Names of devices as tables of measurements and drivers write them: words in any order, memory, form of the module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAKERS: Final = frozenset(
    {"nvidia", "tesla", "geforce", "quadro", "amd", "radeon", "instinct", "intel", "habana", "google", "cloud", "aws"}
)
"""Words before the name of a chip that do not tell chips apart."""
NOISE: Final = frozenset(
    {"gpu", "gpus", "accelerator", "card", "graphics", "module", "tensor", "core", "ac", "generation", "edition"}
)
"""Words behind it that do not."""
FORMS: Final = frozenset({"sxm", "pcie", "oam", "nvl", "nvl72", "nvl36"})
"""Forms of a module, which tell chips apart where the catalogue has several of one."""
RACKS: Final = frozenset({"nvl72", "nvl36"})
"""Forms that say which rack a module is in, and nothing about it."""
LONGEST: Final = 200
"""Letters of a name that are read."""
MEMORY_TOLERANCE: Final = 0.075
"""Relative difference up to which a memory is that of a datasheet: GB or GiB, and what of it is in use."""
_MEMORY: Final = re.compile(r"\b(\d{1,4}) ?gi?b?\b")
_BOUNDARY: Final = re.compile(r"^(rtx|gtx)(?=\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """What a name says."""

    words: frozenset[str]
    """Words that tell chips apart, without their form."""
    forms: frozenset[str]
    memory_gb: float | None
    """Memory that the name states; GB or GiB."""


def spelling_of(name: str) -> Spelling:
    """What a name of a device says, whatever the order of its words.

    >>> found = spelling_of("NVIDIA A100-SXM4-80GB")
    >>> sorted(found.words), sorted(found.forms), found.memory_gb
    (['a100'], ['sxm'], 80.0)
    >>> sorted(spelling_of("rtx4090").words), spelling_of("NVIDIA H100 80GB HBM3").forms
    (['4090', 'rtx'], frozenset())
    """
    plain = re.sub(r"[\s_\-,()]+", " ", name.lower()[:LONGEST]).strip()
    memory = _MEMORY.search(plain)
    rest = _MEMORY.sub(" ", plain, count=1) if memory else plain
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in _BOUNDARY.sub(r"\1 ", rest).split()}
    words = {word for word in words if not re.fullmatch(r"hbm\d\w?|gddr\d\w?|gen\d", word)} - MAKERS - NOISE
    return Spelling(words=frozenset(words - FORMS), forms=frozenset(words & FORMS) - RACKS,
                    memory_gb=float(memory[1]) if memory else None)  # fmt: skip


def is_memory(stated_gb: float, memory_bytes: float) -> bool:
    """Whether a stated memory, in GB or GiB, is that of a device (bytes).

    >>> is_memory(80, 80 * 2**30), is_memory(141, 141e9), is_memory(40, 80e9)
    (True, True, False)
    """
    return any(abs(stated_gb * unit / memory_bytes - 1) <= MEMORY_TOLERANCE for unit in (1e9, 2.0**30))
