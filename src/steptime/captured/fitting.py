"""Search for the cheapest way to fit a training step on one device, for a module or a model given by its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from steptime.api.jobs import (
    CAPTURED_DEFAULT,
    adapter_of,
    captured_optimizer,
    estimated_optimizer,
    framework_of,
    with_choices,
)
from steptime.api.models import import_notes, load_model
from steptime.api.request import NameOrPath, choice, name_or_path, text, whole
from steptime.captured.fit.choice import ADAPTERS, Point
from steptime.captured.fit.driver import FitResult, Found, search
from steptime.captured.fit.estimated import OFFLOADS, Estimated, Kind
from steptime.captured.fit.techniques import Change
from steptime.captured.record.inputs import InputSpec, parse_inputs
from steptime.errors import FieldError, first_few
from steptime.estimate.further_kernels import alone
from steptime.estimate.machine import host_basis
from steptime.estimate.memory_definitions import memory_constants
from steptime.estimate.single import Setting
from steptime.hardware import device_within
from steptime.hardware.records import Device
from steptime.model.captured import is_target
from steptime.options import MAX_FIT_BATCH, MAX_FIT_SEQ, number
from steptime.plan.job import PRECISIONS, Job
from steptime.plan.optimizers import OPTIMIZERS
from steptime.search.modes import MODES
from steptime.version import __version__

if TYPE_CHECKING:
    from steptime.captured.fit.captured import Captured

DEFAULT_BATCH: Final = 8
ADAPTERS_OF: Final = "transformers"
"""Default framework of adapters on 4-bit weights, whose settings are printed."""
FACTORY: Final = "of a torch module name the factory that makes it: 'file.py:factory'"
"""Hint for an object that is no model."""
Progress = Callable[[int, int], None]


def fit(
    model: NameOrPath, device: NameOrPath, *, batch: int | None = None, seq: int | None = None,
    optimizer: str = CAPTURED_DEFAULT, host_bandwidth_Bps: float | None = None, allow: str = "rounding",
    inputs: Sequence[str] = (), loss: str | None = None, framework: str | None = None,
    lora: Mapping[str, Any] | None = None, progress: Progress | None = None,
) -> FitResult:  # fmt: skip
    """Find the cheapest way to fit a training step on one device.

    Args:
        model: ``pkg.module:factory`` or ``file.py:factory``, which is imported and captured; or a catalogue name, a
            ``config.json`` or a TOML file, which is estimated by its dimensions.
        device: catalogue name or TOML file of a device, or of a cluster of it.
        batch: samples of an optimiser step; None: the default of the factory, or 8 for other models. A factory that
            takes ``batch`` is called for each micro-batch; for one that does not, the leading dim of the inputs is
            resized.
        seq: tokens of a sample; None: the default of the model.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``; for a captured module also any of them with
            ``-loop``, the first two with ``-fused``, ``adagrad``, ``rmsprop`` and ``adafactor``; for other models also
            ``adam8bit``.
        host_bandwidth_Bps: sustained bytes per second of the link between device and host, each way; None: that of the
            device.
        allow: strongest change of the numerics: ``none``, ``rounding`` (fewer bits somewhere), or ``training`` (the
            trained model may differ).
        inputs: shapes of the inputs of a captured module, as ``8x1024:int64``, if the factory returns none.
        loss: loss of a captured module: ``own``, ``cross-entropy``, ``mse``, ``sum`` or ``mean``; None: that of the
            factory.
        framework: framework whose habits and memory are evaluated, for a model given by its dimensions; None:
            ``generic``, and for adapters on 4-bit weights a framework that has them.
        lora: adapters of such a model, as for an estimate: ``{"rank": 16, "targets": "linear", "qlora": True}``; None:
            all weights are trained, unless ``allow`` is ``training`` and adapters are cheaper.
        progress: called with the number of captures done, and of those known so far.

    Raises:
        UserError: the input is wrong; the message says what to change.
    """
    change = Change(choice("allow", allow, tuple(Change)))
    machine = device_within(name_or_path("device", device))
    if host_bandwidth_Bps is not None:
        given_Bps = number("host_bandwidth", host_bandwidth_Bps, 1e6, 1e15, "bytes per second between device and host")
        machine = machine.with_host_link(given_Bps)
    asked = _Asked(
        model=name_or_path("model", model, FACTORY),
        device=machine,
        batch=None if batch is None else whole("batch", batch, 1, MAX_FIT_BATCH),
        seq=None if seq is None else whole("seq", seq, 1, MAX_FIT_SEQ),
        optimizer=text("optimizer", optimizer),
        allow=change,
        framework=framework,
        lora=lora,
    )
    if is_target(asked.model):
        for name, value in (("framework", framework), ("lora", lora)):
            if value is not None:
                hint = "leave it out: the code of the module says what runs"
                raise FieldError("", name, "is for a model that is given by its dimensions", hint=hint)
        return _captured(asked, loss, parse_inputs(inputs), progress)
    if inputs:
        raise FieldError("", "inputs", "are shapes for a module that is captured; this model has its own")
    if loss is not None:
        raise FieldError("", "loss", "is for a module that is captured; this model has its own")
    return _estimated(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Checked arguments of :func:`fit`."""

    model: str
    device: Device
    batch: int | None
    seq: int | None
    optimizer: str
    allow: Change
    framework: str | None
    lora: Mapping[str, Any] | None


