"""Cost of a captured model on one device: operators, time, and memory by liveness."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steptime.api.jobs import CAPTURED_DEFAULT, captured_optimizer
from steptime.api.models import which_of
from steptime.api.request import NameOrPath, name_or_path
from steptime.captured.cost import CostTable, Metrics, Timer, cost_table, table_metrics
from steptime.captured.cost.timing import time_model
from steptime.captured.graph import BEFORE, Call, Program, TensorType
from steptime.captured.graph.liveness import Held, Liveness, Peak
from steptime.captured.graph.placement import Placement, arena_of, place
from steptime.captured.ops.work import variant, whole_bytes
from steptime.captured.record.factory import Target, load_target
from steptime.captured.record.inputs import parse_inputs
from steptime.errors import InputFileError, UserError, shorten
from steptime.estimate.learned import Correction, correction_named
from steptime.estimate.memory_definitions import exceeding, memory_constants
from steptime.hardware import device_within
from steptime.hardware.records import Device
from steptime.model.captured import is_target
from steptime.registry import Registry
from steptime.units import format_seconds

if TYPE_CHECKING:
    from steptime.captured.onnx.step import Stored


CACHES: Final = Registry[Callable[..., Mapping[str, float]]]("model of caches", "steptime.caches")
"""Name -> function for the hit rates of all caches of a CPU; ``product``: for a product of (m, n, k) in a dtype."""
NO_LOSS: Final = "sum of the output (give --loss)"
OWN_LOSS: Final = "the module's own"
OF_FACTORY: Final = "the factory's"
OF_ONNX: Final = "ones into every output (forward and derived backward, no optimiser)"
NOT_OF_ONNX: Final = (
    "batch", "seq", "input", "dtype", "autocast", "optimizer", "loss", "nonzero-share", "no-fold",
)  # fmt: skip
"""Options that do not apply to an ONNX file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the capture of a step; None: unknown, since the program was captured elsewhere."""

    inputs: tuple[str, ...]
    """Shapes and element types, written as for ``--input``."""
    training: bool
    kernels: str | None = None
    """Device type whose operators were recorded: ``cuda`` or ``cpu``."""
    optimizer: str | None = None
    loss: str | None = None
    autocast: str | None = None
    stored: Mapping[str, Stored] | None = None
    """Stored parameters, buffers and constants of an ONNX file; None for other models."""
    notes: tuple[str, ...] = ()
    """Reasons why the module behind an ONNX file may have other parameters."""


class NotedLoss:
    """Default loss of a module, which notes if the module has returned one."""

    def __init__(self) -> None:
        self.text = OWN_LOSS

    def __call__(self, output: Any) -> Any:
        """The loss that the module returns, else the sum of its output."""
        from steptime.captured import torch_parts as parts
        from steptime.captured.record.training import given_loss, own_loss

        value = own_loss(output)
        own = value is given_loss(output) or any(value is leaf for leaf in parts.pytree.tree_leaves(output))
        self.text = OWN_LOSS if own else NO_LOSS
        return value


def check_onnx(given: Mapping[str, Any]) -> None:
    """Refuse options that do not apply to an ONNX file; keys are names of options, None and False mean not given.

    Raises:
        UserError: such an option is given; the message names it.

    >>> check_onnx({"batch": None, "no-fold": False})
    """
    names = [f"--{name}" for name in NOT_OF_ONNX if given.get(name) not in (None, False, (), [])]
    if names:
        hint = (
            "the file has its own shapes and element types (--dim NAME=N sets those that it leaves open); training is "
            "its forward and PyTorch's backward, without a loss or an optimiser"
        )
        raise UserError(f"an ONNX file cannot be captured with {', '.join(names)}", hint=hint)


def tensor_text(type: TensorType, name: str = "") -> str:
    """A tensor in the form of ``--input``.

    >>> tensor_text(TensorType((8, 1024), "int64"), "ids")
    'ids=8x1024:int64'
    """
    return f"{name}{'=' if name else ''}{'x'.join(map(str, type.shape)) or 'scalar'}:{type.dtype}"


def input_texts(program: Program) -> tuple[str, ...]:
    """Inputs of a program that a call reads, in the order of its storages; numbered inputs have no name."""
    found: dict[str, TensorType] = {}
    for call in program.calls:
        for value in call.node.inputs:
            name = value.node.attribute("name")
            if value.node.op == "input" and isinstance(name, str) and not name.startswith("outside."):
                found[name] = value.type
    stored = [s.name for s in program.storages if s.category == "input" and s.born == BEFORE and s.name in found]
    return tuple(
        tensor_text(found[name], "" if name.startswith("input.") else name) for name in dict.fromkeys([*stored, *found])
    )


def texts_of_tensors(inputs: Any) -> tuple[str, ...]:
    """Tensors among the arguments of a module; a mapping has keyword arguments."""
    import torch

    from steptime.captured import torch_parts as parts
    from steptime.captured.record.values import type_of

    named = inputs.items() if isinstance(inputs, Mapping) else (("", given) for given in inputs)
    return tuple(
        tensor_text(type_of(tensor), str(name))
        for name, given in named
        for tensor in parts.pytree.tree_leaves(given)
        if isinstance(tensor, torch.Tensor)
    )


CUDA_ROUNDING_BYTES: Final = 512
"""Multiple to which CUDA's caching allocator rounds sizes (c10/cuda/CUDACachingAllocator.cpp, `kMinBlockSize`)."""
WORKSPACE_BYTES: Final = {"hopper": 32 * 2**20, "other": 4096 * 1024 * 2 + 16 * 1024 * 8}
"""cuBLAS workspace of one handle (aten/src/ATen/cuda/CublasHandlePool.cpp, `getChosenWorkspaceSize`)."""
HANDLES: Final = 2
"""Threads with their own cuBLAS handle: those of the forward and of the backward pass."""
LISTED: Final = 8
"""Number of tensors listed at a peak."""
OBJECT: Final = (
    'capture a torch module first: steptime.capture(module, inputs, optimizer="adamw", target="cuda"), '
    "or name the factory that makes it: 'file.py:factory'"
)
"""Hint for an object that is no model."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A captured program with its cost on a device."""

    program: Program
    settings: Settings
    """Settings of the capture."""
    device: Device
    table: CostTable
    cuda: bool
    """True if CUDA's caching allocator manages the memory of the device."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        totals = self.table.totals
        cost = f"{format_seconds(totals.step_s)}, MFU {100 * totals.mfu:.1f} %"
        return f"<Profile of {self.program.name} on {self.device.name}: {cost}>"

    @cached_property
    def live(self) -> Liveness:
        """Memory in use at every call."""
        with countable_sizes():
            if self.cuda:
                return Liveness(without_scratch(self.program), rounding=CUDA_ROUNDING_BYTES)
            return Liveness(with_workspaces(self.program, self.table.timer.correction))

    @cached_property
    def placement(self) -> Placement | None:
        """The storages as CUDA's caching allocator places them; None on other devices."""
        with countable_sizes():
            return place(without_scratch(self.program)) if self.cuda else None

    @cached_property
    def workspaces(self) -> tuple[int, ...]:
        """Sizes in bytes of the cuBLAS workspaces, which exist from the first product on."""
        kind = "hopper" if self.device.architecture == "hopper" else "other"
        return (WORKSPACE_BYTES[kind],) * HANDLES if self.cuda else ()

    @cached_property
    def memory(self) -> dict[str, float]:
        """Peak memory in bytes by definition, and the workspaces and context between them."""
        peak = float(self.live.peak().size_bytes)
        if self.placement is None:
            return {"allocated": peak}
        workspace = float(sum(self.workspaces))
        context = memory_constants().context_bytes
        reserved = self.placement.peak_reserved_bytes + workspace
        return {
            "allocated": self.placement.peak_allocated_bytes + workspace, "workspace": workspace, "reserved": reserved,
            "context": context, "device": reserved + context,
        }  # fmt: skip

    @cached_property
    def arena_bytes(self) -> int | None:
        """Memory of the activations of a forward pass in a static plan; None if the program trains."""
        if any(call.phase != "forward" for call in self.program.calls):
            return None
        return arena_of(self.program).size_bytes

    @cached_property
    def cache_hit_rates(self) -> dict[str, float]:
        """Hit rate of every cache of this machine in the matrix products, weighted by their operations.

        In closed form, with the best tiles (``steptime lab tile``). Empty on devices other than the CPU of a host, and
        if the system does not list its caches.
        """
        if not self.device.is_host:
            return {}
        shapes: dict[tuple[int, int, int, str], float] = {}
        for cost, number in zip(self.table.kinds, np.bincount(self.table.kind), strict=False):
            for call in cost.work.kernels:
                if {"m", "n", "k"} <= set(call.shape) and cost.work.dtype in ("fp32", "fp64"):
                    m, n, k = (max(int(call.shape[side]), 1) for side in "mnk")
                    key = (m, n, k, cost.work.dtype)
                    shapes[key] = shapes.get(key, 0.0) + 2.0 * m * n * k * float(number)
        return _mean_hit_rates(shapes)

    @property
    def metrics(self) -> Metrics:
        """Static and dynamic metrics, for the objectives of a rewriter."""
        return table_metrics(self.table, peak_bytes=self.memory["allocated"])

    @property
    def needed_bytes(self) -> float:
        """Memory that the step needs on the device."""
        return self.memory.get("device", self.memory["allocated"])

    @property
    def oom_probability(self) -> float:
        """Chance that the step does not fit, from residuals of measured memory."""
        return exceeding(self.needed_bytes, self.device.memory_bytes, memory_constants().deviation["device"])

    def to_json(self, depth: int = 3) -> dict[str, Any]:
        """Plain values, SI units."""
        s, settings = self.table.totals, asdict(self.settings)
        return {
            "model": self.program.name, "device": self.device.name, "parameters": self.program.parameter_count,
            "trained_parameters": self.trained_parameters, "parameter_dtypes": self.parameter_dtypes,
            **settings, "inputs": list(self.settings.inputs), "notes": list(self.settings.notes),
            "folded": list(self.program.folded), "unfolded": self.program.unfolded,
            "taken_as_true": list(self.program.assumed),
            "batch": self.program.batch, "samples_per_s": self.samples_per_s,
            "step_time_s": s.step_s, "step_time_bracket_s": list(s.bracket_s), "step_time_band_s": list(s.band_s),
            "mfu": s.mfu, "hfu": s.hfu, "model_flops": s.model_flops, "executed_flops": s.executed_flops,
            "saved_flops": s.saved_flops,
            "flops_convention": "2mnk, a causal mask counted once; mfu and hfu without saved_flops (Winograd)",
            "vector_flops": s.vector_flops,
            "moved_bytes": s.moved_bytes, "launches": s.launches, "device_time_s": s.device_s, "host_time_s": s.host_s,
            "peak_memory_bytes": self.memory["allocated"], "memory_by_definition_bytes": self.memory,
            "memory_capacity_bytes": self.device.memory_bytes, "oom_probability": self.oom_probability,
            "feasible": self.needed_bytes <= self.device.memory_bytes,
            "memory": dict(self.live.peak().by_category),
            "peaks": {phase: self._peak(peak) for phase, peak in self.live.peaks().items()},
            "arena_bytes": self.arena_bytes, "cache_hit_rates": self.cache_hit_rates,
            "roofs": self._roofs(),
            "by_phase": _groups(self.table.by_phase()), "by_operator": _groups(self.table.by_operator()),
            "by_module": _groups(self.table.by_module(depth, folded=True)), "by_bound": _groups(self.table.by_bound()),
            "coverage": asdict(self.table.coverage), "predictor": self.predictor, "metrics": asdict(self.metrics),
            "provenance": self._provenance(),
        }  # fmt: skip

    @property
    def trained_parameters(self) -> int:
        """Elements of the parameters that are trained, shared ones once."""
        return sum(p.elements for p in {p.storage: p for p in self.program.parameters}.values() if p.trained)

    @property
    def parameter_dtypes(self) -> list[str]:
        """Element types of the parameters."""
        return sorted({parameter.dtype for parameter in self.program.parameters})

    @property
    def samples_per_s(self) -> float | None:
        r"""Throughput $b / t$ of batch $b$ in a step of $t$ seconds; None if the batch is unknown."""
        batch, step_s = self.program.batch, self.table.totals.step_s
        return None if batch is None or not step_s else batch / step_s

    def _peak(self, peak: Peak) -> dict[str, Any]:
        return {
            "size_bytes": peak.size_bytes, "operator": peak.operator, "module": peak.module, "call": peak.call,
            "by_category": dict(peak.by_category),
            "tensors": [
                {"size_bytes": held.storage.size_bytes, "category": held.storage.category, "made_by": held.made_by}
                for held in self.largest(peak)
            ],
        }  # fmt: skip

    def largest(self, peak: Peak, count: int = LISTED) -> list[Held]:
        """The largest storages that are alive at a peak."""
        return self.live.alive(peak.call)[:count]

    def _roofs(self) -> dict[str, Any]:
        """Bandwidth of memory, peak of the matrix units in each dtype of the products, peak of the vector units."""
        device, costs = self.table.timer.device, self.table.kinds
        used = dict.fromkeys(cost.dtype for cost in costs if cost.work.matrix_flops)
        peaks = {f"{dtype} matrix": device.matrix_flops_per_s[dtype] for dtype in used}
        peaks["vector"] = device.peak_vector_flops_per_s
        return {"memory_Bps": device.memory_Bps, "flops_per_s": peaks}

    @cached_property
    def predictor(self) -> dict[str, Any] | None:
        """Effect of a learned correction on the times, and its provenance; None without one."""
        found = self.table.timer.correction
        if found is None:
            return None
        plain = replace(self.table.timer, correction=None, _machines={}, _costs={})
        strange = {cost.op for cost in self.table.kinds if cost.seconds and not found.knows(time_model(cost.work))}
        table = cost_table(self.program, plain)
        before, plainly_s = table.totals, {group.name: group.seconds for group in table.by_operator()}
        return {
            "name": found.name,
            "factors": {each.name: each.seconds / plainly_s[each.name] for each in self.table.by_operator()},
            "host_factor": self.table.totals.host_s / before.host_s if before.host_s else 1.0,
            "step_time_before_s": before.step_s,
            "unseen_operators": sorted(strange),
            "error": found.error,
            "provenance": dict(found.provenance),
        }

    def _provenance(self) -> dict[str, Any]:
        bases = [group for group in self.table.by_basis() if group.seconds]
        whole = sum(group.seconds for group in bases) or 1.0
        return {
            "captured_by": self.program.source,
            "device_source": self.device.title,
            "time_rests_on": {group.name: group.seconds / whole for group in bases},
            "band": "errors of the fitted curves",
            "memory": "liveness of recorded storages" + (", CUDA caching allocator simulated" if self.cuda else ""),
        }


