"""Optimiser steps: operators over lists of tensors, and fused ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Final

from steptime.captured.cost.maps import MAPS, REDUCTIONS
from steptime.captured.cost.work import OperatorRow, Shape, moved, stored_bytes
from steptime.captured.graph import Node, Value
from steptime.cost.data_parallel import TENSORS_PER_LAUNCH, adam_flops, list_launches
from steptime.cost.elementwise import pointwise_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

FUSED: Final = ("adam", "adamw", "sgd", "adagrad")
_LISTS = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma
log log10 log1p log2 max maximum minimum mul neg norm pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh
trunc
"""
LISTS: Final = frozenset(_LISTS.split())
"""Maps and reductions that PyTorch has over lists of tensors too."""


def _read_bytes(node: Node) -> int:
    """Bytes of the lists; a tensor that stands at one place of two of them is read once.

    Parameters of equal blocks that were recorded once are one value at many places, and other tensors at each.
    """
    lists: dict[str, list[Value]] = {}
    for name, value in zip(node.names, node.inputs, strict=True):
        lists.setdefault(name, []).append(value)
    places = zip_longest(*lists.values())
    return sum(stored_bytes(value.type) for place in places for value in {*place} if value is not None)


def _lists(node: Node) -> dict[str, Num]:
    """Tensors and elements of the first list, and how many lists a launch walks over."""
    counts = Counter(node.names)
    first = node.names[0] if node.names else "self"
    members = [value.type for name, value in zip(node.names, node.inputs, strict=True) if name == first]
    lists = sum(count == len(members) for count in counts.values())
    return {
        "tensors": len(members), "elements": sum(member.elements for member in members), "operations": 1,
        "lists": max(lists, 1), "read_bytes": _read_bytes(node),
    }  # fmt: skip


def _launches(s: Shape) -> Num:
    """A result that is not written over a list is one more list."""
    lists = min(int(s["lists"] + 1 - s["inplace"]), max(TENSORS_PER_LAUNCH))
    return list_launches(s["tensors"], s["elements"], TENSORS_PER_LAUNCH[lists])


def _list_row(operations: int) -> OperatorRow:
    return OperatorRow(
        sizes=lambda node: {**_lists(node), "operations": operations}, vector_flops=Formula(pointwise_flops),
        launches=_launches, kernels=moved,
    )  # fmt: skip


_UNWRITTEN: Final = frozenset({"grads", "state_steps", "lr", "grad_scale", "found_inf"})
"""Arguments of fused optimisers that they only read."""


def _fused(node: Node) -> dict[str, Num]:
    """Weights and states are written; gradients only where they are unscaled on the way."""
    unwritten = _UNWRITTEN if node.input("grad_scale") is None else _UNWRITTEN - {"grads"}
    pairs = zip(node.names, node.inputs, strict=True)
    written = sum(stored_bytes(value.type) for name, value in pairs if name not in unwritten)
    return {**_lists(node), "written_bytes": written}


_FUSED = OperatorRow(sizes=_fused, vector_flops=Formula(adam_flops), launches=_launches, kernels=moved)
_MOVES = _list_row(0)

TABLE: Final[Mapping[str, OperatorRow]] = {
    **{
        f"_foreach_{name}": _list_row(count)
        for table in (MAPS, REDUCTIONS) for count, names in table.items() for name in names.split() if name in LISTS
    },
    "_foreach_powsum": _list_row(3), "_foreach_copy": _MOVES, "_foreach_clone": _MOVES, "_foreach_zero": OperatorRow(
        sizes=_lists, moved_bytes=lambda s: s["written_bytes"], launches=_launches, kernels=moved
    ),
    **{f"_fused_{name}": _FUSED for name in FUSED},
    "_amp_foreach_non_finite_check_and_unscale": _list_row(1), "_amp_update_scale": _list_row(1),
}  # fmt: skip
