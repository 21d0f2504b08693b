"""Which machine this is: what the journal is checked against, and what a profile names as its source."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
#: Limits of the memory of a container (control groups, second and first version); ``max`` or a huge number: none.
_LIMITS: Final = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine and the software on it."""

    host: str
    processor: str
    cores: int
    memory_bytes: float
    """Of one device: of the GPU, or of the whole host."""
    cache_bytes: float
    """Of the last cache before memory."""
    device: str
    """``cpu`` or ``cuda``."""
    gpus: int
    torch: str
    threads: int

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{self.processor} in {self.host}"

    def header(self) -> dict[str, Any]:
        """What has to be equal for a journal to be resumed."""
        return asdict(self)


def this_host(torch: Any, threads: int, device: str | None = None) -> Host:
    """The machine that this process runs on.

    Args:
        torch: the module.
        threads: threads of one process on a CPU.
        device: ``"cpu"`` or ``"cuda"``; default: CUDA if there is a GPU.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    common: dict[str, Any] = {
        "host": platform.node() or "unknown",
        "cores": os.cpu_count() or 1,
        "torch": str(torch.__version__),
    }
    if chosen == "cuda":
        return Host(**common, **_gpu(torch), threads=threads)
    return Host(
        **common,
        processor=_processor(),
        memory_bytes=_memory_bytes(),
        cache_bytes=_last_cache_bytes(),
        device="cpu",
        gpus=0,
        threads=threads,
    )


def _gpu(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "processor": str(properties.name),
        "memory_bytes": float(properties.total_memory),
        "cache_bytes": float(getattr(properties, "L2_cache_size", 0) or 4e7),
        "device": "cuda",
        "gpus": int(torch.cuda.device_count()),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "unknown CPU"


def _memory_bytes() -> float:
    """Of the host, or what a container may use of it; 8 GB if the system does not tell."""
    try:
        sizes = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    except (ValueError, OSError, AttributeError):
        sizes = []
    for path in _LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdecimal() and int(text):
            sizes.append(float(text))
    return min(sizes, default=8e9)


def _last_cache_bytes() -> float:
    """Of the largest cache of the first core; 32 MB if the system does not tell."""
    sizes = []
    for path in sorted(_CACHES.glob("index*/size")):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if found:
            sizes.append(float(found.group(1)) * _UNITS.get(found.group(2), 1))
    return max(sizes, default=3.2e7)