def with_workspaces(program: Program, correction: Correction | None) -> Program:
    """A program whose calls also have the kernel workspaces of a learned correction."""
    known = {} if correction is None else correction.workspaces
    if not known:
        return program

    def taken(call: Call) -> Call:
        shares = known.get(variant(call.node), (0.0, 0.0))
        more = sum(share * size for share, size in zip(shares, whole_bytes(call.node), strict=True))
        return replace(call, scratch_bytes=call.scratch_bytes + int(more)) if more and not call.view else call

    return replace(program, calls=tuple(map(taken, program.calls)))


def _mean_hit_rates(shapes: Mapping[tuple[int, int, int, str], float]) -> dict[str, float]:
    """Mean hit rates of caches over products, weighted by operations."""
    out: dict[str, float] = {}
    whole = sum(shapes.values())
    try:
        for (m, n, k, dtype), flops in shapes.items():
            for level, rate in CACHES["product"]((m, n, k), "machine", dtype).items():
                out[level] = out.get(level, 0.0) + rate * flops / whole
    except UserError:  # the system does not list its caches
        return {}
    return out


def profile(
    model: NameOrPath | Program,
    device: NameOrPath,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    inputs: Sequence[str] = (),
    optimizer: str | None = CAPTURED_DEFAULT,
    loss: str | None = None,
    autocast: str | None = None,
    training: bool = True,
    fold: bool = True,
    nonzero_share: float | None = None,
    dims: Mapping[str, int] | None = None,
    predictor: str | None = None,
) -> Profile:
    """Capture a model and cost it on a device; no weights, no data, no GPU.

    Args:
        model: ``pkg.module:factory``, ``file.py:factory`` (importing runs its code), an ``.onnx`` file, or a program
            that was captured before.
        device: catalogue name or file of the device, or of a cluster of it.
        batch: samples; passed to the factory if it takes them.
        seq: tokens of a sequence; passed to the factory if it takes them.
        dtype: element type of the weights: ``fp32`` (PyTorch's default), ``bf16``, ``fp16``.
        inputs: shapes of the forward's arguments, as ``8x1024:int64``; by default those of the factory.
        optimizer: name of an optimiser, ``none`` for none.
        loss: ``own``, ``cross-entropy``, ``mse``, ``sum``, ``mean``.
        autocast: element type of automatic mixed precision.
        training: False: the forward pass alone.
        fold: record a few blocks of each run of equal ones.
        nonzero_share: assumed fraction of true elements of a mask where shapes depend on data.
        dims: sizes of the named dims of an ONNX file.
        predictor: learned correction of the times: ``learned`` for that of the kind of device, or a file.

    Raises:
        UserError: the model cannot be imported, built or captured, or the device is unknown; the message has a hint.
    """
    target = device_within(name_or_path("device", device))
    correction = None if predictor is None else correction_named(predictor, target)
    if isinstance(model, Program):
        known = any(call.phase != "forward" for call in model.calls)
        program, settings = model, Settings(inputs=input_texts(model), training=known)
    else:
        options = capture_options(
            target, optimizer=optimizer, loss=loss, autocast=autocast,
            training=training, fold=fold, nonzero_share=nonzero_share,
        )  # fmt: skip
        named = name_or_path("model", model, OBJECT)
        program, settings = captured(
            named, batch=batch, seq=seq, dtype=dtype, inputs=inputs, options=options, dims=dims
        )
    table = cost_table(program, Timer(device=target, correction=correction))
    return Profile(program=program, settings=settings, device=target, table=table, cuda=target.runs_cuda)


