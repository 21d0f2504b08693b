"""A measured machine in an estimate: its own curves and collectives, through the cluster file that names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from explained_terms import differing, explained, noted
from steptime.api.models import load_model
from steptime.cost.regression import SENT, half_size_matmul_s, linear_s, streaming_s
from steptime.errors import UnknownNameError, UserError
from steptime.estimate.communication import collective_of, message_time_s
from steptime.estimate.evaluate import evaluate
from steptime.estimate.kernels import streamed
from steptime.estimate.layer import BACKWARD, FORWARD, phase_time
from steptime.estimate.machine import Machine, curve_constants, machine_of
from steptime.estimate.measured import FORMULAS, RAN
from steptime.estimate.operators import COLLECTIVES, OPERATORS
from steptime.hardware import Cluster, load_cluster
from steptime.hardware.profiles import profile_toml
from steptime.hardware.records import Curve, Profile
from steptime.measure.machine.profile import CANDIDATES
from steptime.plan import rows
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

PRODUCT = {"latency_s": 1e-6, "flops_per_s": 1e11, "m_half": 8.0, "n_half": 4.0, "k_half": 2.0}
STREAM = {
    "latency_s": 2e-6, "near_Bps": 4e10, "far_Bps": 1e10, "cache_bytes": 1e6, "fresh_Bps": 5e9,
    "fresh_from_bytes": 2.0**25,
}  # fmt: skip
LINEAR = {"latency_s": 5e-5, "rate_per_s": 2e9}
TEXT = """
[device]
name = "mine"
memory = "16 GB"
memory_bandwidth = "40 GB/s"
curves = "m.curves.toml"
matrix = {bf16 = "400 GFLOP/s", fp32 = "100 GFLOP/s"}
vector = {fp32 = "50 GFLOP/s"}
[levels.local]
devices = 4
bandwidth = "1 GB/s"
efficiency = 1.0
latency = "100 us"
[levels.node]
bandwidth = "0.1 GB/s"
efficiency = 1.0
latency = "1 ms"
"""


def curve(family: str, values: dict[str, float], dtype: str = "fp32") -> Curve:
    return Curve(
        family=family, dtype=dtype, coefficients=values, points=20, median_ape=0.05, mean_ape=0.05, bias=0.0,
        band=(0.9, 1.1), source="bench",
    )  # fmt: skip


ALIGNED = {"loose_flops_per_s": 1e30, "odd_flops_per_s": 1e30}
TURNED = {"turned_flops_per_s": 8e11, "turned_per_s": 1e9} | ALIGNED
UNTURNED = {"turned_flops_per_s": 1e30, "turned_per_s": 1e30} | ALIGNED

CURVES = (
    curve("half_size_matmul/matmul", PRODUCT),
    curve("half_size_matmul/matmul", PRODUCT | {"flops_per_s": 4e11} | TURNED, "bf16"),
    *(curve(f"streaming/{k}", STREAM) for k in ("gelu", "gelu_backward", "add", "update", "softmax", "layer_norm")),
    curve("linear/column_sum", LINEAR),
    curve("linear/add", LINEAR, "bf16"),
    *(curve(f"linear/{k}/local{n}", LINEAR) for k in ("all_reduce", "broadcast", "point_to_point") for n in (2, 4)),
    curve("linear/all_reduce/node2", LINEAR | {"rate_per_s": 1e8}),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "m.curves.toml").write_text(profile_toml(Profile(device="mine", curves=CURVES)))
    (tmp_path / "m.toml").write_text(TEXT)
    return load_cluster(tmp_path / "m.toml")


def machine(cluster: Cluster, dtype: str = "fp32", *, calibrated: bool = True) -> Machine:
    precision = PRECISIONS.get(dtype)
    return machine_of(cluster, 8, precision, lone_rank_has_all_links=False, calibrated=calibrated)


def seconds(row: rows.Row, phase: str, of: Machine) -> float:
    return float(phase_time(row, phase, Plans(), of).total_s)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_take_the_curve_of_their_dtype(cluster: Cluster, dtype: str) -> None:
    """Files of before say nothing of transposed operands, as this one of fp32."""
    values = PRODUCT | {"fp32": {"flops_per_s": 1e11} | UNTURNED, "bf16": {"flops_per_s": 4e11} | TURNED}[dtype]
    row = rows.matmul("p", "b", rows.Product(m=100, n=200, k=300, element_bytes=4.0), kept_elements=0)
    forward = half_size_matmul_s(100, 200, 300, 0, 0, 0, **values)
    assert seconds(row, FORWARD, machine(cluster, dtype)) == forward
    of_data, of_weights = (
        half_size_matmul_s(*dims, turned, 0, 0, **values) for *dims, turned in ((100, 300, 200, 0), (300, 200, 100, 1))
    )
    assert seconds(row, BACKWARD, machine(cluster, dtype)) == of_data + of_weights
    turned = replace(row, shape={**row.shape, "turned": 1.0})
    late = 2 * 100 * 200 * 300 / 8e11 + 100 * 300 / 1e9 if dtype == "bf16" else 0.0
    assert seconds(turned, FORWARD, machine(cluster, dtype)) == pytest.approx(forward + late, rel=1e-12)
    plain = seconds(row, FORWARD, machine(cluster, dtype, calibrated=False))
    assert plain != forward, "a reproduced paper takes the numbers of the file alone"


def test_a_product_whose_rows_lie_off_a_boundary_is_slower(cluster: Cluster) -> None:
    """A vocabulary of 50,257 in bf16: the head, both its gradients, and nothing else."""
    pieces = {"loose_flops_per_s": 2e11, "odd_flops_per_s": 1e11}
    mine = [replace(c, coefficients={**c.coefficients, **pieces}) if c is CURVES[1] else c for c in CURVES]
    device = replace(cluster.device, curves=Profile(device="mine", curves=tuple(mine)))
    loose = machine(replace(cluster, device=device), "bf16")
    for width, late in ((50264, 0.0), (50260, 1 / 2e11), (50257, 1 / 2e11 + 1 / 1e11)):
        row = rows.matmul("p", "b", rows.Product(m=64, n=width, k=768, element_bytes=2.0), kept_elements=0)
        flops = 2 * 64 * width * 768
        for phase, products in ((FORWARD, 1), (BACKWARD, 2)):
            slower = seconds(row, phase, loose) - seconds(row, phase, machine(cluster, "bf16"))
            assert slower == pytest.approx(products * flops * late, rel=1e-9, abs=1e-12), (width, phase)
    short = rows.matmul("p", "b", rows.Product(m=63, n=512, k=768, element_bytes=2.0), kept_elements=0)
    assert seconds(short, FORWARD, loose) == seconds(short, FORWARD, machine(cluster, "bf16")), "tokens lie in rows"


@pytest.mark.parametrize("elements", [1e4, 2e6, 2e7])
def test_operators_that_move_memory(cluster: Cluster, elements: float) -> None:
    mine = machine(cluster)
    gelu = rows.activation("g", "b", elements, element_bytes=4.0)
    assert seconds(gelu, FORWARD, mine) == streaming_s(8 * elements, 4 * elements, **STREAM)
    assert seconds(gelu, BACKWARD, mine) == streaming_s(12 * elements, 4 * elements, **STREAM)
    bias = rows.bias("b", "b", elements / 100, 100, element_bytes=4.0)
    assert seconds(bias, BACKWARD, mine) == pytest.approx(linear_s(4 * elements, **LINEAR)), "one pass, not two"
    both = [(4.0, "fp32", streaming_s(12 * elements, 4 * elements, **STREAM)),
            (2.0, "bf16", linear_s(6 * elements, **LINEAR))]  # fmt: skip
    for width, dtype, wanted in both:
        add = rows.residual("r", "b", elements, element_bytes=width)
        assert seconds(add, FORWARD, machine(cluster, dtype)) == wanted
    update = streamed(mine.models, 12 * elements)
    assert update is not None
    assert update.seconds == streaming_s(12 * elements, 0.0, **STREAM)


def test_the_optimiser_takes_whichever_curve_updates_have(cluster: Cluster) -> None:
    """On a GPU without a cache to show, the better model of updates is the line."""
    others = [c for c in CURVES if c.family != "streaming/update"]
    curves = Profile(device="mine", curves=(*others, curve("linear/update", LINEAR)))
    update = streamed(machine(replace(cluster, device=replace(cluster.device, curves=curves))).models, 1e8)
    assert update is not None and update.seconds == pytest.approx(linear_s(1e8, **LINEAR))


def test_what_was_not_measured_keeps_the_roofline(cluster: Cluster) -> None:
    dropout = rows.dropout("d", "b", 1e6, element_bytes=4.0, mask_bytes=1.0)
    assert phase_time(dropout, FORWARD, Plans(), machine(cluster)).timed is None
    half = rows.activation("g", "b", 1e6, element_bytes=2.0)
    plain = streaming_s(4e6, 0.0, **STREAM)
    assert seconds(half, FORWARD, machine(cluster, "bf16")) == plain, "no curve of a map in bf16: as the optimiser"


def test_collectives_of_measured_groups(cluster: Cluster) -> None:
    mine, plans = machine(cluster), Plans(tp=4, in_tp=4, dp=2)
    found = collective_of("all_reduce", plans, mine, ("tp",), 8e6)
    assert found == linear_s(8e6 * 2 * 3 / 4, **LINEAR)
    assert collective_of("reduce", plans, mine, ("tp",), 8e6) == linear_s(8e6, **LINEAR), "mirror of broadcast"
    across = collective_of("all_reduce", plans, mine, ("dp",), 8e6)
    assert across == linear_s(8e6, 5e-5, 1e8)
    assert collective_of("all_reduce", plans, mine, ("tp",), 0.0) == 0.0
    assert message_time_s(mine, 1e6) == (linear_s(1e6, **LINEAR), pytest.approx(1e-3 + 1e6 / 0.1e9))


@pytest.mark.parametrize(("kind", "tp", "inside"), [("all_gather", 4, 4), ("all_reduce", 3, 3), ("all_reduce", 8, 4)])
def test_other_groups_keep_the_ring(cluster: Cluster, kind: str, tp: int, inside: int) -> None:
    plans = Plans(tp=tp, in_tp=inside)
    plain = machine(cluster, calibrated=False)
    found = collective_of(kind, plans, machine(cluster), ("tp",), 8e6)
    assert found == collective_of(kind, plans, plain, ("tp",), 8e6) > 0


def test_near_is_known_to_be_fast_only_where_nothing_else_was_measured(cluster: Cluster) -> None:
    """Placements that leave room in a domain are left out of a search where they can't be faster."""
    mine, plain = machine(cluster), machine(cluster, calibrated=False)
    assert mine.groups is not None
    inside = replace(mine.groups, curves=tuple(one for one in mine.groups.curves if one.axis == "local"))
    assert plain.nearer_is_faster and replace(mine, groups=inside).nearer_is_faster
    assert not mine.nearer_is_faster, "one group between nodes was measured, many inside"
    assert not replace(plain, fast_Bps=plain.slow_Bps / 2).nearer_is_faster
    assert not replace(plain, fast_latency_s=2 * plain.slow_latency_s).nearer_is_faster
    assert not replace(plain, lone_slow_Bps=2 * plain.fast_Bps).nearer_is_faster
    assert replace(plain, fast_Bps=plain.slow_Bps, fast_latency_s=plain.slow_latency_s).nearer_is_faster


