"""Rewriting of a model that a user names: the cheaper graph, its rewrites with reasons and gains, output files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from steptime.api.jobs import CAPTURED_DEFAULT, captured_optimizer
from steptime.api.request import NameOrPath, name_or_path
from steptime.captured import profiling
from steptime.captured.cost import cost_table
from steptime.captured.profiling import check_onnx
from steptime.captured.record.factory import Target
from steptime.captured.record.higher_order import changed
from steptime.errors import UserError
from steptime.hardware import device_within
from steptime.hardware.records import Device
from steptime.rewrite.checking import Check, check, require_same
from steptime.rewrite.engine import Measure, Rewritten, Step, apply_passes, graph_metrics, metrics, modes_of
from steptime.rewrite.flow import FUSED, Flow, substituted
from steptime.rewrite.fused import opened, results_of
from steptime.rewrite.layout.laid import Laid, with_layouts
from steptime.rewrite.pricing import Prices
from steptime.rewrite.scene import Objective
from steptime.rewrite.search.problem import CostModel, time_weights
from steptime.rewrite.search.run import Options, Searched, check_options, searched
from steptime.rewrite.trace import Traced, check_numbers, trace, trace_onnx

SUFFIXES: Final = (".py", ".onnx")
SYNCHRONISING: Final = frozenset({"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2"})
"""Operators that make the host wait for the device, which a CUDA graph cannot contain."""


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """A model, its graph before and after, and the gain."""

    name: str
    traced: Traced
    rewritten: Rewritten
    device: Device
    objective: Objective
    checked: Check | None = None
    """Check of the rewritten graph; None: it was not run, as nothing was written."""
    notes: tuple[str, ...] = ()
    searched: Searched | None = None
    """Result of a search, if one was asked for."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the whole graph before and after on this machine, if measured."""
    laid: Laid | None = None
    """Layouts of the rewritten graph, if asked for."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook."""
        a, b = self.captured["step_time_s"], self.stages["rewritten"]["step_time_s"]
        return f"<Rewriting of {self.name} on {self.device.name}: {a:.3g} s to {b:.3g} s>"

    @property
    def prices(self) -> Prices:
        """Prices on the device."""
        return self.rewritten.prices

    @cached_property
    def captured(self) -> Mapping[str, float]:
        """Totals of the recorded step; time, work and launches equal those of ``steptime profile``."""
        return graph_metrics(self.prices, self.rewritten.before, cost_table(self.traced.program, self.prices.timer))

    @cached_property
    def stages(self) -> Mapping[str, Mapping[str, float]]:
        """Totals as recorded, rewritten to kernels of the library, with chains fused, and as one CUDA graph."""
        after = self.rewritten.after
        found = {"captured": self.captured, "rewritten": metrics(self.prices, unfused(after))}
        if any(node.op == FUSED for node in after.order):
            found["fused"] = metrics(self.prices, after)
        if self.graph_refused is None:
            graphed = Prices(replace(self.prices.timer, graphed=True, _fused={}))
            whole = dict(metrics(graphed, after))
            whole["peak_bytes"] = metrics(self.prices, after)["peak_bytes"]
            host_s = self.prices.timer.host_s
            found["cuda graph"] = whole | {"launches": 1.0, "host_s": host_s}
        return found

    @property
    def graph_refused(self) -> str | None:
        """The reason why the step cannot be one CUDA graph; None: it can."""
        if not self.device.runs_cuda:
            return "the device has no CUDA"
        waits = next((node.op for node in self.rewritten.after.order if node.op in SYNCHRONISING), None)
        return None if waits is None else f"{waits} makes the host wait for the device"

    @property
    def steps(self) -> tuple[Step, ...]:
        """Rewrites, the applied ones first."""
        return self.rewritten.steps

    def repeats(self) -> list[dict[str, Any]]:
        """Calls that the graph does not need, with their time."""
        rows: dict[tuple[str, bool], dict[str, Any]] = {}
        for each in self.traced.repeats:
            cost = self.prices.cost(self.rewritten.before, each.node)
            row = rows.setdefault(
                (each.node.op, each.dead), {"operator": each.node.op, "dead": each.dead, "calls": 0, "gain_s": 0.0}
            )
            row["calls"] += each.times
            row["gain_s"] += 0.0 if cost is None else cost.seconds * each.times
        return sorted(rows.values(), key=lambda row: -float(row["gain_s"]))

    def opaque(self) -> list[dict[str, Any]]:
        """Opaque operators, which no rewrite touches, with their share of the device's time."""
        flow = self.rewritten.after
        whole = self.prices.sums(flow, flow.order).device_s or 1.0
        rows: dict[str, dict[str, Any]] = {}
        for node in flow.opaque():
            cost = self.prices.cost(flow, node)
            row = rows.setdefault(node.op, {"operator": node.op, "calls": 0, "share_of_time": 0.0})
            row["calls"] += 1
            row["share_of_time"] += 0.0 if cost is None else cost.seconds / whole
        return sorted(rows.values(), key=lambda row: -float(row["share_of_time"]))

    def to_json(self) -> dict[str, Any]:
        """Plain values, SI units."""
        return {
            "model": self.name,
            "device": self.device.name,
            "objective": self.objective,
            "mode": modes_of(self.rewritten.before),
            "stages": {name: dict(totals) for name, totals in self.stages.items()},
            "cuda_graph_refused": self.graph_refused,
            "rewrites": [asdict(step) for step in self.steps],
            "saved_calls": self.repeats(),
            "opaque": self.opaque(),
            "check": None if self.checked is None else asdict(self.checked) | {"passed": self.checked.passed},
            "measured": dict(self.measured),
            "layouts": None if self.laid is None else self.laid.to_json(),
            "search": None if self.searched is None else self.searched.to_json(),
            "notes": list(self.notes),
            "provenance": {"captured_by": self.traced.program.source, "device_source": self.device.title},
        }


