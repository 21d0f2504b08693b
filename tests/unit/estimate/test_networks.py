"""Hand numbers of groups on networks whose levels are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime import api
from steptime.estimate.communication import collective_in, collective_over, group_of, message_time_s
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.network import consecutive, slice_shape
from steptime.estimate.operators import COLLECTIVES
from steptime.hardware import load_cluster
from steptime.plan.job import PRECISIONS
from steptime.plan.placements import members_of, numbered, order_of
from steptime.plan.plans import Plans

DEVICE = """
[device]
base = "mi300x"

[levels.node]
devices = 8
bandwidth = "400 GB/s"
efficiency = 1
latency = "0 s"
"""
LEAF = """
[levels.leaf]
devices = 32
bandwidth = "50 GB/s"
efficiency = 1
latency = "0 s"
"""
SPINE = """
[levels.spine]
bandwidth = "50 GB/s"
efficiency = 1
latency = "0 s"
oversubscription = 4
"""


def machine(folder: Path, text: str, gpus: int = 512) -> Machine:
    file = folder / "net.toml"
    file.write_text(text, encoding="utf-8")
    precision = PRECISIONS["bf16"]
    return machine_of(load_cluster(file), gpus, precision, lone_rank_has_all_links=False, calibrated=False)


def tree(folder: Path, kind: str = 'kind = "fat-tree"') -> Machine:
    return machine(folder, f"{DEVICE}{LEAF}{SPINE}[topology]\n{kind}\n")


def dp_gather_s(on: Machine, plans: Plans, kind: str = "all_gather", axes: tuple[str, ...] = ("dp",)) -> float:
    return float(collective_in(kind, on, 1e9, group_of(plans, axes)))


def test_ring_over_an_oversubscribed_fat_tree(tmp_path: Path) -> None:
    """A leaf has 4 nodes, the spine is 4:1. Rings of 64 nodes next to each other leave a leaf once: as fast as the NIC.

    16 apart each of their hops crosses the spine, a quarter of the bandwidth: 63/64 GB at 12.5 GB/s.
    """
    on = tree(tmp_path)
    near = numbered(Plans(tp=8, dp=64, in_tp=8))
    assert dp_gather_s(on, near) == pytest.approx(63 / 64 / 50)
    far = numbered(Plans(tp=8, dp=16, pp=4, in_tp=8), order_of("tp-pp-dp"))
    assert far.at_dp == 4
    assert dp_gather_s(on, far) == pytest.approx(15 / 16 / 12.5)
    half = numbered(Plans(tp=8, dp=32, pp=2, in_tp=8), order_of("tp-pp-dp"))
    assert dp_gather_s(on, half) == pytest.approx(31 / 32 / 25)
    within = numbered(Plans(tp=8, dp=4, pp=16, in_tp=8))
    assert dp_gather_s(on, within) == pytest.approx(3 / 4 / 50)


def test_exchange_over_an_oversubscribed_spine(tmp_path: Path) -> None:
    """Of 16 nodes 12 lie under other leaves: 12/16 GB at 12.5 GB/s."""
    plans = numbered(Plans(tp=8, dp=16, in_tp=8))
    assert dp_gather_s(tree(tmp_path), plans, "all_to_all") == pytest.approx(12 / 16 / 12.5)


def test_messages_between_stages(tmp_path: Path) -> None:
    """Eight stages next to each other: of seven borders one leaves its leaf, which one in four of its nodes does."""
    on = tree(tmp_path)
    near = numbered(Plans(tp=8, pp=8, in_tp=8))
    far = numbered(Plans(tp=8, dp=4, pp=8, in_tp=8))
    assert message_time_s(on, 1e9, group_of(near, ("pp",)))[1] == pytest.approx(1 / 50)
    assert message_time_s(on, 1e9, group_of(far, ("pp",)))[1] == pytest.approx(1 / 12.5)


def test_rails_keep_what_is_forwarded(tmp_path: Path) -> None:
    """Without forwarding one in eight messages is for the sender's own rail, and of those 3 of 15 stay on the leaf."""
    plans = numbered(Plans(tp=8, dp=16, in_tp=8))
    kept = tree(tmp_path, 'kind = "rail"\nrails = 8')
    spread = tree(tmp_path, 'kind = "rail"\nrails = 8\nforwarding = false')
    assert dp_gather_s(kept, plans, "all_to_all") == pytest.approx(12 / 16 / 12.5)
    assert dp_gather_s(spread, plans, "all_to_all") == pytest.approx(15 / 16 / 12.5 * (1 - 3 / 15 / 8))
    assert dp_gather_s(spread, plans) == dp_gather_s(kept, plans)


def test_dragonfly_rings_take_detours(tmp_path: Path) -> None:
    """All that leaves a group goes to one other: twice the bytes on its global links."""
    level = LEAF.replace("leaf", "group")
    on = machine(
        tmp_path, f'{DEVICE}{LEAF.replace("32", "16")}{level}{SPINE}[topology]\nkind = "dragonfly"\ngroups = 64\n'
    )
    plans = numbered(Plans(tp=8, dp=16, pp=4, in_tp=8), order_of("tp-pp-dp"))
    assert dp_gather_s(on, plans) == pytest.approx(15 / 16 / 50 * 8)