def capture_options(
    device: Device,
    *,
    optimizer: str | None,
    loss: str | None,
    autocast: str | None,
    training: bool = True,
    fold: bool = True,
    nonzero_share: float | None = None,
) -> dict[str, Any]:
    """Options of :func:`captured` for a device.

    Raises:
        UserError: the optimiser is unknown or cannot be captured.
    """
    return {
        "optimizer": None if optimizer in (None, "none") else captured_optimizer(optimizer, device),
        "loss": loss,
        "autocast": autocast,
        "training": training,
        "fold": fold,
        "nonzero_share": nonzero_share,
        "target": "cuda" if device.runs_cuda else "cpu",
    }


def captured(
    model: str,
    *,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    dims: Mapping[str, int] | None = None,
) -> tuple[Program, Settings]:
    """Program of a model given as text, and the settings of its capture; its code prints to standard error.

    Raises:
        UserError: the model is neither a factory nor an ONNX file, or cannot be captured, or an option does not apply.
    """
    if model.lower().endswith(".onnx"):
        optimizer = options.get("optimizer")
        check_onnx({
            "batch": batch, "seq": seq, "dtype": dtype, "input": inputs, "loss": options.get("loss"),
            "autocast": options.get("autocast"), "nonzero-share": options.get("nonzero_share"),
            "optimizer": None if optimizer == CAPTURED_DEFAULT else optimizer,
        })  # fmt: skip
        return _from_onnx(model, dims or {}, training=bool(options.get("training", True)))
    check_target(model, further="; `steptime estimate` takes names and configs")
    if dims:
        raise UserError("--dim sets open sizes of ONNX files", hint="give --batch, --seq or --input")
    with contextlib.redirect_stdout(sys.stderr):
        return _from_factory(target_of(model, batch=batch, seq=seq, dtype=dtype, inputs=inputs), options)


