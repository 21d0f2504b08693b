"""Shardings of any captured module on the devices of a cluster: the function behind ``steptime shard``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, isfinite
from typing import Any, Final

from steptime.api.jobs import CAPTURED_DEFAULT
from steptime.api.request import NameOrPath, cluster_given, whole
from steptime.captured.graph import Program
from steptime.captured.ops.placement import text_of
from steptime.captured.profiling import capture_options, captured
from steptime.errors import UserError
from steptime.estimate.result import Estimate
from steptime.estimate.single import Setting
from steptime.hardware.records import Cluster
from steptime.options import MAX_DEVICES
from steptime.options import number as number_in
from steptime.plan.plans import Plans
from steptime.sharding.complete import Complete, Directions, completed
from steptime.sharding.costing import Asked, Costing, costing_of
from steptime.sharding.export import followed
from steptime.sharding.flow import Flow, flow_of
from steptime.sharding.ilp import GAP
from steptime.sharding.layout import LaidOut
from steptime.sharding.mesh import Mesh, logical_meshes, mesh_on, parse_axes
from steptime.sharding.planner import ENOUGH, PROVED, ShardingPlan
from steptime.sharding.propagate import Propagated

SECONDS: Final = 60.0
QUICK_ITEMS: Final = 600
"""Largest number of items for which an integer program on two axes takes only seconds."""
AXES: Final = 2
"""Largest number of axes of the meshes that are tried by default."""


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The best shardings of a module, and the results of the other meshes that were tried."""

    model: str
    cluster: str
    flow: Flow
    best: ShardingPlan
    estimate: Estimate
    """Estimate of its step and memory, as for any other plan."""
    setting: Setting
    """The job with the workload of one device."""
    plans: Plans
    """Axes of the mesh as parallel degrees."""
    bound_s: float
    """Lower bound for all shardings on this mesh, in seconds; 0: nothing was searched."""
    tried: tuple[tuple[str, float | None, str], ...]
    """Mesh, seconds of its best step (None: nothing fits), and the reason why its search stopped."""
    limit_bytes: float
    given: Propagated | LaidOut | None = None
    """Propagation from annotations, or the layout, that the best shardings follow; None: neither was used."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.estimate.step_time_s

    @property
    def gap(self) -> float:
        """Share of the step by which it may exceed the optimum."""
        return max(self.step_s - self.bound_s, 0.0) / self.step_s if self.step_s else 0.0

    @property
    def stop(self) -> str:
        """The reason why the search stopped, or what its bound leaves open."""
        if self.bound_s and self.best.stop == PROVED and self.gap > ENOUGH:
            return "the bound lets all computation overlap traffic of parameters, as far as the framework does"
        return self.best.stop

    @property
    def unknown(self) -> list[str]:
        """Operators that every device runs whole, because nothing is known of their dims."""
        names = {self.flow.items[item].node.op for item in self.best.built.unknown}
        return sorted(names)

    @property
    def unknown_share(self) -> float:
        """Share of the computation in :attr:`unknown` operators."""
        plan = self.best
        seconds = [float(each[option]) for each, option in zip(plan.built.seconds.operators, plan.choice, strict=True)]
        return sum(seconds[item] for item in plan.built.unknown) / (sum(seconds) or 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        plan = self.best
        return {
            **self.estimate.to_json(),
            "model": self.model,
            "cluster": self.cluster,
            "mesh": dict(zip(plan.built.mesh.names, plan.built.mesh.sizes, strict=True)),
            "bound_s": self.bound_s or None,
            "gap": self.gap if self.bound_s else None,
            "stop": self.stop,
            "overlaps": bool(plan.overlaps),
            "memory_limit_bytes": None if self.limit_bytes == inf else self.limit_bytes,
            "solver_cpu_s": plan.cpu_s,
            "meshes": [{"mesh": mesh, "step_time_s": step_s, "stop": stop} for mesh, step_s, stop in self.tried],
            "parameters": {name: text_of(sharding) for name, sharding in plan.parameters.items()},
            "transfers": [asdict(transfer) for transfer in plan.transfers],
            "replicated_operators": {"names": self.unknown, "share_of_compute": self.unknown_share},
            "conflicts": [str(each) for each in self.given.conflicts] if isinstance(self.given, Propagated) else [],
            "taken_as_true": list(self.flow.program.assumed),
            "unmatched": [asdict(each) for each in self.given.unmatched] if isinstance(self.given, LaidOut) else [],
        }


def shard(
    model: str | Program,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int,
    mesh: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    inputs: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    optimizer: str | None = CAPTURED_DEFAULT,
    loss: str | None = None,
    autocast: str | None = None,
    memory_bytes: float | None = None,
    annotate: Sequence[str] = (),
    layout: str | None = None,
    complete: Complete = "solve",
    overlaps: bool = True,
    synchronised_norms: bool = False,
    runnable: bool = False,
    framework: str | None = None,
    quick: bool = False,
    gap: float = GAP,
    seconds: float = SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> Sharded:
    """The best shardings of a module's training step over a number of devices.

    Args:
        model: ``pkg.module:factory``, ``file.py:factory``, an ``.onnx`` file, or a captured program.
        cluster: catalogue name, file, or the record.
        gpus: devices of the mesh.
        mesh: ``data=2,model=4`` or ``2x4``; None: every mesh of one and two axes.
        batch: samples of the whole step.
        memory_bytes: memory of a device for tensors; None: that of the device less the driver's context and the
            allocator's usual slack; infinite: no limit.
        annotate: shardings of parameters, inputs and results of modules by pattern: ``blocks.*.mlp.0.weight=R S(0)``.
        layout: named dims and their axes: ``batch:data, heads:model, ffn:model``.
        complete: the solver decides the rest (``solve``), or it follows from the given shardings (``propagate``).
        overlaps: traffic of weights and their gradients runs while the devices compute.
        synchronised_norms: batch norms take the statistics of the whole batch, for which devices exchange sums; if
            False, those of each device's part, as in data-parallel training by default. PyTorch's DTensor, and so a
            ``runnable`` plan, always synchronises.
        runnable: only shardings that PyTorch's DTensor follows (:func:`steptime.sharding.export.followed`).
        framework: training software, whose factors, host times and overheads are applied; None: ``generic``, as for
            ``plan``; ``ideal``: none.
        quick: try only the mesh of one axis for a step with more than :data:`QUICK_ITEMS` items.
        gap: share above the bound at which a search may stop.
        seconds: time limit of each mesh's search.
        progress: called with meshes done and meshes to try.

    The other arguments are those of :func:`steptime.captured.profiling.profile`.

    Raises:
        UserError: the module cannot be captured, the mesh has another number of devices, or nothing fits.
    """
    whole("gpus", gpus, 2, MAX_DEVICES)
    number_in("seconds", seconds, 1e-3, 1e9, "seconds that a search may take")
    if memory_bytes is not None and not memory_bytes > 0:
        raise UserError(f"memory_bytes {memory_bytes:g}", hint="a device has more than 0; leave it out for what it has")
    machines = cluster_given(cluster)
    program = (
        model
        if isinstance(model, Program)
        else captured_step(
            model,
            machines,
            batch=batch,
            seq=seq,
            dtype=dtype,
            inputs=inputs,
            dims=dims,
            optimizer=optimizer,
            loss=loss,
            autocast=autocast,
        )
    )
    directions = Directions(annotate=tuple(annotate), layout=layout, complete=complete)
    if directions and mesh is None:
        raise UserError("annotations and layouts are of the axes of one mesh", hint="give it: mesh data=2,model=4")
    costing = costing_of(program, machines, gpus, optimizer=optimizer, framework=framework, overlaps=overlaps)
    how: dict[str, Any] = {
        "overlaps": costing.overlaps,
        "gap": gap,
        "seconds": seconds,
        "runnable": runnable,
        "plain_norms": not (synchronised_norms or runnable),
    }
    flow, limit = flow_of(costing.program), costing.room_bytes if memory_bytes is None else memory_bytes
    few = quick and len(flow.items) > QUICK_ITEMS
    meshes = _meshes(machines, str(gpus) if few and mesh is None else mesh, gpus)
    each = [(one, partial(_completed, flow, one, costing, limit, directions, how)) for one in meshes]
    (asked, given), tried = _each_mesh(each, progress)
    return Sharded(
        model=program.name,
        cluster=machines.name,
        flow=flow,
        best=asked.plan,
        setting=asked.setting,
        plans=asked.plans,
        estimate=asked.estimate,
        bound_s=min(costing.least_s(asked.plan.bound_s), asked.step_s),
        tried=tuple(tried),
        limit_bytes=limit,
        given=given,
    )


def _completed(
    flow: Flow, mesh: Mesh, costing: Costing, limit_bytes: float, directions: Directions, how: Mapping[str, Any]
) -> Completed:
    """The best plan on one mesh, and the propagation or layout that it follows."""
    limits = dict(how)
    plain = limits.pop("plain_norms")
    problem = costing.built(flow, mesh, limit_bytes, plain_norms=plain)
    problem = followed(problem) if limits.pop("runnable") else problem
    found, given = completed(problem, directions, **limits)
    if not isfinite(found.step_s):
        hint = "leave --complete propagate out, so that the rest is solved, or change the batch"
        raise UserError("the shardings that follow from what is given cannot be: pieces differ in size", hint=hint)
    # Where traffic can hardly overlap, the choice that sends least is the best.
    solved = found.overlaps and found.solutions
    further = [completed(problem, directions, **limits | {"overlaps": 0.0})[0]] if solved else []
    return costing.best_of(found, further), given


Completed = tuple[Asked, Propagated | LaidOut | None]


def _each_mesh(
    meshes: Sequence[tuple[Mesh, Callable[[], Completed]]], progress: Callable[[int, int], None] | None
) -> tuple[Completed, list[tuple[str, float | None, str]]]:
    """The best result over all meshes on which something fits, and the result of each mesh.

    Raises:
        UserError: nothing fits on any of them.
    """
    best: Completed | None = None
    tried: list[tuple[str, float | None, str]] = []
    for number, (mesh, plan) in enumerate(meshes):
        if progress is not None:
            progress(number, len(meshes))
        try:
            found = plan()
            tried.append((str(mesh), found[0].step_s, found[0].plan.stop))
            best = found if best is None or found[0].step_s < best[0].step_s else best
        except UserError as error:
            if len(meshes) == 1:
                raise
            tried.append((str(mesh), None, str(error)))
    if best is None:
        raise UserError(f"nothing fits on any of {len(meshes)} meshes: {tried[0][2]}")
    return best, tried


def captured_step(model: str, machines: Cluster, **given: Any) -> Program:
    """The captured training step of a module on a device of the cluster; arguments as in :func:`shard`."""
    given = {"batch": None, "seq": None, "dtype": None, "inputs": (), "loss": None, "autocast": None, **given}
    options = capture_options(
        machines.device,
        optimizer=given.pop("optimizer", CAPTURED_DEFAULT),
        loss=given.pop("loss"),
        autocast=given.pop("autocast"),
    )
    return captured(model, options=options, **given)[0]


def _meshes(machines: Cluster, mesh: str | None, gpus: int) -> list[Mesh]:
    if mesh is not None:
        return [mesh_on(machines, parse_axes(mesh), gpus)]
    return [mesh_on(machines, parse_axes("x".join(map(str, sizes))), gpus) for sizes in logical_meshes(gpus, AXES)]
