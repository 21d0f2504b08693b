"""The processor of this machine: part of the names of all files that hold only for it."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steptime.store.journal import content_key

CPUINFO: Final = Path("/proc/cpuinfo")
X86: Final = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
ARM: Final = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
FIELDS: Final = (*X86, *ARM)
"""Lines of ``/proc/cpuinfo`` that identify the processor and its instructions."""
LONGEST: Final = 32
"""Largest number of letters of the model in a file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A processor as its system describes it."""

    cpu: str
    """Model of the processor."""
    key: str
    """Equal for processors of one model, stepping and set of instructions."""

    @property
    def label(self) -> str:
        """The model as part of a file name.

        >>> Host(cpu="Intel(R) Xeon(R) CPU @ 2.20GHz", key="").label
        'Intel-R-Xeon-R-CPU-2-20GHz'
        """
        return re.sub(r"[^A-Za-z0-9]+", "-", self.cpu).strip("-")[:LONGEST] or "unknown"


def this_host(path: Path | None = None) -> Host:
    """The processor that this process runs on; where it is not described, the name of the machine stands for it.

    Args:
        path: description of the processors, in the form of ``/proc/cpuinfo``, which is the default.
    """
    found = _first_processor(path or CPUINFO)
    cpu = found.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    return Host(cpu=cpu, key=content_key(found or {"cpu": cpu, "machine": platform.machine(), "node": platform.node()}))


def _first_processor(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = (part.strip() for part in line.partition(":"))
                if not name and found:  # further processors of a large machine are slow to read
                    break
                if name in FIELDS:
                    found[name] = " ".join(sorted(value.split())) if name in ("flags", "Features") else value
    except OSError:
        pass
    return found