def test_a_block_of_plans_is_its_plans(cluster: Cluster) -> None:
    mine = machine(cluster)
    block = Plans(tp=np.array([1, 2, 3, 4, 4, 8]), in_tp=np.array([1, 2, 3, 4, 2, 4]))
    sizes = np.array([8e6, 8e6, 8e6, 0.0, 8e6, 8e6])
    for kind in COLLECTIVES:
        each = [collective_of(kind, block.row(i), mine, ("tp",), sizes[i]) for i in range(6)]
        assert np.allclose(collective_of(kind, block, mine, ("tp",), sizes), each, rtol=1e-12)


def test_an_explanation_names_the_curve(cluster: Cluster) -> None:
    mine = machine(cluster)
    seconds = collective_of("all_reduce", Plans(tp=4, in_tp=4), mine, ("tp",), 8e6)
    call, basis = noted(lambda: collective_of("all_reduce", Plans(tp=4, in_tp=4), mine, ("tp",), 8e6))
    assert call.formula is FORMULAS["linear"].function
    assert basis == "measured all_reduce of 4 ranks (median error 5.0 %)"
    assert call.formula(**call.arguments) == call.value == seconds
    names = {constant.name for constant in curve_constants(mine)}
    assert "linear/all_reduce/local4.median_error" in names
    assert any("half_size_matmul/matmul" in name for name in names)


