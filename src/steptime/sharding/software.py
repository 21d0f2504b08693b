"""What software makes of a sharded step: factors on kernels and links, the host, what ranks do together, a band."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptime.api.jobs import framework_of
from steptime.captured.cost import Timer
from steptime.captured.graph import Program
from steptime.cost.host import growth_s, issued_s, step_overhead_s
from steptime.hardware.records import Device
from steptime.plan.framework import BUSY, Framework, from_fitted_scale, to_fitted_scale
from steptime.plan.job import PRECISIONS
from steptime.search.modes import MODES

if TYPE_CHECKING:
    from steptime.sharding.planner import ShardingPlan

KINDS = ("matrix", "attention", "vector", "optimizer")
"""Parameters of a framework that are factors on kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A framework on the devices of a job; the step of one device is the same program whatever its shardings."""

    framework: Framework
    dtype: str
    """Element type that most parameters have."""
    host_s: float
    """Time of the host to issue all operators of a step to its device, by the framework's time of one."""
    devices: int
    tensors: int
    """Tensors of trained parameters."""

    @property
    def overhead_s(self) -> float:
        """What the ranks do together once a step."""
        return float(step_overhead_s(self.framework.step_s, self.devices, self.tensors))

    def step_s(self, device_s: float) -> float:
        """Time of a step whose devices compute and exchange for some seconds; rises with them."""
        return device_s + sum(self.terms(device_s).values())

    def terms(self, device_s: float) -> dict[str, float]:
        """What comes on top of the time of the devices: waits for the host, stragglers, and the overhead."""
        issued = float(issued_s(device_s, 1.0, self.host_s, self.framework.issue_sharpness))
        grown = float(growth_s(issued, self.devices, self.framework.growth))
        return {"host": max(issued - device_s, 0.0), "growth": grown, "overhead": self.overhead_s}

    def band_s(self, plan: ShardingPlan) -> tuple[float, float] | None:
        r"""Band around the step, as that of an estimate (:func:`steptime.estimate.band.band_of`); None without fit.

        $$\sigma^2 = \sum_k \left(\ln \frac{T(\theta_k + \sigma_k)}{T}\right)^2 + \sigma_n^2$$

        with $\theta_k$ the factors on kernels and on data-parallel traffic, the host's time of an operator, the growth
        and the overhead of the framework, and the factor of the device.
        """
        spread = self.framework.spread
        if spread is None:
            return None
        whole_s = self._total_s(plan, {})
        changes = [
            math.log(self._total_s(plan, {name: self._moved(name, doubt)}) / whole_s)
            for name, doubt in spread.doubts.items()
            if name in _DOUBTED
        ]
        device = math.exp(spread.device_doubt)
        changes.append(math.log(self._total_s(plan, {"matrix": device, "attention": device}) / whole_s))
        deviation = spread.widening * math.sqrt(sum(change**2 for change in changes) + spread.noise**2)
        low, high = (whole_s * math.exp(end * deviation) for end in (spread.low, spread.high))
        return low, high

    def _moved(self, name: str, doubt: float) -> float:
        """Factor on what a parameter makes of the step, one standard deviation up."""
        value = float(getattr(self.framework, name))
        return float(from_fitted_scale(name, to_fitted_scale(name, value) + doubt)) / value

    def _total_s(self, plan: ShardingPlan, by: Mapping[str, float]) -> float:
        """Time of a plan with parameters multiplied by some factors."""
        from steptime.sharding.planner import step_of

        kinds = plan.kinds_s
        computing, data, others = plan.parts_s
        more = {kind: kinds.get(kind, 0.0) * (by.get(kind, 1.0) - 1.0) for kind in KINDS}
        computing += sum(more[kind] for kind in BUSY if kind in more) + more["vector"]
        parts = computing, data * by.get("data_links", 1.0), others + more["optimizer"]
        device_s = step_of(parts, plan.overlaps)
        issued = float(issued_s(device_s, 1.0, self.host_s * by.get("host_s", 1.0), self.framework.issue_sharpness))
        grown = float(growth_s(issued, self.devices, self.framework.growth * by.get("growth", 1.0)))
        return issued + grown + self.overhead_s * by.get("step_s", 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"framework": self.framework.name, "dtype": self.dtype, "host_s": self.host_s, "devices": self.devices}


_DOUBTED = frozenset({*KINDS, "data_links", "host_s", "growth", "step_s"})


def software_of(program: Program, device: Device, gpus: int, name: str | None) -> tuple[Software, Timer]:
    """A framework for a captured step, and the time models of its operators.

    Args:
        program: the unsharded step.
        device: of the cluster.
        gpus: devices of the job.
        name: of the framework; None: ``generic``, as for ``plan``.

    Raises:
        UnknownNameError: the framework is unknown.
    """
    sizes: dict[str, int] = {}
    for parameter in program.parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.elements
    dtype = max(sizes, key=lambda each: sizes[each], default="fp32")
    precision = PRECISIONS[dtype if dtype in PRECISIONS else "fp32"].on(device)
    framework = framework_of(name, MODES["corrected"], device, precision)
    factors = {kind: float(getattr(framework, kind)) for kind in (*KINDS, "data_links")}
    first_s = float(framework.host_s)
    timer = Timer(device=device, factors=factors, given_host_s=first_s, host_more_s=0.0)
    calls = [timer.cost(call.node, inplace=call.inplace) for call in program.calls if not call.view]
    trained = sum(1 for parameter in program.parameters)
    return Software(
        framework=framework, dtype=dtype, host_s=sum(each.host_s for each in calls), devices=gpus, tensors=trained
    ), timer
