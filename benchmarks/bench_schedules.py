"""Simulated against measured step times of pipeline schedules: the runs of the zero-bubble paper (arXiv 2401.10241).

python benchmarks/bench_schedules.py            prints the tables
python benchmarks/bench_schedules.py --write    also writes them to benchmarks/schedules.md

The measured times of a pass of a stage and of a message go into the simulator; a rank computes nothing while it sends.
One number is fitted: seconds that each micro-batch takes on each rank beyond them.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from machine import report
from steptime.measure.runs.reading import read_runs
from steptime.measure.runs.samples import settings_of
from steptime.schedule import SCHEDULES, Pipeline, Times
from steptime.simulation.graph import ActionGraph, Transport, graph_of
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.simulate import Durations, Simulation, simulate
from steptime_lab.data_root import require_data

NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-1p", "ZB-2p": "zb-2p"}
PAPER = "2401.10241) Tables 3-4"
CANDIDATES_S = np.arange(0, 15.01e-3, 0.1e-3)


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run, and what it is simulated with."""

    model: str
    schedule: str
    pipeline: Pipeline
    graph: ActionGraph
    measured_s: float
    row_id: str
    layers: int
    measured_bytes: float
    """Peak memory; printed as GB, taken as GiB."""

    def simulated(self, overhead_s: float) -> Simulation:
        """The step, each micro-batch taking so many seconds more on each rank.

        They are spread over its passes as their measured times are.
        """
        times, chunks = self.pipeline.times, self.pipeline.chunks
        factor = (1 + overhead_s / times.all_s) / chunks
        durations = Durations(
            forward_s=factor * times.forward_s, input_gradient_s=factor * times.input_gradient_s,
            weight_gradient_s=factor * times.weight_gradient_s, message_s=times.message_s,
        )  # fmt: skip
        return simulate(self.graph, durations)

    def step_s(self, overhead_s: float) -> float:
        """Seconds from one step to the next."""
        return float(self.simulated(overhead_s).rank_span_s.max())

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.pipeline.micro_batches


def read() -> list[Run]:
    """Runs whose stage times are measured."""
    with require_data("pipeline_stage_times.csv").open() as file:
        rows = list(csv.DictReader(file))
    stages = {(r["model"], int(r["pp"]), int(r["micro_batch"]), int(r["microbatches"])): r for r in rows}
    with gzip.open(require_data("measured_training.csv.gz"), "rt") as file:
        rows = [row for row in csv.DictReader(file) if PAPER in row["source"] and row["schedule"] in NAMES]
    found = []
    for row in rows:
        micro_batches = int(row["global_batch_sequences"]) // int(row["micro_batch"])
        times = stages.get((row["model"], int(row["pp"]), int(row["micro_batch"]), micro_batches))
        if times is not None:
            found.append(run_of(row, times, micro_batches))
    return found


def run_of(row: Mapping[str, str], stage: Mapping[str, str], micro_batches: int) -> Run:
    times = Times(
        forward_s=1e-3 * float(stage["T_F_ms"]), input_gradient_s=1e-3 * float(stage["T_B_ms"]),
        weight_gradient_s=1e-3 * float(stage["T_W_ms"]), message_s=1e-3 * float(stage["T_comm_ms"]),
    )  # fmt: skip
    pipeline = Pipeline(ranks=int(row["pp"]), chunks=int(row["vpp"]), micro_batches=micro_batches, times=times)
    name = NAMES[row["schedule"]]
    graph = graph_of(SCHEDULES[name].order(pipeline), Transport(overlap=False))
    return Run(
        row["model"], name, pipeline, graph, float(row["derived_step_time_s"]), row["row_id"], int(row["layers"]),
        2.0**30 * float(row["metric_peak_mem_gb"]),
    )  # fmt: skip


def errors(runs: Iterable[Run], overhead_s: float) -> np.ndarray:
    """Relative errors of the simulated step times."""
    return np.array([run.step_s(overhead_s) / run.measured_s - 1 for run in runs])


def fitted_s(runs: list[Run]) -> float:
    """The overhead with the least mean error, found on a grid of 1 ms and then of 0.1 ms."""
    coarse = min(CANDIDATES_S[::10], key=lambda each: np.abs(errors(runs, each)).mean())
    near = CANDIDATES_S[np.abs(CANDIDATES_S - coarse) < 1e-3]
    return float(min(near, key=lambda each: np.abs(errors(runs, each)).mean()))


def closed_form_s(run: Run) -> float | None:
    """The closed form of a schedule, which knows neither messages nor overhead."""
    bubble_s = SCHEDULES[run.schedule].bubble_s(run.pipeline)
    return None if bubble_s is None else bubble_s + run.micro_batches * run.pipeline.times.all_s


def by_schedule(runs: list[Run], overheads_s: list[float]) -> list[str]:
    """Mean errors, one line for each schedule."""
    lines = []
    for name in (*NAMES.values(), "all"):
        own = [run for run in runs if name in (run.schedule, "all")]
        closed = [closed_form_s(run) for run in own]
        known = [abs(s / run.measured_s - 1) for s, run in zip(closed, own, strict=True) if s is not None]
        cells = [f"{np.abs(each).mean():.1%} ({each.mean():+.1%})" for each in (errors(own, s) for s in overheads_s)]
        shown = f"{np.mean(known):.1%}" if len(known) == len(own) else "-"
        lines.append(f"| {name} | {len(own)} | {shown} | {' | '.join(cells)} |")
    return lines


