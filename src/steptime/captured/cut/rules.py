"""How values lie on the tensor ranks, and what operators and views do to values that are cut: one rule per kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steptime.captured.graph import Node, Value

FEW: Final = 3
"""Projections that one weight joins, as queries, keys and values: such a dim is no dim of heads."""
TURNING: Final = ("t", "transpose", "permute", "numpy_T")
"""Looks that exchange the dims of a matrix."""
KEEPING: Final = ("detach", "alias", "_to_copy")
"""Looks, and the copy, that leave the dims in the order in which they lie."""


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


def turned(value: Value) -> bool:
    """Whether a matrix is the transpose of what lies in memory: of the looks at it an odd number exchange its dims."""
    out, node = False, value.node
    while node.op in (*TURNING, *KEEPING) and len(node.outputs[0].shape) == 2:
        out ^= node.op in TURNING
        node = node.inputs[0].node
    return out


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
Rule = Callable[[Node, Given], list[Layout]]

_MAPS = """
add sub rsub mul div neg abs relu threshold_backward clamp clamp_min clamp_max maximum minimum pow sqrt rsqrt exp log
sigmoid sigmoid_backward tanh tanh_backward gelu gelu_backward silu silu_backward hardswish hardswish_backward where
masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_not bitwise_and bitwise_or isnan sin cos
reciprocal square leaky_relu leaky_relu_backward elu elu_backward softplus softplus_backward mish mish_backward erf
addcmul addcdiv _to_copy to clone copy contiguous detach fill zero zeros_like ones_like empty_like full_like rand_like
bernoulli native_dropout native_dropout_backward hardtanh hardtanh_backward glu_jvp sign lerp _conj threshold
"""
MAPS: Final = frozenset(_MAPS.split())
"""Operators that treat every element apart."""
ADDITIONS: Final = frozenset({"add", "clone", "detach"})
"""Maps that a sum over ranks may wait for; what is added to one is added on one rank."""


def origins_of(given: Given) -> frozenset[str]:
    """All parameters that any of the values is cut because of."""
    return frozenset().union(*(each.origins for each in given))


def cut(given: Given) -> list[Layout]:
    """Those values that are cut."""
    return [each for each in given if each.dim is not None]


def elementwise(node: Node, given: Given) -> list[Layout]:
    """Maps: operands are cut along the same dim of the result, or do not have it."""
    out: list[Layout] = []
    origins = origins_of(cut(given))
    for output in node.outputs:
        rank = len(output.shape)
        dims = {each.dim + rank - len(v.type.shape) for v, each in zip(node.inputs, given, strict=True)
                if each.dim is not None}  # fmt: skip
        if len(dims) > 1:
            raise Uncut(origins)
        for dim in dims:
            _check_operands(node, given, rank, dim, origins)
        parts = max((each.parts for each in given), default=0)
        out += [Layout(dim, origins=origins, parts=parts) for dim in dims] or [WHOLE]
    return out


def _check_operands(node: Node, given: Given, rank: int, dim: int, origins: frozenset[str]) -> None:
    """A whole operand must not have the dim that the others are cut along."""
    for value, layout in zip(node.inputs, given, strict=True):
        shape = value.type.shape
        at = dim - (rank - len(shape))
        if layout.dim is None and 0 <= at < len(shape) and shape[at] > 1:
            raise Uncut(origins)


def reduction(node: Node, given: Given) -> list[Layout]:
    """Sums and means over dims; over the dim that is cut only a sum can be finished later."""
    x, rank = given[0], len(node.inputs[0].type.shape)
    if x.dim is None:
        return [WHOLE] * len(node.outputs)
    over = {each % rank for each in integers(node, "dim")} or set(range(rank))
    if x.dim in over:
        if node.op != "sum":
            raise Uncut(x.origins)
        return [Layout(partial=True, origins=x.origins)]
    kept = len(node.outputs[0].shape) == rank
    return [x.along(x.dim if kept else x.dim - sum(each < x.dim for each in over))] * len(node.outputs)


def along_dim(node: Node, given: Given) -> list[Layout]:
    """Softmax and scans: anything but the dim that they work along."""
    rank = len(node.inputs[0].type.shape)
    at = (integers(node, "dim") or (-1,))[0] % rank
    out = elementwise(node, given)
    if out[0].dim == at:
        raise Uncut(out[0].origins)
    return out


def log_softmax(node: Node, given: Given) -> list[Layout]:
    """Over a vocabulary that is cut, if only a loss takes it: ranks then exchange numbers of a row."""
    return elementwise(node, given)


def norm(node: Node, given: Given) -> list[Layout]:
    """Norms over the last dims, forward and backward."""
    shape = node.inputs[0].type.shape
    normed = len(integers(node, "normalized_shape")) or 1
    found = cut(given)
    if not found:
        return [WHOLE] * len(node.outputs)
    dim = found[0].dim
    if dim is None or any(each.dim != dim for each in found) or dim >= len(shape) - normed:
        raise Uncut(origins_of(found))
    out = []
    for output in node.outputs:
        lies = len(output.shape) == len(shape)
        out.append(found[0] if lies else Layout(partial=True, origins=found[0].origins))
    return out


def _dim_of_result(node: Node) -> int:
    """The dim of its result that an operator names, the first by default."""
    return (integers(node, "dim") or (0,))[0] % len(node.outputs[0].shape)


def joined(node: Node, given: Given) -> list[Layout]:
    """Concatenation: all members are cut alike."""
    dims = {each.dim for each in given}
    if len(dims) > 1:
        raise Uncut(origins_of(given))
    if node.op == "stack" and given[0].dim is not None:
        return [given[0].along(given[0].dim + (_dim_of_result(node) <= given[0].dim))]
    return [Layout(given[0].dim, origins=origins_of(given))] if given[0].dim is not None else [WHOLE]


def attention(node: Node, given: Given) -> list[Layout]:
    """Fused attention, forward and backward: cut by heads, dim 1 of (batch, heads, tokens, head).

    A mask may be whole: each rank takes the part of its heads.
    """
    found = cut(given)
    if not found:
        return [WHOLE] * len(node.outputs)
    origins = origins_of(found)
    for name, value, layout in zip(node.names, node.inputs, given, strict=True):
        shape = value.type.shape
        whole = layout.dim is None and len(shape) >= 3 and shape[1] > 1 and name not in MASKS
        if layout.dim not in (None, 1) or whole:
            raise Uncut(origins)
    return [Layout(1, origins=origins) if len(output.shape) >= 3 else WHOLE for output in node.outputs]


def products(left: str, right: str) -> Rule:
    """``left`` times ``right``; leading dims of a batch are cut alike."""

    def rule(node: Node, given: Given) -> list[Layout]:
        layout = dict(zip(node.names, given, strict=True))
        a, b = layout[left], layout[right]
        origins = a.origins | b.origins
        rank = len(node.outputs[0].shape)
        inner = (rank - 1, rank - 2)
        if a.dim is None and b.dim is None:
            return [WHOLE]
        if a.dim == inner[0] or b.dim == inner[1]:
            if (a.dim, b.dim) == inner:
                return [Layout(partial=True, origins=origins)]
            raise Uncut(origins)
        if rank == 3 and 0 in (a.dim, b.dim):
            if a.dim != b.dim:
                raise Uncut(origins)
            return [Layout(0, origins=origins, parts=max(a.parts, b.parts))]
        if a.dim is not None and b.dim is not None:
            raise Uncut(origins)
        return [Layout(a.dim if b.dim is None else b.dim, origins=origins, parts=max(a.parts, b.parts))]

    return rule


def look_up(node: Node, given: Given) -> list[Layout]:
    """A table that is cut by rows: each rank finds some of them."""
    layout = dict(zip(node.names, given, strict=True))
    table = layout.get("weight", WHOLE)
    if table.dim is None:
        return [WHOLE]
    if table.dim != 0:
        raise Uncut(table.origins)
    return [Layout(partial=True, origins=table.origins)]


def part_gradient(node: Node, given: Given) -> list[Layout]:
    """Gradient of a look at a part: zeros with the part in them."""
    x = given[0]
    if x.dim is None:
        return [WHOLE]
    grown = len(node.outputs[0].shape) - len(node.inputs[0].type.shape)
    at = _dim_of_result(node)
    if not grown and at == x.dim:
        raise Uncut(x.origins)
    return [x.along(x.dim + (grown and at <= x.dim))]


def label_loss(node: Node, given: Given) -> list[Layout]:
    """Negative log-likelihood of rows that are cut over the classes; its gradient is cut over them too."""
    found = cut(given)
    if not found:
        return [WHOLE] * len(node.outputs)
    if any(each.dim != 1 for each in found):
        raise Uncut(origins_of(found))
    return [Layout(1, origins=found[0].origins) if len(out.shape) == 2 else WHOLE for out in node.outputs]


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
MASKS: Final = ("attn_mask", "attn_bias")
PRODUCTS: Final[Mapping[str, tuple[str, str]]] = {
    "mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2"),
}  # fmt: skip
RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(MAPS, elementwise),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var_mean", "var", "logsumexp"), reduction),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "_safe_softmax", "cumsum"), along_dim),
    **dict.fromkeys(("_log_softmax", "_log_softmax_backward_data"), log_softmax),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), label_loss),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"), norm
    ),
    **dict.fromkeys(("slice_backward", "select_backward"), part_gradient),
    **dict.fromkeys(("cat", "stack"), joined),
    **{name: attention for base in _ATTENTION for name in (base, f"{base}_backward")},
    **{name: products(*operands) for name, operands in PRODUCTS.items()},
    "embedding": look_up,
}
"""Operator -> rule; all others need whole values."""


def parameter_of(value: Value) -> tuple[str, tuple[str, ...]] | None:
    """Name of the parameter that a value is a look at, and the looks (``t``, ``detach``, ...) from it to the value."""
    looks: list[str] = []
    node = value.node
    while node.op in ("t", "detach", "alias", "transpose", "view", "_to_copy"):
        looks.append(node.op)
        node = node.inputs[0].node
    name = node.attribute("name")
    return (str(name), tuple(reversed(looks))) if node.op == "parameter" else None
