"""The three numbers that are called peak memory, how far each can be trusted, and the chance of running out of it.

``allocated`` is the largest sum of live tensors (the peak that plans are compared by), ``reserved`` what the caching
allocator holds for them, ``device`` what the driver reports as used. Constants and spreads are fitted to measured
peaks by :mod:`memory_fit` and stand in ``memory_constants.toml`` with their provenance, those of a framework in its
file.
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
"""Name of the spread of figures that do not say which of the three they are."""
AXES = ("tp", "tp2", "cp", "dp", "pp", "ep")
FEW = 2
"""Domains that a group may reach without counting."""
FILE = "memory_constants.toml"
LIKELY_FITS = 0.05
"""A plan up to this chance of running out of memory likely fits; none above it is put first unless asked for."""


class _Files(Mapping[str, Mapping[str, float]]):
    """What the files of frameworks have of their memory."""

    def __getitem__(self, name: str) -> Mapping[str, float]:
        found: Mapping[str, float] = framework_tables(name)["fitted_memory"]
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in framework_names() if "fitted_memory" in framework_tables(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """What lies between the definitions, and the spread of measured over predicted peaks."""

    slack: float
    """Share of the allocated memory that the allocator holds beyond it."""
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of a framework with runs in the fit its `slack`, and a `deviation` wider than that of others, where it has them:
    ``[fitted_memory]`` of its file."""
    context_bytes: float
    communicator_bytes: float
    deviation: Mapping[str, float]
    """Standard deviation of the logarithm of measured over predicted, by definition."""
    source: str
    unseen: float = 0.0
    """The same of software whose memory no run of the fit shows: errors of sources that the fit has not seen."""
    released: float = 0.0
    """Share of the slack that the allocator gives back before a job runs out."""

    def spread(self, definition: str, framework: str) -> float:
        """Standard deviation of the logarithm of measured over predicted memory of a framework's runs."""
        own = self.own.get(framework)
        return max(self.deviation[definition], self.unseen if own is None else own.get("deviation", 0.0))

    def needed(self, allocated: Num, communicators: Num, framework: str) -> Num:
        r"""Least capacity of a device on which a job does not run out, in bytes: $M_d - \rho\,\epsilon\,M_a$.

        $M_d$ is the memory used on the device, $M_a$ the allocated one (B), $\epsilon$ the slack of the allocator and
        $\rho$ = :attr:`released`: where memory is short PyTorch's allocator gives cached blocks back and tries again
        (`release_cached_blocks` of c10/cuda/CUDACachingAllocator.cpp), so that only what is in use within a block
        stays.
        """
        slack = self.own.get(framework, {}).get("slack", self.slack)
        return self.defined(allocated, communicators, framework)["device"] - self.released * slack * allocated

    def defined(self, allocated: Num, communicators: Num, framework: str) -> dict[str, Num]:
        """Peak memory in bytes by definition, from the allocated one."""
        reserved = reserved_bytes(allocated, self.own.get(framework, {}).get("slack", self.slack))
        device = device_bytes(reserved, self.context_bytes, communicators, self.communicator_bytes)
        return {"allocated": allocated, "reserved": reserved, "device": device}


@cache
def memory_constants(*, is_host: bool = False) -> MemoryConstants:
    """The fitted constants of the package; ``is_host``: of a device that is its host, which no driver takes memory of.

    >>> memory_constants(is_host=True).context_bytes
    0.0
    """
    if is_host:
        return replace(memory_constants(), context_bytes=0.0, communicator_bytes=0.0)
    file = Path(__file__).with_name(FILE)
    return constants_of(parse_toml(file.read_text(encoding="utf-8"), str(file)), _Files())


