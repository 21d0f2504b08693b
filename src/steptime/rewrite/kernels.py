"""The operators of a graph as calls of PyTorch: found by name and arguments, and run on real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch.nn import functional

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Node, Nodes, Value
from steptime.captured.graph.program import SOURCES
from steptime.captured.record.values import TORCH_DTYPES
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import AGAIN, COMPOSITE, Flow
from steptime.rewrite.fused import opened, results_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """A call of PyTorch that computes a node."""

    function: Any
    arguments: tuple[Any, ...]
    """Positional arguments; a tensor is a :class:`Value`, lists may hold them."""
    keywords: Mapping[str, Any]
    taken: tuple[int | None, ...]
    """Where each output of the node is in the result; None: the result itself."""


SKIPPED: Final = frozenset({"draw", AGAIN, "layout", "pin_memory", "device"})
"""Attributes that do not change what is computed."""
_DTYPES: Final = ("dtype", "input_dtype", "out_dtype")
_WIDER: Final = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


@lru_cache(maxsize=4096)
def _overloads(op: str) -> tuple[Any, ...]:
    space, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    return tuple(getattr(packet, each) for each in packet.overloads() if "out" not in each.split("_"))


def _numbers(node: Node) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Attributes as arguments, and where members of lists stand."""
    given: dict[str, Any] = {}
    places: dict[str, tuple[int, ...]] = {}
    for name, value in node.attributes:
        if name.endswith(".at") and isinstance(value, tuple):
            places[name.removesuffix(".at")] = tuple(int(str(n)) for n in value)
        elif name not in SKIPPED:
            name = "storage_offset" if name == "offset" and node.op.startswith("as_strided") else name
            given[name] = _plain(name, value)
    return given, places


def _plain(name: str, value: Any) -> Any:
    if name in _DTYPES and isinstance(value, str):
        return TORCH_DTYPES[value] if value in TORCH_DTYPES else getattr(torch, value.removeprefix("torch."))
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


def _fits(overload: Any, tensors: Mapping[str, Sequence[Value]], numbers: Mapping[str, Any]) -> bool:
    known = {argument.name: argument for argument in parts.schema_of(overload).arguments}
    if not set(tensors) | set(numbers) <= set(known):
        return False
    lists = {len(tensors[name]) for name in tensors if "List" in str(known[name].type)}
    if len(lists) > 1 and parts.schema_of(overload).name.startswith("aten::_foreach"):
        return False  # one tensor for all of them is another overload
    for name, argument in known.items():
        kind = str(argument.type)
        if name in tensors:
            if "Tensor" not in kind or ("List" not in kind and len(tensors[name]) != 1):
                return False
        elif name in numbers:
            if "Tensor" in kind and not isinstance(numbers[name], list):
                return False
            if kind in ("int", "float", "bool", "number") and isinstance(numbers[name], (list, str)):
                return False
            if "List" in kind and not isinstance(numbers[name], list) and "Optional" not in kind:
                return False
            if "str" in kind and not isinstance(numbers[name], str):  # dims by name: a tensor has none
                return False
        elif not argument.has_default_value() and "Optional" not in kind:
            return False
    return True


Special = Callable[[Node], CallSpec]


def spec(node: Node, *, portable: bool = True) -> CallSpec:
    """The call that computes a node.

    Args:
        node: the operator.
        portable: by a function that every device has, where there is one; it gives the first result only.

    Raises:
        UserError: PyTorch does not have the operator, or it runs on another device only.
    """
    special: Special | None = _view if node.op == "view" and node.attribute("dtype") is None else None
    special = special or (_widened if node.attribute("half_to_float") else None)
    special = special or next((row for prefix, row in PORTABLE.items() if node.op.startswith(prefix)), None)
    if special is not None and (portable or node.op not in NATIVE) and not node.op.endswith("backward"):
        return special(node)
    tensors: dict[str, list[Value]] = {}
    for name, value in zip(node.names, node.inputs, strict=True):
        tensors.setdefault(name, []).append(value)
    numbers, places = _numbers(node)
    overload = next((each for each in _overloads(node.op) if _fits(each, tensors, numbers)), None)
    if overload is None:
        raise UserError(f"PyTorch has no operator {shorten(node.op)!r} that takes what this graph gives it")
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for place, argument in enumerate(parts.schema_of(overload).arguments):
        name = argument.name
        if name not in tensors and name not in numbers and argument.has_default_value():
            continue
        given: Any = numbers.get(name)
        if name in tensors:
            many = "List" in str(argument.type)
            given = _listed(tensors[name], places.get(name)) if many else tensors[name][0]
        if argument.kwarg_only or len(positional) < place:
            keywords[name] = given
        else:
            positional.append(given)
    return CallSpec(function=overload, arguments=tuple(positional), keywords=keywords, taken=_taken(node, overload))


