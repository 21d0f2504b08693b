"""Models of a measured machine: the curves next to its cluster file, by operator of a strategy table.

A curve is named MODEL/OPERATOR: a formula of :mod:`steptime.cost.regression`, and the measured operator. Operators of a
table that were not measured themselves take the curve of one with similar memory traffic.

Collectives have one regression per kind, axis and size of group, named MODEL/KIND/AXIS and number of ranks
(``streaming/all_reduce/local4``). Groups of sizes that were not measured, and groups over both axes, keep the ring
formulas with the fitted numbers of the cluster file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Final

from steptime.cost.regression import (
    SENT,
    additive_s,
    blocked_convolution_s,
    half_size_matmul_s,
    linear_roofline_s,
    linear_s,
    resident_matmul_s,
    short_loops_s,
    streaming_s,
)
from steptime.cost.roofline import stated_latency_s
from steptime.errors import UnknownNameError, UserError
from steptime.estimate.fabrics import as_measured, stated_text
from steptime.estimate.operators import Formula
from steptime.hardware.records import Curve, Level, Profile
from steptime.num import Num, where
from steptime.plan.job import Precision

FORMULAS: Final[Mapping[str, Formula]] = {
    "half_size_matmul": Formula(half_size_matmul_s),
    "linear_roofline": Formula(linear_roofline_s),
    "linear": Formula(linear_s),
    "constant": Formula(linear_s),
    "streaming": Formula(streaming_s),
    "additive": Formula(additive_s),
    "blocked_convolution": Formula(blocked_convolution_s),
    "short_loops": Formula(short_loops_s),
    "resident_matmul": Formula(resident_matmul_s),
}
WORK: Final = ("matrix_flops", "vector_flops", "moved_bytes", "result_bytes")
"""Arguments of the formulas that come from a row; all others are coefficients."""

#: Operator of a table -> measured operators that time it forward and backward.
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
_LOOPS: Final = ("loops", "steps", "moved_bytes", "result_bytes")
_IMPLICIT: Final = ("rows", "columns", "depth", "tensor_bytes", "channelwise")
_MAPS: Final = "two number row column one exp tanh sigmoid erf gelu gelu_tanh silu sqrt log sin power"
_ROWS: Final = (
    "row_sum row_mean row_max row_softmax row_norm plane_norm copy_whole copy_turned copy_joined view turn call"
)
CPU_MAPS: Final = tuple(f"cpu_{name}" for name in f"{_MAPS} {_ROWS}".split())
CPU_PRODUCT, CPU_PRODUCTS, CPU_ATTENTION, CPU_CONVOLUTION, CPU_UNFOLDED = (
    "cpu_product",
    "cpu_products",
    "cpu_attention",
    "cpu_convolution",
    "cpu_unfolded",
)
CPU_VIEW, CPU_TURN, CPU_CALL, CPU_TWO = "cpu_view", "cpu_turn", "cpu_call", "cpu_two"
#: Operators of PyTorch on a CPU as a graph calls them (call and allocation of the result included) -> shape arguments.
CPU: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(CPU_MAPS, _LOOPS),
    **dict.fromkeys((CPU_PRODUCT, CPU_PRODUCTS), ("m", "n", "k", "groups", "biased", "moved_bytes", "working_bytes")),
    **dict.fromkeys((CPU_ATTENTION, CPU_UNFOLDED), ("matrix_flops", "vector_flops", "moved_bytes")),
    CPU_CONVOLUTION: _IMPLICIT,
}
#: Kernels of captured modules that are measured under their own name -> shape arguments.
OWN: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(CONVOLVED, _IMPLICIT), **dict.fromkeys(LOOPED, _LOOPS), **CPU
}  # fmt: skip
MEASURED: Final = frozenset(("matmul", "update", *chain.from_iterable(RAN.values()), *OWN))
"""Everything that is measured on one rank."""

_RATE_ENDS: Final = ("_per_s", "_Bps")
"""Suffixes of the names of rates."""
AGAIN: Final = "measure the machine again: steptime calibrate machine"
PRODUCT: Final = ("m", "n", "k", "turned", "loose", "odd")
"""Shape arguments of the formula of products."""
LAYOUT_FREE: Final = dict.fromkeys(("turned_flops_per_s", "turned_per_s", "loose_flops_per_s", "odd_flops_per_s"), 1e30)
"""Coefficients of products in files without the layout of operands in memory, which then costs nothing."""

#: Measured operator -> passes over the elements if the row counts more: the gradient of a bias only reads.
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
        known = replace(product, coefficients={**LAYOUT_FREE, **product.coefficients})
        out["matmul"] = checked(known, PRODUCT, profile)
    for operator, ran in RAN.items():
        for backward, kind in enumerate(ran):
            curve = next((c for c in profile.curves if _is(c, kind, dtype)), None)
            if curve is not None:
                out[measured_name(operator, bool(backward))] = checked(curve, WORK, profile)
    update = next((c for c in profile.curves if _is(c, "update", "fp32")), None)
    if update is not None:
        made = "result_bytes" in FORMULAS[update.family.partition("/")[0]].arguments
        known = replace(update, coefficients={**update.coefficients, **({"result_bytes": 0.0} if made else {})})
        out["stream"] = checked(known, WORK, profile)
    return out


def own_curves_of(profile: Profile, precision: Precision) -> dict[str, tuple[Formula, Curve]]:
    """Formula and curve of the kernels of :data:`OWN` that were measured in a precision.

    Raises:
        UserError: a curve lacks a coefficient of its formula.
    """
    dtypes = {
        **dict.fromkeys(CONVOLVED, precision.matrix_dtype),
        **dict.fromkeys((*LOOPED, *CPU), _moved_dtype(precision)),
    }
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
        UserError: an argument of the formula is neither in the curve nor in ``given``, the curve has one that the
            formula lacks, a coefficient is negative, or a rate is zero.
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


NAME: Final = re.compile(r"(\w+)/(\w+)/(local|node)(\d+)")
#: Kind that was not measured -> kind that sends the same bytes in the other direction.
MIRROR: Final = {"reduce": "broadcast", "p2p": "point_to_point"}
OF_RATE: Final = ("rate_per_s", "near_Bps", "far_Bps")
"""Coefficients that are rates of the links."""
#: Axis -> rate of a machine -> coefficients that scale with it.
RATES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "fast_Bps": ("local", OF_RATE),
    "slow_Bps": ("node", OF_RATE),
    "fast_latency_s": ("local", ("latency_s",)),
    "slow_latency_s": ("node", ("latency_s",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """Time of one kind of collective over groups of one size."""

    kind: str
    axis: str
    """``local``: all ranks in one fast domain; ``node``: each in a domain of its own."""
    ranks: int
    formula: Formula
    fixed: Mapping[str, float]
    curve: Curve
    stated: str = ""
    """Phrase on given numbers that replace those of the level on which the curve was measured."""

    @property
    def inside(self) -> int:
        """Ranks of the group in each fast domain."""
        return self.ranks if self.axis == "local" else 1

    @property
    def text(self) -> str:
        """One phrase for a report."""
        error = f"median error {100 * self.curve.median_ape:.1f} %"
        return f"measured {self.kind} of {self.ranks} ranks ({error}){self.stated and f', {self.stated}'}"

    def arguments(self, size_bytes: Num) -> dict[str, Num]:
        """Arguments of the formula for a tensor of that size."""
        return {**self.fixed, "moved_bytes": size_bytes * SENT[self.kind](self.ranks), "result_bytes": 0.0}

    def seconds(self, size_bytes: Num) -> Num:
        """Time of one collective; nothing is sent for an empty tensor."""
        return where(size_bytes > 0, self.formula(self.arguments(size_bytes)), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All measured groups of a machine."""

    curves: tuple[GroupCurve, ...]

    @property
    def between(self) -> bool:
        """True if groups between fast domains were measured; then these need not be slower than groups inside."""
        return any(one.axis == "node" for one in self.curves)

    def seconds(self, kind: str, size_bytes: Num, ranks: Num, inside: Num, otherwise: Num) -> Num:
        """Time of a collective; ``otherwise`` if its group was not measured."""
        out = otherwise
        for one in self.curves:
            if one.kind == MIRROR.get(kind, kind):
                out = where((ranks == one.ranks) & (inside == one.inside), one.seconds(size_bytes), out)
        return out

    def find(self, kind: str, ranks: float, inside: float) -> GroupCurve | None:
        """The curve that :meth:`seconds` uses for a single plan; None if there is none."""
        for one in reversed(self.curves):
            if (one.kind, one.ranks, one.inside) == (MIRROR.get(kind, kind), ranks, inside):
                return one
        return None

    def restated(self, levels: Mapping[str, Level]) -> Groups:
        """The groups with the given numbers of a file in place of those of the levels that they were measured on.

        Args:
            levels: axis -> its level.
        """
        return Groups(curves=tuple(_restated(one, levels[one.axis]) for one in self.curves))

    def faster(self, factors: Mapping[str, float]) -> Groups:
        """The same groups on a machine whose rates are multiplied."""
        return Groups(curves=tuple(_faster(one, factors) for one in self.curves))


