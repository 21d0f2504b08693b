"""Models of a machine that was measured: the curves beside its cluster file, by operator of a strategy table.

A curve is named MODEL/OPERATOR: a formula of :mod:`steptime.cost.regression`, and what ran. Operators of a table that
were not measured themselves take the curve of one that moves memory alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Final

from steptime.cost.regression import (
    additive_s,
    blocked_convolution_s,
    half_size_matmul_s,
    linear_roofline_s,
    linear_s,
    short_loops_s,
    streaming_s,
)
from steptime.errors import UnknownNameError, UserError
from steptime.estimate.operators import Formula
from steptime.hardware.profile import Curve, Profile
from steptime.num import Num
from steptime.plan.job import Precision

FORMULAS: Final[Mapping[str, Formula]] = {
    "half_size_matmul": Formula(half_size_matmul_s),
    "linear_roofline": Formula(linear_roofline_s),
    "linear": Formula(linear_s),
    "streaming": Formula(streaming_s),
    "additive": Formula(additive_s),
    "blocked_convolution": Formula(blocked_convolution_s),
    "short_loops": Formula(short_loops_s),
}
WORK: Final = ("matrix_flops", "vector_flops", "moved_bytes", "result_bytes")
"""Arguments of the formulas that a row gives; all others are coefficients."""

#: Operator of a table -> what was measured, forward and backward.
RAN: Final[Mapping[str, tuple[str, str]]] = {
    "fused_attention": ("attention_forward", "attention_backward"),
    **dict.fromkeys(("softmax", "triangular_softmax"), ("softmax", "softmax_backward")),
    "layer_norm": ("layer_norm", "layer_norm_backward"),
    "one_pass_layer_norm": ("layer_norm", "layer_norm_backward"),
    **dict.fromkeys(("rms_norm", "plain_rms_norm"), ("layer_norm", "layer_norm_backward")),
    "activation": ("gelu", "gelu_backward"),
    "gated_activation": ("gelu", "gelu_backward"),
    "bias": ("add", "column_sum"),
    "residual": ("add", "add"),
    "dropout_add": ("add", "add"),
    **dict.fromkeys(("rope", "complex_rope"), ("add", "add")),
    "embedding": ("copy", "copy"),
    "cross_entropy": ("softmax", "softmax"),
}

CONVOLVED: Final = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
NORMS: Final = ("batch_norm", "batch_norm_backward")
MAX_POOLS: Final = ("max_pool", "max_pool_backward")
POOLS: Final = (*MAX_POOLS, "avg_pool", "avg_pool_backward")
LOOPED: Final = (*NORMS, *POOLS)
#: Kernels of captured modules that are measured under their own name, and what each says of its shape.
OWN: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(CONVOLVED, ("rows", "columns", "depth", "tensor_bytes", "channelwise")),
    **dict.fromkeys(LOOPED, ("loops", "steps", "moved_bytes", "result_bytes")),
}
MEASURED: Final = frozenset(("matmul", "update", *chain.from_iterable(RAN.values()), *OWN))
"""All that is measured of one rank."""

_RATE_ENDS: Final = ("_per_s", "_Bps")
"""Ends of the names of rates."""
AGAIN: Final = "measure the machine again: steptime calibrate machine"
_NEVER_TURNED: Final = {"turned_flops_per_s": 1e30, "turned_per_s": 1e30}
"""Coefficients of products in files that say nothing of transposed operands: these cost nothing more."""

#: What was measured -> passes over the elements, where a row counts more: the gradient of a bias only reads.
PASSES: Final[Mapping[str, float]] = {"column_sum": 1.0}


@cache
def measured_name(operator: str, backward: bool) -> str:
    """Key of the model of an operator in one direction.

    >>> measured_name("softmax", True)
    'measured softmax backward'
    """
    return f"measured {operator} {'backward' if backward else 'forward'}"


def curves_of(profile: Profile, precision: Precision) -> dict[str, tuple[Formula, Curve]]:
    """Formula and curve by key: ``matmul``, ``stream`` (the optimiser), and those of :func:`measured_name`.

    Raises:
        UserError: a curve lacks a coefficient of its formula.
    """
    dtype = _moved_dtype(precision)
    out = {}
    product = profile.curve("half_size_matmul/matmul", precision.matrix_dtype)
    if product is not None:
        known = replace(product, coefficients={**_NEVER_TURNED, **product.coefficients})
        out["matmul"] = checked(known, ("m", "n", "k", "turned"), profile)
    for operator, ran in RAN.items():
        for backward, kind in enumerate(ran):
            curve = next((c for c in profile.curves if _is(c, kind, dtype)), None)
            if curve is not None:
                out[measured_name(operator, bool(backward))] = checked(curve, WORK, profile)
    update = profile.curve("streaming/update", "fp32")
    if update is not None:
        coefficients = {**update.coefficients, "result_bytes": 0.0}
        out["stream"] = checked(replace(update, coefficients=coefficients), WORK, profile)
    return out


def own_curves_of(profile: Profile, precision: Precision) -> dict[str, tuple[Formula, Curve]]:
    """Formula and curve of the kernels of :data:`OWN` that were measured in a precision.

    Raises:
        UserError: a curve lacks a coefficient of its formula.
    """
    dtypes = {
        **dict.fromkeys(CONVOLVED, precision.matrix_dtype), **dict.fromkeys(LOOPED, _moved_dtype(precision))
    }  # fmt: skip
    found = {kind: next((c for c in profile.curves if _is(c, kind, dtypes[kind])), None) for kind in OWN}
    return {kind: checked(curve, OWN[kind], profile) for kind, curve in found.items() if curve is not None}


def _moved_dtype(precision: Precision) -> str:
    """Element type of operators that only move memory."""
    return "fp32" if precision.element_bytes > 2 else precision.vector_dtype


def _is(curve: Curve, kind: str, dtype: str) -> bool:
    name, _, ran = curve.family.partition("/")
    return ran == kind and curve.dtype == dtype and name in FORMULAS


def checked(curve: Curve, given: tuple[str, ...], profile: Profile) -> tuple[Formula, Curve]:
    """The formula of a curve, with the curve.

    Raises:
        UserError: neither the curve nor ``given`` has an argument of the formula, the curve has one that the formula
            has not, or a coefficient is negative, or a rate zero.
    """
    formula, named = FORMULAS[curve.family.partition("/")[0]], f"{curve.family} {curve.dtype} of {profile.device}"
    missing = [n for n in formula.arguments if n not in given and n not in curve.coefficients]
    if missing:
        raise UserError(f"the curve {named} lacks the coefficient {missing[0]}", hint=AGAIN)
    for name, value in curve.coefficients.items():
        if name not in formula.arguments:
            raise UnknownNameError(f"coefficient of {named}", name, formula.arguments, otherwise=AGAIN)
        positive = name.endswith(_RATE_ENDS)
        if value < 0 or (positive and not value):
            wanted = "has to be more than 0" if positive else "must not be negative"
            raise UserError(f"the curve {named} has {name} {value}, which {wanted}", hint=AGAIN)
    return formula, curve


def work_of(curve: Curve, shape: Mapping[str, Num]) -> dict[str, Num]:
    """Arguments of a curve's formula for one row.

    Args:
        curve: one of :func:`curves_of`.
        shape: the row's shape with ``matrix_flops``, ``vector_flops`` and ``moved_bytes`` of the direction.
    """
    name, _, kind = curve.family.partition("/")
    known = {"elements", "element_bytes"} <= shape.keys()
    result: Num = shape["elements"] * shape["element_bytes"] if known else 0.0
    given: dict[str, Num] = {**shape, "result_bytes": result}
    if kind in PASSES and known:
        given["moved_bytes"] = PASSES[kind] * result
    return {n: given[n] for n in FORMULAS[name].arguments if n in WORK and n in given}
