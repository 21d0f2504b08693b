"""Cluster files with a topology: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import api
from steptime.errors import UserError
from steptime.hardware import cluster_names, load_cluster
from steptime.hardware.topology import KINDS

BASE = 'base = "dgx-h100"\n'
LEAF = '[levels.leaf]\ndevices = 64\nlink = "infiniband-ndr"\n'
TPU = 'device = "tpu-v4"\n[levels.ici]\ndevices = 64\nlink = "ici-v4"\n'
REFUSED = [
    (f'{TPU}[topology]\nkind = "torus"\nshape = [4, 4, 2]\n', "a torus of 4 x 4 x 2 has 32 devices"),
    (f'{TPU}[topology]\nkind = "torus"\n', "topology.shape"),
    (f'{TPU}[topology]\nkind = "fat-tree"\n', "links are missing"),
    (f'{BASE}[topology]\nkind = "dragonfly"\ngroups = 8\n', "links are missing"),
    (f'{BASE}[topology]\nkind = "fat-tree"\nrails = 8\n', "means nothing for kind fat-tree"),
    (f'{BASE}[topology]\nkind = "rail"\nrails = 3\n', "3 rails do not divide the 8 devices"),
    (f'{BASE}[topology]\nkind = "cloud"\npool = 4\n', "fewer than the 8 of one node"),
    (f'{BASE}[topology]\nkind = "mesh"\n', "topology.kind"),
    (f'{BASE}[topology]\nkind = "cloud"\npool = 64\nplacement = "near"\n', "topology.placement"),
    (f'{BASE}{LEAF}[levels.network]\noversubscription = 0.5\n[topology]\nkind = "fat-tree"\n', "not a number from 1"),
    (f'{BASE}{LEAF}[levels.network]\ndevices = 4096\n[topology]\nkind = "dragonfly"\ngroups = 8\n', "do not hold the"),
]  # fmt: skip


@pytest.mark.each(("text", "words"), REFUSED)
def test_topologies_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_cluster(file)
    assert words in str(caught.value)


def test_jobs_larger_than_the_topology(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'{BASE}{LEAF}[topology]\nkind = "cloud"\npool = 128\n', encoding="utf-8")
    with pytest.raises(UserError, match="holds 128 devices, the job has 256"):
        api.estimate("llama3-8b", str(file), gpus=256, global_batch=256, plan={"tp": 8})


def test_every_kind_is_in_the_catalogue_and_works() -> None:
    found = {}
    for name in cluster_names():
        cluster = load_cluster(name)
        if cluster.topology is not None:
            found.setdefault(cluster.topology.kind, name)
            assert cluster.topology.sources or not cluster.topology.shape
    assert set(found) == set(KINDS)
    for name in found.values():
        e = api.estimate("llama3-8b", name, gpus=16, global_batch=16, plan={"tp": 4})
        assert e.plan["order"].startswith("tp")


def test_a_file_inherits_the_topology_of_its_base(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('base = "meta-roce-24k"\n[levels.network]\noversubscription = 2\n', encoding="utf-8")
    cluster = load_cluster(file)
    assert cluster.topology == load_cluster("meta-roce-24k").topology
    assert cluster.levels[-1].oversubscription == 2
