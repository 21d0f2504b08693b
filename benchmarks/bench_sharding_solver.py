"""Sizes and CPU seconds of the exact solver of shardings, and quality of the baselines against CPU seconds.

Problems are those of `synthetic_shardings.py`: a transformer's step on an 8 x 8 mesh. "1, 94, 1" are 96 equal layers of
which the middle ones are folded into one block that counts 94 times. Memory is the limit as a share of what the step
takes with everything replicated.

    python benchmarks/bench_sharding_solver.py            prints the tables
    python benchmarks/bench_sharding_solver.py --write    also writes them to benchmarks/sharding_solver.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from machine import report  # noqa: E402
from steptime.sharding.baselines import BASELINES, Budget, Trace, search  # noqa: E402
from steptime.sharding.ilp import Solution, solve  # noqa: E402
from steptime.sharding.presolve import Conflict, presolve  # noqa: E402
from steptime.sharding.problem import Problem  # noqa: E402
from steptime.sharding.relaxation import model_of, run  # noqa: E402
from synthetic_shardings import transformer  # noqa: E402

FOLDED = (1.0, 94.0, 1.0)
SOLVED: tuple[tuple[tuple[float, ...], float | None], ...] = (
    (FOLDED, None), (FOLDED, 0.1), (FOLDED, 0.05), (FOLDED, 0.02),
    ((1.0,) * 8, None), ((1.0,) * 8, 0.1), ((1.0,) * 32, None), ((1.0,) * 32, 0.1),
)  # fmt: skip
COMPARED: tuple[tuple[tuple[float, ...], float | None], ...] = (
    ((1.0,), None),
    ((1.0,), 0.05),
    (FOLDED, None),
    (FOLDED, 0.1),
)
TIMES = (0.5, 2.0, 6.0)
MILP_S, LP_S = 30.0, 120.0


def words(weights: Sequence[float], memory: float | None) -> str:
    blocks = ", ".join(f"{weight:g}" for weight in weights) if len(weights) < 4 else f"{len(weights)} x 1"
    return f"{blocks}; {'no limit' if memory is None else f'memory {memory:g}'}"


def solved(weights: Sequence[float], memory: float | None) -> str:
    problem = transformer(weights, memory=memory)
    found = solve(problem, time_limit_s=LP_S)
    size, at = found.size, found.cpu_s - found.build_cpu_s
    return (
        f"| {words(weights, memory)} | {len(problem.nodes)} | {problem.sizes.sum()} | {size.nodes} | {size.binaries} | "
        f"{size.variables} | {size.rows} | "
        f"{found.build_cpu_s:.2f} | {at:.2f} | {percent(found)} | {found.stop.reason} |"
    )


def percent(found: Solution) -> str:
    return f"{found.gap:.3%}" if math.isfinite(found.gap) else "-"


def compared(weights: Sequence[float], memory: float | None) -> str:
    """The relaxation, the default solution, and HiGHS left alone with the whole integer program."""
    problem = transformer(weights, memory=memory)
    quick, long = solve(problem), solve(problem, gap=1e-4, time_limit_s=MILP_S)
    reduction = presolve(problem)
    assert not isinstance(reduction, Conflict)
    began = time.process_time()
    alone = run(model_of(reduction.problem), binaries=True, gap=1e-4, limit_s=MILP_S)
    alone_s, base = time.process_time() - began, reduction.constant_s
    against = (alone.value_s + base) / (alone.bound_s + base) - 1
    return (
        f"| {words(weights, memory)} | {quick.cpu_s:.2f} | {quick.gap:.3%} | {long.cpu_s:.1f} | {long.gap:.3%} | "
        f"{long.bound_s / long.relaxation_s - 1:.3%} | {alone_s:.1f} | {against:.3%} |"
    )


def best_at(trace: Trace, cpu_s: float) -> float:
    return min((point.total_s for point in trace.points if point.cpu_s <= cpu_s), default=math.inf)


def baselines(weights: Sequence[float], memory: float | None) -> list[str]:
    problem: Problem = transformer(weights, memory=memory)
    bound = solve(problem, gap=1e-4, time_limit_s=MILP_S).bound_s
    lines = []
    for method in BASELINES:
        trace = search(method, problem, Budget(cpu_s=max(TIMES)), 0)
        quality = [best_at(trace, cpu_s) / bound - 1 for cpu_s in TIMES]
        shown = " | ".join(f"{each:+.2%}" if math.isfinite(each) else "none fits" for each in quality)
        lines.append(f"| {words(weights, memory)} | {method} | {shown} | {trace.evaluations} | {trace.cpu_s:.1f} |")
    return lines


NOTES = f"""\
CPU seconds are `time.process_time`, one thread, one run. First table: `solve` with its default gap of 1 %; "build" is
reductions and models, "HiGHS" the relaxation and dives. Second: the default; `solve` with a gap of 0.01 % and a limit
of {MILP_S:g} s; by how much its bound exceeds that of the relaxation; and HiGHS alone on the whole integer program,
after our reductions, with the same gap and limit. Third: seconds above the bound of the exact solver (gap 0.01 %,
{MILP_S:g} s) after some CPU seconds, seed 0; "none fits": no legal choice within the limit was found.
Baselines that start from the greedy choice: local, mcmc, bayesian, learned, tree. The temperature of mcmc and the rate
of rl were chosen on the second and third of the problems shown, among six and four values.
"""


def main() -> None:
    first = (
        "| blocks; memory | nodes | options | nodes, reduced | binaries | variables | rows | build, CPU s | "
        "HiGHS, CPU s | gap | stop |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    )
    second = (
        "| blocks; memory | gap 1 %, CPU s | its gap | gap 0.01 %, CPU s | its gap | bound over relaxation | "
        "HiGHS alone, CPU s | its gap |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    third = (
        "| blocks; memory | baseline | " + " | ".join(f"{each:g} s" for each in TIMES) + " | evaluations | CPU s |\n"
        "|---|---|" + "---:|" * (len(TIMES) + 2)
    )
    lines = [
        first,
        *(solved(*case) for case in SOLVED),
        "",
        second,
        *(compared(*case) for case in SOLVED[:6]),
        "",
        third,
    ]
    lines += [line for case in COMPARED for line in baselines(*case)]
    report("sharding_solver", "Solving for shardings", "\n".join(lines), NOTES)


if __name__ == "__main__":
    main()
