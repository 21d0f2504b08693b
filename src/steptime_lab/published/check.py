"""Check of the published mode against figures of the published code, and the changes by each corrected defect."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Final

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import FORWARD, RECOMPUTE, PhaseTime, exposed_transfers_s
from steptime.estimate.machine import Machine
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.model.known import load_catalogue_model
from steptime.model.spec import ModelSpec
from steptime.plan.job import PRECISIONS, Job
from steptime.plan.optimizers import OPTIMIZERS
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.space import CorrectedSpace, Space
from steptime.plan.strategies import CORRECTED, Method
from steptime.search.exhaustive import Found, Task, search
from steptime_lab.data_root import data_root, require_data
from steptime_lab.published.mode import GIGA, TERA, PublishedSpace, flops_of, statistics
from steptime_lab.published.rows import FIXES, NONE, PUBLISHED, Defects, PublishedMethod

MODELS: Final = ("gpt3_1T", "vit_era5")
STRATEGIES: Final = ("1d", "context", "2d")
DEVICES: Final = ("a100", "h200", "b200")
FAST_DOMAINS: Final = (4, 8, 64)
GPUS: Final = tuple(2**k for k in range(2, 15))
GLOBAL_BATCH: Final = 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """One search of the paper."""

    model: str
    strategy: str
    device: str
    fast_domain: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """Best configuration of a point."""

    step_time_s: float
    plan: dict[str, int]


Winners = dict[Point, Winner | None]
Search = Callable[[int], list[tuple[Point, Found]]]
"""Runs a group of searches; its argument is the number of best configurations to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of the best throughput after a fix to the one before it, at the points where they differ."""

    points: int
    least: float
    median: float
    greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Changes of the published results by one fix or several."""

    name: str
    """Switch that is turned off, ``all_switches``, or ``corrected_mode``."""
    fix: str
    both: int
    """Points that are feasible before and after."""
    plans: int
    """Points feasible before and after whose best configuration changes."""
    ratios: dict[str, Ratio]
    """Model -> ratio of throughput."""
    gained: tuple[Point, ...]
    """Points that become feasible."""
    lost: tuple[Point, ...]
    """Points that become infeasible."""


def searches(method: Method, space: Space) -> Iterator[Search]:
    """The searches of all points, in groups that share their layers; calling a group runs it."""
    clusters = {(device, n): load_cluster(f"published-{device}-nvs{n}") for device in DEVICES for n in FAST_DOMAINS}
    for model, strategy, device in product(MODELS, STRATEGIES, DEVICES):
        points = [
            Point(model=model, strategy=strategy, device=device, fast_domain=n, gpus=gpus)
            for n, gpus in product(FAST_DOMAINS, GPUS)
        ]
        tasks = [
            Task(
                setting=Setting(method=method, job=job_of(point), cluster=clusters[device, point.fast_domain]),
                strategy=method.strategy(strategy),
                space=space,
            )
            for point in points
        ]
        yield partial(_run, points, tasks)


def _run(points: list[Point], tasks: list[Task], top: int) -> list[tuple[Point, Found]]:
    return list(zip(points, search(tasks, top), strict=True))


def job_of(point: Point) -> Job:
    """The paper's job at a point."""
    model = load_catalogue_model(point.model)
    return Job(
        model=model,
        gpus=point.gpus,
        global_batch=GLOBAL_BATCH,
        seq_len=model.seq_len,
        precision=PRECISIONS["bf16"],
        optimizer=OPTIMIZERS["adam"],
    )


def winners(method: Method, space: Space, progress: Callable[[], None] | None = None) -> Winners:
    """Best configuration of every point."""
    out: Winners = {}
    for group in searches(method, space):
        for point, found in group(1):
            out[point] = None
            if len(found.best_s):
                row: Any = found.best.row(0)
                out[point] = Winner(step_time_s=float(found.best_s[0]), plan=row.columns())
        if progress:
            progress()
    return out


def compare(name: str, fix: str, before: Winners, after: Winners) -> Change:
    """Changes from one set of winners to another."""
    both = [(p, b, a) for p, b in before.items() if b is not None and (a := after[p]) is not None]
    ratios = {}
    for model in MODELS:
        values = [b.step_time_s / a.step_time_s for p, b, a in both if p.model == model]
        values = [value for value in values if value != 1.0]
        if values:
            ratios[model] = Ratio(points=len(values), least=min(values), median=median(values), greatest=max(values))
    return Change(
        name=name,
        fix=fix,
        both=len(both),
        plans=sum(b.plan != a.plan for _, b, a in both),
        ratios=ratios,
        gained=tuple(sorted(p for p, a in after.items() if a is not None and before[p] is None)),
        lost=tuple(sorted(p for p, b in before.items() if b is not None and after[p] is None)),
    )


