"""The three definitions of peak memory, the spread of each, and the chance of running out of memory.

``allocated`` is the largest sum of live tensors (the peak that plans are compared by), ``reserved`` what the caching
allocator holds for them, ``device`` what the driver reports as used. Constants and spreads are fitted to measured
peaks by :mod:`memory_fit` and kept in ``memory_constants.toml`` with their provenance, or for a framework in its file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from steptime.cost.memory import device_bytes, reserved_bytes
from steptime.estimate.evaluate import Evaluation
from steptime.num import Num, where
from steptime.plan.framework_file import framework_names, framework_tables
from steptime.plan.plans import Plans
from steptime.store.files import parse_toml

DEFINITIONS = ("allocated", "reserved", "device")
UNSTATED = "unstated"
"""Name of the spread of figures without a definition."""
AXES = ("tp", "tp2", "cp", "dp", "pp", "ep")
FEW = 2
"""Domains up to which the buffers of a group do not count."""
FILE = "memory_constants.toml"
LIKELY_FITS = 0.05
"""Largest chance of running out of memory of a plan that likely fits; no plan above it ranks first by default."""


class _Files(Mapping[str, Mapping[str, float]]):
    """Fitted memory constants in the files of frameworks."""

    def __getitem__(self, name: str) -> Mapping[str, float]:
        found: Mapping[str, float] = framework_tables(name)["fitted_memory"]
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in framework_names() if "fitted_memory" in framework_tables(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Differences between the definitions, and the spread of measured over predicted peaks."""

    slack: float
    """Share of the allocated memory that the allocator holds beyond it."""
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Framework -> its own `slack` and wider `deviation`, if runs of it are in the fit: ``[fitted_memory]`` of its
    file."""
    context_bytes: float
    communicator_bytes: float
    deviation: Mapping[str, float]
    """Standard deviation of the logarithm of measured over predicted peaks, by definition."""
    source: str
    unseen: float = 0.0
    """The same deviation for software without memory in the fit: that of errors on sources outside the fit."""
    released: float = 0.0
    """Share of the slack that the allocator gives back before a job runs out."""

    def spread(self, definition: str, framework: str) -> float:
        """Standard deviation of the logarithm of measured over predicted memory of a framework's runs."""
        own = self.own.get(framework)
        return max(self.deviation[definition], self.unseen if own is None else own.get("deviation", 0.0))

    def needed(self, allocated: Num, communicators: Num, framework: str) -> Num:
        r"""Smallest capacity of a device on which a job does not run out, in bytes: $M_d - \rho\,\epsilon\,M_a$.

        $M_d$ is the memory used on the device, $M_a$ the allocated one (B), $\epsilon$ the slack of the allocator and
        $\rho$ = :attr:`released`: where memory is short PyTorch's allocator gives cached blocks back and tries again
        (`release_cached_blocks` of c10/cuda/CUDACachingAllocator.cpp), so that only what is in use within a block
        stays.
        """
        slack = self.own.get(framework, {}).get("slack", self.slack)
        return self.defined(allocated, communicators, framework)["device"] - self.released * slack * allocated

    def defined(self, allocated: Num, communicators: Num, framework: str) -> dict[str, Num]:
        """Peak memory in bytes by definition, computed from the allocated one."""
        reserved = reserved_bytes(allocated, self.own.get(framework, {}).get("slack", self.slack))
        device = device_bytes(reserved, self.context_bytes, communicators, self.communicator_bytes)
        return {"allocated": allocated, "reserved": reserved, "device": device}


@cache
def memory_constants(*, is_host: bool = False) -> MemoryConstants:
    """The fitted constants; ``is_host``: for a device that is its host, whose memory no driver takes a part of.

    >>> memory_constants(is_host=True).context_bytes
    0.0
    """
    if is_host:
        return replace(memory_constants(), context_bytes=0.0, communicator_bytes=0.0)
    file = Path(__file__).with_name(FILE)
    return constants_of(parse_toml(file.read_text(encoding="utf-8"), str(file)), _Files())


def constants_of(table: Mapping[str, Any], own: Mapping[str, Mapping[str, float]]) -> MemoryConstants:
    """Constants from the table of the file, and from the tables of frameworks."""
    values = {name: float(table[name]["value"]) for name in ("slack", "context_bytes", "communicator_bytes")}
    deviation = {name: float(table["deviation"][name]) for name in (*DEFINITIONS, UNSTATED)}
    return MemoryConstants(
        **values,
        own=own,
        deviation=deviation,
        source=str(table["provenance"]["source"]),
        unseen=float(table["deviation"].get("unseen", {}).get("value", 0.0)),
        released=float(table["slack"].get("released", 0.0)),
    )


