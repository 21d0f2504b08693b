"""Predicted gain of compiling a module (fused chains, fewer launches, CUDA graphs), and the kernels Inductor makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops import FREE, OPERATORS, VIEWS
from steptime.errors import UserError, shorten
from steptime.hardware.records import Device
from steptime.rewrite.engine import apply_passes, metrics
from steptime.rewrite.flow import Flow, is_opaque
from steptime.rewrite.fused import FusedTimer, is_map
from steptime.rewrite.passes.fusion import Grower
from steptime.rewrite.pricing import Prices, timer_for
from steptime.rewrite.trace import trace

LIBRARY: Final = ("product", "convolution", "attention", "recurrent")
"""Families of operators for which Inductor calls a library."""
CALL_S: Final = 20e-6
"""Time of the host to call one compiled piece; assumed."""
GUARD_S: Final = 20e-9
"""Time of the host to check one guard; measured on an EPYC with PyTorch 2.13, 1,059 and 3,266 guards of two models."""
COMPILED: Final = ("element-wise chain", "identity", "stacked views", "common subexpression", "constant folding")
"""Passes that a compiler does on every device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A graph between two breaks."""

    operators: int
    reason: str
    """Reason for the break after it; empty for the last piece."""
    line: str
    guards: int = 0
    """Conditions that PyTorch checks before each call: types, shapes and versions of traced values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inductor:
    """Kernels of a module compiled by PyTorch on this machine."""

    generated_kernels: int
    library_kernels: int
    layout_kernels: int
    """Generated kernels that only convert an image or a weight to the layout of the CPU's convolutions."""
    nodes_before_fusion: int
    compile_s: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Predicted metrics of a module in eager mode and compiled."""

    name: str
    device: str
    eager: Mapping[str, float]
    fused: Mapping[str, float]
    graphed: Mapping[str, float] | None
    """Metrics with one CUDA graph for each piece; None where the device has no CUDA graphs."""
    kernels: int
    """Predicted number of generated kernels, without library calls."""
    library: int
    pieces: tuple[Piece, ...] = ()
    inductor: Inductor | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, SI units."""
        return asdict(self)


def generated(flow: Flow) -> tuple[int, int]:
    """Predicted number of kernels that a fusing compiler generates, and of library calls.

    Element-wise operators, reductions, norms, look-ups and copies that read each other over the same elements are one
    kernel; products, convolutions and attention are library calls.
    """

    wholes = _wholes(flow)

    def domain(node: Node) -> object:
        whole = wholes.get(node)
        return None if whole is None else (whole, flow.place(node).phase)

    groups = sum(1 for _ in Grower(flow, domain, (10**6, 10**6)).groups(least=1))
    library = sum(1 for node in flow.order if node.op in OPERATORS and OPERATORS[node.op].family in LIBRARY)
    return groups, library


def _wholes(flow: Flow) -> dict[Node, int]:
    """Size of the generated loop of each operator, in elements.

    Maps of a reduction's result run in the loop of the reduction. A map that only feeds a concatenation, and reads no
    generated operator, runs in the loop of the concatenation. `arange` is computed where it is read.
    """
    wholes: dict[Node, int] = {}
    for node in flow.order:
        if (node in flow.constant and node.inputs) or is_opaque(node) or node.op in FREE:
            continue
        if node.op not in OPERATORS or node.op == "arange" or OPERATORS[node.op].family in LIBRARY:
            continue
        own = node.outputs[0].elements
        sizes = [own, *(type.elements for type in node.outputs)]
        if not is_map(node) and node.op != "embedding":
            sizes += [value.type.elements for value in node.inputs]
        sources = [_behind_views(value).node for value in node.inputs]
        sizes += [wholes[each] for each in sources if is_map(node) and wholes.get(each, 0) > each.outputs[0].elements]
        wholes[node] = max(sizes)
    for node in reversed(flow.order):
        readers = set(flow.users.get(node.value(), ())) if node in wholes and is_map(node) else set()
        alone = not any(_behind_views(value).node in wholes for value in node.inputs)
        if readers and alone and all(reader.op == "cat" for reader in readers):
            wholes[node] = max(wholes.get(reader, 0) for reader in readers) or wholes[node]
    return wholes