def _captured(asked: _Asked, loss: str | None, inputs: tuple[InputSpec, ...], progress: Progress | None) -> FitResult:
    from steptime.captured.fit.bench import Bench
    from steptime.captured.fit.captured import Captured

    device, optimizer = asked.device, captured_optimizer(asked.optimizer, asked.device)
    bench = Bench(
        text=asked.model, device=device, optimizer=optimizer, loss=loss, batch=asked.batch, seq=asked.seq, inputs=inputs
    )
    batch = bench.batch = bench.own_batch() if asked.batch is None else asked.batch
    engine = Captured(bench=bench, batch=batch, host_Bps=device.host_Bps, allow=asked.allow, is_host=device.is_host)
    counter = _Counter(progress, len(engine.precisions) + 2 * len(engine.micro_batches) + 4)
    bench.ran = counter.one
    found = search(engine, counter.more)
    return _result(found, replace(asked, batch=batch), captures=bench.captures, notes=_notes(engine))


def _notes(engine: Captured) -> list[str]:
    """Notes on the result."""
    bench = engine.bench
    unknown = bench.run("fp32", engine.batch).table.coverage.unknown
    notes = []
    if unknown:
        notes.append(f"timed by their bytes only, as no table has them: {first_few([one.op for one in unknown], 3)}")
    notes += [f"{name} is left out: {why}" for name, why in engine.refused.items()]
    notes += [f"{name} could not be captured and is simulated: {why}" for name, why in engine.unverified.items()]
    if bench.resizes:
        notes.append("the leading dim of the inputs is taken for the batch: no factory makes them for a batch")
    if not bench.paths:
        notes.append("no list of equal blocks was found in the module: checkpoints were not tried")
    return notes


class _Counter:
    """Counter of captures done, and of those known so far."""

    def __init__(self, progress: Progress | None, expected: int) -> None:
        self.progress, self.done, self.total = progress, 0, expected

    def one(self) -> None:
        """Count one more capture as done."""
        self.done += 1
        self.total = max(self.total, self.done)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def more(self, captures: int) -> None:
        """Announce further captures."""
        self.total = max(self.total, self.done + captures)


