"""Utilisation against compute: the checks of the limits' specification, each under the rule of overlap that it is of.

Figures that the authors printed are in test_limits.py. The curve of arXiv 2411.01137 itself is not published as code;
what is held here is an independent search over the same laws and devices, and what must follow from any rule.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from steptime.errors import UserError
from steptime.hardware import device_names
from steptime_lab.cost import limits as formulas
from steptime_lab.limits import limits, notebook_run
from steptime_lab.scale import OVERLAPS, Curve, Laws, Run, ScaleDevice, best_run, changed, curve, known_device

T = 7.889e6
LAWS = Laws(duration_s=T)
H100 = known_device("h100-sxm")


@cache
def found(overlap: str, device: ScaleDevice = H100, laws: Laws = LAWS) -> Curve:
    return curve(device, laws, overlap)


@pytest.mark.quick(without=["all"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_wall_of_the_search_is_that_of_the_closed_form(overlap):
    wall = notebook_run(T, 38e-6).wall_flops
    assert wall / 2 < found(overlap).last_flops <= wall


@pytest.mark.parametrize(
    ("overlap", "share", "reference", "factor"),
    [
        ("all", 0.9, 7.9e28, 1.5), ("all", 0.8, 2.5e29, 2.5), ("bandwidth", 0.9, 2.0e28, 1.5),
        ("bandwidth", 0.8, 1.3e29, 2.0), ("bandwidth", 0.5, 4.0e29, 1.5), ("none", 0.8, 6.3e27, 5.0),
    ],
)  # fmt: skip
def test_a_share_of_the_most_is_left_where_another_search_leaves_it(overlap, share, reference, factor):
    """The other search had transfers, latencies and a grid of its own; it is coarse, and of ``none`` a factor of 4."""
    assert reference / factor < found(overlap).reaches(share) < reference * factor


def test_the_cliff_is_not_robust_and_moves_with_the_rule():
    cliffs = [found(overlap).reaches(0.8) for overlap in ("none", "bandwidth", "all")]
    assert cliffs == sorted(cliffs) and cliffs[2] / cliffs[0] > 40
    falls = found("bandwidth").reaches(0.9)
    assert 1e28 < falls < 4e28, "2e28, where utilisation starts to fall, is that of serial latencies"


def test_rules_agree_on_order_at_every_size():
    for i, run in enumerate(found("none").runs):
        serial, all_ = found("bandwidth").runs[i], found("all").runs[i]
        assert run.utilization <= serial.utilization * (1 + 1e-12) <= all_.utilization * (1 + 2e-12)


@pytest.mark.slow
def test_what_moves_the_cliff():
    base = found("bandwidth").reaches(0.8)
    pod = found("bandwidth", changed(H100, fast_domain=256)).reaches(0.8)
    assert 1.6 < pod / base < 5
    without = found("bandwidth", changed(H100, latency_factor=0.0))
    assert without.reaches(0.8) == pytest.approx(1e30, rel=0.5) and without.last_flops >= 1e33
    for laws in (replace(LAWS, batch_growth=1 / 3), replace(LAWS, batch_tokens=10 * 2048**2)):
        assert found("bandwidth", H100, laws).reaches(0.8) == pytest.approx(2e31, rel=0.5)


@pytest.mark.parametrize(("name", "reference"), [("a100-sxm", 1.8e29), ("v100-sxm", 5.6e27)])
def test_older_devices_fall_earlier(name, reference):
    assert found("all", known_device(name)).reaches(0.8) == pytest.approx(reference, rel=0.25)


def test_a_card_of_2012_trains_1e26_flop_with_16_million_of_them():
    """The exercise of the authors' tool; the card's figures are NVIDIA's, its links PCIe 2.0 and FDR InfiniBand."""
    card = ScaleDevice(name="GTX 580", peak_flops_per_s=1.581e12, utilization=0.7, memory_Bps=192.4e9, fast_domain=4,
                       network_Bps=(16e9, 14e9), kernel_latency_s=4.5e-6, network_latency_s=(5e-6, 5e-6))  # fmt: skip
    run = best_run(card, LAWS, "bandwidth", 1e26)
    assert run.devices == 2**24 and run.utilization > 0.8 * 0.7


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_run_is_above_what_products_sustain_or_takes_too_long(overlap):
    for run in found(overlap).runs:
        assert run.utilization <= 0.7 * (1 + 1e-12)
        if run.utilization:
            took = run.compute_flops / (run.devices * run.utilization * H100.peak_flops_per_s)
            assert took <= T * (1 + 1e-12)
            product = np.prod([run.degrees[name] for name in ("pp", "dp", "tp_hidden", "tp_residual")])
            assert product == run.devices


