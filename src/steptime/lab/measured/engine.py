"""A measured run in the terms of the engine: job, cluster and plan of each plausible setting."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.machine import Machine, machine_of
from steptime.hardware.library import architecture_of, cluster_names, load_cluster
from steptime.hardware.records import Cluster
from steptime.lab.measured.candidate import Candidate
from steptime.lab.measured.candidates import candidates
from steptime.lab.measured.run import MeasuredRun
from steptime.lab.measured.setting import job_of, plans_of, precision_of
from steptime.plan.framework import IDEAL, Framework, habits_of, kernel_factor
from steptime.plan.job import Job, Precision
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

EAGER: Final = 2.5
"""Traffic of norms, activations, rotary embeddings and adapters operator by operator, over that of fused kernels: about
10 passes for 2 (norm), 5 for 3 (gated activation), 8 for 2 (rotary embedding); counted in a Llama of Hugging Face."""
_EAGER: Final = re.compile(r"(?:^|[;,])\s*(?:eager\s*|kernel opts:\s*(?:-|\d+)\s*)(?:$|[;,])", re.IGNORECASE)
LARGEST_NODE: Final = 8
"""Domains up to this size are nodes, whose number of devices a run may state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One plausible setting of a run."""

    weight: float
    job: Job
    cluster: Cluster
    machine: Machine
    plans: Plans

    def evaluate(self, framework: Framework = IDEAL) -> Evaluation:
        """Time and memory of the setting under a framework."""
        strategy = CORRECTED.strategy("context" if self.plans.cp > 1 else "1d")
        return evaluate(CORRECTED, strategy, replace(self.job, framework=framework), self.machine, self.plans)


@lru_cache(maxsize=1)
def _clusters() -> dict[str, Cluster]:
    """The catalogue's cluster of each device; a vendor's own system first."""
    found: dict[str, Cluster] = {}
    for name in sorted(cluster_names(), key=lambda name: (not name.startswith("dgx"), name)):
        if not name.startswith("published"):
            cluster = load_cluster(name)
            found.setdefault(cluster.device.name, cluster)
    return found


@lru_cache(maxsize=512)
def cluster_of(device: str, per_node: int, network_Bps: float | None) -> Cluster:
    """Cluster of a run: that of the catalogue for its device, with the node and the network that the run states."""
    cluster = _clusters().get(device) or load_cluster(device)
    inner, *outer = cluster.levels
    if inner.devices is not None and per_node < inner.devices <= LARGEST_NODE:
        inner = replace(inner, devices=per_node)
    if network_Bps and outer:
        known = {**outer[-1].catalogue, "link_Bps": network_Bps, "links_per_device": 1.0}
        outer[-1] = replace(outer[-1], link_Bps=network_Bps, links_per_device=1.0, catalogue=known)
    return replace(cluster, levels=(inner, *outer))


@lru_cache(maxsize=2048)
def _machine(device: str, per_node: int, network_Bps: float | None, gpus: int, precision: Precision) -> Machine:
    cluster = cluster_of(device, per_node, network_Bps)
    return machine_of(cluster, gpus, precision, lone_rank_has_all_links=True, calibrated=True)


def factors_of(run: MeasuredRun, attention: str) -> dict[str, float]:
    """What the software of a run makes of times, over what its framework makes of them as a rule.

    ``attention``: its kernel over the newest one; ``vector``: operators bound by memory, where a row says that nothing
    fuses them (see :data:`EAGER`).

    >>> from types import SimpleNamespace
    >>> run = SimpleNamespace(notes="eager; 8 GPUs", kernel="flash2", framework="torchtitan", device="h100-sxm")
    >>> factors_of(run, "fused")
    {'attention': 1.7, 'vector': 2.5}
    """
    habits = habits_of(run.framework)
    kernel = kernel_factor(run.kernel or habits.kernel, architecture_of(run.device))
    return {
        "attention": kernel if attention == "fused" else 1.0,
        "vector": EAGER if _EAGER.search(run.notes) else 1.0,
    }


def settings_of(run: MeasuredRun) -> tuple[Setting, ...]:
    """Plausible settings of a run with weights that sum to 1.

    Raises:
        UserError: none of them can be modelled.
    """
    found, problem = [], None
    for candidate in candidates(run):
        try:
            found.append(_setting(run, candidate))
        except UserError as error:
            problem = error
    if not found:
        raise problem or UserError("no plausible setting")
    total = sum(s.weight for s in found)
    return tuple(replace(s, weight=s.weight / total) for s in found)


def _setting(run: MeasuredRun, found: Candidate) -> Setting:
    precision = precision_of(run, found)
    key = (run.device, run.gpus_per_node, run.internode_Bps)
    cluster, machine = cluster_of(*key), _machine(*key, run.gpus, precision)
    return Setting(weight=found.weight, job=job_of(run, found, precision), cluster=cluster, machine=machine,
                   plans=plans_of(found, cluster.fast_domain))  # fmt: skip
