"""Measured gain of a rewrite on this machine's CPU, in CPU time of one thread on which both graphs alternate.

A turn is a few runs of one graph. The first one is not timed, as it refills the caches that the other graph has
evicted. Other load on the machine can only make a run longer, so fast runs count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import quantiles
from typing import Any, Final

from steptime.captured.graph import Node, Value
from steptime.captured.graph.program import SOURCES
from steptime.errors import UserError
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match

Run = Callable[..., object]

BUDGET_S: Final = 0.4
"""Least CPU seconds spent on one pair of graphs."""
LEAST_RUNS: Final = 6
RUNS_OF_A_TURN: Final = 3
NOISE: Final = 0.03
"""Relative difference between measurements of two equal graphs."""


def paired(before: Flow, after: Flow, budget_s: float = BUDGET_S, backend: str = "eager") -> tuple[float, float]:
    """CPU seconds of both graphs on one thread, run in turns: the 20th percentile of the runs.

    Args:
        before: a graph.
        after: an equivalent graph.
        budget_s: CPU time to spend.
        backend: ``eager``, ``inductor`` or ``onnxruntime``.

    Raises:
        UserError: an operator cannot be run here.
    """
    return by_turns(runner(before, backend), runner(after, backend), budget_s)


def by_turns(one: Run, other: Run, budget_s: float = BUDGET_S) -> tuple[float, float]:
    """CPU seconds of two functions on one thread, measured as in :func:`paired`."""
    runs = (one, other)
    times: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        run()
    begin = time.thread_time()
    while time.thread_time() - begin < budget_s or len(times[0]) < LEAST_RUNS:
        for run, found in zip(runs, times, strict=True):
            run()
            for _ in range(RUNS_OF_A_TURN):
                start = time.thread_time()
                run()
                found.append(time.thread_time() - start)
    first, second = (quantiles(found, n=5)[0] for found in times)
    return first, second


def runner(flow: Flow, backend: str = "eager") -> Run:
    """A function that runs a graph on random contents: ``eager``, ``inductor`` or ``onnxruntime``."""
    import torch

    from steptime.rewrite.export_torch import graph_module
    from steptime.rewrite.kernels import as_tensor, random_contents

    torch.set_num_threads(1)
    read = replace(flow, outputs=(*flow.outputs, *flow.inputs))  # also inputs that only the other graph reads
    contents = random_contents(read)
    inputs = [as_tensor(contents[_name(v.node)], v.type.dtype, wide=False) for v in flow.inputs]
    if backend != "onnxruntime":
        torch.compiler.reset()
        made = graph_module(flow, contents)
        module: Run = torch.compile(made) if backend == "inductor" else made

        def run() -> object:
            with torch.no_grad():
                return module(*inputs)

        return run
    return _session(flow, contents, inputs)


def _session(flow: Flow, contents: Any, inputs: Any) -> Callable[[], object]:
    import onnxruntime

    from steptime.rewrite.export_onnx import onnx_model

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    data = onnx_model(flow, contents).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    read = {each.name for each in session.get_inputs()}
    given = {_name(v.node): x.numpy() for v, x in zip(flow.inputs, inputs, strict=True) if _name(v.node) in read}
    return lambda: session.run(None, given)


def _name(node: Node) -> str:
    return str(node.attribute("name"))


def around(flow: Flow, match: Match) -> tuple[Flow, Flow]:
    """The part of a graph that a match removes, with its boundary as inputs, and its replacement.

    Raises:
        RefusedError: the part cannot be built alone.
    """
    old, _ = removed_and_added(flow, match.replace)
    inside = set(old) | {value.node for value in match.replace}
    inputs: dict[Value, Value] = {}
    own: dict[Value, None] = {}
    for node in sorted(inside, key=lambda node: node.number):
        for value in node.inputs:
            if value.node.op == "input":
                own.setdefault(value)
            elif value.node not in inside and value.node not in flow.constant and value.node.op not in SOURCES:
                name = f"boundary.{len(inputs)}"
                inputs.setdefault(value, flow.nodes.source("input", name, value.type))
    part = replace(
        flow, outputs=tuple(match.replace), names=tuple(f"out.{n}" for n in range(len(match.replace))), kept=()
    )
    before = substituted(part, inputs, {})
    after = substituted(part, {**inputs, **match.replace}, {})
    given = (*own, *inputs.values())
    return replace(before, inputs=given), replace(after, inputs=given)


def gain_here(flow: Flow, match: Match, backend: str = "eager") -> float | None:
    """Seconds that a match saves on this machine; 0: within the noise; None: it cannot be run alone.

    Args:
        flow: the graph.
        match: a place where a pass applies.
        backend: as for :func:`paired`.
    """
    try:
        before, after = paired(*around(flow, match), backend=backend)
    except (RefusedError, UserError, RuntimeError):
        return None
    return before - after if abs(before - after) > NOISE * before else 0.0