def ranked(runs: list[Run], overhead_s: float) -> list[str]:
    """Schedules from fast to slow, simulated and measured."""
    lines = []
    for key in dict.fromkeys((run.model, run.micro_batches) for run in runs):
        own = [run for run in runs if (run.model, run.micro_batches) == key]
        simulated = sorted(own, key=lambda run: run.step_s(overhead_s))
        measured = sorted(own, key=lambda run: run.measured_s)
        same = all(one.measured_s <= other.measured_s for one, other in pairwise(simulated))
        words = " < ".join(run.schedule for run in simulated)
        if not same:
            told = " < ".join(run.schedule for run in measured)
        elif len({run.measured_s for run in own}) < len(own):
            told = "same, with a tie"
        else:
            told = "same"
        lines.append(f"| {key[0]} | {key[1]} | {words} | {told} |")
    return lines


def footprints(runs: list[Run]) -> dict[tuple[str, int], Footprint]:
    """What stages hold, by model and chunks, from the estimates of the runs with 1F1B.

    Embedding and head count as a layer each, so that all virtual stages have the same number of them. Everything but
    activations stays with the first chunk of a rank.
    """
    by_row = {run.row_id: run for run in read_runs(require_data("measured_training.csv.gz")).runs}
    found = {}
    for one in {run.model: run for run in runs if run.schedule == "1f1b"}.values():
        p, stages = one.pipeline.ranks, settings_of(by_row[one.row_id])[0].evaluate().memory
        calls = {name: stage.calls() for name, stage in stages.items()}
        layers = {n: float(c["activations/layers/activation_bytes"].value) for n, c in calls.items()}
        head = float(calls["last"]["activations/ends/activation_bytes"].value)
        fixed = {n: max(map(float, stages[n].totals.values())) - layers[n] for n in stages}
        own = (one.layers + 2) // p
        layer = layers["middle"] / own / min(p - 1, one.micro_batches)
        for run in (each for each in runs if each.model == one.model):
            count = p * run.pipeline.chunks
            kept = np.full(count, layer * own / run.pipeline.chunks)
            kept[[0, -1]] -= layer
            kept[-1] += head
            rest = np.concatenate([[fixed["first"]], np.full(p - 2, fixed["middle"]), [fixed["last"] - head]])
            rest = np.concatenate([rest, np.zeros(count - p)])
            found[run.model, run.pipeline.chunks] = Footprint(
                activation_bytes=kept, deferred_bytes=kept, fixed_bytes=rest
            )
    return found


def peaks(runs: list[Run]) -> list[str]:
    """Peak memory, one line for each model and schedule."""
    held, lines, apart = footprints(runs), [], []
    for run in {(run.model, run.schedule): run for run in runs}.values():
        peak = memory_replay(run.simulated(0.0), held[run.model, run.pipeline.chunks]).peak_bytes.max()
        apart.append(peak / run.measured_bytes - 1)
        gib = [f"{each / 2**30:.1f}" for each in (peak, run.measured_bytes)]
        lines.append(f"| {run.model} | {run.schedule} | {gib[0]} | {gib[1]} | {apart[-1]:+.1%} |")
    return [*lines, f"| all | | | | {np.abs(apart).mean():.1%} |"]


def main() -> None:
    runs = read()
    models = list(dict.fromkeys(run.model for run in runs))
    overhead_s = fitted_s(runs)
    lines = ["| schedule | runs | closed form | simulated | with the overhead |", "|---|---:|---:|---:|---:|"]
    lines += by_schedule(runs, [0.0, overhead_s])
    lines += ["", f"Overhead per micro-batch, fitted to all runs: {1e3 * overhead_s:.1f} ms.", ""]
    lines += ["| model | fitted to the other model | mean error (bias) | fitted to it |", "|---|---:|---:|---:|"]
    for model in models:
        own, others = ([run for run in runs if (run.model == model) == same] for same in (True, False))
        unseen_s = fitted_s(others)
        each = errors(own, unseen_s)
        lines.append(
            f"| {model} | {1e3 * unseen_s:.1f} ms | {np.abs(each).mean():.1%} ({each.mean():+.1%}) "
            f"| {1e3 * fitted_s(own):.1f} ms |"
        )
    lines += ["", "| model | micro-batches | simulated, fast to slow | measured |", "|---|---:|---|---|"]
    lines += ranked(runs, overhead_s)
    lines += ["", "| model | schedule | peak memory, GiB | measured | error |", "|---|---|---:|---:|---:|"]
    lines += peaks(runs)
    notes = (
        "Mean error, in brackets the mean with its sign (below 0: too fast), of the time from step to step.\n"
        "Peak memory: what stages hold by the estimate of the run with 1F1B, replayed; without the allocator.\n"
    )
    report("schedules", "Measured pipeline schedules", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
