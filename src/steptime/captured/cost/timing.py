"""Work of every operator of a graph, and its time on a device, by a fitted model or else by the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from steptime.captured.graph import Node
from steptime.captured.ops import OPERATORS, left_factor
from steptime.captured.ops.views import turned
from steptime.captured.ops.work import STREAM, KernelCall, OperatorWork, Work, evaluate, moved
from steptime.cost.host import IN_TURN
from steptime.cost.roofline import memory_s, roofline_compute_s, roofline_exposed_memory_s
from steptime.estimate.further_kernels import convolved_in, machine_for, rate_dtype
from steptime.estimate.kernels import Timed, called_once, timed, winograd_saved_flops
from steptime.estimate.learned import Correction, described
from steptime.estimate.machine import Machine, issue_sharpness
from steptime.estimate.measured import CPU_CALL, CPU_PRODUCT, CPU_PRODUCTS, CPU_TURN, CPU_VIEW
from steptime.hardware.records import Device
from steptime.num import Num

VIEW, UNKNOWN = "view", "unknown"
NOTHING: Final = Work(family=VIEW)
_UNKNOWN_ROW: Final = OperatorWork(kernels=moved)


def work_of(node: Node, *, inplace: bool = False) -> Work:
    """Work of a node, independent of the device.

    A view costs nothing. An operator that is in no table moves its inputs and outputs once, has no known computation,
    and has the family ``unknown``.

    Args:
        node: the operator with its inputs.
        inplace: its output is written over an input.
    """
    row = OPERATORS.get(node.op)
    if row is None:
        return evaluate(_UNKNOWN_ROW, node, UNKNOWN, inplace)
    return NOTHING if row.work is None else evaluate(row.work, node, row.family, inplace)


def direct_call(node: Node, work: Work, working_bytes: float) -> KernelCall | None:
    """Measured operator that a node is timed as on a CPU; None if none was measured.

    Args:
        node: the operator.
        work: its work.
        working_bytes: memory that the step traverses before it returns to the same tensors.
    """
    row = OPERATORS.get(node.op)
    if row is None or row.processor is None or not node.inputs or not node.outputs or node.outputs[0].dtype != "fp32":
        return None
    found = row.processor(node, work)
    if found is None:
        return None
    kind, sizes = found
    products = kind in (CPU_PRODUCT, CPU_PRODUCTS)
    return KernelCall(operator=kind, shape={**sizes, "working_bytes": working_bytes} if products else sizes)


Bound = Literal["matrix", "vector", "memory", "launch", "none"]
BOUNDS: Final[tuple[Bound, ...]] = ("matrix", "vector", "memory", "launch", "none")

HOST_S: Final = 20e-6
"""Time of the host to issue one kernel in eager PyTorch, with modules and autograd; assumed, between the 7 us that a
planner for PyTorch assumes (autoparallel) and the 45 us of ResNets with 12 images on a DGX A100 of 2020."""
HOST_MORE_S: Final = 4e-6
"""Time of the host for every further kernel of an operator, without Python code in between; assumed."""
HOST_BAND: Final = (0.3, 2.3)
"""Band of the host time as a factor: from a fast host to the one of the measured ResNets."""
STEP_BAND: Final = (0.9, 1.45)
"""Band of a step over the sum of its separately measured kernels, as a factor: clocks under load, memory management,
different kernels; from training and inference of OPT, GPT-2, BERT, ResNet and VGG on 15 devices."""
ROOFLINE_BAND: Final = (0.7, 2.0)
"""Band of a time without a curve as a factor; assumed."""

Tf32 = Literal["none", "convolutions", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Cost of one operator on one device."""

    op: str
    work: Work
    seconds: float
    """Time of the device, with launches."""
    bound: Bound
    """Its longest part: arithmetic, memory or launches."""
    basis: str
    """Basis of the time: a curve, or the roofline."""
    band: tuple[float, float]
    """Factors on the time that bound nine of ten measurements."""
    peak_flops_per_s: float
    """Dense peak of the matrix units in its element type."""
    dtype: str
    """Element type at whose rate it runs."""
    host_s: float
    """Time of the host to issue it."""
    saved_flops: float = 0.0
    """Matrix operations that Winograd's algorithm saves."""
    scatter: float | None = None
    """Relative standard deviation of its time that kernels of similar size do not share; None: unknown."""


