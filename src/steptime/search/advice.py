"""What to change when no plan fits: device counts that work, and what idle devices cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from steptime.estimate.single import Setting
from steptime.plan.constraints import Constraint
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
        other = replace(setting, job=replace(setting.job, gpus=count))
        best = min(
            (float(f.best_s[0]) for f in find(other, space, strategies, constraints) if len(f.best_s)), default=None
        )
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