def _estimated(asked: _Asked) -> FitResult:
    spec, device = load_model(asked.model), asked.device
    states = estimated_optimizer(asked.optimizer)
    batch, seq = DEFAULT_BATCH if asked.batch is None else asked.batch, asked.seq or spec.seq_len
    cluster, mode = alone(device), MODES["corrected"]
    adapters = adapter_of(with_rank(asked.lora))
    assert adapters is not None

    def make(kind: Kind) -> Setting:
        optimizer_states = OPTIMIZERS["adam8bit"] if kind.optimizer == "8bit" else states
        lora = with_rank(asked.lora) | {"qlora": kind.weights == "qlora"}
        adapter = None if kind.weights == "trained" else adapter_of(lora)
        precision = PRECISIONS[kind.precision].on(device)
        own = ADAPTERS_OF if kind.weights == "qlora" else None
        framework = framework_of(kind.framework or asked.framework or own, mode, device, precision)
        job = Job(
            model=spec, gpus=1, global_batch=batch, seq_len=seq,
            precision=precision, optimizer=optimizer_states, adapter=adapter, framework=framework,
        )  # fmt: skip
        offload = {OFFLOADS[kind.optimizer]} if kind.optimizer in OFFLOADS else set()
        offload |= {"activations"} if kind.swapped else set()
        job = with_choices(job, {"offload": frozenset(offload)} if offload else {})
        return Setting(method=mode.method, job=job, cluster=cluster, statistics=mode.statistics)

    engine = Estimated(
        make=make, strategy=mode.method.strategy("1d"), batch=batch, matrix_dtypes=frozenset(device.matrix_flops_per_s),
        allow=asked.allow, is_host=device.is_host, of_matrices=states.matrices is not None,
        weights=_weights(asked.lora), adapters=(adapters.rank, adapters.targets),
    )  # fmt: skip
    found = search(engine)
    best = found.cheapest or found.least
    stacks = [engine.under(best.choice, name) for name in best.choice.stacks if name != best.framework]
    notes = [f"memory and time are estimated from the dimensions of {spec.name}; a module is captured exactly"]
    notes += import_notes(asked.model, seq=asked.seq)
    asked = replace(asked, batch=batch, seq=seq)
    return _result(found, asked, captures=0, notes=(*notes, *engine.left_out), stacks=stacks)


def with_rank(lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Adapters with the default rank if none is given.

    >>> with_rank(None), with_rank({"rank": 8})
    ({'rank': 16}, {'rank': 8})
    """
    return {"rank": ADAPTERS[0]} | dict(lora or {})


def _weights(lora: Mapping[str, Any] | None) -> str:
    """Value of :attr:`Choice.weights` for the adapters of a job."""
    adapter = None if lora is None else adapter_of(with_rank(lora))
    return "trained" if adapter is None else "lora" if adapter.weight_bytes is None else "qlora"


def _result(
    found: Found, asked: _Asked, *, captures: int, notes: Sequence[str], stacks: Sequence[Point] = ()
) -> FitResult:
    assert asked.batch is not None
    device = asked.device
    constants = memory_constants(is_host=device.is_host)
    provenance: dict[str, Any] = {
        "steptime_version": __version__, "memory_constants": constants.source,
        "memory": {"capture": "live tensors of a captured step, placed by a model of PyTorch's caching allocator",
                   "simulation": "the recorded chain of blocks under a schedule, and the allocator's usual slack",
                   "estimate": "the estimate of the model's dimensions, and the allocator's usual slack"},
        "host_bandwidth": host_basis(device),
    }  # fmt: skip
    return FitResult(
        model=asked.model, device=device.name, device_type="cpu" if device.is_host else "cuda", batch=asked.batch,
        seq=asked.seq, optimizer=asked.optimizer, allow=str(asked.allow), host_Bps=device.host_Bps,
        capacity_bytes=device.memory_bytes,
        context_bytes=constants.context_bytes,
        baseline=found.baseline, cheapest=found.cheapest, least=found.least, front=found.front, guide=found.guide,
        candidates=found.candidates, captures=captures, stacks=tuple(stacks), provenance=provenance, notes=tuple(notes),
    )  # fmt: skip
