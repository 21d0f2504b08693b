"""Every figure of 400 configurations that the published code evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import published_cases as cases
import pytest

from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import BACKWARD, FORWARD, PhaseTime, exposed_transfers_s
from steptime.estimate.machine import Machine
from steptime_lab.data_root import require_data

TOLERANCE = 1e-9
ATTENTION = {"flash": "fused", "noflash": "unfused", "recompute": "unfused", "summa_attention": "summa"}


def _machine(s: dict[str, Any]) -> Machine:
    link_Bps = s["ib_bandwidth"] * s["ib_eff"] * 1e9
    return Machine(
        matrix_flops_per_s=s["matrix_flops_fp16"] * 0.8e12, attention_flops_per_s=s["matrix_flops_fp16"] * 0.8e12,
        vector_flops_per_s=s["vector_flops_fp16"] * 0.8e12, peak_flops_per_s=s["matrix_flops_fp16"] * 1e12,
        memory_Bps=s["hbm_bandwidth"] * 1e9, memory_bytes=s["hbm_capacity"] * 1e9, kernel_latency_s=20e-6,
        fast_Bps=s["nvlink_bandwidth"] * s["nvlink_eff"] * 1e9, fast_latency_s=s["nvlink_latency"],
        slow_Bps=link_Bps * s["nic_factor"], lone_slow_Bps=link_Bps, slow_latency_s=s["ib_latency"],
        host_Bps=1e30, fast_domain=s["nvlink_size"],
    )  # fmt: skip


def _evaluated(r: dict[str, Any]) -> Evaluation:
    m, c, name = r["model"], r["config"], r["strategy"]
    model = cases.blocks("x", m["l"], m["e"], m["h"], m["depth"], m["f"])
    job = cases.job(model, 1, c["global_batch_size"], ATTENTION[r["variant"]])
    plans = cases.plans_of(
        name, c["tp1"], c["tp2"], c["pp"], c["dp"], c["mbs"], c["nb"] or 1,
        (c["nv_tp1"], c["nv_tp2"], c["nv_dp"], c["nv_pp"]), recompute=int(r["variant"] == "recompute"),
    )  # fmt: skip
    return evaluate(cases.PUBLISHED, cases.strategy(name), job, _machine(r["system"]), plans)


def _direction(time: PhaseTime, o: dict[str, Any], end: str, rate: float, recompute: bool) -> Iterator[tuple[Any, ...]]:
    flops = time.matrix_flops + time.vector_flops * (rate if time.row.operator == "fused_attention" else 1)
    yield f"flops_{end}", flops * 1e-12, o[f"flops_{end}"]
    yield f"mem_{end}", time.moved_bytes * 1e-9, o[f"mem_{end}"]
    yield f"t_{end}_comp", time.compute_s, o[f"t_{end}_comp"]
    yield f"t_{end}_mem", time.exposed_memory_s, o[f"t_{end}_mem"]
    yield f"t_{end}_comm", sum(exposed_transfers_s(time)), o[f"t_{end}_comm"]
    if not recompute:
        yield f"t_{end}", time.total_s, o[f"t_{end}"]


def _figures(r: dict[str, Any], e: Evaluation) -> Iterator[tuple[Any, ...]]:
    """Name, ours, theirs."""
    rate = r["system"]["matrix_flops_fp16"] / r["system"]["vector_flops_fp16"]
    times = {(t.row.name, t.phase): t for t in e.times["layer"]}
    for row, o in zip(e.block.layer, r["layers"], strict=True):
        assert row.name == o["name"], r["id"]
        again = times.get((row.name, "recompute"))
        for phase, end in ((FORWARD, "fwd"), (BACKWARD, "bwd")):
            time = times[row.name, phase]
            for name, ours, theirs in _direction(time, o, end, rate, again is not None and end == "bwd"):
                yield f"{row.name} {name}", ours, theirs
        if again is not None:
            yield f"{row.name} t_bwd", times[row.name, BACKWARD].total_s + again.total_s, o["t_bwd"]
        yield f"{row.name} weights", row.weights * 2e-9, o["weights_mem"]
        yield f"{row.name} kept", row.kept_bytes * 1e-9, o["activation_buffer_stat"]
    totals = r["totals"]
    yield "t", e.step_time_s, totals["t"]
    yield "t_pp_comm", e.step.pipeline_comm_s, totals["t_pp_comm"]
    yield "t_bubble", e.step.bubble_s, totals["t_bubble"]
    yield "t_dp_comm", e.step.data_s["gradients"] + e.step.data_s["weights"], totals["t_dp_comm"]
    yield "mem", e.peak_bytes * 1e-9, totals["mem"]


@pytest.mark.shared
def test_every_figure_of_every_layer_and_all_totals():
    wrong, compared = [], 0
    records = cases.records(require_data("published_layers.jsonl.gz"))
    assert len(records) == 400
    for r in records:
        e = _evaluated(r)
        for name, ours, theirs in _figures(r, e):
            compared += 1
            if not cases.relative(float(ours), theirs) <= TOLERANCE:
                wrong.append((r["id"], name, float(ours), theirs))
        if bool(e.peak_bytes <= e.machine.memory_bytes) != r["feasible"]:
            wrong.append((r["id"], "feasible", e.peak_bytes, r["feasible"]))
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:5]}"
    assert compared > 70_000