def _behind_views(value: Value) -> Value:
    while value.node.op in VIEWS and value.node.inputs:
        value = value.node.inputs[0]
    return value


def compiled(flow: Flow, device: Device, *, pieces: Sequence[Piece] = (), inductor: Inductor | None = None) -> Compiled:
    """Predicted metrics of a graph in eager mode, compiled, and compiled with CUDA graphs.

    Args:
        flow: the graph.
        device: device that it runs on.
        pieces: graphs between breaks; each is checked and launched separately.
        inductor: kernels of the module compiled on this machine.
    """
    found = apply_passes(flow, device, everything=True, passes=COMPILED)
    eager, fused = metrics(found.prices, found.before), dict(metrics(found.prices, found.after))
    count = max(len(pieces), 1)
    guards_s = CALL_S * count + GUARD_S * sum(piece.guards for piece in pieces)
    fused["step_time_s"] += guards_s
    graphed = None
    if device.runs_cuda:
        timer = timer_for(flow, device, graphed=True)
        graphed = dict(metrics(Prices(timer), found.after))
        graphed["launches"] = float(count)
        graphed["host_s"] = timer.host_s * count + guards_s
        graphed["step_time_s"] = max(graphed["step_time_s"], graphed["host_s"])
    kernels, library = generated(flow)
    return Compiled(
        name=flow.name,
        device=device.name,
        eager=eager,
        fused=fused,
        graphed=graphed,
        kernels=kernels,
        library=library,
        pieces=tuple(pieces),
        inductor=inductor,
    )


def broken(module: Any, inputs: Any) -> tuple[Piece, ...]:
    """Pieces of the graph of a module between its breaks, from a run under PyTorch's tracer.

    Args:
        module: a module with real weights.
        inputs: arguments of its forward.

    Raises:
        UserError: the module cannot be traced.
    """
    import torch

    from steptime.captured import torch_parts as parts

    explain, forget, counted = parts.tracer()
    torch.compiler.reset()
    forget()
    try:
        given = explain(module)
        with torch.no_grad():
            found = given(**inputs) if isinstance(inputs, Mapping) else given(*inputs)
    except Exception as error:  # whatever the user's module raises
        raise UserError(f"torch.compile cannot trace the module: {shorten(str(error), 200)}") from None
    reasons = [_reason(each) for each in found.break_reasons]
    counts = [sum(node.op.startswith("call_") for node in each.graph.nodes) for each in found.graphs] or [0]
    ends = [*reasons, *[("", "")] * len(counts)][: len(counts) - 1]
    guards = [int(each.guard_count or 0) for each in counted() if each.graph_op_count]
    guards = guards if len(guards) == len(counts) else [0] * len(counts)
    return tuple(
        Piece(operators=count, reason=reason, line=line, guards=checked)
        for count, checked, (reason, line) in zip(counts, guards, [*ends, ("", "")], strict=True)
    )


def _reason(given: Any) -> tuple[str, str]:
    frames = list(given.user_stack or ())
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return shorten(str(given.reason).strip().splitlines()[0], 100), line


def inductor_here(module: Any, inputs: Any) -> Inductor:
    """Compile a module for this machine's CPU and count the kernels.

    Raises:
        UserError: there is no C++ compiler, or the compilation fails.
    """
    import shutil
    import time

    import torch

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise UserError("--compile needs a C++ compiler", hint="apt install g++")
    from steptime.captured import torch_parts as parts

    counted, run_and_get_code = parts.inductor()
    torch.compiler.reset()
    counted.reset()
    start = time.perf_counter()
    positional, named = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        with torch.no_grad():
            compiled = torch.compile(module, options={"fx_graph_cache": False})
            _, codes = run_and_get_code(compiled, *positional, **named)
    except Exception as error:  # whatever the compiler or the module raises
        raise UserError(f"torch.compile fails here: {shorten(str(error), 200)}") from None
    spent = time.perf_counter() - start
    calls = [line for code in codes for line in code.splitlines()]
    return Inductor(
        generated_kernels=sum(_GENERATED.match(line) is not None for line in calls),
        library_kernels=sum(_LIBRARY.search(line) is not None for line in calls),
        layout_kernels=sum(_LAYOUT.match(line) is not None for line in calls),
        nodes_before_fusion=int(counted.ir_nodes_pre_fusion),
        compile_s=spent,
    )