def test_faster_parts_make_every_curve_faster(cluster: Cluster) -> None:
    mine = machine(cluster)
    row = rows.matmul("p", "b", rows.Product(m=4096, n=4096, k=4096, element_bytes=4.0), kept_elements=0)
    gelu = rows.activation("g", "b", 1e8, element_bytes=4.0)
    fast = mine.faster(matrix_flops_per_s=2.0, memory_Bps=2.0, fast_Bps=2.0)
    assert seconds(row, FORWARD, fast) == pytest.approx(seconds(row, FORWARD, mine) / 2, rel=1e-3)
    assert seconds(gelu, FORWARD, fast) == pytest.approx(seconds(gelu, FORWARD, mine) / 2, rel=1e-3)
    tensor, replica = Plans(tp=4, in_tp=4), Plans(dp=2)
    before, after = (collective_of("all_reduce", tensor, m, ("tp",), 8e9) for m in (mine, fast))
    assert after == pytest.approx(before / 2, rel=1e-3)
    before, after = (collective_of("all_reduce", replica, m, ("dp",), 8e9) for m in (mine, fast))
    assert after == before, "links between domains are not made faster"


@pytest.mark.parametrize(
    ("level", "stated", "ranks", "inside", "factor"),
    [
        ("local", 'bandwidth = "2 GB/s"', 4, 4, 0.5), ("local", "efficiency = 0.5", 4, 4, 2.0),
        ("node", 'bandwidth = "0.4 GB/s"', 2, 1, 0.25), ("node", "oversubscription = 2", 2, 1, 2.0),
        ("node", 'bandwidth = "0.4 GB/s"', 4, 4, 1.0), ("local", "links_per_device = 2", 2, 1, 1.0),
    ],
)  # fmt: skip
def test_a_file_that_states_other_links_moves_what_was_measured_on_them(
    cluster: Cluster, tmp_path: Path, level: str, stated: str, ranks: int, inside: int, factor: float
) -> None:
    (tmp_path / "other.toml").write_text(f'base = "m.toml"\n[levels.{level}]\n{stated}\n')
    plans = Plans(tp=ranks, in_tp=inside)
    long, none = 1e9, 1e-9
    machines = [machine(c) for c in (cluster, load_cluster(tmp_path / "other.toml"))]
    before, after = (collective_of("all_reduce", plans, m, ("tp",), long) for m in machines)
    late = [collective_of("all_reduce", plans, m, ("tp",), none) for m in machines]
    assert after - late[1] == pytest.approx(factor * (before - late[0])) and late[0] == pytest.approx(late[1])
    _, basis = noted(lambda: collective_of("all_reduce", plans, machines[1], ("tp",), long))
    assert basis.startswith(f"measured all_reduce of {ranks} ranks") and ("with the stated" in basis) == (factor != 1)