TORUS = """
device = "tpu-v4"
[levels.ici]
devices = 64
bandwidth = "300 GB/s"
efficiency = 1
latency = "0 s"
[topology]
kind = "torus"
shape = [4, 4, 4]
"""


def test_rings_in_a_torus(tmp_path: Path) -> None:
    """Six links of 50 GB/s. A ring along one dim has two of them, along two four; a pair has one."""
    on = machine(tmp_path, TORUS, 64)
    line, plane = numbered(Plans(tp=4, dp=16)), numbered(Plans(tp=16, dp=4))
    assert dp_gather_s(on, line, axes=("tp",)) == pytest.approx(3 / 4 / 100)
    assert dp_gather_s(on, line) == pytest.approx(15 / 16 / 200)
    assert dp_gather_s(on, plane, axes=("tp",)) == pytest.approx(15 / 16 / 200)
    shared = numbered(Plans(tp=2, dp=32))
    assert dp_gather_s(on, shared, axes=("tp",)) == pytest.approx(1 / 2 / 50)


def test_exchange_in_a_torus(tmp_path: Path) -> None:
    """In a ring of four each link carries half a rank's tensor: 0.5 GB at 50 GB/s."""
    on = machine(tmp_path, TORUS, 64)
    assert dp_gather_s(on, numbered(Plans(tp=4, dp=16)), "all_to_all", ("tp",)) == pytest.approx(0.5 / 50)


def test_slices_close_only_where_they_may(tmp_path: Path) -> None:
    """Of a 16 x 16 torus a slice of 4 x 4 is open: half of the links."""
    text = TORUS.replace("64", "256").replace("[4, 4, 4]", "[16, 16]").replace("300", "200")
    plans = numbered(Plans(tp=4, dp=4))
    assert dp_gather_s(machine(tmp_path, text, 16), plans, axes=("tp",)) == pytest.approx(3 / 4 / 50)
    joined = f"{text}wraps = 4\n"
    assert dp_gather_s(machine(tmp_path, joined, 16), plans, axes=("tp",)) == pytest.approx(3 / 4 / 100)
    assert slice_shape((16, 16, 16), 128) == (4, 4, 8)


def test_cards_under_one_bridge(tmp_path: Path) -> None:
    """Four cards share one port of 32 GB/s: rings of two bridges in one server have 8 GB/s for each of their lanes."""
    text = """
device = "l40s"
[levels.switch]
devices = 4
bandwidth = "32 GB/s"
efficiency = 1
latency = "0 s"
[levels.bridge]
devices = 8
bandwidth = "32 GB/s"
links_per_device = 0.25
efficiency = 1
latency = "0 s"
[topology]
kind = "pcie"
"""
    on = machine(tmp_path, text, 8)
    assert dp_gather_s(on, numbered(Plans(dp=8, in_dp=4))) == pytest.approx(7 / 8 / 32)
    assert dp_gather_s(on, numbered(Plans(tp=4, dp=2, in_tp=4))) == pytest.approx(1 / 2 / 32)


def test_scattered_nodes_are_between_packed_and_worst(tmp_path: Path) -> None:
    plans = numbered(Plans(tp=8, dp=16, in_tp=8))
    times = [
        dp_gather_s(tree(tmp_path, f'kind = "cloud"\npool = 4096\nplacement = "{how}"'), plans)
        for how in ("packed", "random", "worst")
    ]
    assert times == pytest.approx([15 / 16 / 50, 15 / 16 / 12.5 * (1 - 3 / 511), 15 / 16 / 12.5])


def test_longer_hops_across_the_spine(tmp_path: Path) -> None:
    """Rings of 16 nodes: 15 hops of 2 us, and the 3 that cross the spine take 3 us more."""
    leaf, spine = LEAF.replace("0 s", "2 us"), SPINE.replace("0 s", "5 us")
    text = f"{DEVICE}{leaf}{spine}"
    on = machine(tmp_path, f'{text}[topology]\nkind = "fat-tree"\n')
    plans = numbered(Plans(tp=8, dp=16, in_tp=8))
    assert dp_gather_s(on, plans) == pytest.approx(15 / 16 / 50 + 15 * 2e-6 + 3 * 3e-6)