def _faster(one: GroupCurve, factors: Mapping[str, float]) -> GroupCurve:
    fixed = dict(one.fixed)
    for rate, factor in factors.items():
        axis, names = RATES.get(rate, ("", ()))
        for name in names if axis == one.axis else ():
            if name in fixed:
                fixed[name] *= factor
    return replace(one, fixed=fixed)


def _restated(one: GroupCurve, level: Level) -> GroupCurve:
    """A curve with rates in proportion to the level's, latencies by :func:`~steptime.cost.roofline.stated_latency_s`.

    A collective has at least one hop per rank but the first.
    """
    known = as_measured(level)
    text = "" if known is None else stated_text(level, known)
    if known is None or not text:
        return one
    fixed = {n: value * level.rank_Bps / known.rank_Bps if n in OF_RATE else value for n, value in one.fixed.items()}
    hops = one.ranks - 1
    if "latency_s" in fixed:
        fixed["latency_s"] = stated_latency_s(fixed["latency_s"], hops * level.latency_s, hops * known.latency_s)
    return replace(one, fixed=fixed, stated=text)


def groups_of(profile: Profile | None) -> Groups | None:
    """The measured groups of a profile; None if it has none.

    Raises:
        UserError: a curve lacks a coefficient of its formula.
        UnknownNameError: a curve names an unknown formula or an unknown measurement.
    """
    if profile is None:
        return None
    found = []
    for curve in profile.curves:
        _check_family(curve, profile)
        name = NAME.fullmatch(curve.family)
        if name is not None:
            formula, _ = checked(curve, ("moved_bytes", "result_bytes"), profile)
            found.append(
                GroupCurve(
                    kind=name[2], axis=name[3], ranks=int(name[4]), formula=formula, fixed=curve.coefficients,
                    curve=curve,
                )
            )  # fmt: skip
    return Groups(curves=tuple(found)) if found else None


def _check_family(curve: Curve, profile: Profile) -> None:
    """Refuses a curve with a misspelt name, which would otherwise be left out silently."""
    formula, _, ran = curve.family.partition("/")
    named = f"the curve {curve.family} {curve.dtype} of {profile.device}"
    if formula not in FORMULAS:
        raise UnknownNameError("formula of curves", formula, FORMULAS, where=named)
    ranks = re.findall(r"\d+$", ran) or ["2"]
    known = MEASURED | {f"{kind}/{axis}{ranks[0]}" for kind in SENT for axis in ("local", "node")}
    if ran not in known:
        raise UnknownNameError("measured operator", ran, known, where=named, otherwise=AGAIN)
