"""Operators on every element, reductions and scans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.captured.cost.work import KernelCall, OperatorRow, Shape, as_operator, moved
from steptime.captured.graph import Node
from steptime.cost.elementwise import pointwise_flops, residual_bytes
from steptime.estimate.operators import Formula
from steptime.num import Num

#: Vector operations per element -> maps that take so many. Functions of the library count as their polynomials do.
MAPS: Final[Mapping[int, str]] = {
    0: "bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor eq ne lt le gt ge"
       " where masked_fill isnan isinf isfinite sign sgn bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__"
       " __lshift__ __rshift__ signbit nan_to_num",
    1: "add sub rsub mul neg abs relu threshold threshold_backward clamp clamp_min clamp_max maximum minimum floor ceil"
       " round trunc fmod remainder hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp square"
       " floor_divide fmax fmin conj real imag prelu _prelu_kernel _prelu_kernel_backward relu6 frac heaviside",
    2: "addcmul hardswish hardsigmoid hardsigmoid_backward glu _add_relu",
    3: "addcdiv hardswish_backward",
    4: "div reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sigmoid sigmoid_backward tanh_backward"
       " true_divide",
    6: "silu softplus softplus_backward elu elu_backward celu selu logit log_sigmoid_forward xlogy",
    8: "gelu tanh erf erfc erfinv pow sin cos tan asin acos atan atan2 sinh cosh mish silu_backward glu_backward"
       " log_sigmoid_backward logaddexp float_power hypot polar lgamma digamma sinc",
    13: "gelu_backward mish_backward logit_backward",
}  # fmt: skip

#: Vector operations per input element -> reductions and scans.
REDUCTIONS: Final[Mapping[int, str]] = {
    0: "any all count_nonzero equal _is_all_true _is_any_true",
    1: "sum mean amax amin max min argmax argmin prod cumsum cumprod nansum trace cummax cummin aminmax diff"
       " bincount histc logcumsumexp _cummax_helper sum_to_size nanmean",
    3: "norm linalg_vector_norm std var var_mean std_mean _linalg_svd dist _weight_norm_interface"
       " _weight_norm_interface_backward",
    5: "logsumexp renorm cdist _cdist_forward _cdist_backward",
}  # fmt: skip

#: Random numbers: vector operations per element of the generator (Philox, Salmon et al. 2011: ten rounds for four).
RANDOM: Final[Mapping[int, str]] = {
    10: "bernoulli rand rand_like uniform random randint randint_like exponential geometric cauchy",
    20: "normal randn randn_like log_normal normal_functional multinomial",
}


ACTIVATION: Final = 6
"""Maps of at least so many operations per element are timed as an activation; lighter ones as what they move."""


def _light(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    """Two whole tensors in and one out is what was measured as an addition."""
    whole = s["moved_bytes"] == residual_bytes(s["elements"], s["element_bytes"])
    return as_operator("residual")(node, s) if whole else moved(node, s)


def _heavy(node: Node, s: Shape) -> tuple[KernelCall, ...]:
    return as_operator("activation", backward=node.op.endswith("_backward"))(node, s)


def _outputs(operations: int) -> OperatorRow:
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorRow(
        sizes=lambda node: sizes, vector_flops=Formula(pointwise_flops),
        kernels=_heavy if operations >= ACTIVATION else _light,
    )  # fmt: skip


def _inputs(operations: int) -> OperatorRow:
    def sizes(node: Node) -> dict[str, Num]:
        return {"operations": operations, "elements": max((v.type.elements for v in node.inputs), default=0)}

    return OperatorRow(sizes=sizes, vector_flops=Formula(pointwise_flops), kernels=moved)


def _drawn(operations: int) -> OperatorRow:
    sizes: Mapping[str, Num] = {"operations": operations}
    return OperatorRow(
        sizes=lambda node: sizes, vector_flops=Formula(pointwise_flops), moved_bytes=lambda s: s["written_bytes"],
        kernels=moved,
    )  # fmt: skip


TABLE: Final[Mapping[str, OperatorRow]] = {
    **{name: _outputs(count) for count, names in MAPS.items() for name in names.split()},
    **{name: _inputs(count) for count, names in REDUCTIONS.items() for name in names.split()},
    **{name: _drawn(count) for count, names in RANDOM.items() for name in names.split()},
}