def _listed(values: Sequence[Value], places: tuple[int, ...] | None) -> list[Value | None]:
    if places is None:
        return list(values)
    out: list[Value | None] = [None] * (places[-1] + 1)
    for place, value in zip(places, values, strict=True):
        out[place] = value
    return out


def _taken(node: Node, overload: Any) -> tuple[int | None, ...]:
    returns = parts.schema_of(overload).returns
    count = len(node.outputs)
    if len(returns) == 1:
        return (None,) if str(returns[0].type) == "Tensor" else tuple(range(count))
    tensors = [n for n, each in enumerate(returns) if str(each.type) == "Tensor"]
    mask = node.attribute("output_mask")
    if isinstance(mask, tuple) and len(mask) == len(tensors):
        tensors = [n for n, wanted in zip(tensors, mask, strict=True) if wanted]
    return tuple(tensors[:count])


def _attention(node: Node) -> CallSpec:
    """Any device's fused attention as PyTorch's own function, which chooses the kernel."""
    keywords: dict[str, Any] = {
        "is_causal": bool(node.attribute("is_causal", False)),
        "dropout_p": float(str(node.attribute("dropout_p", 0.0))),
    }
    mask = node.input("attn_mask") or node.input("attn_bias")
    if mask is not None:
        keywords["attn_mask"] = mask
    scale = node.attribute("scale")
    if scale is not None:
        keywords["scale"] = float(str(scale))
    arguments = tuple(node.input(name) for name in ("query", "key", "value"))
    query, key = (value.type.shape for value in arguments[:2] if value is not None)
    if len(query) > 3 and query[-3] != key[-3]:
        keywords["enable_gqa"] = True
    return CallSpec(
        function=functional.scaled_dot_product_attention, arguments=arguments, keywords=keywords, taken=(None,)
    )


def _view(node: Node) -> CallSpec:
    """A reshape, which is the view where the strides allow it: a rewrite may have changed them."""
    return CallSpec(
        function=aten.reshape.default,
        arguments=(node.inputs[0], list(node.outputs[0].shape)),
        keywords={},
        taken=(None,),
    )


def _rms(node: Node) -> CallSpec:
    shape = node.attribute("normalized_shape")
    arguments = (node.input("input"), list(shape) if isinstance(shape, tuple) else shape)
    keywords = {"weight": node.input("weight"), "eps": node.attribute("eps")}
    return CallSpec(function=functional.rms_norm, arguments=arguments, keywords=keywords, taken=(None,))


def _widened(node: Node) -> CallSpec:
    """A softmax of half precision that gives fp32, which one kernel does on CUDA alone."""
    function = functional.log_softmax if node.op.startswith("_log") else functional.softmax
    arguments = (node.input("self"), node.attribute("dim"))
    return CallSpec(function=function, arguments=arguments, keywords={"dtype": torch.float32}, taken=(None,))


#: Beginning of the name of an operator that not every device has -> the function of PyTorch that does the same.
PORTABLE: Final[Mapping[str, Special]] = {
    "_scaled_dot_product_": _attention,
    "_fused_rms_norm": _rms,
}


NATIVE: Final = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Operators of the table of portable functions that run here under their own name, with all their results."""


def run(node: Node, known: Mapping[Node, tuple[Any, ...]], *, wide: bool, portable: bool = True) -> tuple[Any, ...]:
    """Results of a node on real tensors.

    Args:
        node: the operator.
        known: results of the nodes below it.
        wide: compute in fp64 whatever the graph says.
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
    wanted = TORCH_DTYPES[dtype]
    if wide:
        wanted = _WIDER.get(wanted, wanted)
    return tensor.detach().to(wanted)


def evaluate(
    flow: Flow, values: Iterable[Value], contents: Mapping[str, Any], *, wide: bool = False, seed: int = 0
) -> list[Any]:
    """Tensors of values.

    Args:
        flow: the graph, for its constants.
        values: what is asked for.
        contents: name of each source -> tensor or array.
        wide: compute in fp64.
        seed: of what random operators draw; the same draw of two graphs is equal.

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
    tensor = tensor.clone() if flow.training else tensor  # A batch norm in training writes over its statistics.
    strides = node.outputs[0].strides
    if strides is not None and tuple(tensor.stride()) != strides and 0 not in strides:
        tensor = torch.empty_strided(node.outputs[0].shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor


def random_contents(flow: Flow, seed: int = 0, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Contents for every source of a graph that a check needs: small numbers, spread as a trained weight's.

    Integers are 0 and 1, which every table has rows for; variances and states are positive. ``given`` comes first.
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