def variants() -> dict[str, tuple[str, Method, Space]]:
    """Name -> description, method and space: each fix alone, all of them, and the corrected mode."""

    def published(defects: Defects) -> tuple[Method, Space]:
        return PublishedMethod(defects), PublishedSpace(defects=defects)

    plain = CorrectedSpace(recompute=(RECOMPUTE_CODES["none"],), zero=(1,), vpp=(1,))
    return {
        **{name: (fix, *published(Defects().without(name))) for name, fix in FIXES.items()},
        "all_switches": ("all of the above", *published(NONE)),
        "corrected_mode": ("corrected mode without recomputation and interleaving, ZeRO-1", CORRECTED, plain),
    }


def corrections(progress: Progress | None = None) -> tuple[int, list[Change]]:
    """Number of feasible points of the published model, and the changes by each fix.

    Args:
        progress: called with groups of searches done and all groups.
    """
    chosen = variants()
    total = (1 + len(chosen)) * len(MODELS) * len(STRATEGIES) * len(DEVICES)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    before = winners(PUBLISHED, PublishedSpace(), step)
    changes = [
        compare(name, fix, before, winners(method, space, step)) for name, (fix, method, space) in chosen.items()
    ]
    return sum(winner is not None for winner in before.values()), changes


NAMES: Final = {"1d": "1d", "2d": "2d", "2d-seqp": "context"}
"""Strategy in the files -> strategy here."""
SECOND: Final = {"1d": None, "2d": "tp2", "context": "cp"}
ATTENTION: Final = {"flash": "fused", "noflash": "unfused", "recompute": "unfused", "summa_attention": "summa"}


@dataclass(kw_only=True)
class Check:
    """Outcome of one comparison; it grows while figures are compared."""

    name: str
    cases: int = 0
    """Number of configurations, points or counts."""
    figures: int = 0
    """Number of values that were compared."""
    worst: float = 0.0
    """Largest relative error."""
    where: str = ""
    """Case and figure with the largest relative error."""
    mismatches: list[str] = field(default_factory=list)
    """Differences other than errors of numbers."""

    def number(self, here: Any, there: Any, where: str) -> None:
        """Compare two numbers."""
        self.figures += 1
        error = abs(float(here) - float(there)) / (abs(float(there)) or 1.0)
        if not error <= self.worst:
            self.worst, self.where = error, where

    def same(self, here: object, there: object, where: str) -> None:
        """Compare two values that must be equal."""
        self.figures += 1
        if here != there:
            self.mismatches.append(f"{where}: {here} instead of {there}")