def unfused(flow: Flow) -> Flow:
    """The graph with every fused kernel replaced by its single operators."""
    replacements = {}
    for node in flow.order:
        if node.op == FUSED:
            steps = opened(flow.nodes, node)
            for index, at in enumerate(results_of(node)):
                replacements[node.value(index)] = steps[at].value()
    return substituted(flow, replacements, flow.definitions) if replacements else flow


def check_output(path: Path | None) -> None:
    """Check before any work that an output can be written.

    Raises:
        UserError: its suffix is unknown, or it cannot be written.
    """
    if path is None:
        return
    from steptime.store.files import refuse_unwritable

    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"-o {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"-o {path}: there is no folder {path.parent}")
    refuse_unwritable(path)


def rewrite(
    model: NameOrPath,
    device: NameOrPath,
    *,
    objective: Objective = "time",
    training: bool = False,
    everything: bool = False,
    passes: Sequence[str] = (),
    measure: bool = False,
    layouts: bool = False,
    mutants: bool = False,
    output: Path | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    inputs: Sequence[str] = (),
    optimizer: str | None = CAPTURED_DEFAULT,
    loss: str | None = None,
    dims: Mapping[str, int] | None = None,
    search: Options | None = None,
) -> Rewriting:
    """Find a cheaper equivalent graph of a model, and write it if an output is given.

    Args:
        model: ``pkg.module:factory``, ``file.py:factory`` (importing runs its code), or an ``.onnx`` file.
        device: catalogue name or file of the device, or of a cluster of it.
        objective: ``time``, ``memory`` or ``launches``.
        training: the whole step with loss, backward pass and optimiser; if False, the forward pass.
        everything: apply every rewrite, also those whose gain is within the doubt of the prediction.
        passes: names of the passes to try; empty: all.
        measure: time each kind of rewrite on this machine's CPU, which decides; in ONNX Runtime if an ONNX file is
            written, else in PyTorch.
        layouts: choose the layouts of all values afterwards, if that gains.
        mutants: try the mutants of partial equality too, each with its correction.
        output: a ``.py`` or ``.onnx`` file; it is written atomically, after a check against the original graph.
        batch: samples; handed to the factory if it takes it.
        seq: tokens of a sequence; handed to the factory if it takes it.
        dtype: element type of the weights.
        inputs: shapes of the forward's arguments.
        optimizer: name of the optimiser, in training.
        loss: name of the loss, in training.
        dims: sizes of the named dims of an ONNX file.
        search: options of a search; its objective, passes, measuring, mutants and layouts are those of this call.

    Raises:
        UserError: the model cannot be captured, an option does not apply, or the rewritten graph differs.
    """
    check_output(output)
    if search is not None:
        search = replace(search, objective=objective, everything=everything, passes=passes)
        search = replace(search, measured=measure, mutants=mutants, layouts=layouts)
        check_options(search)
    target = device_within(name_or_path("device", device))
    named = name_or_path("model", model, "name the factory that makes the module: 'file.py:factory'")
    own = {"batch": batch, "seq": seq, "input": inputs, "dtype": dtype}
    if named.lower().endswith(".onnx"):
        check_onnx(own | {"loss": loss, "optimizer": None if optimizer == CAPTURED_DEFAULT else optimizer})
        if training:
            raise UserError("an ONNX file is rewritten for inference", hint="give the module that it came from")
        traced = trace_onnx(named, dims)[0]
        notes: tuple[str, ...] = ("sizes are fixed at those given",)
    else:
        if dims:
            raise UserError("--dim sets open sizes of ONNX files", hint="give --batch, --seq or --input")
        found = target_of(named, own, with_memory=measure or output is not None)
        traced, notes = _recorded(found, target, training, optimizer, loss, runs=measure or output is not None)
    done = rewritten_of(
        traced,
        target,
        objective=objective,
        everything=everything,
        passes=passes,
        measure=measure,
        layouts=layouts,
        mutants=mutants,
        output=output,
        search=search,
    )
    taken = tuple(f"taken as true: {each}" for each in traced.program.assumed)
    return replace(done, notes=(*notes, *taken))