Basis = tuple[str, tuple[float, float]]
"""Basis of a time, and its band as factors."""
NO_COST: Final[Basis] = ("", (1.0, 1.0))
FREE: Final = OperatorCost(
    op=VIEW, work=NOTHING, seconds=0.0, bound="none", basis=NO_COST[0], band=NO_COST[1], peak_flops_per_s=1.0,
    dtype="fp32", host_s=0.0,
)  # fmt: skip
"""Cost of an operator without work."""
TURNS: Final = frozenset({"t", "transpose", "permute"})
"""Views that only exchange dims."""
MATRIX: Final = ("product", "convolution", "recurrent", "attention")
"""Families whose time models need operations."""


_BEYOND: Final = 2.0
"""Largest size for which a curve is used, over that of the largest measured operator."""
_TWO_BYTES: Final = 12.0
"""Bytes per element that a map of two fp32 tensors moves."""


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Timer of operators on a device; equal nodes are timed once."""

    device: Device
    calibrated: bool = True
    """True to use the profile of the device, if it has one."""
    tf32: Tf32 = "convolutions"
    """The fp32 products that run in TF32, on devices that have it; PyTorch's default is convolutions only."""
    given_host_s: float | None = None
    """Time of the host to issue one operator with its first kernel; None: as measured, or :data:`HOST_S`."""
    host_more_s: float = HOST_MORE_S
    """Time of the host for every further kernel of the same operator."""
    working_bytes: float = math.inf
    """Memory that a step traverses before it returns to the same tensors; infinite: no cache keeps any."""
    correction: Correction | None = None
    """Learned correction of the times of operators and of the host."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of a framework on the time of products (``matrix``), attention, the optimiser and all else (``vector``),
    and on data-parallel traffic (``data_links``); by default 1."""
    recorded: bool = True
    """True if modules issue the operators and record gradients; else a graph issues them, as in the measurements."""
    _machines: dict[str, Machine] = field(default_factory=dict, repr=False, compare=False)
    _costs: dict[tuple[object, ...], OperatorCost] = field(default_factory=dict, repr=False, compare=False)

    @property
    def host_s(self) -> float:
        """Time of the host to issue one operator with its first kernel."""
        known = (self.given_host_s, self.device.issue_s, HOST_S)
        return next(seconds for seconds in known if seconds is not None)

    def measured_s(self, kind: str, moved_bytes: float = 0.0) -> float | None:
        """Time of a CPU operator (:data:`steptime.estimate.measured.CPU_MAPS`) that moves some bytes.

        With 0 bytes it is the time of its call. None if the device has no such measurement.
        """
        model = self.machine("fp32").models.get(kind) if self.in_turn else None
        if model is None or not moved_bytes:  # curves of convolutions and products take other sizes than maps
            return None if model is None else model.fixed.get("latency_s", 0.0)
        sizes = {"loops": 0.0, "steps": moved_bytes / _TWO_BYTES, "moved_bytes": moved_bytes, "result_bytes": 0.0}
        return float(model.formula({**model.fixed, **sizes}))

    def _issued_s(self, kind: str) -> float:
        """Time of the host for an operator without traffic; 0 if unknown, or part of the time of the operators."""
        return 0.0 if self.recorded else self.measured_s(kind) or 0.0

    @cached_property
    def _looks(self) -> tuple[OperatorCost, OperatorCost]:
        """Cost of a view, and of a view that only exchanges dims."""
        times = (self._issued_s(CPU_VIEW), self._issued_s(CPU_TURN))
        first, second = (replace(FREE, host_s=host_s) if host_s else FREE for host_s in times)
        return first, second

    def look(self, op: str) -> OperatorCost:
        """Cost of a view: time of the host, if it was measured."""
        return self._looks[op in TURNS]

    @cached_property
    def call_s(self) -> float:
        """Time of the host to call a graph."""
        return self._issued_s(CPU_CALL)

    @property
    def sharpness(self) -> float:
        """Exponent of the smooth maximum of device and host time."""
        return issue_sharpness(self.device)

    @property
    def in_turn(self) -> bool:
        """True if the host is the device itself, which issues an operator after it has computed the previous one."""
        return self.sharpness == IN_TURN

    @cached_property
    def _convolved(self) -> str:
        """Element type at whose rate fp32 convolutions run."""
        return rate_dtype(self.device, convolved_in(self.device, "fp32"))

    def machine(self, dtype: str) -> Machine:
        """The device with the rates and models of an element type."""
        found = self._machines.get(dtype)
        if found is None:
            found = self._machines[dtype] = machine_for(self.device, dtype, calibrated=self.calibrated)
        return found

    def cost(self, node: Node, *, inplace: bool = False) -> OperatorCost:
        """Cost of a node, cached by operator, types and attributes."""
        attributes = tuple(pair for pair in node.attributes if pair[0] != "draw")
        left = left_factor(node)
        key = (node.op, inplace, node.names, tuple(v.type for v in node.inputs), attributes, node.outputs,
               len(set(node.inputs)), left is not None and turned(left))  # fmt: skip
        found = self._costs.get(key)
        if found is None:
            # PyTorch launches no kernel for an operator with only empty outputs.
            empty = node.outputs and not any(output.elements for output in node.outputs)
            work = NOTHING if empty else work_of(node, inplace=inplace)
            found = self._direct(node, work) or self.time(node.op, work)
            factor = self.factors.get(kind_of(work), 1.0)
            found = self._costs[key] = found if factor == 1.0 else replace(found, seconds=found.seconds * factor)
        return found

    def _direct(self, node: Node, work: Work) -> OperatorCost | None:
        """Cost of an operator that was measured on this CPU as a graph calls it, with its call.

        None with gradients, for sizes beyond the measured ones, and for operators that were not measured.
        """
        wanted = self.in_turn and not self.recorded and work.launches
        call = direct_call(node, work, self.working_bytes) if wanted else None
        model = None if call is None else self.machine(work.dtype).models.get(call.operator)
        if call is None or model is None:
            return None
        most_bytes = _BEYOND * model.curve.ranges.get("moved_bytes", (0.0, math.inf))[1]
        if call.shape.get("moved_bytes", 0.0) > most_bytes:
            return None
        found = self.time(node.op, replace(work, kernels=(call,), launches=1.0))
        return replace(found, work=work, scatter=model.curve.scatter, host_s=0.0)

    def time(self, op: str, work: Work) -> OperatorCost:
        """Cost of some work."""
        if any(called_once(call.operator, on_host=self.in_turn) for call in work.kernels):
            work = replace(work, launches=float(len(work.kernels)))
        dtype = self._dtype(work)
        machine = self.machine(dtype)
        rate = machine.attention_flops_per_s if work.family == "attention" else machine.matrix_flops_per_s
        parts: dict[Bound, float] = {
            "matrix": float(work.matrix_flops / rate),
            "vector": float(work.vector_flops / machine.vector_flops_per_s),
            "memory": float(memory_s(work.moved_bytes, machine.memory_Bps)),
            "launch": float(machine.kernel_latency_s * work.launches),
        }
        bound: Bound = max(parts, key=lambda name: parts[name]) if any(parts.values()) else "none"
        seconds, saved, (basis, band) = self._seconds(machine, work, rate) if bound != "none" else (0.0, 0.0, NO_COST)
        launches = float(work.launches)
        host_s = self.host_s + self.host_more_s * (launches - 1) if launches else 0.0
        if self.correction is not None and seconds:
            seconds *= float(self.correction.factor(*described_work(work, seconds, machine), self.device.name))
        return OperatorCost(
            op=op, work=work, seconds=seconds, bound=bound, basis=basis, band=band,
            peak_flops_per_s=machine.peak_flops_per_s, dtype=dtype, host_s=host_s,
            saved_flops=saved,
        )  # fmt: skip

    def _dtype(self, work: Work) -> str:
        dtype = rate_dtype(self.device, work.dtype)
        if work.dtype != "fp32" or self.tf32 == "none":
            return dtype
        if work.family == "convolution":
            return self._convolved
        tf32 = self.tf32 == "all" and work.family == "product" and "tf32" in self.device.matrix_flops_per_s
        return "tf32" if tf32 else dtype

    def _seconds(self, machine: Machine, work: Work, rate: float) -> tuple[float, float, Basis]:
        """Time, operations that Winograd's algorithm saves, and the basis of the time."""
        counts = {n: getattr(work, n) for n in ("matrix_flops", "vector_flops", "moved_bytes")}
        calls = () if work.family in MATRIX and not work.matrix_flops else work.kernels  # k = 0: a fill
        models = [fitted(machine, call, counts) for call in calls]
        known = [model for model in models if model is not None]
        if known and len(known) == len(models):
            # Curves of streams are of single kernels; all others were fitted to whole operators with their launches.
            streams = all(call.operator == STREAM for call in calls)
            more = max(float(work.launches) - len(known), 0.0) if streams else 0.0
            seconds = sum(float(model.seconds) for model in known) + machine.kernel_latency_s * more
            return seconds, sum(winograd_saved_flops(model) for model in known), _basis(known)
        launch_s = machine.kernel_latency_s * work.launches
        compute_s = roofline_compute_s(work.matrix_flops, work.vector_flops, rate, machine.vector_flops_per_s, launch_s)
        exposed_s = roofline_exposed_memory_s(work.moved_bytes, machine.memory_Bps, compute_s)
        return float(compute_s + exposed_s), 0.0, ("roofline", ROOFLINE_BAND)


