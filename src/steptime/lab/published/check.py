"""Checks the published mode against figures that the published code computed.

The figures are files of the folder of measurements (:mod:`steptime.lab.data_root`): every operation of random
configurations, the ten best configurations of the searches, and the numbers of candidates.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import FORWARD, RECOMPUTE, PhaseTime, shown_s
from steptime.estimate.machine import Machine
from steptime.lab.data_root import data_root, require_data
from steptime.lab.published.fixes import Point, searches
from steptime.lab.published.method import PUBLISHED
from steptime.lab.published.space import PublishedSpace
from steptime.lab.published.statistics import GIGA, TERA, flops_of, statistics
from steptime.model.spec import ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.search.exhaustive import Found

NAMES: Final = {"1d": "1d", "2d": "2d", "2d-seqp": "context"}
"""Strategy in the files -> strategy here."""
SECOND: Final = {"1d": None, "2d": "tp2", "context": "cp"}
ATTENTION: Final = {"flash": "fused", "noflash": "unfused", "recompute": "unfused", "summa_attention": "summa"}

Progress = Callable[[int, int], None]


@dataclass(kw_only=True)
class Check:
    """Outcome of one comparison; it grows while figures are compared."""

    name: str
    cases: int = 0
    """Configurations, points or counts."""
    figures: int = 0
    """Numbers that were compared."""
    worst: float = 0.0
    """Largest relative error."""
    where: str = ""
    """Case and figure of it."""
    mismatches: list[str] = field(default_factory=list)
    """What is not a number and differs."""

    def number(self, here: Any, there: Any, where: str) -> None:
        """Compares two numbers."""
        self.figures += 1
        error = abs(float(here) - float(there)) / (abs(float(there)) or 1.0)
        if not error <= self.worst:
            self.worst, self.where = error, where

    def same(self, here: object, there: object, where: str) -> None:
        """Compares what must be equal."""
        self.figures += 1
        if here != there:
            self.mismatches.append(f"{where}: {here} instead of {there}")


def check_layers(progress: Progress | None = None) -> Check:
    """Work, traffic, times, weights and kept bytes of every operation, and the totals, of random configurations."""
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
        f"t_{short}_comm": sum(shown_s(time)),
    }


def _job(record: Mapping[str, Any]) -> Job:
    m = record["model"]
    model = ModelSpec(
        name="published", family="transformer", source="arXiv 2410.00273", layers=m["depth"], hidden=m["e"],
        heads=m["h"], kv_heads=m["h"], head_dim=m["e"] // m["h"], ffn_hidden=m["f"], gated_mlp=False,
        activation="gelu", norm="layernorm", causal=False, seq_len=m["l"], vocab=0,
    )  # fmt: skip
    return Job(
        model=model, gpus=1, global_batch=record["config"]["global_batch_size"], seq_len=m["l"],
        precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], attention=ATTENTION[record["variant"]],
    )  # fmt: skip


def _plans(record: Mapping[str, Any], strategy: str) -> Plans:
    c = record["config"]
    second = SECOND[strategy]
    columns = {} if second is None else {second: c["tp2"], f"in_{second}": c["nv_tp2"]}
    code = RECOMPUTE_CODES["attention" if record["variant"] == "recompute" else "none"]
    return Plans(
        tp=c["tp1"], pp=c["pp"], dp=c["dp"], micro_batch=c["mbs"], panels=c["nb"] or 1, recompute=code,
        in_tp=c["nv_tp1"], in_dp=c["nv_dp"], in_pp=c["nv_pp"], **columns,
    )  # fmt: skip


UNUSED_BPS = float("inf")
"""The paper keeps nothing on the host."""


def _machine(s: Mapping[str, float]) -> Machine:
    """The paper's system; 0.8 of peak and 20 us per operation are constants of its code."""
    matrix, vector = s["matrix_flops_fp16"] * 1e12, s["vector_flops_fp16"] * 1e12
    one_link_Bps = s["ib_bandwidth"] * s["ib_eff"] * 1e9
    return Machine(
        matrix_flops_per_s=0.8 * matrix, attention_flops_per_s=0.8 * matrix, vector_flops_per_s=0.8 * vector,
        peak_flops_per_s=matrix, memory_Bps=s["hbm_bandwidth"] * 1e9, memory_bytes=s["hbm_capacity"] * 1e9,
        kernel_latency_s=20e-6, fast_Bps=s["nvlink_bandwidth"] * s["nvlink_eff"] * 1e9,
        fast_latency_s=s["nvlink_latency"], slow_Bps=one_link_Bps * s["nic_factor"], lone_slow_Bps=one_link_Bps,
        slow_latency_s=s["ib_latency"], host_Bps=UNUSED_BPS, fast_domain=int(s["nvlink_size"]),
    )  # fmt: skip


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
                out[Point(model=row["model"], strategy=NAMES[row["strategy"]], device=row["gpu"].lower(),
                          fast_domain=int(row["nvs"]), gpus=int(row["n_gpus"]))].append(row)  # fmt: skip
    return out


def check_search(progress: Progress | None = None) -> tuple[Check, Check]:
    """The ten best configurations of every search with all their statistics, and the numbers of candidates."""
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
    """All checks.

    Raises:
        UserError: the files are not here; the message says how to point steptime to them.
    """
    if data_root() is None:
        raise UserError(
            "the figures of the published code are not here",
            hint="set the environment variable STEPTIME_DATA to the folder that has published_layers.jsonl.gz",
        )
    return [check_layers(progress), *check_search(progress)]
