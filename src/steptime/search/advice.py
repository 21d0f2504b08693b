"""What to change when no plan fits: device counts that work, and what idle devices cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from steptime.estimate.single import Setting
from steptime.plan.constraints import MESH_COLUMNS, Constraint
from steptime.plan.job import Job
from steptime.plan.space import Space
from steptime.search.planner import find

TRIES = 64
"""Device counts that are tried on either side."""


def _counts(gpus: int, fast_domain: int) -> Iterator[tuple[int, int]]:
    """Counts below and above, nearest first: all near ones, then whole fast domains, then powers of two."""
    near = [gpus - d for d in range(1, 17)] + [gpus + d for d in range(1, 17)]
    domain = max(fast_domain if fast_domain < 2**20 else 8, 1)
    floor = gpus // domain * domain
    whole = [floor - k * domain for k in range(8)] + [floor + (k + 1) * domain for k in range(8)]
    powers = [1 << k for k in range(gpus.bit_length() + 7)]
    for count in sorted({c for c in near + whole + powers if c > 0 and c != gpus}, key=lambda c: abs(c - gpus)):
        yield count, -1 if count < gpus else 1


def why_empty(job: Job, constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Why no candidate satisfies the constraints."""
    out = [
        f"{c.column} {c.value} does not divide {job.gpus} devices"
        for c in constraints
        if c.relation == "=" and c.column in MESH_COLUMNS and job.gpus % max(c.value, 1)
    ]
    return tuple(out) or ("no candidate of the space satisfies the constraints",)


def faster_counts(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint], best_s: float,
) -> tuple[str, ...]:  # fmt: skip
    """Fewer devices that are faster, where the number of devices does not fill whole fast domains."""
    gpus, domain = setting.job.gpus, setting.machine.fast_domain
    if gpus <= domain or gpus % domain == 0:
        return ()
    rounder = {gpus // size * size for size in (domain, 4 * domain) if gpus // size}
    times = {count: _best_s(setting, count, space, strategies, constraints) for count in rounder}
    better = {count: time_s for count, time_s in times.items() if time_s is not None and time_s < best_s}
    if not better:
        return ()
    count = min(better, key=lambda c: better[c])
    return (
        f"{count} of the {gpus} devices are faster: {better[count]:.4g} s against {best_s:.4g} s, {gpus - count} idle",
    )


def _best_s(
    setting: Setting, gpus: int, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint],
) -> float | None:  # fmt: skip
    """Step time of the best plan on another number of devices."""
    other = replace(setting, job=replace(setting.job, gpus=gpus))
    return min((float(f.best_s[0]) for f in find(other, space, strategies, constraints) if len(f.best_s)), default=None)


def nearest_counts(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]], constraints: Sequence[Constraint]
) -> tuple[str, ...]:
    """Sentences that name the nearest numbers of devices with a plan, and the price of the idle ones."""
    gpus, out = setting.job.gpus, list[str]()
    wanted = {-1, 1}
    tried = 0
    for count, side in _counts(gpus, setting.machine.fast_domain):
        if side not in wanted or tried >= TRIES:
            continue
        tried += 1
        best = _best_s(setting, count, space, strategies, constraints)
        if best is None:
            continue
        wanted.discard(side)
        if side < 0:
            idle = gpus - count
            out.append(
                f"{count} of the {gpus} devices work: best step {best:.4g} s, {idle} idle ({100 * idle / gpus:.1f} % "
                "of what is paid for)"
            )
        else:
            out.append(f"{count} devices work: best step {best:.4g} s, {count - gpus} more than there are")
        if not wanted:
            break
    return tuple(out)
