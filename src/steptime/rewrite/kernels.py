"""Evaluation of graphs: operators as calls of PyTorch, found by name and arguments, on real tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from steptime.captured.graph import Node, Nodes, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops.calls import spec
from steptime.captured.record.values import TORCH_DTYPES
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import COMPOSITE, Flow
from steptime.rewrite.fused import opened, results_of

aten = torch.ops.aten


_WIDER: Final = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


def run(node: Node, known: Mapping[Node, tuple[Any, ...]], *, wide: bool, portable: bool = True) -> tuple[Any, ...]:
    """Results of a node on real tensors.

    Args:
        node: the operator.
        known: results of the nodes below it.
        wide: compute in fp64 instead of the graph's floating-point types.
        portable: as for :func:`spec`.
    """
    if node.op in COMPOSITE:
        return _run_fused(node, known, wide=wide)
    call = spec(node, portable=portable)

    def real(given: Any) -> Any:
        if isinstance(given, Value):
            return known[given.node][given.index]
        if isinstance(given, list):
            return [real(item) for item in given]
        return _WIDER.get(given, given) if wide and isinstance(given, torch.dtype) else given

    result = call.function(*map(real, call.arguments), **{name: real(item) for name, item in call.keywords.items()})
    return tuple(result if at is None else result[at] for at in call.taken)


def _run_fused(node: Node, known: Mapping[Node, tuple[Any, ...]], *, wide: bool) -> tuple[Any, ...]:
    steps = opened(Nodes(), node)
    inside = dict(known)
    for step in steps:
        inside[step] = run(step, inside, wide=wide)
    return tuple(inside[steps[at]][0] for at in results_of(node))


def as_tensor(given: Any, dtype: str, *, wide: bool) -> Any:
    """Contents of a source as a tensor of its element type, or of fp64."""
    tensor = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    kind = TORCH_DTYPES[dtype]
    return tensor.detach().to(_WIDER.get(kind, kind) if wide else kind)


def evaluate(
    flow: Flow, values: Iterable[Value], contents: Mapping[str, Any], *, wide: bool = False, seed: int = 0
) -> list[Any]:
    """Evaluate values of a graph.

    Args:
        flow: the graph, for its constants.
        values: the values.
        contents: name of each source -> tensor or array.
        wide: compute in fp64.
        seed: seed of random operators; draws with the same number are equal in two graphs.

    Raises:
        UserError: an operator cannot be run here, or the contents of a source are unknown.
    """
    wanted = list(values)
    known: dict[Node, tuple[Any, ...]] = {}
    with torch.no_grad():
        for node in _below_in_order(flow, wanted):
            if node.op in SOURCES:
                known[node] = (_source(flow, node, contents, wide=wide, seed=seed),)
                continue
            draw = node.attribute("draw")
            if draw is not None:
                torch.manual_seed(seed * 1_000_003 + int(str(draw)))
            known[node] = run(node, known, wide=wide, portable=not flow.training)
        return [known[value.node][value.index] for value in wanted]


def _below_in_order(flow: Flow, values: Iterable[Value]) -> Iterable[Node]:
    from steptime.captured.graph import topological

    return topological(value.node for value in values)


def _source(flow: Flow, node: Node, contents: Mapping[str, Any], *, wide: bool, seed: int) -> Any:
    name = str(node.attribute("name", ""))
    if name in flow.definitions:
        return evaluate(flow, [flow.definitions[name]], contents, wide=wide, seed=seed)[0]
    given = contents.get(name, flow.numbers.get(name))
    if given is None:
        raise UserError(f"the contents of {shorten(name)!r} are unknown")
    tensor = as_tensor(given, node.outputs[0].dtype, wide=wide)
    tensor = tensor.clone() if flow.training else tensor  # Batch norms in training overwrite their statistics.
    strides = node.outputs[0].strides
    if strides is not None and tuple(tensor.stride()) != strides and 0 not in strides:
        tensor = torch.empty_strided(node.outputs[0].shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor


def random_contents(flow: Flow, seed: int = 0, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Random contents of every source of a graph, with the spread of initialised weights.

    Integers are 0 or 1, which are rows of every table; variances and states are positive. Contents in ``given`` are
    kept.
    """
    torch.manual_seed(seed)
    out: dict[str, Any] = dict(given or {})
    folded = _below_in_order(flow, flow.definitions.values())
    for node in dict.fromkeys((*flow.order, *folded)):
        name = str(node.attribute("name", ""))
        if node.op not in SOURCES or name in out or name in flow.definitions or name in flow.numbers:
            continue
        type = node.outputs[0]
        dtype = TORCH_DTYPES[type.dtype]
        if not dtype.is_floating_point:
            out[name] = torch.randint(0, 2, type.shape).to(dtype)
            continue
        fan = math.prod(type.shape[1:]) if node.op == "parameter" and type.rank > 1 else 1
        made = torch.randn(type.shape, dtype=torch.float64) / math.sqrt(max(fan, 1))
        positive = node.op == "state" or "var" in name.rpartition(".")[2]
        out[name] = made.abs() + 0.5 if positive else made
    return out
