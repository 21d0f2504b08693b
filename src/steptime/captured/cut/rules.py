"""Layouts of values on the tensor ranks, and the rules by which operators and views propagate them."""

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
"""Largest number of projections that one weight joins (queries, keys, values): such a dim does not count heads."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a value: whole on every rank, cut along one dim, or partial (each rank has a term of a sum)."""

    dim: int | None = None
    partial: bool = False
    origins: frozenset[str] = frozenset()
    """Parameters whose cuts are the reason for this layout."""
    parts: int = 0
    """Size of the dim before it was merged with others; 0: it was not merged."""

    @property
    def whole(self) -> bool:
        """True if every rank has the whole value."""
        return self.dim is None and not self.partial

    def along(self, dim: int) -> Layout:
        """The layout with the cut along another dim."""
        return Layout(dim, origins=self.origins, parts=self.parts)


WHOLE: Final = Layout()


class Uncut(Exception):
    """An operator needs the whole of a value that is cut; `origins` are the parameters to blame."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(origins)))
        self.origins = origins


def integers(node: Node, *names: str) -> tuple[int, ...]:
    """The first attribute with one of the names, as integers."""
    for name in names:
        given = node.attribute(name)
        if isinstance(given, int) and not isinstance(given, bool):
            return (given,)
        if isinstance(given, tuple):
            return tuple(int(item) for item in given if isinstance(item, int))
    return ()


def of_view(node: Node, index: int, given: Layout, heads: frozenset[int], few: int = FEW) -> Layout:
    """Layout of one output of a view of a value.

    Raises:
        Uncut: the view mixes the dim that is cut with others.
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
    """Heads of a width that a view splits and merges with the previous dim: (batch, width) to (batch heads, head).

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
    """Dim of a reshaped tensor along which it is cut; None if that is none of the new dims.

    Merged dims are cut along the merged dim. If a dim is split, the new dim that counts heads is cut, else the last but
    one that is larger than ``few``: weights can be stored in any order of rows, so that each rank has its heads.

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
    """Groups of old and new dims with equal products."""
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
"""Operators that can run before a sum over ranks is finished; an addend is then added on one rank."""
LOSS_NAMES: Final = frozenset(name for row in LOSSES for name in row.names.split())
"""Names of the losses."""
CLASSES: Final = frozenset({"_log_softmax", "_log_softmax_backward_data"})
"""Softmax over a vocabulary that is cut, if only a loss reads it: ranks then exchange a few numbers per row."""
MASKS: Final = ("attn_mask", "attn_bias")
"""Arguments of attention that may be whole: each rank uses the part of its heads."""


def origins_of(given: Given) -> frozenset[str]:
    """Union of the origins of the layouts."""
    return frozenset().union(*(each.origins for each in given))


def cut(given: Given) -> list[Layout]:
    """Layouts that are cut."""
    return [each for each in given if each.dim is not None]


def followed(node: Node, given: Given) -> list[Layout]:
    """Layouts of the outputs of an operator from those of its inputs, by the labels of its dims.

    Raises:
        Uncut: no dim of the operator can be cut so without an exchange inside it.
    """
    found = cut(given)
    if not found:
        return [WHOLE] * len(node.outputs)
    origins = origins_of(found)
    parts = max(each.parts for each in found)
    if node.op == "cat" and len(found) == len(given) and len({each.dim for each in found}) == 1:
        # Also along the cut dim: weights can be stored in any order, so that each rank joins its own parts.
        return [Layout(found[0].dim, origins=origins)]
    known = dims_of(node)
    dim = None if known is None else next((each for each in known.dims if _is_cut(each, node, given)), None)
    if dim is None:
        raise Uncut(origins)
    return [_layout(node, placement, origins, parts) for placement in dim.outputs]


def _is_cut(dim: Dim, node: Node, given: Given) -> bool:
    """True if all inputs have the placements of a split along the dim."""
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
    # The sum of a loss over classes is one of the numbers that its softmax exchanges.
    return Layout(partial=True, origins=origins) if placement.partial and node.op not in LOSS_NAMES else WHOLE


def parameter_of(value: Value) -> tuple[str, tuple[str, ...]] | None:
    """Name of the parameter of which a value is a view, and the views (``t``, ``detach``, ...) between them."""
    looks: list[str] = []
    node = value.node
    while node.op in ("t", "detach", "alias", "transpose", "view", "_to_copy"):
        looks.append(node.op)
        node = node.inputs[0].node
    name = node.attribute("name")
    return (str(name), tuple(reversed(looks))) if node.op == "parameter" else None