def test_members_by_counting() -> None:
    """Members of a block as they lie when all domains are numbered one by one, for orders and degrees at random."""
    draw = np.random.default_rng(7)
    for _ in range(60):
        degrees = dict(zip(("cp", "dp", "pp"), (int(2**n) for n in draw.integers(0, 4, 3)), strict=True))
        order = tuple(draw.permutation(list(degrees)))
        plans = numbered(Plans(**degrees), order_of("-".join(order)))
        shape = [degrees[axis] for axis in reversed(order)]
        places = np.arange(np.prod(shape)).reshape(shape)
        axis = str(draw.choice(list(degrees)))
        block = int(2 ** draw.integers(0, 6))
        line = np.moveaxis(places, len(order) - 1 - order.index(axis), 0).reshape(degrees[axis], -1)[:, 0]
        assert members_of(plans, (axis,), block) == np.count_nonzero(line // block == 0)


def test_levels_without_a_topology_make_no_network() -> None:
    on = machine_of(load_cluster("frontier"), 64, PRECISIONS["bf16"], lone_rank_has_all_links=False, calibrated=True)
    assert on.network is None
    assert "order" not in api.estimate("llama3-8b", "dgx-h100", gpus=64, global_batch=64, plan={"tp": 8}).plan


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", ["h100-nvl-2", "h200-nvl-4", "frontier"])
def test_a_group_is_timed_on_the_levels_that_it_crosses(name: str, calibrated: bool) -> None:
    """Inside the second level as in a job that ends there; beyond it as if no level were nearer."""
    cluster = load_cluster(name)
    small, large = (
        machine_of(cluster, n, PRECISIONS["bf16"], lone_rank_has_all_links=False, calibrated=calibrated)
        for n in (cluster.levels[1].group, 64)
    )
    alone = replace(large, nearer=None)
    for kind, size in ((kind, size) for kind in COLLECTIVES for size in (1e3, 1e6, 1e9)):
        inside = cluster.fast_domain
        within = [collective_over(kind, on, size, 8, inside) for on in (small, large)]
        assert within[0] == within[1]
        beyond = [collective_over(kind, on, size, 16, inside) for on in (alone, large)]
        assert beyond[0] == beyond[1]


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4]),
    order=st.permutations(["tp", "pp", "dp"]),
)
def test_blocks_of_plans_cost_what_each_plan_costs_on_three_levels(tp: int, pp: int, dp: int, order: list[str]) -> None:
    on = machine_of(load_cluster("h100-nvl-2"), 64, PRECISIONS["bf16"], lone_rank_has_all_links=False, calibrated=True)
    axes = order_of("-".join(order))
    each = [numbered(Plans(tp=tp, pp=pp, dp=dp).in_order(2, along), along) for along in (axes, order_of("tp-dp-pp"))]
    block = Plans(**{
        name: np.array([getattr(plans, name) for plans in each])
        for axis in ("tp", "pp", "dp") for name in (axis, f"in_{axis}", f"at_{axis}")
    })  # fmt: skip
    for axis in ("tp", "dp"):
        together = np.broadcast_to(collective_in("all_reduce", on, 1e8, group_of(block, (axis,))), (2,))
        alone = [collective_in("all_reduce", on, 1e8, group_of(plans, (axis,))) for plans in each]
        np.testing.assert_allclose(together, alone, rtol=1e-12)
    sent = [np.broadcast_to(x, (2,)) for x in message_time_s(on, 1e8, group_of(block, ("pp",)))]
    alone = [message_time_s(on, 1e8, group_of(plans, ("pp",))) for plans in each]
    np.testing.assert_allclose(np.stack(sent, axis=1), alone, rtol=1e-12)


def test_a_flat_topology_changes_nothing(tmp_path: Path) -> None:
    """One level between nodes, as wide as ever: the same estimate with and without a topology."""
    (tmp_path / "flat.toml").write_text('base = "dgx-h100"\n[topology]\nkind = "fat-tree"\n', encoding="utf-8")
    plan = {"tp": 4, "pp": 4, "overlap": "none"}
    each = [
        api.estimate("llama3-8b", name, gpus=64, global_batch=64, plan=plan).step_time_s
        for name in ("dgx-h100", str(tmp_path / "flat.toml"))
    ]
    assert each[0] == each[1]


def test_messages_contend_with_gradients_in_the_background() -> None:
    """One message per virtual stage, as long again; nothing where gradients do not overlap."""
    plan = {"tp": 8, "pp": 4, "overlap": "dp"}
    shared = api.estimate("llama3-8b", "meta-roce-24k", gpus=512, global_batch=512, plan=plan)
    path = "pp_comm/contention/fair_share_wait_s"
    detail = next(each for each in shared.details if each.path == path)
    assert shared.time[path] == min(detail.arguments["background_s"], detail.arguments["exposed_s"]) > 0
    assert sum(shared.time.values()) == pytest.approx(shared.step_time_s, rel=1e-12)
    alone = api.estimate("llama3-8b", "meta-roce-24k", gpus=512, global_batch=512, plan={**plan, "overlap": "none"})
    assert path not in alone.time


def test_the_tier_that_slows_a_group_is_named() -> None:
    found = api.estimate("llama3-8b", "aws-p4d-scattered", gpus=256, global_batch=256, plan={"tp": 8})
    named = [each for each in found.details if "/network/" in each.path]
    assert named
    assert all("times slower on network" in each.basis for each in named)
    assert any("if no two share a leaf" in note for note in found.notes)


def test_consecutive_groups() -> None:
    reach = consecutive(16.0)
    assert [reach.members(block) for block in (1, 4, 64)] == [1, 4, 16]