def constants_of(table: Mapping[str, Any], own: Mapping[str, Mapping[str, float]]) -> MemoryConstants:
    """Constants from a table as the file has it, and from those of frameworks."""
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
    """Groups of ranks with buffers of their own: all ranks, axes, and with stages their two neighbours.

    Counted are those that reach more than two fast domains: inside a domain peers write to each other's memory, and
    measured jobs on two nodes show no buffers of the size that measured jobs on many have.
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

    :math:`M` is what it needs of a device in bytes (:meth:`MemoryConstants.needed`), :math:`C` its capacity and
    :math:`\sigma` the standard deviation of the logarithm of measured over predicted memory, wider of software whose
    memory no measured run shows. Held against layouts that were tried in benchmarks/outcomes.md.
    """
    constants, name = memory_constants(is_host=e.machine.is_host), e.job.memory.name
    needed = float(constants.needed(e.peak_bytes, communicators(e.plans), name))
    return exceeding(needed, e.machine.memory_bytes, constants.spread("device", name))


def likely_fits(
    allocated: Num, plans: Plans, framework: str, capacity_bytes: float, chance: float, *, is_host: bool = False
) -> Any:
    r"""Whether plans of that allocated peak run out of memory with that chance at most, plan by plan.

    They do where what they need :math:`M \le C\,e^{\sigma\,\Phi^{-1}(p)}`, the inverse of :func:`oom_probability`,
    with the chance :math:`p` between 0 and 1.
    """
    return _likely_fits(allocated, communicators(plans), framework, capacity_bytes, chance, is_host=is_host)


def may_fit(allocated: Num, framework: str, capacity_bytes: float, chance: float, *, is_host: bool = False) -> Any:
    """As :func:`likely_fits` for the placement with the fewest buffers that is conceivable: none."""
    return _likely_fits(allocated, 0, framework, capacity_bytes, chance, is_host=is_host)


def _likely_fits(
    allocated: Num, buffers: Num, framework: str, capacity_bytes: float, chance: float, *, is_host: bool
) -> Any:
    needed = memory_constants(is_host=is_host).needed(allocated, buffers, framework)
    return needed <= _most_bytes(framework, capacity_bytes, chance, is_host=is_host)


def _most_bytes(framework: str, capacity_bytes: float, chance: float, *, is_host: bool) -> float:
    """What a job may need of a device with that chance of running out of memory."""
    from statistics import NormalDist  # here, as it loads more than all of an estimate does

    deviation = memory_constants(is_host=is_host).spread("device", framework)
    return capacity_bytes * math.exp(deviation * NormalDist().inv_cdf(chance))


def allocated_within(
    capacity_bytes: float, framework: str, chance: float = LIKELY_FITS, *, is_host: bool = False
) -> float:
    r"""Largest allocated peak in bytes that runs out of memory with that chance at most, without communicators.

    $$M_a = \frac{C\,e^{\sigma\,\Phi^{-1}(p)} - M_0}{m}, \qquad M = M_0 + m M_a$$

    where $C$ = `capacity_bytes`, $p$ = `chance` and $\sigma$ are those of :func:`oom_probability`, and what a job needs
    of a device (:meth:`MemoryConstants.needed`) is $M_0$ without any tensor and rises by $m$ for each byte of $M_a$.
    """
    constants = memory_constants(is_host=is_host)
    none, one = (float(constants.needed(size, 0, framework)) for size in (0.0, 1e9))
    return (_most_bytes(framework, capacity_bytes, chance, is_host=is_host) - none) / (one - none) * 1e9


def exceeding(needed_bytes: float, capacity_bytes: float, deviation: float) -> float:
    """Probability that a log-normal need with that median exceeds a capacity.

    >>> exceeding(80e9, 80e9, 0.1), round(exceeding(72e9, 80e9, 0.1), 3), round(exceeding(80e9, 72e9, 0.1), 3)
    (0.5, 0.146, 0.854)
    """
    if needed_bytes <= 0:
        return 0.0
    return 0.5 * math.erfc(-math.log(needed_bytes / capacity_bytes) / (deviation * math.sqrt(2)))
