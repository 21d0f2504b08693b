"""Sizes and CPU seconds of the exact solver of shardings, and quality of the baselines against CPU seconds.

Problems are those of `synthetic_shardings.py`: a transformer's step on an 8 x 8 mesh. "1, 94, 1" are 96 equal layers of
which the middle ones are folded into one block that counts 94 times. Memory is the limit as a share of what the step
takes with everything replicated.

    python benchmarks/bench_sharding_solver.py            prints the tables
    python benchmarks/bench_sharding_solver.py --write    also writes them to benchmarks/sharding_solver.md
    python benchmarks/bench_sharding_solver.py --captured only the captured models of `captured_shardings.py`
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import json  # noqa: E402
import math  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from machine import report  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.ilp import Solution, least_memory, solve  # noqa: E402
from steptime.sharding.local_search import Budget, Trace  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.presolve import Conflict, presolve  # noqa: E402
from steptime.sharding.problem import Problem, memory_bytes  # noqa: E402
from steptime.sharding.relaxation import model_of, run  # noqa: E402
from steptime.sharding.shard import captured_step  # noqa: E402
from steptime.units import format_seconds  # noqa: E402
from steptime_lab.planners.searches import BASELINES, search  # noqa: E402
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


FILE = Path(__file__).with_name("captured_shardings.py")
SHARES = (None, 0.5, 0.2)
"""Limits for the 96 layers: of the way from the least memory to that of their optimum without a limit."""


def captured_gpt() -> Iterator[str]:
    """96 layers, captured: tables of costs and reductions are "build", HiGHS is "solve"."""
    machines = load_cluster("dgx-h100")
    began = time.process_time()
    program = captured_step(f"{FILE}:gpt_96", machines, batch=64, dtype="bf16")
    capture_s, low, high = time.process_time() - began, 0.0, 0.0
    for share in SHARES:
        began = time.process_time()
        limit = math.inf if share is None else low + share * (high - low)
        mesh = mesh_on(machines, parse_axes("8x8"), 64)
        problem = built(flow_of(program), mesh, Timer(device=machines.device), limit).problem(None)
        made_s = time.process_time() - began
        found = solve(problem)
        if share is None:
            least = least_memory(problem)
            assert least is not None
            low, high = least.peak_bytes, max(memory_bytes(problem, found.choice or ()).values())
        yield (
            f"| GPT, 96 layers; {'no limit' if share is None else f'{limit / 1e9:.1f} GB'} | {len(program.calls)} | "
            f"{len(problem.nodes)} | {problem.sizes.sum()} | {capture_s:.1f} | {made_s + found.build_cpu_s:.2f} | "
            f"{found.cpu_s - found.build_cpu_s:.2f} | {percent(found)} | {format_seconds(found.total_s)} |"
        )


def captured_llama(overlap: str) -> str:
    """The command from a file to a plan, in a process of its own; `overlap` is empty or its option against it."""
    options = f"--cluster dgx-h100 --gpus 64 --mesh 8x8 --batch 64 --dtype bf16 --json {overlap}"
    command = f"steptime shard {FILE}:llama_8b {options}"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    plan = json.loads(done.stdout)
    return (
        f"| {overlap or 'overlap'} | {cpu_s:.1f} | {wall_s:.0f} | {plan['solver_cpu_s']:.1f} | {plan['gap']:.2%} | "
        f"{format_seconds(plan['step_time_s'])} | {plan['stop']} |"
    )


def captured() -> list[str]:
    """Both tables."""
    return [
        "| captured; memory | calls | nodes | options | capture, CPU s | build, CPU s | solve, CPU s | gap | step |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *captured_gpt(),
        "",
        "| Llama 3 8B, from file to plan | CPU s | wall s | of it solver, CPU s | gap | step | stop |",
        "|---|--:|--:|--:|--:|--:|---|",
        captured_llama("--no-overlap"),
        captured_llama(""),
    ]


NOTES = f"""\
CPU seconds are `time.process_time`, one thread, one run. First table: `solve` with its default gap of 1 %; "build" is
reductions and models, "HiGHS" the relaxation and dives. Second: the default; `solve` with a gap of 0.01 % and a limit
of {MILP_S:g} s; by how much its bound exceeds that of the relaxation; and HiGHS alone on the whole integer program,
after our reductions, with the same gap and limit. Third: seconds above the bound of the exact solver (gap 0.01 %,
{MILP_S:g} s) after some CPU seconds, seed 0; "none fits": no legal choice within the limit was found.
Baselines that start from the greedy choice: local, mcmc, bayesian, learned, tree. The temperature of mcmc and the rate
of rl were chosen on the second and third of the problems shown, among six and four values.
Fourth: a GPT of 96 equal layers (width 4096, 64 x 2048 tokens, bf16, AdamW), forward and backward, captured by
`captured_shardings.py` and put on 8 x 8 devices of dgx-h100, nothing overlapped, default gap; "build" is tables of
costs, reductions and models, "solve" is HiGHS. Fifth: the command `steptime shard` with all imports and the capture,
for Llama 3 8B of `transformers` on the same devices; with overlap it takes several solutions. Its time limit is wall
time, so that the gap depends on what else the machine does.
"""


def main() -> None:
    if "--captured" in sys.argv[1:]:
        print("\n".join(captured()))
        return
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
    lines += ["", *captured()]
    report("sharding_solver", "Solving for shardings", "\n".join(lines), NOTES)


if __name__ == "__main__":
    main()
