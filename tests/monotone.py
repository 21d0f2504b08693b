"""Hunts for steps that a faster machine makes longer, over random models, clusters, plans and rates.

A point is one plan of one job on one cluster, and one rate or latency of that cluster: the step is estimated with four
values of it, and no better value may give a longer step. At each MFU <= HFU <= 1 and the bracket holds the step. Twice
the replicas with twice the batch take no less time, but for fewer messages, and where ZeRO shares nothing out no more
memory.

python tests/monotone.py [--points 10000] [--seed 0]    counts the points that break this, and shows the worst
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.random import Generator

from steptime.api.jobs import Request
from steptime.errors import UserError
from steptime.estimate.band import bracket_s
from steptime.estimate.evaluate import evaluate, recomputed_flops_per_step, utilisation
from steptime.estimate.single import Setting
from steptime.hardware.library import cluster_names
from steptime.hardware.records import Cluster
from steptime.model.known import catalogue_names
from steptime.model.known import load_catalogue_model as load_model
from steptime.num import divisors
from steptime.options import choices_of
from steptime.plan.framework_file import framework_names
from steptime.plan.job import GRAPHS
from steptime.plan.plans import BIT, COLUMNS, RECOMPUTE_CODES, Plans, broken_rules
from steptime.plan.strategies import Strategy
from steptime.search.modes import MODES

EXACT: Final = 1e-9
"""Relative difference that rounding may make."""
BUCKETS: Final = 0.01
"""Share of a step that twice the replicas may save: they reduce gradients in fewer, larger messages."""
PLANS_OF_A_JOB, PARAMETERS_OF_A_JOB, VALUES = 12, 3, 4
DTYPES: Final = ("bf16", "bf16", "bf16", "fp16", "fp8", "fp8-te", "fp8-blockwise", "mxfp8", "nvfp4", "fp32", "tf32")
OVERLAPS: Final = (None, None, (), ("dp",), ("dp", "pp"), ("dp", "ep"), ("pp",))
SCHEDULES: Final = ("1f1b", "1f1b", "zb-h1", "zb-h2", "dualpipe")
OFFLOADS: Final = ((), (), ("optimizer",), ("activations",), ("activations", "optimizer"))
RECOMPUTE: Final = (0, 0, RECOMPUTE_CODES["full"], *RECOMPUTE_CODES.values())

Faster = Callable[[Setting, float], Setting]


def _rates(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    return {dtype: rate * factor for dtype, rate in rates.items()}


def _of_device(name: str, better: int = 1) -> Faster:
    """The job on a cluster with one number of its device multiplied, divided where less is better."""

    def faster(setting: Setting, factor: float) -> Setting:
        device = setting.cluster.device
        value: Any = getattr(device, name)
        factor = factor**better
        if isinstance(value, Mapping):
            changed: Any = _rates(value, factor)
        else:
            changed = min(value * factor, 1.0) if name.endswith("efficiency") else value * factor
        return replace(setting, cluster=replace(setting.cluster, device=replace(device, **{name: changed})))

    return faster


def _of_level(index: int, name: str, better: int = 1) -> Faster:
    def faster(setting: Setting, factor: float) -> Setting:
        levels = list(setting.cluster.levels)
        level = levels[index]
        value = getattr(level, name) * factor**better
        value = min(value, 1.0) if name == "efficiency" else value
        value = max(value, 1.0) if name == "oversubscription" else value
        levels[index] = replace(level, **{name: value})
        return replace(setting, cluster=replace(setting.cluster, levels=tuple(levels)))

    return faster


LEVEL_NUMBERS: Final = {
    "link_Bps": 1, "links_per_device": 1, "efficiency": 1, "latency_s": -1, "oversubscription": -1,
}  # fmt: skip
DEVICE_NUMBERS: Final = {
    "matrix_flops_per_s": 1, "vector_flops_per_s": 1, "memory_Bps": 1, "host_link_Bps": 1, "matrix_efficiency": 1,
    "vector_efficiency": 1, "memory_efficiency": 1, "kernel_latency_s": -1,
}  # fmt: skip
#: Number of a cluster -> the same job where it is so many times as good.
PARAMETERS: Final[Mapping[str, Faster]] = {
    **{name: _of_device(name, better) for name, better in DEVICE_NUMBERS.items()},
    **{
        f"level {index} {name}": _of_level(index, name, better)
        for index in range(3) for name, better in LEVEL_NUMBERS.items()
    },
}  # fmt: skip


class Violation(NamedTuple):
    """A plan of which a better machine takes longer, or whose numbers contradict each other."""

    what: str
    excess: float
    """Relative size."""
    where: str
    setting: Setting
    strategy: Strategy
    plans: Plans
    factors: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One job and some plans of it."""

    setting: Setting
    strategy: Strategy
    plans: list[Plans]
    text: str


