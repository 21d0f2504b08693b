"""Round trips of launch files: random legal plans of every software, written, read back, and held against the run.

``python benchmarks/bench_launch.py --write`` makes ``benchmarks/launch.md``; ``--plans N`` takes fewer plans. Where a
software is installed, its own parser reads every file too, and what it makes of it is held against the plan.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

import launch_parsers  # noqa: E402
from launch_plans import legal_launches  # noqa: E402
from steptime.launch import SOFTWARE, launch_of, read_launch, software_called  # noqa: E402
from steptime.launch.table import real_options  # noqa: E402

PAGE = Path(__file__).with_name("launch.md")


def trip(name: str, plans: int) -> dict[str, Any]:
    """Round trips of one software."""
    counts: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    unlisted: set[str] = set()
    real, software = real_options(name), software_called(name)
    own = name in launch_parsers.PARSERS and not launch_parsers.missing(name)
    start_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for _, launch, exported in islice(legal_launches(name), plans):
            path = Path(folder) / exported.file
            path.write_text(exported.text)
            read = read_launch(str(path))
            counts["plans"] += 1
            counts["same"] += read.launch == launch and launch_of(read.run) == launch and not read.kept
            counts["whole"] += not exported.lost
            lost.update(exported.lost)
            unlisted |= {
                each for each in exported.options if each not in real and not each.startswith(software.whole or "\0")
            }
            if own:
                counts["own"] += _own(name, path, launch)
    return {
        "software": name,
        "version": software.version,
        "plans": counts["plans"],
        "same": counts["same"],
        "whole": counts["whole"],
        "options": len(real),
        "unlisted": sorted(unlisted),
        "lost": lost.most_common(4),
        "own": counts["own"] if own else None,
        "ms": 1e3 * (time.process_time() - start_s) / max(counts["plans"], 1),
    }


def _own(name: str, path: Path, launch: Any) -> bool:
    """Whether the software's own parser reads the file as the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = launch_parsers.parsed(name, path, launch.values)
        except (Exception, SystemExit) as error:
            found = {"refused": f"{type(error).__name__}: {error}"[:300]}
    if found != launch_parsers.wanted(name, launch.values, launch.node_devices):
        print(f"{name}: {found} for {launch.values}", file=sys.stderr)
        return False
    return True


def page(rows: list[dict[str, Any]], plans: int) -> str:
    """The rows as a page."""
    lines = [
        "# Launch files: round trips",
        "",
        f"`python benchmarks/bench_launch.py --write`: {plans} random legal plans for each software, from a run to its",
        "launch file and back. *same*: the run that was read is the run that was written, and no option is left over;",
        "*whole*: nothing of the plan had to stand in a comment, where the model's, the cluster's and the framework's",
        "names always stand; *own parser*: files that the installed software's own parser reads as the plan.",
        "",
        "| software | options of | plans | same | whole | unlisted | own parser | ms a plan | oftenest in a comment |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        own = "-" if row["own"] is None else str(row["own"])
        lost = ", ".join(f"{name} {count}" for name, count in row["lost"]) or "-"
        lines.append(
            f"| {row['software']} | {row['version']} | {row['plans']} | {row['same']} | {row['whole']} | "
            f"{len(row['unlisted'])} of {row['options']} | {own} | {row['ms']:.0f} | {lost} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run all, print the page, write it if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("software", nargs="*", default=SOFTWARE)
    given = parser.parse_args()
    rows = [trip(name, given.plans) for name in given.software]
    text = page(rows, given.plans)
    print(text)
    if given.write:
        PAGE.write_text(text)
    if any(row["same"] != row["plans"] or row["unlisted"] or row["own"] not in (None, row["plans"]) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