_GENERATED: Final = re.compile(r"\s+(kernels\.)?cpp_fused_\w*\(")
_LAYOUT: Final = re.compile(r"\s+(kernels\.)?cpp_fused_convolution_\d+\(")
_LIBRARY: Final = re.compile(r"(extern_kernels\.\w+|= torch\.ops\.(aten|mkldnn|onednn)\.\w+[.\w]*)\(")
"""Library calls in the Python code that Inductor writes."""
MOST_PATHS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way through the branches of a module that depend on data."""

    taken: tuple[bool, ...]
    probability: float
    step_time_s: float
    operators: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """A module whose control flow depends on data: every way with its probability, and the expected time."""

    paths: tuple[Path, ...]
    step_time_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def branched(module: Any, inputs: Any, device: Device, probability: float, **options: Any) -> Branched:
    r"""Expected time of a module over all ways through its branches that depend on data.

    $$T = \sum_w t_w \prod_{b \in w} p^{[b]} (1 - p)^{1 - [b]}$$

    over the ways $w$, with the time $t_w$ (s) of each and the probability $p$ that a branch $b$ is taken.

    Args:
        module: any module.
        inputs: arguments of its forward.
        device: device that it runs on.
        probability: probability that a branch is taken.
        options: options of :func:`steptime.rewrite.trace.trace`.

    Raises:
        UserError: there are more than ``MOST_PATHS`` ways, or the probability is out of range.
    """
    from steptime.rewrite.recording import Watching

    if not 0 <= probability <= 1:
        raise UserError(f"--branch {probability} is no probability", hint="from 0 to 1")
    prices = Prices(FusedTimer(device=device))
    found: list[Path] = []
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        prefix = waiting.pop()
        watching = Watching(branches=prefix, decides=True)
        traced = trace(module, inputs, watching=watching, **options)
        taken = tuple(watching.taken)
        waiting += [(*taken[:n], False) for n in range(len(prefix), len(taken))]
        chance = 1.0
        for way in taken:
            chance *= probability if way else 1.0 - probability
        totals = prices.table(traced.flow).totals
        found.append(
            Path(taken=taken, probability=chance, step_time_s=totals.step_s, operators=len(traced.program.calls))
        )
        if len(found) + len(waiting) > MOST_PATHS:
            raise UserError(f"more than {MOST_PATHS} ways through branches that depend on data")
    ordered = tuple(sorted(found, key=lambda path: path.taken, reverse=True))
    return Branched(paths=ordered, step_time_s=sum(path.probability * path.step_time_s for path in ordered))


def times_by_length(lengths: Iterable[int], flows: Mapping[int, Flow], device: Device) -> dict[int, float]:
    """Time of a step at each length, from a polynomial through the recorded lengths.

    Products grow with the length and attention with its square, so that a parabola through three recordings is exact
    for the work and close for the time. Times are made not to decrease with the length.
    """
    import numpy as np

    prices = Prices(FusedTimer(device=device))
    known = sorted(flows)
    times = [prices.table(flows[length]).totals.step_s for length in known]
    curve = np.polyfit(known, times, min(len(known) - 1, 2))
    out: dict[int, float] = {}
    least = 0.0
    for length in sorted(set(lengths)):
        least = max(least, float(np.polyval(curve, length)), 1e-9)
        out[length] = least
    return out
