"""Models, systems and plans of the published results, in the words of their tables."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.model.spec import ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import Strategy
from steptime.search.exhaustive import Found, Task, search
from steptime_lab.published.mode import PublishedSpace, statistics
from steptime_lab.published.rows import PUBLISHED

SPACE = PublishedSpace()
STRATEGIES = {"1d": "1d", "2d": "2d", "2d-seqp": "context"}
"""Name in the tables -> name here."""
SECOND = {"1d": None, "2d": "tp2", "2d-seqp": "cp"}
GPUS, DOMAINS, COUNTS = ("a100", "h200", "b200"), (4, 8, 64), tuple(2**k for k in range(2, 15))
SHAPES = {
    "gpt3_1T": (2048, 25600, 160, 128), "vit_era5": (64800, 12288, 64, 48), "gpt3": (2048, 12288, 96, 96),
}  # fmt: skip
BATCH = 4096
DAY_S = 86400.0


def table(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV.gz."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def blocks(name: str, seq_len: int, hidden: int, heads: int, layers: int, ffn: int | None = None) -> ModelSpec:
    """A model that is known by its blocks alone."""
    return ModelSpec(
        name=name, family="transformer", source="arXiv 2410.00273", layers=layers, hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=hidden // heads, ffn_hidden=ffn or 4 * hidden, gated_mlp=False, activation="gelu",
        norm="layernorm", causal=False, seq_len=seq_len, vocab=0,
    )  # fmt: skip


def job(model: ModelSpec, gpus: int, batch: int = BATCH, attention: str = "fused") -> Job:
    """A bf16 job with Adam."""
    return Job(model=model, gpus=gpus, global_batch=batch, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
               optimizer=OPTIMIZERS["adam"], attention=attention)  # fmt: skip


@cache
def setting(model: str, gpu: str, domain: int, gpus: int) -> Setting:
    """One point of the published search."""
    cluster = load_cluster(f"published-{gpu}-nvs{domain}")
    return Setting(method=PUBLISHED, job=job(blocks(model, *SHAPES[model]), gpus), cluster=cluster,
                   statistics=statistics)  # fmt: skip


def strategy(name: str) -> Strategy:
    """Published rows of a strategy, by its name in the tables."""
    return PUBLISHED.strategies[STRATEGIES[name]]


def plans_of(
    name: str, tp1: int, tp2: int, pp: int, dp: int, micro_batch: int, panels: int, inside: tuple[int, int, int, int],
    recompute: int = 0,
) -> Plans:  # fmt: skip
    """A plan from the columns of a table; ``inside`` is for tp1, tp2, dp, pp."""
    columns = {"tp": tp1, "pp": pp, "dp": dp, "micro_batch": micro_batch, "panels": panels, "recompute": recompute,
                   "in_tp": inside[0], "in_dp": inside[2], "in_pp": inside[3]}  # fmt: skip
    second = SECOND[name]
    if second:
        columns |= {second: tp2, f"in_{second}": inside[1]}
    return Plans(**columns)


def configuration(name: str, plans: Plans) -> tuple[int, ...]:
    """Identity of a plan as the tables have it: dp, tp1, tp2, pp, mbs, nb, and the placement in the same order."""
    second = SECOND[name]
    degree = int(getattr(plans, second)) if second else 1
    inside = int(plans.inside(second)) if second else 1
    return tuple(int(x) for x in (plans.dp, plans.tp, degree, plans.pp, plans.micro_batch, plans.panels,
                                  plans.in_dp, plans.in_tp, inside, plans.in_pp))  # fmt: skip


def best(settings: list[Setting], name: str, top: int = 10) -> list[Found]:
    """Searches of one strategy that share model and rates."""
    return search([Task(setting=s, strategy=strategy(name), space=SPACE) for s in settings], top)


def with_device(base: Setting, **changes: Any) -> Setting:
    """The same point on a changed device."""
    return replace(base, cluster=replace(base.cluster, device=replace(base.cluster.device, **changes)))


def relative(value: float, expected: float) -> float:
    """Relative error; absolute where zero is expected."""
    return abs(value - expected) / abs(expected) if expected else abs(value)