def _from_factory(found: Target, options: Mapping[str, Any]) -> tuple[Program, Settings]:
    from steptime.captured.record import capture

    loss, noted, training = options.get("loss"), NotedLoss(), bool(options.get("training", True))
    given = noted if loss in (None, "own") else loss
    if loss is None and found.loss is not None:
        given = found.loss
    program = capture(found.module, found.inputs, name=found.name, **{**options, "loss": given})
    text = noted.text if given is noted else found.loss if isinstance(found.loss, str) else OF_FACTORY
    return program, Settings(
        inputs=texts_of_tensors(found.inputs), training=training, kernels=options.get("target"),
        optimizer=(options.get("optimizer") or "none") if training else "none",
        loss=(loss if loss not in (None, "own") else text) if training else "none",
        autocast=options.get("autocast") or "none",
    )  # fmt: skip


def check_target(model: str, further: str = "") -> None:
    """Refuse a text that names no factory; ``further`` is appended to the hint.

    Raises:
        UserError: the text is no factory.
    """
    if is_target(model):
        return
    if Path(model).exists():
        hint = which_of(model) if model.lower().endswith(".py") else None
        raise InputFileError(model, "is neither an .onnx file nor written as file.py:factory", hint=hint)
    hint = f"write pkg.module:factory, file.py:factory or FILE.onnx{further}"
    raise UserError(f"{shorten(model)!r} is no model that can be captured", hint=hint)


