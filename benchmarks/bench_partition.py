"""Splits of layers over pipeline stages: against all splits, published layouts, even splits, and placement learnt.

python benchmarks/bench_partition.py            prints the tables
python benchmarks/bench_partition.py --write    also writes them to benchmarks/partition.md
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from machine import report
from steptime.errors import UserError
from steptime.schedule import SCHEDULES
from steptime.simulation.graph import Transport, graph_of
from steptime.simulation.layout import layout_text
from steptime.simulation.partition import Counts, SplitTask, best_split, candidates, even_counts, fastest
from steptime.simulation.run import SimulatedStep
from steptime.simulation.simulate import Durations, simulate
from steptime.simulation.stages import simulate_stages
from steptime_lab.planners.partition_milp import proved_slowest_s
from steptime_lab.planners.placement_learning import learnt

CASES, PROVED = 1000, 200
LLAMA: dict[str, Any] = {"gpus": 2048, "global_batch": 256, "seq": 8192}
LLAMA_PLAN = {"tp": 8, "pp": 16, "zero": 1}
DEEPSEEK: dict[str, Any] = {"gpus": 1024, "global_batch": 8192, "seq": 4096, "dtype": "fp8", "framework": "megatron"}
DEEPSEEK_PLAN = {"tp": 1, "pp": 16, "ep": 64, "recompute": "norm+activation+up_projection+experts"}
PUBLISHED = (
    ("llama3.1-405b", "dgx-h100", LLAMA, LLAMA_PLAN, "Et*7|(t*8|)*14t*7L", "arXiv 2407.21783, section 3.3.2"),
    ("llama3.1-405b", "dgx-h100", LLAMA, LLAMA_PLAN, "E|(t|)*126L", "arXiv 2407.21783, section 3.3.2"),
    ("deepseek-v3", "dgx-h200", DEEPSEEK, DEEPSEEK_PLAN, "Et*3|(tt|)*29m|L", "Megatron-Core, user guide"),
    ("deepseek-v3", "dgx-h100", DEEPSEEK, DEEPSEEK_PLAN, "Et*3|(tt|)*29m|L", "Megatron-Core, user guide"),
    ("deepseek-v3", "dgx-h100", DEEPSEEK, DEEPSEEK_PLAN, "Et*4|(t*4|)*14tmL", "Megatron-Bridge, recipe"),
)
GRID = (
    "gpt3-175b", "llama2-7b", "llama2-13b", "llama2-70b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "gemma2-9b",
    "gemma2-27b", "qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "mixtral-8x7b", "mixtral-8x22b", "deepseek-v2-lite",
    "deepseek-v2", "qwen3-30b-a3b", "qwen3-235b-a22b", "glm4.5-air", "mistral-7b", "bloom-176b", "falcon-40b",
    "gpt-neox-20b",
)  # fmt: skip
GRID_PLANS = ((4, 1), (8, 1), (4, 2))


def tasks(count: int, most: int = 12) -> Iterator[SplitTask]:
    """Small random cases: equal and unequal layers and devices, with and without memory, one to three stages a rank."""
    random = np.random.default_rng(0)
    for _ in range(count):
        p, v = int(random.integers(1, 5)), int(random.integers(1, 4))
        items = int(random.integers(p * v, max(p * v, most - 3) + 3))
        seconds, held = random.integers(1, 9, items).astype(float), random.integers(1, 5, items).astype(float)
        if random.random() < 0.5:
            seconds[1:-1], held[1:-1] = 3.0, 2.0
        speed = random.choice([0.5, 1.0, 2.0], p) if random.random() < 0.5 else np.ones(p)
        flight = np.arange(p, 0, -1.0)[:, None]
        room = random.uniform(0.6, 2.5) * held.sum() * flight.mean() / p * random.uniform(0.7, 1.3, p)
        room = np.full(p, np.inf) if random.random() < 0.3 else room
        yield SplitTask(
            seconds=seconds / speed[:, None], held_bytes=(0.3 + flight) * held, room_bytes=room,
            rank=np.tile(np.arange(p), v),
        )  # fmt: skip


def all_splits(task: SplitTask) -> Iterator[Counts]:
    """All of them that fit into the memory."""
    for cuts in combinations(range(1, task.items), task.stages - 1):
        counts = tuple(np.diff([0, *cuts, task.items]).tolist())
        if task.fits(counts):
            yield counts


def against_all() -> list[str]:
    """How often the best split is that of all splits, and of the mixed-integer program."""
    same, without, proved = 0, 0, 0
    for number, task in enumerate(tasks(CASES)):
        best = min(map(task.slowest_s, all_splits(task)), default=None)
        try:
            found = task.slowest_s(best_split(task).counts)
        except UserError:
            found = None
        without += best is None
        same += found == best or (None not in (found, best) and abs(found - best) < 1e-9)
        if number < PROVED:
            least = proved_slowest_s(task)
            proved += least == found or (None not in (found, least) and abs(found - least) < 1e-6)
    return [
        "| check | cases | same |", "|---|---:|---:|",
        f"| all splits ({without} cases: none fits) | {CASES} | {same} |",
        f"| mixed-integer program (HiGHS) | {PROVED} | {proved} |",
    ]  # fmt: skip


def speed() -> list[str]:
    """CPU seconds of best splits of 128 layers."""
    lines = ["| layers | ranks | stages of a rank | CPU |", "|---|---:|---:|---:|"]
    random = np.random.default_rng(0)
    for ranks, chunks, words in ((32, 1, "128, all unequal"), (32, 4, "128, equal"), (16, 2, "128, equal")):
        each = random.random(130) if chunks == 1 else np.concatenate([[0.1], np.ones(128), [1.7]])
        task = SplitTask(
            seconds=np.tile(each, (ranks, 1)), held_bytes=np.ones((ranks, 130)), room_bytes=np.full(ranks, 1e9),
            rank=np.tile(np.arange(ranks), chunks),
        )  # fmt: skip
        start = process_time()
        best_split(task)
        lines.append(f"| {words} | {ranks} | {chunks} | {1e3 * (process_time() - start):.0f} ms |")
    return lines


def deepseek_file(folder: Path) -> str:
    """DeepSeek-V3 of the catalogue with its multi-token-prediction layer."""
    import tomllib

    from steptime.model import known

    text = (Path(known.__file__).parent / "catalogue" / "deepseek.toml").read_text()
    assert "deepseek-v3" in tomllib.loads(text)
    body = text.split("[deepseek-v3]\n", 1)[1].split("\n[", 1)[0]
    path = folder / "deepseek-v3.toml"
    path.write_text(f'name = "deepseek-v3"\n{body}\nmtp_depth = 1\n')
    return str(path)


def published(folder: Path) -> list[str]:
    """Layouts in public recipes against the split that is found."""
    lines = [
        "| model, cluster | published layout | step | memory | split found | step | memory | even split |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for name, cluster, job, plan, layout, _ in PUBLISHED:
        model = deepseek_file(folder) if name == "deepseek-v3" else name
        given = simulate_stages(model, cluster, layout=layout, plan=plan, **job)
        chunks = given.table.stages // given.table.ranks
        own = plan if chunks == 1 else {**plan, "vpp": chunks}
        found = simulate_stages(model, cluster, balance=True, plan=own, **job)
        cells = [escaped(each) for each in (given, found)]
        lines.append(f"| {name}, {cluster} | {cells[0]} | {cells[1]} | {found.even_step_s:.3f} s |")
    return lines


def escaped(step: SimulatedStep) -> str:
    """Layout, step and memory as cells of a table."""
    text = layout_text(step.layout).replace("|", "\\|")
    return f"`{text}` | {step.step_s:.3f} s | {gib(step)}"


def gib(step: SimulatedStep) -> str:
    """Memory of the fullest rank, marked where it is more than there is."""
    peak = step.memory.peak_bytes.max()
    return f"{peak / 2**30:.1f} GiB{' (too much)' if peak > np.max(step.capacity_bytes) else ''}"


def grid() -> list[str]:
    """The split found against the even one, over models."""
    rows: dict[tuple[int, int], list[float]] = {plan: [] for plan in GRID_PLANS}
    unfit, uneven = 0, dict.fromkeys(GRID_PLANS, 0)
    for model in GRID:
        for pp, vpp in GRID_PLANS:
            plan = {"tp": 8, "pp": pp, **({"vpp": vpp} if vpp > 1 else {})}
            try:
                found = simulate_stages(
                    model, "dgx-h100", balance=True, plan=plan, gpus=8 * pp * 4, global_batch=4 * 4 * pp
                )
            except UserError:
                unfit += 1
                continue
            if found.even_fits:
                rows[pp, vpp].append(found.step_s / found.even_step_s - 1)
            else:
                uneven[pp, vpp] += 1
    lines = [
        "| ranks | stages of a rank | models | slower | same | faster | mean | best | only the split found fits |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (pp, vpp), each in rows.items():
        change = np.array(each)
        slower, faster = int((change > 1e-9).sum()), int((change < -1e-4).sum())
        lines.append(
            f"| {pp} | {vpp} | {len(each)} | {slower} | {len(each) - slower - faster} | {faster} "
            f"| {change.mean():+.1%} | {change.min():+.1%} | {uneven[pp, vpp]} |"
        )
    return [*lines, "", f"Cases left out because nothing fits or the layers do not go round: {unfit}."]


def played(task: SplitTask, chunks: int, micro_batches: int) -> Callable[[Counts], float]:
    """Step time of a split of a case, a third of each item's time forward."""
    name = "1f1b" if chunks == 1 else "interleaved"
    ranks = len(task.room_bytes)
    graph = graph_of(SCHEDULES[name].actions(ranks, chunks, micro_batches), Transport())

    def seconds_of(counts: Counts) -> float:
        ends = np.cumsum(counts)
        each = task.sums[0][task.rank, ends] - task.sums[0][task.rank, ends - np.asarray(counts)]
        return simulate(graph, Durations(forward_s=each / 3, input_gradient_s=each * 2 / 3)).step_s

    return seconds_of


