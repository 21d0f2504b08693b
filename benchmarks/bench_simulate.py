"""CPU seconds of simulating schedules, of sampling them, and of writing their traces.

python benchmarks/bench_simulate.py            prints the tables
python benchmarks/bench_simulate.py --write    also writes them to benchmarks/simulate.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from machine import report
from steptime.formats.trace import chrome, perfetto
from steptime.schedule import SCHEDULES
from steptime.simulation.graph import graph_of
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.messages import with_messages
from steptime.simulation.simulate import Durations, Jitter, sampled_step_s, simulate
from steptime.simulation.trace import trace_of

RUNS = 7
DURATIONS = Durations(forward_s=1.0, input_gradient_s=1.1, weight_gradient_s=0.9, message_s=0.05)
CASES = (
    ("1f1b", 4, 1, 64), ("1f1b", 8, 1, 1024), ("zb-h1", 8, 1, 1024), ("interleaved", 16, 2, 512),
    ("interleaved", 64, 4, 1024),
)  # fmt: skip
SLICES = ("1f1b", 16, 1, 1100)
SAMPLED = ("interleaved", 16, 4, 128)
SAMPLES = 100


def cpu_s(work: Callable[[], object]) -> float:
    """Median CPU seconds of a call, after one that is not counted."""
    work()
    times = []
    for _ in range(RUNS):
        before = time.process_time()
        work()
        times.append(time.process_time() - before)
    return median(times)


def simulations() -> list[str]:
    lines = ["| schedule | ranks | chunks | micro-batches | actions | CPU s | again | million actions/s |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, p, v, m in CASES:
        table = SCHEDULES[name].actions(p, v, m)
        graph = graph_of(table)
        actions = len(table) + 2 * len(graph.messages.item)
        whole_s = cpu_s(lambda table=table: simulate(table, DURATIONS).step_s)
        again_s = cpu_s(lambda graph=graph: simulate(graph, DURATIONS).step_s)
        rate = actions / whole_s / 1e6
        lines.append(f"| {name} | {p} | {v} | {m:,} | {actions:,} | {whole_s:.3f} | {again_s:.3f} | {rate:.2f} |")
    return lines


def samples_and_traces() -> list[str]:
    graph = graph_of(SCHEDULES[SAMPLED[0]].actions(*SAMPLED[1:]))
    actions = SAMPLES * (len(graph.table) + 2 * len(graph.messages.item))
    jitter = Jitter(action=0.05, rank=0.02, message=0.1)
    sampled_s = cpu_s(lambda: sampled_step_s(graph, DURATIONS, jitter, SAMPLES))
    simulation = simulate(with_messages(SCHEDULES[SLICES[0]].actions(*SLICES[1:])), DURATIONS)
    memory = memory_replay(simulation, Footprint(activation_bytes=1e6))
    trace = trace_of(simulation, memory, 1e6)
    slices, counts = len(trace.slices.track), sum(len(count.time_ns) for count in trace.counts)
    lines = ["| what | CPU s | |", "|---|---:|---|"]
    lines.append(
        f"| {SAMPLES} samples of {SAMPLED[0]}, {SAMPLED[1]} ranks, {SAMPLED[2]} chunks, {SAMPLED[3]} micro-batches "
        f"| {sampled_s:.3f} | {actions / sampled_s / 1e6:.1f} million actions/s |"
    )
    for name, write in (("Perfetto", perfetto), ("Chrome JSON", chrome)):
        size = f"{len(write(trace)) / 1e6:.0f} MB"
        written_s = cpu_s(lambda write=write: write(trace))
        lines.append(f"| {name} trace of {slices:,} slices, {counts:,} values of memory | {written_s:.3f} | {size} |")
    return lines


def main() -> None:
    notes = (
        f"CPU seconds of one process with one thread, median of {RUNS} runs. Actions are passes, sends and receives;\n"
        "the table of a schedule is there already. *Again*: other durations, with the graph of what waits for what.\n"
    )
    tables = [*simulations(), "", *samples_and_traces()]
    report("simulate", "Simulating schedules", "\n".join(tables), notes)


if __name__ == "__main__":
    main()
