"""Collectives of machines that were not measured: the model that an estimate has of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from steptime.estimate.communication import ROOTED, collective_over_s, message_time_s
from steptime.estimate.fabrics import FabricModel, fabric_model
from steptime.estimate.machine import Machine, machine_of, slow_level
from steptime.hardware.profiles import FabricProfile
from steptime.hardware.records import UNLIMITED, Cluster
from steptime.lab.calibrate.collective_rows import Rows
from steptime.num import Array
from steptime.plan.job import PRECISIONS

TEXTBOOK_BAND: Final = (0.5, 2.0)
"""Band of the textbook formula on datasheet links, as a factor; assumed."""
LEAST_BAND: Final = 1.5
"""Coefficients that were carried over are sure within this factor at best."""
DTYPES: Final = ("fp32", "bf16", "fp16", "tf32")
"""A machine is made for a dtype of its device, of which its links know nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Textbook:
    """Textbook rings on datasheet links, where no fit is carried over."""

    machine: Machine
    band: tuple[float, float] = TEXTBOOK_BAND

    def seconds(self, rows: Rows) -> Array:
        """Time of each row."""
        out = np.full(len(rows.ranks), np.nan)
        for kind in np.unique(rows.kind.astype(str)).tolist():
            own = rows.kind == kind
            size, ranks, inside = rows.size_bytes[own], rows.ranks[own], rows.inside[own]
            if kind == "p2p":
                near, far = message_time_s(self.machine, size)
                out[own] = np.where(ranks > inside, far, near)
            else:
                out[own] = collective_over_s(ROOTED.get(kind, kind), self.machine, size, ranks, inside)
        return out


def estimated(cluster: Cluster, *, leaves_node: bool) -> FabricProfile | Textbook:
    """What an estimate times the collectives of a cluster with, for one group at a time.

    Args:
        cluster: the machine.
        leaves_node: whether groups cross all of its levels, or the second at most.
    """
    gpus = cluster.beyond_domain(1)
    gpus = min(cluster.levels[-1].group, UNLIMITED if leaves_node else gpus)
    model = fabric_model(cluster, slow_level(cluster, gpus), gpus)
    if model is not None:
        return _profile(cluster, model)
    rated = next(dtype for dtype in DTYPES if dtype in cluster.device.matrix_flops_per_s)
    return Textbook(
        machine=machine_of(cluster, gpus, PRECISIONS[rated], lone_rank_has_all_links=True, calibrated=False)
    )


def _profile(cluster: Cluster, model: FabricModel) -> FabricProfile:
    """A fabric of an estimate as a profile."""
    near, level = model.inside.profile, cluster.levels[0]
    between = model.between.profile if model.between is not None else None
    assert near is not None
    at_word = any(basis.profile is None for basis in model.bases())
    outside = between.band[1] if between else 1.0
    sure = max(near.band[1], 1 / near.band[0], outside, TEXTBOOK_BAND[1] if at_word else LEAST_BAND)
    return FabricProfile(
        name=f"{cluster.name}-assumed", device=cluster.device.name, library=near.library,
        link_Bps=level.link_Bps * level.links_per_device, coefficients=asdict(model.fabric),
        nic_Bps=cluster.levels[1].link_Bps if between else 0.0,
        points=0, median_ape=near.median_ape, mean_ape=near.mean_ape, bias=near.bias, band=(1 / sure, sure),
        source="; ".join(basis.text for basis in model.bases()), kind="assumed",
    )  # fmt: skip
