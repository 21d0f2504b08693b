"""A device whose datasheet is nowhere worse than that of a relative is not the slower one, but where that was measured.

Products, attention and what moves memory are compared by the geometric mean over a grid of shapes: single shapes are
within the errors of the curves. Collectives are compared over one network, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from steptime.estimate.communication import collective_over
from steptime.estimate.kernels import timed
from steptime.estimate.machine import Machine, machine_of
from steptime.hardware import device_names, load_cluster, load_device
from steptime.hardware.records import Cluster, Device
from steptime.plan.job import PRECISIONS, Precision

SLOWER = 1.03
"""Ratio of two times up to which devices count as equally fast."""
SUCCESSORS = {
    ("pascal", "volta"), ("volta", "turing"), ("volta", "ampere"), ("turing", "ampere"), ("ampere", "ada"),
    ("ampere", "hopper"), ("hopper", "blackwell"), ("ada", "blackwell"),
}  # fmt: skip
RECIPES = ("tf32", "fp16", "bf16", "fp8-te", "nvfp4")
PRODUCTS = tuple(product((1024.0, 4096.0, 16384.0), (1024.0, 4096.0, 12288.0), (1024.0, 4096.0, 12288.0)))
ATTENTION = ((1, 32, 8, 1024, 128), (1, 32, 8, 4096, 128), (4, 16, 16, 2048, 64), (1, 64, 8, 8192, 128))
LARGE = 4096.0
HEAT = "measured: three serving frameworks of one version each, on both: 2 to 7 % in products beyond 1 TFLOP"
ONE_CURVE = "FP16 has the curve of BF16, which was measured so"
AS_IT = "the H200 is measured so, and lends its share of the peak to what was not measured"
FORWARD = "no backward pass of a like device is known for the A10: 2.5 times its forward pass stands for it"
#: Better and other device, what is compared -> why the better one is the slower one.
KNOWN: Mapping[tuple[str, str, str], str] = {
    ("h200-sxm", "h100-sxm", "bf16 large products"): HEAT,
    ("h200-sxm", "h800-sxm", "bf16 large products"): HEAT,
    ("h200-sxm", "gh200-96gb", "bf16 large products"): HEAT,
    ("h200-sxm", "h100-sxm", "fp16 large products"): ONE_CURVE,
    ("h200-sxm", "h800-sxm", "fp16 large products"): ONE_CURVE,
    ("h200-sxm", "gh200-96gb", "fp16 large products"): ONE_CURVE,
    ("h200-sxm", "gh200-96gb", "tf32 large products"): AS_IT,
    ("h200-sxm", "gh200-96gb", "tf32 products"): AS_IT,
    ("gh200-144gb", "gh200-96gb", "tf32 large products"): AS_IT,
    ("a40", "a10", "attention backward"): FORWARD,
    ("rtx-a6000", "a10", "attention backward"): FORWARD,
}


def no_worse(one: Device, other: Device) -> bool:
    """Whether every figure of a datasheet is at least that of a device of the same or the last architecture."""
    kinds = (other.architecture, one.architecture)
    if one.name == other.name or None in kinds or not (kinds[0] == kinds[1] or kinds in SUCCESSORS):
        return False
    rates = ((one.matrix_flops_per_s, other.matrix_flops_per_s), (one.vector_flops_per_s, other.vector_flops_per_s))
    faster = all(mine.get(dtype, 0.0) >= 0.999 * rate for mine, theirs in rates for dtype, rate in theirs.items())
    figures = ("memory_Bps", "memory_bytes", "power_W", "sm_count")
    return faster and all((getattr(one, name) or 0) >= 0.98 * (getattr(other, name) or 0) for name in figures)


def pairs() -> Iterator[tuple[str, str]]:
    devices = [load_device(name) for name in device_names() if not name.startswith("published")]
    for one, other in product(devices, devices):
        if no_worse(one, other):
            yield one.name, other.name


@cache
def times(device: str, recipe: str) -> Mapping[str, float]:
    """Logarithm of the geometric mean of the times of each operator that has a curve."""
    precision = PRECISIONS[recipe]
    if load_device(device).matrix_rate(precision.matrix_dtype) is None:
        return {}
    machine = machine_of(load_cluster(device), 8, precision, lone_rank_has_all_links=True, calibrated=True)
    found: dict[str, list[float]] = {}
    for name, operator, shape, backward in calls():
        call = timed(machine.models, operator, shape, {}, backward=backward)
        if call is not None:
            found.setdefault(name, []).append(math.log(float(call.seconds)))
        elif operator == "matmul":
            found.setdefault(name, []).append(math.log(by_the_datasheet(machine, precision, **shape)))
    return {name: sum(logs) / len(logs) for name, logs in found.items()}


def by_the_datasheet(machine: Machine, precision: Precision, m: float, n: float, k: float) -> float:
    """Time of a product that has no curve."""
    element_bytes = precision.quantised_bytes or precision.element_bytes
    moved_bytes = (m * k + k * n) * element_bytes + m * n * precision.element_bytes
    work_s = max(2 * m * n * k / machine.matrix_flops_per_s, moved_bytes / machine.memory_Bps)
    return machine.kernel_latency_s + work_s


def calls() -> Iterator[tuple[str, str, Mapping[str, float], bool]]:
    for m, n, k in PRODUCTS:
        yield "products", "matmul", {"m": m, "n": n, "k": k}, False
        if min(m, n, k) >= LARGE and m * n * k > LARGE**3:
            yield "large products", "matmul", {"m": m, "n": n, "k": k}, False
    for (batch, heads, kv_heads, queries, head_dim), backward in product(ATTENTION, (False, True)):
        shape = {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "seen_keys": queries,
            "causal": 1, "window": 0, "head_dim": head_dim, "element_bytes": 2, "rows": batch * heads * queries,
            "kv_rows": batch * kv_heads * queries,
        }  # fmt: skip
        numbers = {name: float(value) for name, value in shape.items()}
        yield f"attention{' backward' * backward}", "fused_attention", numbers, backward


def slower() -> dict[tuple[str, str, str], float]:
    """What is slower on the better device, and by which factor."""
    out: dict[tuple[str, str, str], float] = {}
    for (one, other), recipe in product(pairs(), RECIPES):
        mine, theirs = times(one, recipe), times(other, recipe)
        for name in mine.keys() & theirs.keys():
            ratio = math.exp(mine[name] - theirs[name])
            what = f"{recipe} {name}" if "products" in name else name
            if ratio > SLOWER:
                out[one, other, what] = max(ratio, out.get((one, other, what), 0.0))
    return out


@pytest.mark.slow
def test_no_device_is_slower_than_one_that_its_datasheet_leaves_behind_but_where_it_was_measured() -> None:
    found = slower()
    assert {"h200-sxm", "gb300"} <= {one for one, _ in pairs()}
    assert not {what: round(ratio, 3) for what, ratio in found.items() if what not in KNOWN}
    assert not set(KNOWN) - set(found), "no longer so: take it out"


RELATIVES = (
    ("h100-sxm", "a100-sxm-80gb"), ("h200-sxm", "h100-sxm"), ("b200-sxm", "h100-sxm"), ("b200-sxm", "h200-sxm"),
    ("b300-sxm", "h200-sxm"), ("b300-sxm", "b200-sxm"), ("gb200", "h200-sxm"), ("gb300", "gb200"),
)  # fmt: skip
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = tuple(2.0**i for i in range(12, 35, 2))
LONG, PART = 2.0**26, 2.0**18
"""Bytes of a long transfer, all in all and per rank."""
LATE, SHORT = 1.05, 1.35
"""Most that they may take longer, and shorter ones. These start later, and take longer per rank, on NVLink 5 than on 4:
8.1 and 5.3 us for 512 bytes between two, 16 and 10 us among eight; so measured."""


@cache
def joined(device: str, gpus: int) -> Machine:
    """Machine of a device whose domains are joined by the same network as all others."""
    cluster: Cluster = load_cluster(device)
    cluster = replace(cluster, levels=(cluster.levels[0], load_cluster("dgx-h100").levels[-1]))
    return machine_of(cluster, gpus, PRECISIONS["bf16"], lone_rank_has_all_links=True, calibrated=True)


def seconds(device: str, kind: str, size_bytes: float, ranks: int) -> float:
    machine = joined(device, ranks)
    inside = math.gcd(ranks, machine.fast_domain)
    return float(collective_over(kind, machine, size_bytes, float(ranks), float(inside)))


@pytest.mark.each(("one", "other"), RELATIVES)
def test_collectives_over_one_network_are_no_slower_on_the_newer_device(one: str, other: str) -> None:
    for kind, ranks, size_bytes in product(KINDS, GROUPS, SIZES):
        ratio = seconds(one, kind, size_bytes, ranks) / seconds(other, kind, size_bytes, ranks)
        most = LATE if size_bytes >= max(LONG, PART * ranks) else SHORT
        assert ratio <= most, (kind, ranks, size_bytes, round(ratio, 3))