@pytest.mark.parametrize(("latency", "seconds"), [("50 us", 2.5e-5), ("200 us", 5e-5 + 3 * 1e-4)])
def test_a_stated_latency_moves_that_of_measured_groups(
    cluster: Cluster, tmp_path: Path, latency: str, seconds: float
) -> None:
    (tmp_path / "other.toml").write_text(f'base = "m.toml"\n[levels.local]\nlatency = "{latency}"\n')
    other = machine(load_cluster(tmp_path / "other.toml"))
    assert collective_of("all_reduce", Plans(tp=4, in_tp=4), other, ("tp",), 1e-9) == pytest.approx(seconds)


def test_a_curve_without_a_coefficient_is_named(cluster: Cluster) -> None:
    short = curve("streaming/gelu", {k: v for k, v in STREAM.items() if k != "fresh_from_bytes"})
    device = replace(cluster.device, curves=Profile(device="mine", curves=(short,)))
    with pytest.raises(UserError, match=r"streaming/gelu fp32 of mine lacks the coefficient fresh_from_bytes"):
        machine(replace(cluster, device=device))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"near_Bps": 0.0}, "near_Bps 0.0, which has to be more than 0"),
        ({"far_Bps": -1e9}, "far_Bps -1000000000.0, which has to be more than 0"),
        ({"latency_s": -1e-6}, "latency_s -1e-06, which must not be negative"),
        ({"fresh_Bpz": 1e9}, "there is no coefficient of streaming/gelu fp32 of mine 'fresh_Bpz'"),
    ],
)
def test_a_curve_that_can_give_no_time_is_refused(cluster: Cluster, changed: dict[str, float], message: str) -> None:
    wrong = curve("streaming/gelu", STREAM | changed)
    device = replace(cluster.device, curves=Profile(device="mine", curves=(wrong,)))
    with pytest.raises(UserError, match=message):
        machine(replace(cluster, device=device))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gem", "gem fp32 of mine: there is no formula of curves 'gem'\n  valid: additive, blocked_convolution, "),
        ("streming/gelu", "there is no formula of curves 'streming'\n  did you mean streaming"),
        ("streaming/gelu_bakward", "there is no measured operator 'gelu_bakward'\n  did you mean gelu_backward"),
        ("linear/all_redcue/local4", "'all_redcue/local4'\n  did you mean all_reduce/local4"),
        ("linear/all_reduce/lokal4", "'all_reduce/lokal4'\n  did you mean all_reduce/local4"),
        ("linear/all_reduce/local", "'all_reduce/local'\n  did you mean all_reduce/local2"),
        ("linear", "there is no measured operator ''\n  measure the machine again"),
    ],
)
def test_a_curve_with_a_misspelt_name_is_not_left_out_in_silence(cluster: Cluster, family: str, message: str) -> None:
    device = replace(cluster.device, curves=Profile(device="mine", curves=(*CURVES, curve(family, LINEAR))))
    with pytest.raises(UnknownNameError, match=message):
        machine(replace(cluster, device=device))


