"""What a rewrite gains on this machine's CPU: both graphs run by turns on one thread, in CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Final

from steptime.captured.graph import Node, Value
from steptime.captured.graph.program import SOURCES
from steptime.errors import UserError
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match

BUDGET_S: Final = 0.4
"""CPU time for one pair of graphs."""
LEAST_RUNS: Final = 5
NOISE: Final = 0.03
"""Relative difference of two equal graphs that are run by turns."""


def paired(before: Flow, after: Flow, budget_s: float = BUDGET_S, backend: str = "eager") -> tuple[float, float]:
    """Median CPU seconds of one thread of both graphs, run by turns.

    Args:
        before: a graph.
        after: an equivalent one.
        budget_s: CPU time to spend.
        backend: ``eager``, or ``onnxruntime``.

    Raises:
        UserError: an operator cannot be run here.
    """
    runs = [_runner(flow, backend) for flow in (before, after)]
    times: list[list[float]] = [[], []]
    for run in runs:
        run()
    spent = 0.0
    while spent < budget_s or len(times[0]) < LEAST_RUNS:
        for run, found in zip(runs, times, strict=True):
            start = time.thread_time()
            run()
            found.append(time.thread_time() - start)
            spent += found[-1]
    return median(times[0]), median(times[1])


def _runner(flow: Flow, backend: str) -> Callable[[], object]:
    import torch

    from steptime.rewrite.export_torch import graph_module
    from steptime.rewrite.kernels import as_tensor, random_contents

    torch.set_num_threads(1)
    read = replace(flow, outputs=(*flow.outputs, *flow.inputs))  # also what this one of the two graphs leaves unread
    contents = random_contents(read)
    inputs = [as_tensor(contents[_name(v.node)], v.type.dtype, wide=False) for v in flow.inputs]
    if backend == "eager":
        module = graph_module(flow, contents)

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
    """The part of a graph that a match removes, with its boundary as inputs, and what it becomes.

    Raises:
        RefusedError: it cannot be made by itself.
    """
    old, _ = removed_and_added(flow, match.replace)
    inside = set(old) | {value.node for value in match.replace}
    inputs: dict[Value, Value] = {}
    own: dict[Value, None] = {}
    for node in sorted(inside, key=lambda node: node.number):
        for value in node.inputs:
            if value.node.op == "input":
                own.setdefault(value)
            elif value.node not in inside and not _is_steady(flow, value.node):
                name = f"boundary.{len(inputs)}"
                inputs.setdefault(value, flow.nodes.source("input", name, value.type))
    part = replace(
        flow, outputs=tuple(match.replace), names=tuple(f"out.{n}" for n in range(len(match.replace))), kept=()
    )
    before = substituted(part, inputs, {})
    after = substituted(part, {**inputs, **match.replace}, {})
    given = (*own, *inputs.values())
    return replace(before, inputs=given), replace(after, inputs=given)


def _is_steady(flow: Flow, node: Node) -> bool:
    return node in flow.constant or node.op in SOURCES


def gain_here(flow: Flow, match: Match, backend: str = "eager") -> float | None:
    """Seconds that a match saves where it runs on this machine; 0 within the noise, None where it cannot be run alone.

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