def _random_plan(draw: Generator, gpus: int, domain: int, experts: int, micro_batch: int) -> Plans:
    degrees: dict[str, int] = {}
    left = gpus
    for axis in ("tp", "pp", "cp"):
        most = {"tp": 8, "pp": 8, "cp": 2}[axis]
        degrees[axis] = int(draw.choice([n for n in divisors(left) if n <= most]))
        left //= degrees[axis]
    degrees["dp"] = left
    zero = int(draw.choice([0, 1, 2, 3, 3] if degrees["pp"] == 1 else [0, 1, 1, 2, 3]))
    ranks = degrees["tp"] * degrees["cp"] * left
    columns = {
        **degrees, "micro_batch": micro_batch, "zero": zero, "vpp": int(draw.choice([1, 1, 2])),
        "recompute": int(draw.choice(RECOMPUTE)), "sp": int(draw.choice([0, 1, 1])),
        "ep": int(draw.choice([n for n in divisors(ranks) if experts % n == 0])) if experts else 1,
        "shard": int(draw.choice([0, 0, *(n for n in divisors(left) if n > 1)])) if zero else 0,
    }  # fmt: skip
    return Plans(**columns).in_order(domain)


def _random_setting(draw: Generator) -> tuple[Setting, str]:
    model = str(draw.choice(MODELS))
    cluster = str(draw.choice(BRIDGED if draw.random() < 0.1 else CLUSTERS))
    gpus = int(draw.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512]))
    spec = load_model(model)
    seq = int(draw.choice([spec.seq_len, *([] if spec.vision else [512, 2048, 16384])]))
    dtype, framework = str(draw.choice(DTYPES)), str(draw.choice(FRAMEWORKS))
    lora = {"rank": 8, "qlora": bool(draw.random() < 0.3)} if draw.random() < 0.25 else None
    overlap = OVERLAPS[draw.integers(len(OVERLAPS))]
    chosen: dict[str, Any] = {
        "schedule": str(draw.choice(SCHEDULES)), "offload": frozenset(OFFLOADS[draw.integers(len(OFFLOADS))]),
        "graphs": str(draw.choice(GRAPHS)) if draw.random() < 0.2 else "none",
    }  # fmt: skip
    if overlap is not None:
        chosen["overlap"] = frozenset(overlap) - (frozenset() if spec.experts else {"ep"})
    if draw.random() < 0.3:
        chosen["context"] = str(draw.choice(choices_of("context")))
    batch = gpus * int(draw.choice([1, 2, 4, 8]))
    request = Request(model=model, cluster=cluster, seq=seq, dtype=dtype, optimizer="adam", mode=MODES["corrected"],
                      framework=framework, lora=lora)  # fmt: skip
    setting = request.setting(gpus, batch, chosen)
    described = draw.random() < 0.15
    if described:
        setting = replace(setting, cluster=as_described(setting.cluster))
    said = f"{model} {cluster}{' described' * described} {gpus} {framework} {dtype} seq {seq} batch {batch} lora {lora}"
    return setting, f"{said} {chosen}"