def check_layers(progress: Progress | None = None) -> Check:
    """Check work, traffic, times, weights and kept bytes of operations, and totals, in random configurations."""
    check = Check(name="operations and totals of random configurations")
    with gzip.open(require_data("published_layers.jsonl.gz"), "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    for done, record in enumerate(records, 1):
        _check_record(check, record)
        if progress:
            progress(done, len(records))
    return check


def _check_record(check: Check, record: Mapping[str, Any]) -> None:
    strategy = PUBLISHED.strategy(NAMES[record["strategy"]])
    e = evaluate(PUBLISHED, strategy, _job(record), _machine(record["system"]), _plans(record, strategy.name))
    check.cases += 1
    times = {(time.row.name, time.phase): time for time in e.times["layer"]}
    for row, layer in zip(e.block.layer, record["layers"], strict=True):
        where = f"{record['id']} {row.name}"
        check.same(row.name, layer["name"], where)
        check.number(row.weights * 2 * GIGA, layer["weights_mem"], f"{where} weights")
        check.number(row.kept_bytes * GIGA, layer["activation_buffer_stat"], f"{where} kept")
        for phase, short in ((FORWARD, "fwd"), ("backward", "bwd")):
            again = times.get((row.name, RECOMPUTE)) if short == "bwd" else None
            for name, value in _figures(e, times[row.name, phase], again, short).items():
                check.number(value, layer[name], f"{where} {name}")
    totals, statistic = record["totals"], statistics(e)["stats"]
    for name in statistic.keys() & totals.keys():
        check.number(statistic[name], totals[name], f"{record['id']} {name}")
    check.same(e.peak_bytes <= e.machine.memory_bytes, record["feasible"], f"{record['id']} feasible")


def _figures(e: Evaluation, time: PhaseTime, again: PhaseTime | None, short: str) -> dict[str, Any]:
    total = time.total_s + (again.total_s if again else 0.0)
    return {
        f"flops_{short}": flops_of(time, e) * TERA,
        f"mem_{short}": time.moved_bytes * GIGA,
        f"t_{short}": total,
        f"t_{short}_comp": time.compute_s,
        f"t_{short}_mem": time.exposed_memory_s,
        f"t_{short}_comm": sum(exposed_transfers_s(time)),
    }


def _job(record: Mapping[str, Any]) -> Job:
    m = record["model"]
    model = ModelSpec(
        name="published",
        family="transformer",
        source="arXiv 2410.00273",
        layers=m["depth"],
        hidden=m["e"],
        heads=m["h"],
        kv_heads=m["h"],
        head_dim=m["e"] // m["h"],
        ffn_hidden=m["f"],
        gated_mlp=False,
        activation="gelu",
        norm="layernorm",
        causal=False,
        seq_len=m["l"],
        vocab=0,
    )
    return Job(
        model=model,
        gpus=1,
        global_batch=record["config"]["global_batch_size"],
        seq_len=m["l"],
        precision=PRECISIONS["bf16"],
        optimizer=OPTIMIZERS["adam"],
        attention=ATTENTION[record["variant"]],
    )


def _plans(record: Mapping[str, Any], strategy: str) -> Plans:
    c = record["config"]
    second = SECOND[strategy]
    columns = {} if second is None else {second: c["tp2"], f"in_{second}": c["nv_tp2"]}
    code = RECOMPUTE_CODES["attention" if record["variant"] == "recompute" else "none"]
    return Plans(
        tp=c["tp1"],
        pp=c["pp"],
        dp=c["dp"],
        micro_batch=c["mbs"],
        panels=c["nb"] or 1,
        recompute=code,
        in_tp=c["nv_tp1"],
        in_dp=c["nv_dp"],
        in_pp=c["nv_pp"],
        **columns,
    )


UNUSED_BPS = float("inf")
"""The paper keeps nothing on the host."""


def _machine(s: Mapping[str, float]) -> Machine:
    """The paper's system; 0.8 of peak and 20 us per operation are constants of its code."""
    matrix, vector = s["matrix_flops_fp16"] * 1e12, s["vector_flops_fp16"] * 1e12
    one_link_Bps = s["ib_bandwidth"] * s["ib_eff"] * 1e9
    return Machine(
        matrix_flops_per_s=0.8 * matrix,
        attention_flops_per_s=0.8 * matrix,
        vector_flops_per_s=0.8 * vector,
        peak_flops_per_s=matrix,
        memory_Bps=s["hbm_bandwidth"] * 1e9,
        memory_bytes=s["hbm_capacity"] * 1e9,
        kernel_latency_s=20e-6,
        fast_Bps=s["nvlink_bandwidth"] * s["nvlink_eff"] * 1e9,
        fast_latency_s=s["nvlink_latency"],
        slow_Bps=one_link_Bps * s["nic_factor"],
        lone_slow_Bps=one_link_Bps,
        slow_latency_s=s["ib_latency"],
        host_Bps=UNUSED_BPS,
        fast_domain=int(s["nvlink_size"]),
    )


def _best_rows() -> dict[Point, list[dict[str, str]]]:
    """The published best configurations of each point, best first."""
    root = data_root()
    files = sorted(root.glob("published_search_*.csv.gz")) if root else []
    if not files:
        require_data("published_search_gpt3_1T.csv.gz")
    out: dict[Point, list[dict[str, str]]] = defaultdict(list)
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                out[
                    Point(
                        model=row["model"],
                        strategy=NAMES[row["strategy"]],
                        device=row["gpu"].lower(),
                        fast_domain=int(row["nvs"]),
                        gpus=int(row["n_gpus"]),
                    )
                ].append(row)
    return out


def check_search(progress: Progress | None = None) -> tuple[Check, Check]:
    """Check the ten best configurations of every search with all statistics, and the numbers of candidates."""
    best, counts = Check(name="best configurations of the searches"), Check(name="numbers of candidates")
    published = _best_rows()
    expected = json.loads(require_data("published_candidate_counts.json").read_text(encoding="utf-8"))
    models = {point.model for point in published}
    there = {here: name for name, here in NAMES.items()}
    groups = list(searches(PUBLISHED, PublishedSpace()))
    for done, group in enumerate(groups, 1):
        for point, found in group(10):
            key = f"{point.model}|{there[point.strategy]}|{point.fast_domain}|{point.gpus}"
            if key in expected:
                counts.cases += 1
                counts.same(found.candidates, expected[key], key)
            if point.model in models:
                _check_point(best, point, found, published.get(point, []))
        if progress:
            progress(done, len(groups))
    return best, counts


def _check_point(check: Check, point: Point, found: Found, rows: list[dict[str, str]]) -> None:
    check.cases += 1
    check.same(len(found.best_s), len(rows), f"{point} rows")
    setting = found.task.setting
    for i, row in enumerate(rows[: len(found.best_s)]):
        where = f"{point} rank {i}"
        e = evaluate(PUBLISHED, found.task.strategy, setting.job, setting.machine, found.best.row(i))
        here = statistics(e)
        check.number(here["throughput"], row["throughput"], f"{where} throughput")
        check.number(setting.job.global_batch / found.best_s[i], row["throughput"], f"{where} throughput of the search")
        for name, value in here["stats"].items():
            check.number(value, row[f"stat_{name}"], f"{where} {name}")
        for name, value in here["config"].items():
            column = name if name.startswith("nv_") else f"cfg_{name}"
            check.same(float(value), float(row[column] or 1), f"{where} {name}")


def check_all(progress: Progress | None = None) -> list[Check]:
    """Run all checks.

    Raises:
        UserError: the files are missing; the message says how to point steptime to them.
    """
    if data_root() is None:
        raise UserError(
            "the figures of the published code are not here",
            hint="set the environment variable STEPTIME_DATA to the folder that has published_layers.jsonl.gz",
        )
    return [check_layers(progress), *check_search(progress)]
