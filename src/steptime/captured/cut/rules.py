"""How values lie on the tensor ranks, and what operators and views do to values that are cut: one rule per kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops import dims_of
from steptime.captured.ops.labels import Dim
from steptime.captured.ops.norms import LOSSES
from steptime.captured.ops.placement import Placement

FEW: Final = 3
"""Projections that one weight joins, as queries, keys and values: such a dim is no dim of heads."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Whole on every rank, cut along one dim, or a sum whose terms the ranks have."""

    dim: int | None = None
    partial: bool = False
    origins: frozenset[str] = frozenset()
    """Parameters that it is cut because of."""
    parts: int = 0
    """Size of the dim before it was joined with others; 0: it was not."""

    @property
    def whole(self) -> bool:
        """Whether every rank has all of it."""
        return self.dim is None and not self.partial

    def along(self, dim: int) -> Layout:
        """Cut along another dim."""
        return Layout(dim, origins=self.origins, parts=self.parts)


WHOLE: Final = Layout()


class Uncut(Exception):
    """An operator needs all of a value that is cut; `origins` are the parameters to blame."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(origins)))
        self.origins = origins


def integers(node: Node, *names: str) -> tuple[int, ...]:
    """The first attribute of those names, as integers."""
    for name in names:
        given = node.attribute(name)
        if isinstance(given, int) and not isinstance(given, bool):
            return (given,)
        if isinstance(given, tuple):
            return tuple(int(item) for item in given if isinstance(item, int))
    return ()


def of_view(node: Node, index: int, given: Layout, heads: frozenset[int], few: int = FEW) -> Layout:
    """Layout of one output of a look at a value.

    Raises:
        Uncut: the look mixes the dim that is cut with others.
    """
    if given.dim is None:
        return given
    old, new = node.inputs[0].type.shape, node.outputs[index].shape
    parts = _joined_parts(old, new, given.dim)
    if parts:
        return Layout(given.dim - 1, origins=given.origins, parts=parts)
    if given.parts and _joined_parts(new, old, given.dim + 1) == given.parts:
        return Layout(given.dim + 1, origins=given.origins)
    found = _moved(node, old, new, given.dim, frozenset({given.parts}) if given.parts else heads, few)
    if found is None:
        raise Uncut(given.origins)
    parts = old[given.dim] if new[found] > old[given.dim] else 0 if new[found] < old[given.dim] else given.parts
    return Layout(found, origins=given.origins, parts=parts)


def _joined_parts(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int:
    """Heads of a width that is split while they are joined with the dim before: (batch, width) to (batch heads, head).

    >>> _joined_parts((8, 2, 64), (8, 8, 16), 2), _joined_parts((8, 2, 64), (8, 2, 64), 2)
    (4, 0)
    """
    same = len(old) == len(new) == dim + 1 and dim > 0 and old[: dim - 1] == new[: dim - 1]
    heads = old[dim] // new[dim] if same and new[dim] else 0
    return heads if heads > 1 and heads * new[dim] == old[dim] and new[dim - 1] == old[dim - 1] * heads else 0


def _moved(
    node: Node, old: tuple[int, ...], new: tuple[int, ...], dim: int, heads: frozenset[int], few: int = FEW
) -> int | None:
    op, rank = node.op, len(old)
    if old == new and op not in ("transpose", "permute", "t"):
        return dim
    if op == "t":
        return rank - 1 - dim
    if op == "transpose":
        a, b = (each % rank for each in (*integers(node, "dim0"), *integers(node, "dim1")))
        return {a: b, b: a}.get(dim, dim)
    if op == "permute":
        return [each % rank for each in integers(node, "dims")].index(dim)
    if op in ("unsqueeze", "squeeze", "select", "unbind", "expand"):
        return _resized(node, op, old, new, dim)
    if op in ("slice", "split", "split_with_sizes", "chunk", "narrow"):
        return dim
    return reshaped(old, new, dim, heads, few)


def _resized(node: Node, op: str, old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    if op == "expand":
        return dim + len(new) - len(old)
    if op == "unsqueeze":
        at = integers(node, "dim")[0] % len(new)
        return dim + (at <= dim)
    if op == "squeeze":
        return reshaped(old, new, dim, frozenset())
    at = (integers(node, "dim") or (0,))[0] % len(old)
    return None if at == dim else dim - (at < dim)


def reshaped(old: tuple[int, ...], new: tuple[int, ...], dim: int, heads: frozenset[int], few: int = FEW) -> int | None:
    """Dim of a reshaped tensor along which it is cut; None where the cut would not be one of the new dims.

    Dims that are joined are cut where the joined one is. Of a dim that is split the part that counts heads is cut, else
    the last but one that is larger than ``few``: weights can be stored in any order of rows, so that each rank has its
    heads.

    >>> reshaped((2, 8, 12), (2, 8, 3, 4), 2, frozenset({3}))
    2
    >>> reshaped((2, 8, 12), (16, 12), 2, frozenset())
    1
    """
    groups = _groups(old, new)
    if groups is None:
        return None
    for before, after in groups:
        if dim not in before:
            continue
        wide = [n for n in after if new[n] > 1]
        if len(wide) <= 1:
            return wide[0] if wide else None
        if len([n for n in before if old[n] > 1]) > 1:
            return None
        counted = [n for n in wide if new[n] in heads]
        wide = [n for n in wide if new[n] > few] or wide
        if not counted and len(wide) == 1:
            return wide[0]
        return counted[-1] if counted else wide[-2]
    return None


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]] | None:
    """Dims that go over into each other."""
    if math.prod(old) != math.prod(new):
        return None
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [], []
        left = right = 1
        while True:
            if i < len(old) and (left <= right or j >= len(new)):
                left *= old[i]
                before.append(i)
                i += 1
            elif j < len(new):
                right *= new[j]
                after.append(j)
                j += 1
            if (left == right and before and after) or (i >= len(old) and j >= len(new)):
                break
        out.append((before, after))
    return out


Given = Sequence[Layout]

ADDITIONS: Final = frozenset({"add", "clone", "detach"})
"""Operators that a sum over ranks may wait for; what is added to one is added on one rank."""
LOSS_NAMES: Final = frozenset(name for row in LOSSES for name in row.names.split())
"""Losses."""
CLASSES: Final = frozenset({"_log_softmax", "_log_softmax_backward_data"})
"""Softmax over a vocabulary that is cut, if only a loss takes it: ranks then exchange numbers of a row."""
MASKS: Final = ("attn_mask", "attn_bias")
"""Arguments of attention that may be whole: each rank takes the part of its heads."""


def origins_of(given: Given) -> frozenset[str]:
    """All parameters that any of the values is cut because of."""
    return frozenset().union(*(each.origins for each in given))


def cut(given: Given) -> list[Layout]:
    """Those values that are cut."""
    return [each for each in given if each.dim is not None]


def followed(node: Node, given: Given) -> list[Layout]:
    """Layouts of the outputs of an operator whose inputs lie as given, from the labels of its dims.

    Raises:
        Uncut: no dim of the operator is cut like that without an exchange inside it.
    """
    found = cut(given)
    if not found:
        return [WHOLE] * len(node.outputs)
    origins = origins_of(found)
    parts = max(each.parts for each in found)
    if node.op == "cat" and len(found) == len(given) and len({each.dim for each in found}) == 1:
        # Along the dim that is cut too: weights can be stored in any order, so that each rank joins its own parts.
        return [Layout(found[0].dim, origins=origins)]
    known = dims_of(node)
    dim = None if known is None else next((each for each in known.dims if _is_cut(each, node, given)), None)
    if dim is None:
        raise Uncut(origins)
    return [_layout(node, placement, origins, parts) for placement in dim.outputs]


def _is_cut(dim: Dim, node: Node, given: Given) -> bool:
    """Whether all inputs lie as a split of the dim has them."""
    if dim.kind not in ("batch", "contracted") and not (dim.kind == "exchanged" and node.op in CLASSES):
        return False
    for name, placement, layout in zip(node.names, dim.inputs, given, strict=True):
        whole = layout.dim is None and (not placement.sharded or name in MASKS)
        if not whole and (layout.dim is None or layout.dim != placement.dim):
            return False
    return True


def _layout(node: Node, placement: Placement, origins: frozenset[str], parts: int) -> Layout:
    if placement.dim is not None:
        return Layout(placement.dim, origins=origins, parts=parts)
    # What a loss adds up over classes is one of the numbers that its softmax exchanges.
    return Layout(partial=True, origins=origins) if placement.partial and node.op not in LOSS_NAMES else WHOLE


def parameter_of(value: Value) -> tuple[str, tuple[str, ...]] | None:
    """Name of the parameter that a value is a look at, and the looks (``t``, ``detach``, ...) from it to the value."""
    looks: list[str] = []
    node = value.node
    while node.op in ("t", "detach", "alias", "transpose", "view", "_to_copy"):
        looks.append(node.op)
        node = node.inputs[0].node
    name = node.attribute("name")
    return (str(name), tuple(reversed(looks))) if node.op == "parameter" else None
