"""Measured times of single operators on this machine, cached by kind."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from steptime.captured.graph import Node, Nodes
from steptime.errors import UserError
from steptime.rewrite.flow import Flow
from steptime.rewrite.measuring import runner

BUDGET_S: Final = 0.02
"""Least CPU seconds spent on one operator."""
LEAST_RUNS: Final = 5


@dataclass(frozen=True, slots=True)
class Clock:
    """CPU seconds of operators on one thread; equal operators, by types and attributes, are run once."""

    known: dict[object, float] = field(default_factory=dict)

    def __call__(self, node: Node) -> float:
        """Median seconds of a node.

        Raises:
            UserError: it cannot be run here.
        """
        types = tuple(value.type for value in node.inputs)
        attributes = tuple(pair for pair in node.attributes if pair[0] not in ("draw", "again"))
        same = tuple(node.inputs.index(value) for value in node.inputs)
        key = (node.op, types, attributes, node.outputs, same)
        if key not in self.known:
            self.known[key] = _seconds(node)
        return self.known[key]


def _seconds(node: Node) -> float:
    nodes = Nodes()
    given = {value: nodes.source("input", f"x.{n}", value.type) for n, value in enumerate(dict.fromkeys(node.inputs))}
    made = nodes.node(node.op, tuple(given[v] for v in node.inputs), node.names, node.attributes, node.outputs)
    outputs = tuple(made.value(index) for index in range(len(made.outputs)))
    names = tuple(f"out.{index}" for index in range(len(outputs)))
    flow = Flow(name=node.op, nodes=nodes, outputs=outputs, names=names, places={}, inputs=tuple(given.values()))
    try:
        run = runner(flow, "eager")
        run()
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(f"{node.op} cannot be timed on this machine: {str(error).splitlines()[0]}") from None
    times: list[float] = []
    while sum(times) < BUDGET_S or len(times) < LEAST_RUNS:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return median(times)