def as_described(cluster: Cluster) -> Cluster:
    """The cluster as a file of a user's has it that leans on no numbers of the catalogue."""
    device = replace(cluster.device, catalogue={}, like=None)
    return replace(cluster, device=device, levels=tuple(replace(level, catalogue={}) for level in cluster.levels))


def _random_sample(draw: Generator) -> Sample | None:
    try:
        setting, text = _random_setting(draw)
        machine = setting.machine
    except UserError:
        return None
    job = setting.job
    experts = 0 if job.model.experts is None else job.model.experts.experts
    plans: list[Plans] = []
    for _ in range(60):
        one = _random_plan(draw, job.gpus, machine.fast_domain, experts, int(draw.choice([1, 1, 2, 4])))
        if not broken_rules(job, one, setting.rules) & ~BIT["zero_pipeline"]:
            plans.append(one)
        if len(plans) == PLANS_OF_A_JOB:
            break
    strategy = setting.method.strategy("context")
    return Sample(setting=setting, strategy=strategy, plans=plans, text=text) if plans else None


def stacked(plans: list[Plans]) -> Plans:
    """The plans as one block of arrays."""
    return Plans(**{name: np.array([float(getattr(p, name)) for p in plans]) for name in COLUMNS})


Numbers = tuple[Any, Any, Any]
"""Step and both ends of the bracket, plan by plan."""


def _numbers(sample: Sample, setting: Setting) -> Numbers:
    e = evaluate(setting.method, sample.strategy, setting.job, setting.machine, stacked(sample.plans))
    n = len(sample.plans)
    return tuple(np.broadcast_to(np.asarray(each), n) for each in (e.step_time_s, *bracket_s(e)))  # type: ignore


def _consistent(sample: Sample, numbers: Numbers, setting: Setting, where: str) -> Iterator[Violation]:
    job, peak = setting.job, setting.machine.peak_flops_per_s
    for i, plan in enumerate(sample.plans):
        step_s, low_s, high_s = (float(each[i]) for each in numbers)
        again = recomputed_flops_per_step(job, int(plan.recompute), int(plan.recompute_every))
        mfu = utilisation(setting.model_flops, step_s, job.gpus, peak)
        hfu = utilisation(setting.model_flops + again, step_s, job.gpus, peak)
        found = {"hfu": hfu - 1, "mfu above hfu": mfu / hfu - 1, "bracket": max(low_s / step_s, step_s / high_s) - 1}
        for what, excess in found.items():
            if excess > EXACT:
                yield Violation(what, excess, where, setting, sample.strategy, plan, (1.0, 1.0))


def _slower(sample: Sample, name: str, factors: list[float], usual: Numbers) -> Iterator[Violation]:
    found: list[tuple[float, Numbers]] = [(1.0, usual)]
    where = f"{name}: {sample.text}"
    for factor in factors:
        setting = PARAMETERS[name](sample.setting, factor)
        numbers = _numbers(sample, setting)
        yield from _consistent(sample, numbers, setting, where)
        found.append((factor, numbers))
    found.sort(key=lambda each: each[0])
    for what, which in (("step", 0), ("low", 1), ("high", 2)):
        for i, plan in enumerate(sample.plans):
            pairs = [
                (float(fast[which][i] / slow[which][i]) - 1, (x, y))
                for (x, slow), (y, fast) in itertools.pairwise(found)
            ]
            excess, factors_of = max(pairs)
            if excess > EXACT:
                yield Violation(f"{what} {name}", excess, where, sample.setting, sample.strategy, plan, factors_of)


