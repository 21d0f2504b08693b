"""Predictors of whole training graphs measured on this machine, under the same splits.

    python benchmarks/bench_predict.py GRAPHS.jsonl MACHINE.toml            prints the tables
    python benchmarks/bench_predict.py GRAPHS.jsonl MACHINE.toml --write    also writes benchmarks/predict.md

The journal is that of `steptime predict measure`, the machine that of `steptime calibrate machine`; about half an hour.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from machine import report
from steptime.captured.cost.timing import Timer
from steptime.hardware import device_within
from steptime_lab.learned.data import rows_here
from steptime_lab.learned.graphs import SINGLE
from steptime_lab.learned.harness import FAMILY, FAMILY_ALONE, RANDOM, SIZE
from steptime_lab.learned.measuring import Graph, read_graphs
from steptime_lab.learned.scores import PREDICTORS, memory_table, table
from steptime_lab.learned.train import noise_of

ENCODER = next(name for name in PREDICTORS if "DNNPerf" in name)
KINDS = (RANDOM, SIZE, FAMILY, FAMILY_ALONE)


def score_lines(lines: list[dict[str, Any]]) -> list[str]:
    """Predictors as rows, splits as columns."""
    head = [
        "| predictor | random | size | family | family, alone | fit, CPU s |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    out = []
    for name in dict.fromkeys(line["predictor"] for line in lines):
        mine = {line["split"]: line for line in lines if line["predictor"] == name}
        cells = [
            f"{100 * mine[kind]['mean']:.1f} ({100 * mine[kind]['median']:.1f})" if kind in mine else "-"
            for kind in KINDS
        ]
        out.append(f"| {name} | {' | '.join(cells)} | {mine[RANDOM]['fit_cpu_s']:.1f} |")
    return [*head, *out]


def family_lines(lines: list[dict[str, Any]], memory: list[dict[str, Any]], graphs: list[Graph]) -> list[str]:
    """Families left out: time by the additive predictor and the analytic one, memory."""
    counts = Counter(graph.family for graph in graphs)
    ours, plain = (
        next(line["by_split"] for line in lines if line["predictor"].startswith(name) and line["split"] == FAMILY)
        for name in ("learned", "analytic")
    )
    head = [
        "| family left out | graphs | analytic | learned | peak, simulated | learned too | median | largest |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    return [*head, *(
        f"| {row['family']} | {counts[row['family']]} | {100 * plain[row['family']]:.1f} | "
        f"{100 * ours[row['family']]:.1f} | {100 * row['simulated']:.2f} | {100 * row['learned']:.2f} | "
        f"{100 * row['median']:.2f} | {100 * row['largest']:.1f} |"
        for row in memory
    )]  # fmt: skip


NOTES = """Errors are percent of the measured time or peak, means with medians in parentheses. *Noise* is the distance
of two measurements of the same graphs, half an hour apart. Splits: random 80/20; trained on the shorter 70
%, tested on the longest 15 %; each family left out in turn, with and without graphs of one operator. The
attention over edges is the published encoder (DNNPerf) with its pooled readout, on the features that it has
there. DNNPerf's own figures, 7.4 % for time and 13.7 % for memory, are of TensorFlow on GPUs, of a random
split, of configurations of ten kinds of networks: the
random split is the comparable one, against a
noise that there is far smaller. Memory is the peak of PyTorch's allocator on the processor; DNNPerf's is
that of a GPU's allocator with its workspaces.
"""


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("journal", type=Path)
    parser.add_argument("machine")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--encoder", nargs="*", default=[RANDOM, SIZE, FAMILY_ALONE], choices=KINDS, help="splits of the slowest one"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    graphs, _ = read_graphs(given.journal)
    rows = rows_here(graphs, Timer(device=device_within(given.machine)))
    lines = table(graphs, rows, [name for name in PREDICTORS if name != ENCODER], told=print)
    lines += table(graphs, rows, [ENCODER], told=print, kinds=[kind for kind in KINDS if kind in given.encoder])
    noise = noise_of(graphs)
    whole = sum(graph.family != SINGLE for graph in graphs)
    text = [
        f"{whole:,} graphs of networks, {len(graphs) - whole} of one operator. "
        f"Noise: mean {100 * noise['mean']:.1f} %, median {100 * noise['median']:.1f} %, {noise['graphs']:.0f} graphs.",
        "", *score_lines(lines), "", *family_lines(lines, memory_table(graphs), graphs),
    ]  # fmt: skip
    report("predict", "Predictors of whole training graphs", "\n".join(text), NOTES)


if __name__ == "__main__":
    main()
