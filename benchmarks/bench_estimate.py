"""CPU time of one estimate: time, memory and band alone, the full record of a plan, and the record with its what-ifs.

python benchmarks/bench_estimate.py            prints the table
python benchmarks/bench_estimate.py --write    also writes it to benchmarks/estimate.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from statistics import median  # noqa: E402

from machine import report  # noqa: E402
from steptime.api.models import load_model  # noqa: E402
from steptime.estimate.band import band_of  # noqa: E402
from steptime.estimate.evaluate import evaluate  # noqa: E402
from steptime.estimate.single import Setting, estimate_plan  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.plan.framework_file import GENERIC, load_framework  # noqa: E402
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job  # noqa: E402
from steptime.plan.plans import Plans  # noqa: E402
from steptime.plan.recompute import recompute_code  # noqa: E402
from steptime.search.modes import MODES  # noqa: E402

RUNS = 300
DEEPSEEK = Plans(pp=16, dp=128, ep=64, in_dp=8)
CASES = (
    ("llama3.1-70b", "dgx-h100", "bf16", Plans(tp=8, pp=4, dp=16, in_tp=8)),
    ("deepseek-v3", "hgx-h800", "bf16", DEEPSEEK),
    ("deepseek-v3", "hgx-h800", "mxfp8", DEEPSEEK.with_columns({
        "recompute": recompute_code("norm+activation+up_projection"),
    })),
)  # fmt: skip


def cpu_ms(once: Callable[[], object]) -> tuple[float, float]:
    """Median and least CPU milliseconds of a call, after some to warm up."""
    for _ in range(10):
        once()
    times = []
    for _ in range(RUNS):
        start_s = time.process_time()
        once()
        times.append(1e3 * (time.process_time() - start_s))
    return median(times), min(times)


def row(model: str, cluster: str, dtype: str, plans: Plans) -> str:
    mode, machines = MODES["corrected"], load_cluster(cluster)
    job = Job(
        model=load_model(model), gpus=int(plans.ranks), global_batch=1024, seq_len=4096, precision=PRECISIONS[dtype],
        optimizer=OPTIMIZERS["adam"], framework=load_framework(GENERIC, machines.device.name),
    )  # fmt: skip
    setting, strategy = Setting(method=mode.method, job=job, cluster=machines), mode.method.strategies["1d"]

    def bare() -> object:
        return band_of(evaluate(setting.method, strategy, job, setting.machine, plans))

    def record() -> object:
        return estimate_plan(setting, strategy, plans, what_ifs=False)

    def whole() -> object:
        return estimate_plan(setting, strategy, plans, explain=True)

    cells = [f"{middle:.2f} ({least:.2f})" for middle, least in map(cpu_ms, (bare, record, whole))]
    plan = f"{model} on {job.gpus} {cluster}, {dtype}" + (", parts recomputed" if plans.recompute else "")
    return f"| {plan} | {' | '.join(cells)} |"


NOTES = f"""\
CPU milliseconds of one plan in a process that has read model, cluster and frameworks: median of {RUNS} calls, and the
least. Times of products and collectives of the same shapes are kept between calls, so a first plan takes longer.
*Evaluated*: step time, peak memory, band. *Record*: all of `Estimate` but what-ifs and how terms came about: terms of
time and memory, bracket, provenance. *Explained*: with those, each what-if being another evaluation.
"""


def main() -> None:
    head = "| plan | evaluated | record | explained |\n|---|---:|---:|---:|"
    report("estimate", "One estimate", "\n".join([head, *(row(*case) for case in CASES)]), NOTES)


if __name__ == "__main__":
    main()
