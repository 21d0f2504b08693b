"""Element-wise operators: maps, and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.captured.graph import FLOATS, Node
from steptime.captured.ops import processor
from steptime.captured.ops.labels import OperatorDims, labelled, numbered, right_aligned, terms_of
from steptime.captured.ops.operator import Dims, Measured, Operator
from steptime.captured.ops.pieces import shape_of_output
from steptime.captured.ops.processor import arithmetic
from steptime.captured.ops.work import KernelCall, OperatorWork, Shape, as_operator, moved
from steptime.cost.elementwise import pointwise_flops, residual_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

GRADIENTS: Final = ("grad_output", "grad", "grad_out")
"""Names of the incoming gradient, in which every backward pass is linear."""


class Elementwise:
    """Dims of an element-wise operator: all dims of its result; an input that is broadcast along a dim is replicated.

    Args:
        linear: groups of arguments in which the operator is linear together; a group counts if all of it are given.
    """

    def __init__(self, *linear: str) -> None:
        self.linear = tuple(tuple(group.split()) for group in linear)

    def __call__(self, node: Node) -> OperatorDims:
        """Dims of a node."""
        names = numbered(max((type.rank for type in node.outputs), default=0))
        given = [right_aligned(names, value.type) for value in node.inputs]
        out = [right_aligned(names, type) for type in node.outputs]
        return OperatorDims(dims=labelled(node, given, out), terms=terms_of(node, *self._groups(node)))

    def _groups(self, node: Node) -> tuple[tuple[str, ...], ...]:
        if node.op.endswith("_backward"):
            return tuple((name,) for name in GRADIENTS)
        if node.attribute("rounding_mode") is not None or not all(type.dtype in FLOATS for type in node.outputs):
            return ()
        return tuple(group for group in self.linear if set(group) <= set(node.names))


by_element: Final = Elementwise()
"""Dims of a map that is linear only in the gradient, if it is a backward pass."""


class Drawn(Elementwise):
    """Dims of random numbers: each device draws its own, so the operator is linear in nothing."""

    def _groups(self, node: Node) -> tuple[tuple[str, ...], ...]:
        return ()


drawn: Final = Drawn()
"""Dims of operators that draw random numbers."""


class _Masked(Elementwise):
    """Dims of a masked fill, which is linear in its input where the fill value is zero."""

    def _groups(self, node: Node) -> tuple[tuple[str, ...], ...]:
        return super()._groups(node) if node.attribute("value") == 0 else ()


ACTIVATION: Final = 6
"""Minimum vector operations per element of a map that is timed as an activation; lighter ones are timed by traffic."""


def _light(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """Kernel of a light map: the measured residual addition if two whole tensors go in and one comes out."""
    whole = s["moved_bytes"] == residual_bytes(s["elements"], s["element_bytes"])
    return as_operator("residual")(node, s) if whole else moved(node, s)


def _heavy(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return as_operator("activation", backward=node.op.endswith("_backward"))(node, s)


def per_element(operations: int) -> OperatorWork:
    """Work of a map: vector operations per element of its result; every tensor is read or written once."""
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorWork(
        sizes=lambda node: sizes,
        vector_flops=Formula(pointwise_flops),
        kernels=_heavy if operations >= ACTIVATION else _light,
    )


def _drawn(operations: int) -> OperatorWork:
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorWork(
        sizes=lambda node: sizes, vector_flops=Formula(pointwise_flops), moved_bytes=lambda s: s["written_bytes"],
        kernels=moved,
    )  # fmt: skip


def _map(
    names: str, operations: int, *linear: str, processor: Measured | None = None, dims: Dims | None = None,
    fusable: bool = True,
) -> Operator:  # fmt: skip
    """A map by its vector operations per element of the result; a library function counts as its polynomial."""
    return Operator(
        names=names, family="map", work=per_element(operations), layouts="pointwise",
        dims=dims or (Elementwise(*linear) if linear else by_element), processor=processor,
        operations=operations if fusable else None,
    )  # fmt: skip


_LIGHT, _ALONE = processor.light, processor.light_alone
MAPS: Final = (
    _map(
        "bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor isnan isinf"
        " isfinite sgn bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ signbit"
        " nan_to_num", 0,
    ),
    _map("eq ne lt le gt ge", 0, processor=_LIGHT),
    _map("sign", 0, processor=_ALONE),
    _map("where", 0, "self other", processor=_LIGHT),
    _map("masked_fill", 0, dims=_Masked("self"), processor=_LIGHT),
    _map("add", 1, "self other", processor=_LIGHT),
    _map("sub rsub", 1, "self other", processor=_LIGHT),
    _map("mul", 1, "self", "other", processor=_LIGHT),
    _map("neg", 1, "self", processor=_ALONE),
    _map("abs relu square", 1, processor=_ALONE),
    _map("threshold clamp clamp_min clamp_max maximum minimum hardtanh leaky_relu relu6", 1, processor=_LIGHT),
    _map("conj real imag conj_physical positive deg2rad rad2deg", 1, "self"),
    _map(
        "threshold_backward floor ceil round trunc fmod remainder hardtanh_backward leaky_relu_backward floor_divide"
        " fmax fmin frac heaviside copysign nextafter hardshrink softshrink ldexp isneginf isposinf", 1,
    ),
    _map("lerp", 1, "self end", fusable=False),
    _map("prelu _prelu_kernel _prelu_kernel_backward", 1, fusable=False),
    _map("addcmul hardsigmoid_backward _add_relu", 2),
    _map("hardswish hardsigmoid", 2, processor=_LIGHT),
    _map("addcdiv hardswish_backward", 3),
    _map("div true_divide", 4, "self", processor=_LIGHT),
    _map("sqrt rsqrt reciprocal", 4, processor=arithmetic("sqrt")),
    _map("exp exp2 expm1", 4, processor=arithmetic("exp")),
    _map("log log2 log10 log1p", 4, processor=arithmetic("log")),
    _map("sigmoid", 4, processor=arithmetic("sigmoid")),
    _map("sigmoid_backward tanh_backward", 4),
    _map("silu softplus elu celu selu", 6, processor=arithmetic("silu")),
    _map("softplus_backward elu_backward logit xlogy", 6),
    _map("log_sigmoid_forward", 6, fusable=False),
    _map("gelu", 8, processor=processor.gelu),
    _map("tanh", 8, processor=arithmetic("tanh")),
    _map("erf erfc", 8, processor=arithmetic("erf")),
    _map("pow", 8, processor=processor.power),
    _map("sin cos", 8, processor=arithmetic("sin")),
    _map("mish", 8, processor=arithmetic("silu")),
    _map(
        "erfinv tan asin acos atan atan2 sinh cosh asinh acosh atanh angle silu_backward logaddexp logaddexp2"
        " float_power hypot polar lgamma digamma polygamma igamma igammac i0 sinc special_entr special_erfcx"
        " special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta", 8,
    ),
    _map("log_sigmoid_backward", 8, fusable=False),
    _map("gelu_backward mish_backward logit_backward", 13),
)  # fmt: skip
"""Maps."""
RANDOM: Final = (
    Operator(
        names="bernoulli rand_like uniform random randint_like exponential geometric cauchy",
        family="map", work=_drawn(10), dims=drawn,
    ),
    Operator(names="rand randint", family="map", work=_drawn(10), dims=drawn, pieces=shape_of_output("size", "shape")),
    Operator(
        names="normal randn_like log_normal normal_functional multinomial", family="map", work=_drawn(20), dims=drawn
    ),
    Operator(names="randn", family="map", work=_drawn(20), dims=drawn, pieces=shape_of_output("size", "shape")),
)  # fmt: skip
"""Random numbers, by vector operations per element of Philox (Salmon et al. 2011: ten rounds for four numbers)."""
