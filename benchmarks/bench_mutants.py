"""Corrected programs of partial equality of convolutions and products, and which are proved for all sizes.

python benchmarks/bench_mutants.py --write    (benchmarks/mutants.md; about a minute)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from steptime_lab.rules.mutants.correct import Corrected, corrected, corrected_product, corrected_spread
from steptime_lab.rules.mutants.programs import Convolution
from steptime_lab.rules.verify_cases import proved_by_cases

PAGE = Path(__file__).with_name("mutants.md")
CONVOLUTIONS = {
    "1x1": Convolution(kernel=(1, 1)),
    "3x3": Convolution(pad=1),
    "3x3, dilation 2": Convolution(pad=2, dilation=2),
    "3x3, 4 groups": Convolution(pad=1, groups=4),
}
HEAD = """# Partially equal programs, corrected

Every corrected program that `--mutants` and `--search pet` may use on the geometries below. *Checked*: assignments of
sizes with random values modulo a prime, and shapes of which polynomials are equal. *All sizes*: a proof with symbolic
sizes, for each rest of sizes that are divided, in blocks or phases of the output; "no": it does not close, and the
program rests on the checks. CPU seconds are those of all programs of a geometry. Made by
`python benchmarks/bench_mutants.py --write`.

| program | mutant | correction | checked | all sizes |
|---|---|---|--:|---|
"""


def every() -> Iterator[tuple[str, tuple[Corrected, ...], float]]:
    """Programs by name, with the CPU time that generating and proving them takes."""
    for name, given in CONVOLUTIONS.items():
        start = time.process_time()
        yield name, corrected(given, boxes=False), time.process_time() - start
    for name, found in (
        ("product", lambda: corrected_product(batched=False)),
        ("batched product", lambda: corrected_product(batched=True)),
        ("transposed 2x2", lambda: corrected_spread(2, bias=False)),
    ):
        start = time.process_time()
        yield name, found(), time.process_time() - start


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    lines, spent, closed, total = [], [], 0, 0
    for name, programs, seconds in every():
        spent.append(f"{name} {seconds:.0f}")
        for each in programs:
            made = each.rule.certificate
            generic = proved_by_cases(each.rule)
            total, closed = total + 1, closed + generic
            checks = f"{made.random} + {made.exact}"
            lines.append(f"| {name} | {each.path} | {each.correction} | {checks} | {'yes' if generic else 'no'} |")
        print(f"{name}: {len(programs)} programs, {seconds:.1f} CPU s", flush=True)
    table, times = "\n".join(lines), ", ".join(spent)
    text = f"{HEAD}{table}\n\n{closed} of {total} are proved for all sizes. CPU seconds: {times}.\n"
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
