"""An operator of a graph as a call of PyTorch, found by name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch.nn import functional

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Node, Value
from steptime.captured.record.values import TORCH_DTYPES
from steptime.errors import UserError, shorten

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """A call of PyTorch that computes a node."""

    function: Any
    arguments: tuple[Any, ...]
    """Positional arguments; a tensor is a :class:`Value`, lists may hold them."""
    keywords: Mapping[str, Any]
    taken: tuple[int | None, ...]
    """Index of each output of the node in the result; None: the result itself."""


AGAIN: Final = "again"
"""Attribute that keeps apart equal nodes: those that recomputation runs again, or that may not be shared; a number."""
SKIPPED: Final = frozenset({"draw", AGAIN, "layout", "pin_memory", "device"})
"""Attributes that do not change what is computed."""
_DTYPES: Final = ("dtype", "input_dtype", "out_dtype")


@lru_cache(maxsize=4096)
def _overloads(op: str) -> tuple[Any, ...]:
    space, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    return tuple(getattr(packet, each) for each in packet.overloads() if "out" not in each.split("_"))


def _numbers(node: Node) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Attributes as arguments, and positions of the members of lists of tensors."""
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
        portable: use a function that every device has, where one exists; it returns the first result only.

    Raises:
        UserError: PyTorch does not have the operator, or it runs on another device only.
    """
    special: Special | None = _view if node.op == "view" and node.attribute("dtype") is None else None
    special = special or (_widened if node.attribute("half_to_float") else None)
    special = special or next((row for prefix, row in PORTABLE.items() if node.op.startswith(prefix)), None)
    if special is not None and (portable or node.op not in NATIVE) and not node.op.endswith("backward"):
        return special(node)
    return call_of(node)


def call_of(node: Node) -> CallSpec:
    """The call of the operator itself, by its ATen overload.

    Raises:
        UserError: PyTorch does not have the operator, or it takes other arguments.
    """
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
    """Fused attention of any device as ``scaled_dot_product_attention``, which chooses the kernel."""
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
    """A view as ``reshape``, since a rewrite may have changed the strides that the view needs."""
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
    """A softmax of half precision with an fp32 result; only CUDA does both in one kernel."""
    function = functional.log_softmax if node.op.startswith("_log") else functional.softmax
    arguments = (node.input("self"), node.attribute("dim"))
    return CallSpec(function=function, arguments=arguments, keywords={"dtype": torch.float32}, taken=(None,))


#: Prefix of the names of operators that not every device has -> the portable function of PyTorch for them.
PORTABLE: Final[Mapping[str, Special]] = {
    "_scaled_dot_product_": _attention,
    "_fused_rms_norm": _rms,
}


NATIVE: Final = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Operators that match :data:`PORTABLE` and yet run on a CPU under their own name, with all their results."""