def test_one_layer_by_hand():
    """10^25 FLOP on 2,048 data ranks: products only, and gradients over 8 ranks inside and 256 nodes."""
    parameters = (1e25 / 120) ** 0.5
    run = best_run(H100, LAWS, "bandwidth", 1e25)
    assert run.degrees == {"pp": 1, "dp": 2048, "tp_hidden": 1, "tp_residual": 1, "micro_batches": 1}
    layers, tokens = 240, 2048**2
    flop_s = 6 * (parameters / layers) * (tokens / 2048) / (H100.peak_flops_per_s * 0.7)
    words = parameters / layers
    net_s = max(3 * words * 7 / 8 * 2 / 9e11, 3 * words / 8 * 255 / 256 * 2 / 1e11)
    assert net_s < flop_s
    step_s = layers * (flop_s + 9e-6)
    share = 6 * parameters * tokens / (2048 * step_s * H100.peak_flops_per_s)
    assert run.utilization == pytest.approx(share, rel=1e-9)


def test_walls_of_the_report_with_a_fixed_batch():
    """Nine months, 6e7 tokens a step: 6e31 FLOP inside a node, 7e30 over nodes; batch and depth by the notebook."""
    for latency_s, stated in ((120e-6, 6e31), (400e-6, 7e30)):
        n = formulas.latency_wall_parameters(2.33e7, latency_s, 20, 175e9, 6e7, 0, 96, 0.27)
        assert formulas.training_flops(n, 20 * n) == pytest.approx(stated, rel=0.15)
        took = formulas.serial_latency_s(20 * n, 6e7, 96 * (n / 175e9) ** 0.27, latency_s)
        assert took == pytest.approx(2.33e7, rel=1e-12)
    same = formulas.latency_wall_parameters(T, 38e-6, 20, (1e25 / 120) ** 0.5, 2048**2, 1 / 3, 120, 1 / 3)
    assert formulas.training_flops(same, 20 * same) == pytest.approx(notebook_run(T, 38e-6).wall_flops, rel=1e-12)


def test_a_share_is_found_between_two_runs():
    runs = tuple(Run(compute_flops=c, utilization=u, devices=1, degrees={}) for c, u in ((1e25, 1.0), (1e27, 0.6)))
    made = Curve(overlap="all", runs=runs)
    assert made.reaches(0.8) == pytest.approx(1e26, rel=1e-12) and made.reaches(0.6) == 1e27
    assert Curve(overlap="all", runs=()).reaches(0.8) is None


@pytest.mark.slow
def test_the_api_has_the_curves_that_are_asked_for():
    assert "curve" not in limits().to_json()
    two = limits(overlap=["none", "all", "none"])
    document = json.loads(json.dumps(two.to_json()))
    assert [one["overlap"] for one in document["curve"]] == ["none", "all"]
    assert document["curve"][1]["cliff_flops"] == two.curves[1].reaches(0.8)
    slow = limits(overlap=["all"], device="gb200-nvl72", network_Bps=1e10).curves[0]
    assert slow.reaches(0.8) < limits(overlap=["all"], device="gb200-nvl72").curves[0].reaches(0.8)
    with pytest.raises(UserError, match="rule of overlap 'x'"):
        limits(overlap=["x"])


@pytest.mark.parametrize("compute_flops", [1e26, 1e29, 1e31])
def test_more_overlap_is_never_slower_on_any_device(compute_flops: float) -> None:
    for name in device_names():
        try:
            device = known_device(name)
        except KeyError:
            continue
        runs = (best_run(device, Laws(), rule, compute_flops) for rule in ("all", "bandwidth", "none"))
        every, bandwidth, none = (run.utilization for run in runs)
        assert every >= bandwidth >= none, name


def test_links_that_two_kinds_of_transfers_share_are_shared_without_overlap_too() -> None:
    """Gradients take 5 s of the slow links, activations 0.1 s in each of 8 micro-batches, beside 0.01 s of latency."""
    step, end = (0.0, 0.0, 0.0, 0.1, 0.01), (0.0, 0.0, 0.0, 5.0, 0.0)
    times_s = [float(OVERLAPS[name](step, end, 8.0)) for name in ("all", "bandwidth", "none")]
    assert times_s == pytest.approx([5.8, 5.88, 5.88])