def _doubled(sample: Sample) -> Iterator[Violation]:
    """Twice the replicas with twice the batch, as many in a domain: no less time, and where nothing is shared out no
    more memory."""
    setting = sample.setting
    job = replace(setting.job, gpus=2 * setting.job.gpus, global_batch=2 * setting.job.global_batch)
    alike = [plan for plan in sample.plans if plan.zero == 0 and plan.dp * plan.cp > 1]
    outermost = setting.cluster.levels[-1].devices
    if not alike or (outermost is not None and outermost < job.gpus):
        return
    twice = replace(setting, job=job)
    more = [plan.with_columns({"dp": 2 * plan.dp}) for plan in alike]
    one, two = (
        evaluate(each.method, sample.strategy, each.job, each.machine, stacked(plans))
        for each, plans in ((setting, alike), (twice, more))
    )
    n = len(alike)
    pairs = {"twice faster": (one.step_time_s, two.step_time_s), "twice fuller": (two.peak_bytes, one.peak_bytes)}
    for what, (larger, smaller) in pairs.items():
        excess = np.broadcast_to(np.asarray(larger), n) / np.broadcast_to(np.asarray(smaller), n) - 1
        for plan, each in zip(alike, excess.tolist(), strict=True):
            if each > (BUCKETS if what == "twice faster" else EXACT):
                yield Violation(what, each, sample.text, setting, sample.strategy, plan, (1.0, 2.0))


def _spanned(setting: Setting, name: str) -> bool:
    """Whether a cluster has a level of that index, and the job crosses it."""
    index, levels = int(name.split()[1]), setting.cluster.levels
    return index < len(levels) and (index == 0 or (levels[index - 1].devices or 0) < setting.job.gpus)


def hunt(points: int, seed: int) -> Iterator[list[Violation]]:
    """What each of so many points breaks; an empty list where it breaks nothing."""
    draw = np.random.default_rng(seed)
    done = 0
    while done < points:
        sample = _random_sample(draw)
        if sample is None:
            continue
        usual = _numbers(sample, sample.setting)
        once = [*_consistent(sample, usual, sample.setting, sample.text), *_doubled(sample)]
        names = [name for name in PARAMETERS if not name.startswith("level") or _spanned(sample.setting, name)]
        for name in draw.choice(names, PARAMETERS_OF_A_JOB, replace=False):
            spread = draw.choice([0.1, 1.0, 3.0])
            factors = [float(x) for x in np.exp(draw.uniform(-spread, spread, VALUES - 1))]
            broken = list(_slower(sample, str(name), factors, usual))
            for plan in sample.plans:
                yield [each for each in (*once, *broken) if each.plans is plan]
                done += 1
            once = []


MODELS: Final = catalogue_names()
CLUSTERS: Final = [name for name in cluster_names() if not name.startswith("published")]
BRIDGED: Final = ["h200-nvl-4", "h100-nvl-2", "dgx-h100-superpod", "frontier"]
"""Clusters with several levels that a group crosses."""
FRAMEWORKS: Final = framework_names()


def main() -> None:
    """Prints what was found, by rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=1)
    parser.add_argument("--every", type=int, default=10**9)
    given = parser.parse_args()
    found: list[Violation] = []
    broken = 0
    for done, point in enumerate(hunt(given.points, given.seed), 1):
        broken += bool(point)
        found += point
        if done % given.every == 0 or done == given.points:
            report(done, broken, found, given.worst)


def report(points: int, broken: int, found: list[Violation], shown: int) -> None:
    """Prints the violations so far, by rate."""
    by: dict[str, list[Violation]] = {}
    for each in found:
        by.setdefault(each.what, []).append(each)
    print(f"{points} points, {broken} of them broken")
    for what, some in sorted(by.items()):
        worst = sorted(some, key=lambda one: -one.excess)
        print(f"{what}: {len(some)}, largest {100 * worst[0].excess:.3g} %")
        for one in worst[:shown]:
            plan = {n: int(v) for n, v in one.plans.columns().items() if v != getattr(Plans(), n)}
            values = f"{one.factors[0]:.4g} -> {one.factors[1]:.4g}"
            print(f"    {100 * one.excess:.3g} % at {values}: {one.where} {plan}", flush=True)


if __name__ == "__main__":
    main()
