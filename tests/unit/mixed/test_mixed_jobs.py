"""Jobs over several groups: splits held against all others, waiting, and files that are refused."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product
from math import inf
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.estimate.machine import machine_of
from steptime.hardware import load_cluster
from steptime.jobs.mixed.parties import read_parties
from steptime.jobs.mixed.run import mixed
from steptime.jobs.mixed.shares import best_shares
from steptime.jobs.mixed.stages import Cut, Job, _laid, best_staged, even_split, staged
from steptime.plan.job import PRECISIONS

GROUPS = """
[groups.new]
cluster = "dgx-h100"
gpus = 16
[groups.old]
cluster = "dgx-a100-80gb"
gpus = 16
[link]
bandwidth = "50 GB/s"
latency = "50 us"
"""
JOB = Job("llama3.2-1b", 64, (("seq", 2048),))


@pytest.fixture
def groups(tmp_path: Path) -> str:
    (tmp_path / "groups.toml").write_text(GROUPS, encoding="utf-8")
    return str(tmp_path / "groups.toml")


def test_shares_equal_brute_force() -> None:
    draw = random.Random(3)
    for _ in range(200):
        count, batch = draw.choice((2, 2, 3)), draw.randint(3, 24)
        units = [draw.randint(1, 3) for _ in range(count)]
        tables = [sorted(draw.random() for _ in range(batch + 1)) for _ in range(count)]
        found, slowest = best_shares([each.__getitem__ for each in tables], units, batch)
        every = [
            max(table[n] for table, n in zip(tables, parts, strict=True))
            for parts in product(range(1, batch + 1), repeat=count)
            if sum(unit * n for unit, n in zip(units, parts, strict=True)) == batch
        ]
        assert slowest == min(every, default=inf)
        assert not found or sum(unit * n for unit, n in zip(units, found, strict=True)) == batch


@pytest.mark.each("cut", [Cut((0, 1), (8, 8), (2, 2), 1, 1, "none"), Cut((1, 0), (8, 4), (1, 2), 2, 1, "full")])
def test_split_of_layers_equals_brute_force(cut: Cut, groups: str) -> None:
    """The slowest stage of every split into as many runs."""
    parties = read_parties(groups)
    laid = _laid(JOB, parties, cut)
    assert laid is not None
    items, stages = laid.task.items, laid.task.stages
    every = []
    for borders in combinations(range(1, items), stages - 1):
        edges = (0, *borders, items)
        counts = tuple(b - a for a, b in pairwise(edges))
        if laid.task.fits(counts):
            every.append(laid.task.slowest_s(counts))
    fixed = {"dp": cut.dp, "micro_batch": cut.micro_batch, "recompute": cut.recompute, "pp": sum(cut.stages)}
    found, _ = best_staged(JOB, parties, fixed, 64)
    own = next(one for one in found if one.cut == cut)
    assert laid.task.slowest_s(own.counts) == pytest.approx(min(every), rel=1e-12)


def test_faster_devices_have_more_layers(groups: str) -> None:
    parties, cut = read_parties(groups), Cut((0, 1), (8, 8), (2, 2), 1, 1, "none")
    found, _ = best_staged(JOB, parties, {"dp": 1, "micro_batch": 1, "recompute": "none", "tp": 8}, 4)
    own, even = next(one for one in found if one.cut == cut), even_split(JOB, parties, cut)
    assert even is not None
    assert sum(own.layers[:2]) > sum(own.layers[2:])
    assert own.step_s < even.step_s
    assert sum(own.layers) == sum(even.layers) == 16


def test_slow_link_is_waited_for(groups: str, tmp_path: Path) -> None:
    """A message of one micro-batch: 8 ranks send what each has of 2048 tokens of 2048 numbers in two bytes."""
    parties, cut = read_parties(groups), Cut((0, 1), (8, 8), (2, 2), 1, 1, "none")
    laid = _laid(JOB, parties, cut)
    assert laid is not None
    counts = (5, 5, 4, 4)
    near = staged(JOB, parties, laid, counts)
    assert near.link_s == pytest.approx(50e-6 + 2048 * 2048 * 2 / 50e9)
    (tmp_path / "far.toml").write_text(GROUPS.replace("50 us", "50 ms"), encoding="utf-8")
    apart = read_parties(tmp_path / "far.toml")
    far_laid = _laid(JOB, apart, cut)
    assert far_laid is not None
    assert staged(JOB, apart, far_laid, counts).step_s > near.step_s + 0.09


@pytest.mark.slow
def test_both_ways_name_the_slower_group(groups: str) -> None:
    found = mixed("llama3.2-1b", groups, global_batch=64, seq=2048, top=4, fix={"micro_batch": 1, "recompute": "none"})
    assert {plan["way"] for plan in found.plans} == {"stages", "data"}
    times = [plan["step_time_s"] for plan in found.plans]
    assert times == sorted(times)
    for plan in found.plans:
        waits = {name: own["waiting_s"] for name, own in plan["groups"].items()}
        assert plan["slower"] == min(waits, key=lambda name: waits[name])
        assert min(waits.values()) >= 0
        if plan["even_step_time_s"] is not None:
            assert plan["step_time_s"] <= plan["even_step_time_s"] * (1 + 1e-9)
    data = next(plan for plan in found.plans if plan["way"] == "data")
    assert sum(own["sequences"] for own in data["groups"].values()) == 64
    assert data["groups"]["new"]["sequences"] > data["groups"]["old"]["sequences"]
    assert found.to_json()["groups"]["old"]["device"] == "a100-sxm-80gb"


@pytest.mark.slow
def test_equal_groups_share_equally(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(GROUPS.replace("dgx-a100-80gb", "dgx-h100"), encoding="utf-8")
    found = mixed(
        "llama3.2-1b", str(tmp_path / "g.toml"), global_batch=64, seq=2048, way="data", fix={"micro_batch": 1}
    )
    assert [own["sequences"] for own in found.plans[0]["groups"].values()] == [32, 32]


@pytest.mark.each(
    ("old", "new", "words"),
    [
        ('[link]\nbandwidth = "50 GB/s"\nlatency = "50 us"\n', "", "link"),
        ('bandwidth = "50 GB/s"', 'bandwidth = "50"', "unit"),
        ('bandwidth = "50 GB/s"', 'bandwidth = "0 GB/s"', "link.bandwidth"),
        ('[groups.old]\ncluster = "dgx-a100-80gb"\ngpus = 16\n', "", "2 to 4"),
        ("gpus = 16", "gpus = 0", "groups.new.gpus"),
        ("dgx-h100", "dgx-x100", "dgx-h100"),
        ("[link]", "[link]\nspeed = 1", "speed"),
    ],
)
def test_files_that_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(GROUPS.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_parties(tmp_path / "g.toml")
    assert words in str(caught.value)


def test_a_file_of_groups_is_no_cluster(groups: str) -> None:
    with pytest.raises(UserError, match="steptime mixed"):
        load_cluster(groups)
    with pytest.raises(UserError, match="way"):
        mixed("llama3.2-1b", groups, global_batch=64, way="columns")
    with pytest.raises(UserError, match="key of fix"):
        mixed("llama3.2-1b", groups, global_batch=64, fix={"cp": 2})


def test_old_clusters_are_machines_as_before() -> None:
    one = machine_of(load_cluster("dgx-h100"), 64, PRECISIONS["bf16"], lone_rank_has_all_links=False, calibrated=True)
    assert one.network is None
