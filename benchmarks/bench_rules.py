"""Rules: what the generator finds, how long it and each layer take, how much memory; TASO's rules checked.

python benchmarks/bench_rules.py            prints the tables; --write also keeps them in benchmarks/rules.md
python benchmarks/bench_rules.py --run      generates everything again too (minutes); with --write as the shipped table
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402

from machine import report  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime_lab.data_root import require_data  # noqa: E402
from steptime_lab.rules import pipeline, store, taso  # noqa: E402
from steptime_lab.rules.certify import certified  # noqa: E402
from steptime_lab.rules.rule import Rule  # noqa: E402
from steptime_lab.rules.verify_egraph import proved_together  # noqa: E402
from steptime_lab.rules.verify_exact import proved_exactly  # noqa: E402
from steptime_lab.rules.verify_generic import proved_generically  # noqa: E402
from steptime_lab.rules.verify_random import Counterexample, fuzzed  # noqa: E402

FRESH_SEED = 20_011
"""Of the shapes and values on which shipped rules are tried again."""


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in lines)


def counts(found: store.RuleSet) -> str:
    origins = Counter(rule.origin for rule in found.rules)
    generated = [r for r in found.rules if r.origin not in (store.DECLARED, pipeline.SIBLINGS)]
    rows = []
    for name, chosen in (
        ("declared", [r for r in found.rules if r.origin == store.DECLARED]),
        ("generated", generated),
        ("siblings", [r for r in found.rules if r.origin == pipeline.SIBLINGS]),
        ("all", list(found.rules)),
    ):
        sizes = Counter(min(r.operators, 4) for r in chosen)
        generic, egraph = (sum(getattr(r.certificate, each) for r in chosen) for each in ("generic", "egraph"))
        share = f"{generic} ({generic / max(1, len(chosen)):.0%})"
        rows.append([name, len(chosen), *(sizes[n] for n in (1, 2, 3, 4)), share, egraph])
    head = ("rules", "n", "1 operator", "2", "3", "4 and more", "proved for all sizes", "in the e-graph")
    names = ", ".join(f"{name} {number}" for name, number in origins.items())
    return f"{table(head, rows)}\n\nBy universe: {names}.\n\nGenerator: {dict(found.provenance)}."


def layers(rules: Sequence[Rule]) -> str:
    axioms = store.proved_axioms()
    rows = []
    for name, work in (
        ("random values", fuzzed),
        ("exact polynomials", proved_exactly),
        ("all sizes", proved_generically),
    ):
        times = [timed(lambda rule=rule, work=work: work(rule)) for rule in rules]  # type: ignore[misc]
        rows.append([name, len(rules), f"{sum(times):.1f}", f"{1000 * median(times):.1f}", f"{1000 * max(times):.0f}"])
    batch = timed(lambda: proved_together(rules[:200], axioms))
    rows.append(["e-graph, one batch", len(rules[:200]), f"{batch:.1f}", f"{1000 * batch / len(rules[:200]):.1f}", ""])
    return table(("layer", "rules", "CPU s", "median ms", "largest ms"), rows)


def broken(rules: Sequence[Rule]) -> int:
    return sum(isinstance(fuzzed(rule, 50, FRESH_SEED), Counterexample) for rule in rules)


def of_taso() -> str:
    try:
        path = require_data("taso_substitutions.json")
    except UserError:
        return "TASO's rules are not here."
    start = time.process_time()
    verdicts = certified(taso.read(path), store.proved_axioms())
    spent = time.process_time() - start
    wrong = [each.rule.name.removeprefix("taso-") for each in verdicts if each.word == "unsound"]
    generic = sum(each.rule.certificate.generic for each in verdicts)
    egraph = sum(each.rule.certificate.egraph for each in verdicts)
    return (
        f"TASO's {len(verdicts)} rules in {spent:.1f} CPU s: {len(wrong)} unsound ({', '.join(wrong)}), "
        f"{generic} proved for all sizes, {egraph} in the e-graph."
    )


def generated_again() -> str:
    with tempfile.TemporaryDirectory() as folder:
        job = pipeline.Job(out=Path(folder, "rules.tsv"))
        start, wall = time.process_time(), time.perf_counter()
        found = pipeline.generated(job, lambda line: print(line, file=sys.stderr, flush=True))
        spent, wall = time.process_time() - start, time.perf_counter() - wall
        text = job.out.read_text()
    same = text == store.FILE.read_text()
    if "--write" in sys.argv:
        store.FILE.write_text(text)
        store.shipped.cache_clear()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"Generated, minimised and certified: {len(found.rules)} rules in {spent:.0f} CPU s of one core "
        f"({wall:.0f} s of wall time on the shared machine), largest resident set {memory:.2f} GiB; "
        f"the table {'is' if same else 'was not'} the shipped one, letter by letter."
    )


def main() -> None:
    again = generated_again() if "--run" in sys.argv else ""
    found = store.shipped()
    sample = found.rules[::4]
    parts = [counts(found), again, f"Times of every fourth rule:\n\n{layers(sample)}", of_taso()]
    seen = broken(found.rules)
    notes = f"Tried again on 50 new assignments each (seed {FRESH_SEED}): {seen} of {len(found.rules)} rules broken.\n"
    report("rules", "Rules", "\n\n".join(part for part in parts if part), notes)


if __name__ == "__main__":
    main()
