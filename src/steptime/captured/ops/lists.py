"""Operators on lists of tensors: optimisers and their steps."""

from __future__ import annotations

import math
from collections import Counter
from itertools import zip_longest
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops.labels import Dim, OperatorDims
from steptime.captured.ops.operator import Operator
from steptime.captured.ops.placement import R, shard
from steptime.captured.ops.work import OperatorWork, Shape, moved, stored_bytes
from steptime.cost.data_parallel import TENSORS_PER_LAUNCH, adam_flops, list_launches
from steptime.cost.elementwise import pointwise_flops
from steptime.estimate.operators import Formula
from steptime.num import Num


def _read_bytes(node: Node) -> int:
    """Bytes of the lists; a tensor at the same position of two lists is read once.

    Equal blocks are recorded once: one value then stands at many positions for the distinct tensors of these blocks.
    """
    lists: dict[str, list[Value]] = {}
    for name, value in zip(node.names, node.inputs, strict=True):
        lists.setdefault(name, []).append(value)
    places = zip_longest(*lists.values())
    return sum(stored_bytes(value.type) for place in places for value in {*place} if value is not None)


def _list_sizes(node: Node) -> dict[str, Num]:
    """Tensors and elements of the first list, and the number of lists that a launch walks over."""
    counts = Counter(node.names)
    first = node.names[0] if node.names else "self"
    members = [value.type for name, value in zip(node.names, node.inputs, strict=True) if name == first]
    lists = sum(count == len(members) for count in counts.values())
    return {
        "tensors": len(members), "elements": sum(member.elements for member in members), "operations": 1,
        "lists": max(lists, 1), "read_bytes": _read_bytes(node),
    }  # fmt: skip


def _launches(s: Shape) -> Num:
    """Launches over the lists; a result that is not written in place is one more list."""
    lists = min(int(s["lists"] + 1 - s["inplace"]), max(TENSORS_PER_LAUNCH))
    return list_launches(s["tensors"], s["elements"], TENSORS_PER_LAUNCH[lists])


def _list_row(operations: int) -> OperatorWork:
    return OperatorWork(
        sizes=lambda node: {**_list_sizes(node), "operations": operations}, vector_flops=Formula(pointwise_flops),
        launches=_launches, kernels=moved,
    )  # fmt: skip


_UNWRITTEN: Final = frozenset({"grads", "state_steps", "lr", "grad_scale", "found_inf"})
"""Arguments that fused optimisers only read."""


def _fused(node: Node) -> dict[str, Num]:
    """Sizes of a fused optimiser: weights and states are written, and gradients where it unscales them."""
    unwritten = _UNWRITTEN if node.input("grad_scale") is None else _UNWRITTEN - {"grads"}
    pairs = zip(node.names, node.inputs, strict=True)
    written = sum(stored_bytes(value.type) for name, value in pairs if name not in unwritten)
    return {**_list_sizes(node), "written_bytes": written}


def listed(node: Node) -> OperatorDims:
    """Dims of operators on lists: dim i is dim i of every tensor that has one.

    The placements of the tensors of a list may differ: :func:`~steptime.sharding.local.members` treats each by itself.
    """
    types = [*(value.type for value in node.inputs), *node.outputs]
    dims = []
    for at in range(max((type.rank for type in types), default=0)):
        placements = tuple(shard(at) if type.rank > at and type.shape[at] > 1 else R for type in types)
        sizes = {type.shape[at] for type, placement in zip(types, placements, strict=True) if placement.sharded}
        inputs, outputs, size = placements[: len(node.inputs)], placements[len(node.inputs) :], math.gcd(*sizes)
        equal = len(sizes) > 1
        dims.append(Dim(name=f"d{at}", size=size, kind="batch", inputs=inputs, outputs=outputs, equal=equal))
    return OperatorDims(dims=tuple(dims))


_FUSED = OperatorWork(sizes=_fused, vector_flops=Formula(adam_flops), launches=_launches, kernels=moved)
_ZERO = OperatorWork(sizes=_list_sizes, moved_bytes=lambda s: s["written_bytes"], launches=_launches, kernels=moved)


def _row(names: str, work: OperatorWork) -> Operator:
    return Operator(names=names, family="optimiser", work=work, dims=listed)


_LISTS: Final = {
    0: "sign copy clone",
    1: "abs add ceil clamp_max clamp_min floor frac lerp max maximum minimum mul neg round sub trunc",
    2: "addcmul",
    3: "addcdiv norm powsum",
    4: "div exp expm1 log log10 log1p log2 reciprocal rsqrt sigmoid sqrt",
    8: "acos asin atan cos cosh erf erfc lgamma pow sin sinh tan tanh",
}
"""Vector operations per element -> maps and reductions that PyTorch also has for lists of tensors."""
OPTIMISERS: Final = (
    *(
        _row(" ".join(f"_foreach_{name}" for name in names.split()), _list_row(operations))
        for operations, names in _LISTS.items()
    ),
    _row("_foreach_zero", _ZERO),
    _row("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", _FUSED),
    _row("_amp_foreach_non_finite_check_and_unscale _amp_update_scale", _list_row(1)),
)
"""Steps of optimisers over lists."""
