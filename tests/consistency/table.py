"""Every job asked of every command: what differs from the estimate by more than 1e-6, and under which name.

``scripts/consistency`` prints it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from consistency.answers import ANSWERS, MEMORY, TIME, estimate
from consistency.jobs import JOBS, Job
from steptime.errors import UserError

AGREE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One job asked of one command."""

    job: str
    command: str
    difference: Mapping[str, float]
    """Quantity -> relative difference from the estimate."""
    named: Mapping[str, str]
    """Quantity -> the name under which the command prints the difference."""
    refused: str = ""
    """Why the command does not answer."""

    @property
    def unnamed(self) -> dict[str, float]:
        """Differences above 1e-6 without a name."""
        return {q: d for q, d in self.difference.items() if abs(d) > AGREE and q not in self.named}


def line_of(job: Job, command: str, reference: Mapping[str, float]) -> Line:
    """The answer of a command next to the estimate's."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = ANSWERS[command](job, Path(folder))
        except UserError as error:
            found = " ".join(str(error).split())
    if isinstance(found, str):
        return Line(job=job.name, command=command, difference={}, named={}, refused=found)
    named = {q: found[q][1] for q in (TIME, MEMORY) if isinstance(found.get(q), tuple)}
    values = {q: found[q][0] if q in named else found[q] for q in (TIME, MEMORY) if q in found}
    difference = {q: value / reference[q] - 1 for q, value in values.items()}
    return Line(job=job.name, command=command, difference=difference, named=named)


def reference_of(job: Job) -> Mapping[str, float]:
    """The estimate of a job, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        found = estimate(job, Path(folder))
    assert not isinstance(found, str), f"{job.name}: {found}"
    return found


def lines(jobs: tuple[Job, ...] = JOBS) -> Iterator[Line]:
    """All answers to some jobs."""
    for job in jobs:
        reference = reference_of(job)
        for command in ANSWERS:
            yield line_of(job, command, reference)


def main() -> int:
    """Print the table; 1: something differs without a name."""
    found, width = list(lines()), max(map(len, ANSWERS))
    print(f"{len(JOBS)} jobs, {len(ANSWERS)} commands; equal: within {AGREE:g} of the estimate")
    print(f"{'command':{width}}  equal  named  other  no answer")
    for command in ANSWERS:
        mine = [line for line in found if line.command == command]
        refused = sum(bool(line.refused) for line in mine)
        other = sum(bool(line.unnamed) for line in mine)
        named = sum(bool(line.named) and not line.unnamed for line in mine)
        print(f"{command:{width}}  {len(mine) - refused - other - named:5}  {named:5}  {other:5}  {refused:9}")
    for line in found:
        if line.difference and any(abs(d) > AGREE for d in line.difference.values()):
            shown = ", ".join(
                f"{q} {d:+.3%} ({line.named.get(q, 'no name')})" for q, d in line.difference.items() if abs(d) > AGREE
            )
            print(f"{line.command}: {line.job}: {shown}")
    if "-v" in sys.argv:
        for line in found:
            if line.refused:
                print(f"{line.command}: {line.job}: no answer: {line.refused[:200]}")
    return int(any(line.unnamed for line in found))


if __name__ == "__main__":
    sys.exit(main())