def learning() -> list[str]:
    """Dynamic programming with play against a learner, and against all splits where they can be counted."""
    lines = [
        "| items | ranks | stages | even | found | simulations | CPU | learnt | simulations | CPU | best of all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    random = np.random.default_rng(1)
    for items, p, v, batches in ((12, 4, 1, 40), (14, 3, 2, 40), (34, 8, 1, 120), (66, 16, 1, 120), (66, 8, 2, 120)):
        each = random.uniform(0.5, 1.5, items)
        task = SplitTask(
            seconds=np.tile(each, (p, 1)), held_bytes=np.ones((p, items)), room_bytes=np.full(p, 1e9),
            rank=np.tile(np.arange(p), v),
        )  # fmt: skip
        seconds_of, calls = played(task, v, 4 * p), []

        def counted(counts: Counts, seconds_of: Any = seconds_of, calls: Any = calls) -> float:
            calls.append(counts)
            return float(seconds_of(counts))

        even = even_counts(items, p * v)
        start = process_time()
        best = fastest(task, [best_split(task).counts, *candidates(task), even], counted, lambda _: 0.0, 160)
        ours_s = process_time() - start
        start = process_time()
        other = learnt(task, seconds_of, batches)
        theirs_s = process_time() - start
        whole = f"{min(map(seconds_of, all_splits(task))):.2f} s" if items < 20 else "-"
        lines.append(
            f"| {items} | {p} | {v} | {seconds_of(even):.2f} s | {seconds_of(best):.2f} s | {len(calls)} "
            f"| {ours_s:.2f} s | {other.seconds:.2f} s | {other.simulations} | {theirs_s:.2f} s | {whole} |"
        )
    return lines


def main() -> None:
    lines = [*against_all(), "", *speed(), ""]
    with tempfile.TemporaryDirectory() as folder:
        lines += [*published(Path(folder)), ""]
    lines += [*grid(), "", *learning()]
    sources = "; ".join(dict.fromkeys(f"{name}: {source}" for name, *_, source in PUBLISHED))
    notes = (
        "Small cases: the slowest rank's seconds, with memory limits, unequal devices and up to 3 stages a rank.\n"
        f"Published layouts ({sources}) are played with the same times as the split found, which has to fit.\n"
        "Grid: models of the catalogue, tp 8; change of the step time by the split found.\n"
        "Learnt: a policy gradient on the same simulator; random layers without memory limits.\n"
    )
    report("partition", "Splits of layers over pipeline stages", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