def target_of(
    model: str,
    *,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    inputs: Sequence[str],
    with_memory: bool = False,
) -> Target:
    """Import a factory and call it with the given sizes; ``with_memory``: with memory for weights."""
    sizes = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
    return load_target(model, sizes=sizes, dtype=dtype, inputs=parse_inputs(inputs), with_memory=with_memory)


def _from_onnx(path: str, dims: Mapping[str, int], *, training: bool) -> tuple[Program, Settings]:
    from steptime.captured.onnx import read_onnx

    read = read_onnx(path, dims=dims, training=training)
    program = read.program
    loss = OF_ONNX if training else "none"
    return program, Settings(
        inputs=input_texts(program), training=training, optimizer="none", loss=loss, autocast="none",
        stored=read.stored, notes=read.notes,
    )  # fmt: skip


@contextlib.contextmanager
def countable_sizes() -> Iterator[None]:
    """Report an overflow of sums of sizes, which are integers of 64 bits."""
    try:
        yield
    except OverflowError:
        raise UserError("the step needs more than 2^63 bytes of memory", hint="is a size mistyped?") from None


def without_scratch(program: Program) -> Program:
    """The program without the scratch of CPU kernels."""
    if not any(call.scratch_bytes for call in program.calls):
        return program
    return replace(program, calls=tuple(replace(call, scratch_bytes=0) for call in program.calls))


def _groups(groups: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups]
