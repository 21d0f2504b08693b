"""Advice if no plan fits: device counts that work, and the cost of idle devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from steptime.errors import counted
from steptime.estimate.single import Setting
from steptime.plan.job import Job
from steptime.plan.space import MESH_COLUMNS, Constraint, Space
from steptime.search.planner import find

NEAR = 16
"""Number of smaller device counts that are tried one by one."""
DOMAINS = 16
"""Number of additional fast domains that are tried one by one."""
IDLE = 0.02
"""Largest share of the devices that may idle in a suggested smaller count."""


def why_empty(job: Job, constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Reasons why no candidate satisfies the constraints."""
    out = [
        f"{c.column} {c.value} does not divide {counted(job.gpus, 'device')}"
        for c in constraints
        if c.relation == "=" and c.column in MESH_COLUMNS and job.gpus % max(c.value, 1)
    ]
    return tuple(out) or ("no candidate of the space satisfies the constraints",)


def faster_counts(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint], best_s: float,
) -> tuple[str, ...]:  # fmt: skip
    """Smaller device counts that are faster: whole fast domains, or a power of two, which divides more batches."""
    gpus, domain = setting.job.gpus, setting.machine.fast_domain
    if gpus <= domain:
        return ()
    sizes = () if gpus % domain == 0 else (domain, 4 * domain)
    rounder = {gpus // size * size for size in sizes if gpus // size} | {1 << gpus.bit_length() - 1} - {gpus}
    times = {count: best_step_s(setting, count, space, strategies, constraints) for count in rounder}
    better = {count: time_s for count, time_s in times.items() if time_s is not None and time_s < best_s}
    if not better:
        return ()
    count = min(better, key=lambda c: better[c])
    return (
        f"{count} of the {gpus} devices {'is' if count == 1 else 'are'} faster: {better[count]:.4g} s against "
        f"{best_s:.4g} s, {gpus - count} idle",
    )


def best_step_s(
    setting: Setting, gpus: int, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint],
) -> float | None:  # fmt: skip
    """Step time of the best plan on another number of devices; if none likely fits, of those whose live tensors fit."""
    found = find(replace(setting, job=replace(setting.job, gpus=gpus)), space, strategies, constraints)
    risky = min((float(f.risky_s[0]) for f in found if len(f.risky_s)), default=None)
    return min((float(f.best_s[0]) for f in found if len(f.best_s)), default=risky)


def nearest_counts(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]], constraints: Sequence[Constraint]
) -> tuple[tuple[float, str], ...]:
    """Sentences on device counts that have a plan and the price of idle devices, each with its device seconds.

    Smaller: the fastest count with at most 2 % of the devices idle, else the nearest that works. Larger: the nearest
    power of two or number of whole fast domains.
    """
    gpus, domain = setting.job.gpus, min(setting.machine.fast_domain, 1 << 20)

    def times(counts: Iterable[int], first: bool) -> dict[int, float]:
        out: dict[int, float] = {}
        for count in counts:
            best_s = best_step_s(setting, count, space, strategies, constraints)
            if best_s is not None:
                out[count] = best_s
                if first:
                    break
        return out

    whole = gpus // domain * domain
    near = {gpus - d for d in range(1, NEAR + 1)} | {whole - k * domain for k in range(4)} | {gpus // 8 * 8}
    below = times(sorted((c for c in near if 0 < c < gpus and gpus - c <= IDLE * gpus), reverse=True), first=False)
    below = below or times([1 << k for k in range(gpus.bit_length(), -1, -1) if 1 << k < gpus], first=True)
    powers = [1 << k for k in range(gpus.bit_length(), gpus.bit_length() + 8)]
    above = times(sorted({whole + k * domain for k in range(1, DOMAINS + 1)} | set(powers)), first=True)
    return (*_below(gpus, below), *_above(gpus, above))


def _below(gpus: int, times: Mapping[int, float]) -> Iterator[tuple[float, str]]:
    for count in sorted(times, key=lambda c: times[c])[:1]:
        idle, share = gpus - count, 100 * (gpus - count) / gpus
        words = f"{count} of the {gpus} devices {'works' if count == 1 else 'work'}: best step {times[count]:.4g} s"
        yield gpus * times[count], f"{words}, {idle} idle ({share:.1f} % of what is paid for)"


def _above(gpus: int, times: Mapping[int, float]) -> Iterator[tuple[float, str]]:
    for count, best_s in times.items():
        yield count * best_s, f"{count} devices work: best step {best_s:.4g} s, {count - gpus} more than there are"