def kind_of(work: Work) -> str:
    """Key of the factor of a framework for some work (:attr:`Timer.factors`)."""
    if work.family in ("attention", "optimiser"):
        return "attention" if work.family == "attention" else "optimizer"
    return "matrix" if work.matrix_flops else "vector"


OTHER: Final = "other"
"""Name for work without a time model."""


def time_model(work: Work) -> str:
    """Time model of some work; with several kernels, that of the first one."""
    return work.kernels[0].operator if work.kernels else OTHER


def described_work(work: Work, seconds: float, machine: Machine) -> tuple[str, tuple[Num, ...]]:
    """Time model of some work, and its features (:func:`steptime.estimate.learned.described`).

    With several kernels, the first one gives the model; counts and time are of all.
    """
    first = work.kernels[0] if work.kernels else None
    counts = {n: float(getattr(work, n)) for n in ("matrix_flops", "vector_flops", "moved_bytes", "launches")}
    numbers = described(
        {} if first is None else first.shape,
        counts,
        seconds,
        backward=first is not None and first.backward,
        peak_flops_per_s=machine.matrix_flops_per_s,
        memory_Bps=machine.memory_Bps,
    )
    return time_model(work), numbers


def _basis(models: list[Timed]) -> Basis:
    """Basis and band of the longest kernel."""
    first = max(models, key=lambda model: float(model.seconds)).model
    return first.basis, first.curve.band


def fitted(machine: Machine, call: KernelCall, work: Mapping[str, Num]) -> Timed | None:
    """Fitted model of a kernel; None if there is none, so that the roofline applies."""
    if not machine.models:
        return None
    shape = {name: float(value) for name, value in call.shape.items()}
    counts = {name: float(value) for name, value in work.items()}
    return timed(machine.models, call.operator, shape, counts, backward=call.backward)
