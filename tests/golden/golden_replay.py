"""Replays what steptime says in a fixed set of cases, and shows how each number and text moved.

usage: scripts/golden [FAMILY ...]            print what moved, and write the files of tests/golden
       scripts/golden --check [FAMILY ...]    print what moved; the exit code is 1 if anything did
"""

from __future__ import annotations

import sys
import time

from golden_compare import Move, lines_of, moves
from golden_families import FAMILIES, Family


def moved(family: Family) -> tuple[list[Move], dict[str, object]]:
    """What differs from the golden file, and all cases as they are now; those that cannot be replayed as they were."""
    stored, now, skipped = family.stored(), family.now(), family.skipped()
    now |= {case: stored[case] for case in skipped if case in stored}
    order = family.commands or tuple(now)
    return moves(family.name, stored, now), {case: now[case] for case in order if case in now}


def main(arguments: list[str]) -> int:
    """Print what moved; write it unless it is only to be checked."""
    names = [name for name in arguments if name != "--check"]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        print(f"there is no family {unknown[0]!r}; families: {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    total = 0
    for name in names or FAMILIES:
        family, began = FAMILIES[name], time.process_time()
        found, now = moved(family)
        total += len(found)
        print("\n".join(lines_of(found) or [f"{name}: nothing moved"]))
        for case, reason in family.skipped().items():
            print(f"{name}: not replayed, {reason}: {case}")
        print(f"{name}: {len(now)} cases, {time.process_time() - began:.1f} s of CPU")
        if "--check" not in arguments:
            family.write(now)
    return 1 if total and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