def test_every_name_that_a_calibration_gives_is_known(cluster: Cluster) -> None:
    names = {f"{model}/{kind}" for kind, models in CANDIDATES.items() for model in models}
    names |= {
        f"{model}/{kind}/{axis}4" for model in ("linear", "streaming") for kind in SENT for axis in ("local", "node")
    }
    for name in names:
        values = dict.fromkeys(FORMULAS[name.partition("/")[0]].arguments, 1.0)
        device = replace(cluster.device, curves=Profile(device="mine", curves=(curve(name, values),)))
        machine(replace(cluster, device=device))


def test_every_operator_that_has_a_curve_is_one_of_a_table() -> None:
    assert set(RAN) < set(OPERATORS)


@pytest.mark.parametrize("plans", [Plans(tp=4, in_tp=4, dp=2), Plans(tp=2, in_tp=2, dp=4, in_dp=2, zero=2)])
def test_every_term_is_what_its_record_says(cluster: Cluster, plans: Plans) -> None:
    job = Job(model=load_model("gpt2-xl"), gpus=8, global_batch=16, seq_len=1024, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], attention="unfused")  # fmt: skip
    details = explained(evaluate(CORRECTED, CORRECTED.strategies["1d"], job, machine(cluster, "bf16"), plans))
    assert differing(details) == []
    assert {"regression.linear_s", "regression.streaming_s"} <= {detail.function for detail in details}