def communicators(plans: Plans) -> Num:
    """Number of groups with communication buffers: all ranks, the axes, and with stages the two neighbours.

    Only groups over more than two fast domains count: inside a domain peers write to each other's memory, and measured
    jobs on two nodes show no buffers of the size that measured jobs on many have.
    """
    count: Num = where(plans.ranks > FEW * plans.domain_ranks, 1, 0)
    for axis in AXES:
        count = count + where(getattr(plans, axis) > FEW * plans.inside(axis), 1, 0)
    return count + where(plans.pp > FEW * plans.inside("pp"), 2, 0)


def memory_by_definition(e: Evaluation) -> dict[str, Num]:
    """Peak memory of the fullest device in bytes, by definition."""
    constants = memory_constants(is_host=e.machine.is_host)
    return constants.defined(e.peak_bytes, communicators(e.plans), e.job.memory.name)


def oom_probability(e: Evaluation) -> float:
    r"""Chance that one plan does not fit: :math:`\Phi(\ln(M / C) / \sigma)`.

    :math:`M` is the needed memory of a device in bytes (:meth:`MemoryConstants.needed`), :math:`C` its capacity and
    :math:`\sigma` the standard deviation of the logarithm of measured over predicted memory, wider for software whose
    memory no measured run shows. benchmarks/outcomes.md compares it with layouts that were tried.
    """
    constants, name = memory_constants(is_host=e.machine.is_host), e.job.memory.name
    needed = float(constants.needed(e.peak_bytes, communicators(e.plans), name))
    return exceeding(needed, e.machine.memory_bytes, constants.spread("device", name))


def likely_fits(
    allocated: Num, plans: Plans, framework: str, capacity_bytes: float, chance: float, *, is_host: bool = False
) -> Any:
    r"""True for plans whose chance of running out of memory is at most ``chance``, plan by plan.

    The needed memory is then :math:`M \le C\,e^{\sigma\,\Phi^{-1}(p)}`, the inverse of :func:`oom_probability`, with
    the chance :math:`p` between 0 and 1.
    """
    return _likely_fits(allocated, communicators(plans), framework, capacity_bytes, chance, is_host=is_host)


def may_fit(allocated: Num, framework: str, capacity_bytes: float, chance: float, *, is_host: bool = False) -> Any:
    """Upper bound of :func:`likely_fits` over placements: a plan without communication buffers."""
    return _likely_fits(allocated, 0, framework, capacity_bytes, chance, is_host=is_host)


def _likely_fits(
    allocated: Num, buffers: Num, framework: str, capacity_bytes: float, chance: float, *, is_host: bool
) -> Any:
    needed = memory_constants(is_host=is_host).needed(allocated, buffers, framework)
    return needed <= _most_bytes(framework, capacity_bytes, chance, is_host=is_host)


def _most_bytes(framework: str, capacity_bytes: float, chance: float, *, is_host: bool) -> float:
    """Largest needed memory of a job that runs out of a device's capacity with the given chance."""
    from statistics import NormalDist  # imported here, as it loads more than a whole estimate does

    deviation = memory_constants(is_host=is_host).spread("device", framework)
    return capacity_bytes * math.exp(deviation * NormalDist().inv_cdf(chance))


def allocated_within(
    capacity_bytes: float, framework: str, chance: float = LIKELY_FITS, *, is_host: bool = False
) -> float:
    r"""Largest allocated peak in bytes whose chance of running out of memory is at most ``chance``, without buffers.

    $$M_a = \frac{C\,e^{\sigma\,\Phi^{-1}(p)} - M_0}{m}, \qquad M = M_0 + m M_a$$

    where $C$ = `capacity_bytes`, $p$ = `chance`, $\sigma$ as in :func:`oom_probability`, and the needed memory
    (:meth:`MemoryConstants.needed`) is $M_0$ without any tensor and rises by $m$ for each byte of $M_a$.
    """
    constants = memory_constants(is_host=is_host)
    none, one = (float(constants.needed(size, 0, framework)) for size in (0.0, 1e9))
    return (_most_bytes(framework, capacity_bytes, chance, is_host=is_host) - none) / (one - none) * 1e9


def exceeding(needed_bytes: float, capacity_bytes: float, deviation: float) -> float:
    """Probability that a log-normal need of median ``needed_bytes`` exceeds a capacity.

    >>> exceeding(80e9, 80e9, 0.1), round(exceeding(72e9, 80e9, 0.1), 3), round(exceeding(80e9, 72e9, 0.1), 3)
    (0.5, 0.146, 0.854)
    """
    if needed_bytes <= 0:
        return 0.0
    return 0.5 * math.erfc(-math.log(needed_bytes / capacity_bytes) / (deviation * math.sqrt(2)))