def target_of(model: str, own: Mapping[str, Any], *, with_memory: bool) -> Target:
    """The module of a factory, its inputs and its loss.

    Raises:
        UserError: the name is not a factory, or its code raises.
    """
    profiling.check_target(model)
    sizes = {name: own[name] for name in ("batch", "seq", "dtype")}
    with contextlib.redirect_stdout(sys.stderr):
        return profiling.target_of(model, **sizes, inputs=own["input"], with_memory=with_memory)


def _recorded(
    found: Target, device: Device, training: bool, optimizer: str | None, loss: str | None, *, runs: bool
) -> tuple[Traced, tuple[str, ...]]:
    options: dict[str, Any] = {}
    notes: list[str] = []
    if training:
        known = None if optimizer in (None, "none") else captured_optimizer(optimizer, device)
        options = {"optimizer": known, "loss": loss if loss not in (None, "own") else found.loss}
    else:
        found.module.eval()
    cuda = device.runs_cuda and not (training and runs)
    if device.runs_cuda and not cuda:
        notes.append("operators are those of the CPU, so that the graph can be checked here")
    with contextlib.redirect_stdout(sys.stderr):
        traced = trace(
            found.module, found.inputs, training=training, target="cuda" if cuda else "cpu", name=found.name, **options
        )
    return traced, tuple(notes)


def rewritten_of(
    traced: Traced,
    device: Device,
    *,
    objective: Objective = "time",
    everything: bool = False,
    passes: Sequence[str] = (),
    measure: bool = False,
    layouts: bool = False,
    mutants: bool = False,
    output: Path | None = None,
    search: Options | None = None,
) -> Rewriting:
    """Rewrite a traced model; arguments as in :func:`rewrite`."""
    timing: Measure | None = None
    if measure:
        from steptime.rewrite.measuring import gain_here

        backend = "onnxruntime" if output is not None and output.suffix.lower() == ".onnx" else "eager"
        timing = partial(gain_here, backend=backend)
    seen = None if search is None else searched(traced.flow, device, search)
    if seen is None:
        found = apply_passes(
            traced.flow,
            device,
            objective=objective,
            everything=everything,
            passes=passes,
            measure=timing,
            mutants=mutants,
        )
    else:
        found = seen.rewritten
    laid = None
    if layouts:
        weights = time_weights(found.prices, found.after)
        laid = with_layouts(found.after, CostModel(prices=found.prices, weights=weights))
        found = replace(found, after=laid.flow)
    done = Rewriting(
        name=traced.flow.name,
        traced=traced,
        rewritten=found,
        device=device,
        objective=objective,
        searched=seen,
        laid=laid,
    )
    if measure:
        from steptime.rewrite.measuring import paired

        before, after = paired(traced.flow, found.after, backend=backend)
        done = replace(done, measured={"before_s": before, "after_s": after})
    return done if output is None else write(done, output)


def write(found: Rewriting, path: Path) -> Rewriting:
    """Check the rewritten graph and write it; on failure the file is unchanged.

    Raises:
        UserError: the graph differs from the original, or cannot be written in this form.
    """
    from steptime.store.files import replace_file

    check_output(path)
    other = changed(found.traced.program.assumed)
    if other:
        hint = "leave -o out, or write that part with operators: the gain holds for what was assumed"
        raise UserError(f"the graph is not the module on all inputs: {other}; nothing was written", hint=hint)
    before, after = found.rewritten.before, found.rewritten.after
    check_numbers(after)
    contents = found.traced.weights()
    checked = check(before, after)
    require_same(checked)
    replace_file(path, _data(found, after, contents, path.suffix.lower()))
    return replace(found, checked=checked)


def _data(found: Rewriting, after: Flow, contents: Mapping[str, Any], suffix: str) -> bytes:
    if suffix == ".onnx":
        from steptime.rewrite.export_onnx import onnx_model

        return bytes(onnx_model(after, contents).SerializeToString())
    from steptime.rewrite.export_torch import python_text

    module = found.traced.module
    state = contents if module is None else {**module.state_dict(), **dict(module.named_parameters())}
    unsaved = {name: tensor for name, tensor in contents.items() if name not in state}
    about = f"{found.name} for {found.device.title}"
    return python_text(replace(after, numbers={**after.numbers, **unsaved}), about).encode()
