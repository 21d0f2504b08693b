"""Hand numbers of the collective algorithms, the choice among them, profiles and the reading of rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime.cost.collective_algorithms import (
    ALGORITHMS,
    LIBRARY,
    TWO_PHASES,
    Fabric,
    candidate_s,
    collective_s,
    fabric_of,
    transfer_s,
)
from steptime.cost.collective_schedules import Path as Route
from steptime.cost.collective_schedules import (
    bruck_path,
    direct_path,
    double_tree_path,
    doubling_path,
    hierarchical_path,
    ring_path,
)
from steptime.cost.data_parallel import push_pull_s
from steptime.errors import FieldError
from steptime.estimate.fabrics import carried_between
from steptime.hardware import library, load_cluster
from steptime.hardware.load import Layer
from steptime.hardware.profiles import (
    FabricProfile,
    load_fabric_profiles,
    read_fabric_profile,
    save_fabric_profile,
)
from steptime.measure.table import Table
from steptime_lab.calibrate import collectives
from steptime_lab.calibrate.collective_fit import fit, predict, undetermined
from steptime_lab.calibrate.collective_machines import MACHINES, Machine, Rows, library_of
from steptime_lab.calibrate.collectives import Textbook, estimated, predict_rows, rows_of, usable

PLAIN = Fabric(
    domain=8,
    nics=8,
    start_s=(1e-6, 2e-6, 4e-6),
    hop_s=(1e-6, 1e-6, 2e-6),
    Bps=(10e9, 50e9, 100e9),
    outer_hop_s=(5e-6, 6e-6, 10e-6),
    outer_Bps=(2e9, 8e9, 10e9),
    tree_hop_s=(8e-6, 9e-6, 15e-6),
)


def test_ring_by_hand() -> None:
    seconds, algorithm, protocol = collective_s("all_gather", 800e6, 8, 8, PLAIN)
    assert (algorithm, protocol) == ("ring", "simple")
    assert seconds == pytest.approx(4e-6 + 7 * 2e-6 + 700e6 / 100e9)


def test_small_messages_take_the_fast_start() -> None:
    seconds, _, protocol = collective_s("all_gather", 8.0, 8, 8, PLAIN)
    assert protocol == "ll"
    assert seconds == pytest.approx(1e-6 + 7e-6 + 7 / 10e9)


def test_all_reduce_between_nodes_prefers_the_tree_when_small_and_the_ring_when_large() -> None:
    assert collective_s("all_reduce", 1024.0, 512, 8, PLAIN)[1] == "tree"
    assert collective_s("all_reduce", 4e9, 512, 8, replace(PLAIN, tree_share=0.8))[1] == "ring"


def test_ring_between_nodes_uses_all_nics() -> None:
    seconds = collective_s("all_gather", 16e9, 16, 8, PLAIN)[0]
    assert seconds == pytest.approx(4e-6 + 14 * 2e-6 + 10e-6 + max(15e9 / 100e9, 15e9 / (8 * 10e9)))


def test_contention_rails_and_oversubscription() -> None:
    alone = collective_s("all_gather", 16e9, 16, 8, PLAIN)[0]
    args = ("all_gather", 16e9, 16, 8, PLAIN)
    assert collective_s(*args, groups=4)[0] == pytest.approx(4 * alone, rel=1e-3)
    assert collective_s(*args, oversubscription=4)[0] == pytest.approx(4 * alone, rel=1e-3)
    assert collective_s(*args, nics=2)[0] == pytest.approx(4 * alone, rel=1e-3)


def test_switch_only_for_numbers_that_it_can_add_and_not_in_pairs() -> None:
    fabric = replace(PLAIN, switch_start_s=5e-6, switch_Bps=100e9)
    assert collective_s("all_reduce", 1e9, 8, 8, fabric)[1] == "switch"
    assert collective_s("all_reduce", 1e9, 8, 8, fabric, element_bytes=1)[1] == "ring"
    assert collective_s("all_reduce", 1e9, 16, 2, fabric)[1] != "switch"
    assert collective_s("all_reduce", 1e9, 16, 8, fabric)[0] == pytest.approx(5e-6 + 30e-6 + 1e9 / (8 * 10e9))


def test_links_by_group_slow_small_groups() -> None:
    mesh = replace(PLAIN, links_by_group=(1 / 3, 2 / 3, 1.0))
    pair = collective_s("all_gather", 1e9, 2, 2, mesh)[0]
    assert pair == pytest.approx(4e-6 + 2e-6 + 0.5e9 / (100e9 / 3))


def test_levels_in_turn_add_and_levels_at_once_do_not() -> None:
    at_once = transfer_s(Route(0, 0, 1e9, 1e9), 0.0, 0.0, 0.0, 1e9, 1e9)
    in_turn = transfer_s(Route(0, 0, 1e9, 1e9, serial=True), 0.0, 0.0, 0.0, 1e9, 1e9)
    assert (at_once, in_turn) == (1.0, 2.0)
    assert transfer_s(Route(3, 0, 4e9, 0.0), 0.0, 1.0, 0.0, 1e9, 1.0, overlap=2.0) == pytest.approx(5.0)


def test_volumes_agree_where_the_theory_says_so() -> None:
    ring, halves, levels = (f(64.0, 8, 8, passes=2) for f in (ring_path, doubling_path, hierarchical_path))
    assert ring.inner_bytes == halves.inner_bytes == levels.inner_bytes == 112.0
    assert bruck_path(64.0, 8, 8).inner_bytes == direct_path(64.0, 8, 8).inner_bytes == 56.0
    assert double_tree_path(64.0, 8, 1).outer_bytes == ring_path(64.0, 8, 1, passes=2).outer_bytes


def test_rooted_algorithms_cross_over() -> None:
    both = ("chain", "binomial")
    assert collective_s("broadcast", 8.0, 8, 8, PLAIN, algorithms=both)[1] == "binomial"
    assert collective_s("broadcast", 1e9, 8, 8, PLAIN, algorithms=both)[1] == "chain"


def test_algorithms_that_are_named_are_the_only_ones_weighed() -> None:
    assert collective_s("all_reduce", 1e9, 8, 8, PLAIN, algorithms=("doubling",))[1] == "doubling"
    assert {name for name, _ in candidate_s("all_reduce", 8.0, 8, 8, PLAIN, algorithms=("ring",))[0]} == {"ring"}
    assert TWO_PHASES in {name for name, _ in candidate_s("all_reduce", 8.0, 8, 8, PLAIN)[0]}


def test_every_library_algorithm_exists() -> None:
    for kind, names in LIBRARY.items():
        assert set(names) <= set(ALGORITHMS[kind])


def test_parameter_server_in_every_worker_equals_a_ring() -> None:
    ring = 2 * 7 / 8 * 1e9 / 10e9
    assert push_pull_s(1e9, 8, 8, 10e9, 10e9, 0.0, own_share=1 / 8) == pytest.approx(ring)


def profile_of(name: str) -> FabricProfile:
    (found,) = (profile for profile in load_fabric_profiles() if profile.name == name)
    return found


def test_profile_survives_a_file(tmp_path: Path) -> None:
    profile = profile_of("h100-sxm-nccl")
    again = read_fabric_profile(save_fabric_profile(profile, tmp_path))
    assert again == profile


def test_profile_errors_name_the_field(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\ncolour = 3\n')
    with pytest.raises(FieldError, match="colour"):
        read_fabric_profile(path)


@pytest.mark.quick(every=3)
@pytest.mark.each(
    ("old", "new", "field"),
    [
        ("median_ape = 0.03606", 'median_ape = "x"', "median_ape"),
        ("bias = -0.01717", "bias = nan", "bias"),
        ("bias = -0.01717", f"bias = 1{'0' * 400}", "bias"),
        ("points = 1656", "points = 1.5", "points"),
        ("band = [0.9056, 1.19]", "band = [1.19, 0.9056]", "band"),
        ("band = [0.9056, 1.19]", "band = 1", "band"),
        ("link_Bps = 450000000000.0", "link_Bps = 0.0", "link_Bps"),
        ('sources = ["aiconfigurator_nccl"]', "sources = [1]", "sources[0]"),
        ('kind = "fitted"', 'kind = "guess"', "kind"),
        ("domain = 8", 'domain = "8"', "coefficients.domain"),
        ("domain = 8", "", "coefficients.domain"),
        ("trees = true", "trees = 1", "coefficients.trees"),
        ("own_steps = 0.3248", "own_steps = [0.3]", "coefficients.own_steps"),
        ("Bps = [16590000000.0, 153500000000.0, 347700000000.0]\ndirect", "Bps = 1e9\ndirect", "coefficients.Bps"),
        ("ranks = [2.0, 8.0]", 'ranks = [2.0, "8"]', "ranges.ranks[1]"),
    ],
)
def test_a_malformed_fabric_profile_names_the_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    text = save_fabric_profile(profile_of("h100-sxm-nccl"), tmp_path).read_text()
    assert old in text
    path = tmp_path / "x.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(FieldError, match=re.escape(f"{path}: {field}: ")):
        read_fabric_profile(path)


def test_the_users_fabrics_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = profile_of("h100-sxm-nccl")
    for folder, points in (("config/steptime/fabrics", 1), ("lab/fabrics", 2)):
        save_fabric_profile(replace(known, points=points), tmp_path / folder)
    save_fabric_profile(replace(known, name="mine"), tmp_path / "config/steptime/fabrics")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path / "absent"))
    assert profile_of("h100-sxm-nccl").points == 1, "~/.config/steptime goes before the catalogue"
    assert profile_of("mine").points == known.points
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path / "lab"))
    assert profile_of("h100-sxm-nccl").points == 2, "$STEPTIME_PATH goes before the user's folder"


@pytest.mark.each("profile", load_fabric_profiles(), ids=lambda profile: profile.name)
def test_catalogue_profiles_are_sane(profile: FabricProfile) -> None:
    if profile.library == "deepep-ll":
        return
    fabric = fabric_of(profile.coefficients)
    assert 0 < profile.band[0] <= 1.05 and profile.band[1] >= 0.95
    assert all(0 < rate <= 1.15 * profile.link_Bps + 1 for rate in fabric.Bps)
    assert all(rate <= profile.nic_Bps + 1 for rate in fabric.outer_Bps)


def table(**columns: list[object]) -> Table:
    count = len(next(iter(columns.values())))
    base: dict[str, list[object]] = {
        "source": ["new"] * count, "gpu": ["H100-SXM5-80GB"] * count, "interconnect": [""] * count,
        "n_gpus": [8.0] * count, "gpus_per_node": [8.0] * count, "collective": ["allreduce"] * count,
        "bytes": [1e8] * count, "time_us": [500.0] * count, "dtype": ["half"] * count,
        "method": ["nccl-tests"] * count, "notes": [""] * count,
    }  # fmt: skip
    merged = base | columns
    kinds = {n: float if isinstance(v[0], float) else object for n, v in merged.items()}
    return Table({name: np.array(values, dtype=kinds[name]) for name, values in merged.items()})


def test_rows_of_divides_groups_evenly_over_domains() -> None:
    rows = rows_of(table(n_gpus=[128.0, 16.0], gpus_per_node=[72.0, 8.0]))
    assert list(rows.inside) == [64.0, 8.0]
    assert usable(rows).all()


def test_merged_rows_take_the_median() -> None:
    one = np.ones(3)
    kind = np.array(["p2p"] * 3, dtype=object)
    merged = Rows(kind, 2 * one, 2 * one, 8 * one, 2 * one, np.array([3.0, 1.0, 2.0])).merged()
    assert list(merged.measured_s) == [2.0]


def test_predictions_of_unseen_sources_and_machines() -> None:
    rows = table(
        gpu=["H100-SXM5-80GB", "GB200", "H100-SXM5-80GB", "no-such-gpu"],
        n_gpus=[8.0, 72.0, 64.0, 8.0],
        gpus_per_node=[8.0, 4.0, 8.0, 8.0],
    )
    found = predict_rows(rows, load_fabric_profiles())
    assert list(found.reason[:3]) == ["", "", ""]
    assert found.reason[3] != "" and np.isnan(found.seconds[3])
    assert (found.low_s[:3] < found.seconds[:3]).all() and (found.seconds[:3] < found.high_s[:3]).all()


def test_a_carried_profile_is_marked_as_assumed() -> None:
    profile = estimated(load_cluster("gb200-nvl72"), leaves_node=True)
    assert isinstance(profile, FabricProfile) and profile.kind == "assumed"
    assert profile.coefficients["domain"] == 72


def test_groups_that_stay_near_cross_the_second_level_at_most() -> None:
    node, network = (estimated(load_cluster("frontier"), leaves_node=leaves) for leaves in (False, True))
    assert isinstance(node, Textbook) and isinstance(network, Textbook)
    cluster = load_cluster("frontier")
    assert [one.machine.slow_Bps for one in (node, network)] == [
        level.link_Bps * level.links_per_device * level.efficiency / level.oversubscription
        for level in cluster.levels[1:]
    ]


def test_groups_that_leave_a_domain_cross_the_next_level_and_no_further() -> None:
    bridged = estimated(load_cluster("h100-nvl"), leaves_node=False)
    pcie = load_cluster("h100-nvl").levels[1]
    assert isinstance(bridged, FabricProfile) and bridged.coefficients["outer_Bps"][-1] == pcie.rank_Bps
    assert bridged.band == (0.5, 2.0), "pairs are joined by PCI Express, which is taken at its word"
    frontier = load_cluster("frontier")
    sizes = (1, 2, None)
    lone = replace(
        frontier, levels=tuple(replace(one, devices=n) for one, n in zip(frontier.levels, sizes, strict=True))
    )
    pairs, all_of_them = (estimated(lone, leaves_node=leaves) for leaves in (False, True))
    assert isinstance(pairs, Textbook) and isinstance(all_of_them, Textbook)
    assert pairs.machine.slow_Bps == frontier.levels[1].rank_Bps > all_of_them.machine.slow_Bps


def test_the_band_of_a_carried_profile_is_the_widest_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LEAST_BAND", 1.0)
    profile = estimated(load_cluster("gb200-nvl72"), leaves_node=True)
    near, network = profile_of("gb300-nccl"), profile_of("perlmutter-nccl")
    sure = max(near.band[1], 1 / near.band[0], network.band[1])
    assert isinstance(profile, FabricProfile) and profile.band == (1 / sure, sure)


def test_names_of_machines_are_distinct_and_libraries_known() -> None:
    assert len({m.name for m in MACHINES}) == len(MACHINES)
    assert library_of("framework allreduce (vllm); graph/eager", "kernel=vLLM_custom_graph") == "custom-graph"


def test_own_part_of_a_ring_stays_in_the_domain() -> None:
    path = ring_path(8.0, 2, 1, own_steps=1.0)
    assert (path.inner_bytes, path.outer_bytes) == (0.0, 4.0)
    assert ring_path(8.0, 8, 4, own_steps=1.0)[2:4] == (8.0, 7.0)


def test_short_messages_of_an_exchange_use_few_channels() -> None:
    narrow = replace(PLAIN, direct_pair_Bps=(1e9, 0.0, 0.0))
    free, bound = (candidate_s("all_to_all", 8e3, 8, 8, f)[1][0] for f in (PLAIN, narrow))
    assert free == pytest.approx(1e-6 + 7e3 / 10e9)
    assert bound == pytest.approx(1e-6 + 1e3 / 1e9)


def test_copies_of_a_framework_go_around_all_but_reductions_in_place() -> None:
    wrapped = replace(PLAIN, wrap_start_s=1e-4, wrap_hop_s=1e-5, wrap_Bps=1e9)
    extra = collective_s("all_gather", 1e6, 8, 8, wrapped)[0] - collective_s("all_gather", 1e6, 8, 8, PLAIN)[0]
    assert extra == pytest.approx(1e-4 + 8e-5 + 1e-3)
    assert collective_s("all_reduce", 1e6, 8, 8, wrapped)[0] == collective_s("all_reduce", 1e6, 8, 8, PLAIN)[0]


def measured(machine: Machine, fabric: Fabric, groups: list[tuple[float, float]]) -> Rows:
    """Noise-free all-reduces of some groups (ranks, inside) on a fabric."""
    size = np.tile(np.geomspace(1e3, 1e9, 15), len(groups))
    ranks, inside = (np.repeat([g[i] for g in groups], 15) for i in range(2))
    kind, element = np.full(len(size), "all_reduce", dtype=object), np.full(len(size), 2.0)
    rows = Rows(kind, ranks, inside, size, element, size)
    return replace(rows, measured_s=predict(fabric, rows))


def test_groups_that_were_not_measured_stay_sane() -> None:
    machine = next(m for m in MACHINES if m.name == "h100-nvl-kernel")
    pairs = measured(machine, replace(PLAIN, domain=2, nics=1.0, trees=False, Bps=(8e9, 90e9, 220e9)), [(2.0, 2.0)])
    found = fabric_of(fit(machine, pairs, starts=1))
    assert undetermined(machine, pairs) == ["between domains", "hops"]
    assert 0.4 * machine.nic_Bps < found.outer_Bps[2] <= machine.nic_Bps
    seconds = collective_s("all_reduce", 1e9, 4, 2, found)[0]
    assert 1.5e9 / machine.nic_Bps < seconds < 3 * 1.5e9 / machine.nic_Bps
    assert np.median(np.abs(predict(found, pairs) / pairs.measured_s - 1)) < 0.05


def test_rows_that_name_the_ring_get_no_tree() -> None:
    free, ring = (
        predict_rows(table(n_gpus=[16.0], bytes=[1e9], notes=[note]), load_fabric_profiles()).seconds[0]
        for note in ("", "NCCL_ALGO=Ring; NCCL 2.29.3")
    )
    assert ring > 1.1 * free


def test_size_of_an_exchange_over_the_whole_group() -> None:
    rows = rows_of(table(source=["new", "nnscaler_mi200"], collective=["alltoall"] * 2, gpu=["MI200 GCD"] * 2))
    assert list(rows.size_bytes) == [1e8, 1e8 / 8]


def test_latencies_of_a_carried_network_are_in_units_of_the_hop_that_the_catalogue_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = profile_of("perlmutter-nccl")
    other = replace(load_cluster("dgx-h100").levels[-1], latency_s=2 * load_cluster("perlmutter").levels[-1].latency_s)
    far = carried_between(other, network, 8)
    assert far["outer_hop_s"] == pytest.approx(np.multiply(2, network.coefficients["outer_hop_s"]))
    monkeypatch.setattr(library, "_defaults", lambda kind: Layer(numbers={"latency": 2e-6}))
    library.usual_latency_s.cache_clear()
    try:
        assert carried_between(other, network, 8)["outer_hop_s"] == pytest.approx(np.multiply(2.5, far["outer_hop_s"]))
    finally:
        library.usual_latency_s.cache_clear()
