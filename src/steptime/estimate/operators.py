"""Maps each operator of a strategy table to its formulas in :mod:`steptime.cost`.

A formula takes the arguments of a row's shape that its signature names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

from steptime.cost import attention, collective, elementwise, experts, matmul, memory_bound, recurrence, roofline
from steptime.num import Num


@dataclass(frozen=True)
class Formula:
    """A function of :mod:`steptime.cost` that is called with a row's shape."""

    function: Callable[..., Num]

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of the function."""
        return tuple(inspect.signature(self.function).parameters)

    @cached_property
    def taken(self) -> Callable[[Mapping[str, Num]], tuple[Num, ...]]:
        """Function that picks the arguments from a shape, in order."""
        names = self.arguments
        return itemgetter(*names) if len(names) > 1 else lambda shape: tuple([shape[name] for name in names])

    def named(self, shape: Mapping[str, Num]) -> dict[str, float]:
        """The arguments of one shape by name, as plain numbers."""
        return dict(zip(self.arguments, map(float, self.taken(shape)), strict=True))

    def __call__(self, shape: Mapping[str, Num]) -> Num:
        """Value for a row's shape."""
        return self.function(*self.taken(shape))

    @cached_property
    def name(self) -> str:
        """Dotted name below ``steptime.cost``."""
        return f"{self.function.__module__.removeprefix('steptime.cost.')}.{self.function.__name__}"


@lru_cache
def formula_of(function: Callable[..., Num]) -> Formula:
    """The formula of a function; repeated calls give the same object."""
    return Formula(function)


@dataclass(frozen=True, slots=True)
class Call:
    """A formula with its arguments."""

    formula: Formula
    arguments: Mapping[str, Num]

    @property
    def value(self) -> Num:
        """Result of the formula."""
        return self.formula(self.arguments)


KINDS = ("matrix", "attention", "vector")
"""Kinds of work; a framework has a slowdown factor for each."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Formulas of an operator in one direction; None: no work of the kind."""

    matrix_flops: Formula | None = None
    vector_flops: Formula | None = None
    moved_bytes: Formula | None = None

    @cached_property
    def works(self) -> bool:
        """True if there is any work."""
        return not (self.matrix_flops is None and self.vector_flops is None and self.moved_bytes is None)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Both directions of an operator."""

    forward: Phase
    backward: Phase
    attends: bool = False
    """True for attention, whose products run in a dtype of their own."""
    wide: bool = False
    """True if its operands stay as stored while those of other products have a narrow format."""
    unaligned: bool = False
    """True if the matrix units do not take its products (:func:`steptime.cost.attention.fits_matrix_units`)."""

    @cached_property
    def kind(self) -> str:
        """Kind of its work, of :data:`KINDS`."""
        if self.attends:
            return "attention"
        products = self.forward.matrix_flops or self.backward.matrix_flops
        return "vector" if products is None else "matrix"


def _phase(matrix: Any = None, vector: Any = None, moved: Any = None) -> Phase:
    wrap = [None if f is None else Formula(f) for f in (matrix, vector, moved)]
    return Phase(matrix_flops=wrap[0], vector_flops=wrap[1], moved_bytes=wrap[2])


_A, _E, _M, _R, _X = attention, elementwise, matmul, recurrence, experts
_MOVE = _phase(None, None, memory_bound.streamed_bytes)

_COUNTED = _phase(roofline.counted_matrix_flops, roofline.counted_vector_flops, roofline.counted_bytes)
_COUNTED_PASS = _phase(None, roofline.counted_vector_flops, roofline.counted_bytes)

OPERATORS: Mapping[str, Operator] = {
    "captured_product_forward": Operator(forward=_COUNTED, backward=_phase()),
    "captured_product_backward": Operator(forward=_phase(), backward=_COUNTED),
    "captured_weights_backward": Operator(forward=_phase(), backward=_COUNTED),
    "captured_attention_forward": Operator(forward=_COUNTED, backward=_phase(), attends=True),
    "captured_attention_backward": Operator(forward=_phase(), backward=_COUNTED, attends=True),
    "captured_pass_forward": Operator(forward=_COUNTED_PASS, backward=_phase()),
    "captured_pass_backward": Operator(forward=_phase(), backward=_COUNTED_PASS),
    "matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _M.matmul_bytes),
        backward=_phase(_M.matmul_backward_flops, None, _M.matmul_backward_bytes),
    ),
    "frozen_matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _M.matmul_bytes),
        backward=_phase(_X.input_gradient_flops, None, _M.matmul_bytes),
    ),
    "wide_matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _M.matmul_bytes),
        backward=_phase(_M.matmul_backward_flops, None, _M.matmul_backward_bytes),
        wide=True,
    ),
    "frozen_wide_matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _M.matmul_bytes),
        backward=_phase(_X.input_gradient_flops, None, _M.matmul_bytes),
        wide=True,
    ),
    "grouped_matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _X.grouped_matmul_bytes),
        backward=_phase(_M.matmul_backward_flops, None, _X.grouped_matmul_backward_bytes),
    ),
    "frozen_grouped_matmul": Operator(
        forward=_phase(_M.matmul_flops, None, _X.grouped_matmul_bytes),
        backward=_phase(_X.input_gradient_flops, None, _X.grouped_matmul_bytes),
    ),
    "top_k": Operator(
        forward=_phase(None, _X.top_k_flops, memory_bound.streamed_bytes),
        backward=_phase(None, _X.top_k_flops, memory_bound.streamed_bytes),
    ),
    "nothing": Operator(forward=_phase(), backward=_phase()),
    "move": Operator(forward=_MOVE, backward=_MOVE),
    "move_forward": Operator(forward=_MOVE, backward=_phase()),
    "move_backward": Operator(forward=_phase(), backward=_MOVE),
    "frozen_bias": Operator(forward=_phase(None, _E.bias_flops, _E.bias_bytes), backward=_phase()),
    "frozen_embedding": Operator(forward=_phase(None, None, _E.embedding_bytes), backward=_phase()),
    "blocked_matmul": Operator(
        forward=_phase(_M.blocked_matmul_flops, None, _M.matmul_bytes),
        backward=_phase(_M.matmul_backward_flops, None, _M.matmul_backward_bytes),
    ),
    "fused_attention": Operator(
        forward=_phase(_A.fused_attention_flops, _A.fused_attention_vector_flops, _A.fused_attention_bytes),
        backward=_phase(
            _A.fused_attention_backward_flops,
            _A.fused_attention_backward_vector_flops,
            _A.fused_attention_backward_bytes,
        ),
        attends=True,
    ),
    "scores": Operator(
        forward=_phase(_A.scores_flops, None, _A.scores_bytes),
        backward=_phase(_A.scores_backward_flops, None, _A.scores_backward_bytes),
        attends=True,
    ),
    "attend": Operator(
        forward=_phase(_A.attend_flops, None, _A.attend_bytes),
        backward=_phase(_A.attend_backward_flops, None, _A.attend_backward_bytes),
        attends=True,
    ),
    "unaligned_scores": Operator(
        forward=_phase(_A.scores_flops, None, _A.scores_bytes),
        backward=_phase(_A.scores_backward_flops, None, _A.scores_backward_bytes),
        attends=True,
        unaligned=True,
    ),
    "unaligned_attend": Operator(
        forward=_phase(_A.attend_flops, None, _A.attend_bytes),
        backward=_phase(_A.attend_backward_flops, None, _A.attend_backward_bytes),
        attends=True,
        unaligned=True,
    ),
    "blocked_scores": Operator(
        forward=_phase(_A.scores_flops, None, _A.scores_bytes),
        backward=_phase(_A.scores_backward_flops, None, _A.blocked_scores_backward_bytes),
        attends=True,
    ),
    "blocked_attend": Operator(
        forward=_phase(_A.blocked_attend_flops, None, _A.attend_bytes),
        backward=_phase(_A.attend_backward_flops, None, _A.blocked_attend_backward_bytes),
        attends=True,
    ),
    "softmax": Operator(
        forward=_phase(None, _A.softmax_flops, _E.map_bytes),
        backward=_phase(None, _A.softmax_backward_flops, _E.map_backward_bytes),
    ),
    "triangular_softmax": Operator(
        forward=_phase(None, _A.softmax_flops, _E.triangular_softmax_bytes),
        backward=_phase(None, _A.softmax_backward_flops, _E.triangular_softmax_backward_bytes),
    ),
    "bias": Operator(
        forward=_phase(None, _E.bias_flops, _E.bias_bytes), backward=_phase(None, _E.bias_flops, _E.bias_bytes)
    ),
    "activation": Operator(
        forward=_phase(None, _E.gelu_flops, _E.map_bytes),
        backward=_phase(None, _E.gelu_backward_flops, _E.map_backward_bytes),
    ),
    "gated_activation": Operator(
        forward=_phase(None, _E.gated_flops, _E.gated_bytes),
        backward=_phase(None, _E.gated_backward_flops, _E.gated_backward_bytes),
    ),
    "dropout": Operator(
        forward=_phase(None, _E.dropout_flops, _E.dropout_bytes),
        backward=_phase(None, _E.dropout_flops, _E.dropout_bytes),
    ),
    "dropout_add": Operator(
        forward=_phase(None, _E.dropout_add_flops, _E.dropout_add_bytes),
        backward=_phase(None, _E.dropout_add_flops, _E.dropout_add_backward_bytes),
    ),
    "residual": Operator(
        forward=_phase(None, _E.residual_flops, _E.residual_bytes),
        backward=_phase(None, _E.residual_flops, _E.residual_bytes),
    ),
    "rope": Operator(
        forward=_phase(None, _E.rope_flops, _E.map_bytes), backward=_phase(None, _E.rope_flops, _E.map_bytes)
    ),
    "complex_rope": Operator(
        forward=_phase(None, _E.rope_flops, _E.complex_rope_bytes),
        backward=_phase(None, _E.rope_flops, _E.complex_rope_bytes),
    ),
    "layer_norm": Operator(
        forward=_phase(None, _E.layer_norm_flops, _E.layer_norm_bytes),
        backward=_phase(None, _E.layer_norm_backward_flops, _E.layer_norm_backward_bytes),
    ),
    "one_pass_layer_norm": Operator(
        forward=_phase(None, _E.layer_norm_flops, _E.layer_norm_bytes),
        backward=_phase(None, _E.layer_norm_backward_flops, _E.one_pass_layer_norm_backward_bytes),
    ),
    "rms_norm": Operator(
        forward=_phase(None, _E.rms_norm_flops, _E.rms_norm_bytes),
        backward=_phase(None, _E.rms_norm_backward_flops, _E.rms_norm_backward_bytes),
    ),
    "plain_rms_norm": Operator(
        forward=_phase(None, _E.rms_norm_flops, memory_bound.plain_rms_norm_bytes),
        backward=_phase(None, _E.rms_norm_backward_flops, memory_bound.plain_rms_norm_backward_bytes),
    ),
    "convolution": Operator(
        forward=_phase(None, _R.convolution_flops, _E.map_bytes),
        backward=_phase(None, _R.convolution_backward_flops, _E.map_backward_bytes),
    ),
    "selective_scan": Operator(
        forward=_phase(None, _R.selective_scan_flops, _R.selective_scan_bytes),
        backward=_phase(None, _R.selective_scan_backward_flops, _R.selective_scan_backward_bytes),
    ),
    "ssd": Operator(
        forward=_phase(_R.ssd_flops, _R.ssd_vector_flops, _R.ssd_bytes),
        backward=_phase(_R.ssd_backward_flops, _R.ssd_vector_flops, _R.ssd_backward_bytes),
        attends=True,
    ),
    "delta_rule": Operator(
        forward=_phase(_R.delta_rule_flops, _R.delta_rule_vector_flops, _R.linear_attention_bytes),
        backward=_phase(_R.delta_rule_backward_flops, _R.delta_rule_vector_flops, _R.linear_attention_backward_bytes),
        attends=True,
    ),
    "linear_attention": Operator(
        forward=_phase(_R.linear_attention_flops, _R.linear_attention_vector_flops, _R.linear_attention_bytes),
        backward=_phase(
            _R.linear_attention_backward_flops, _R.linear_attention_vector_flops, _R.linear_attention_backward_bytes
        ),
        attends=True,
    ),
    "linear_recurrence": Operator(
        forward=_phase(None, _R.linear_recurrence_flops, _R.linear_recurrence_bytes),
        backward=_phase(None, _R.linear_recurrence_flops, _R.linear_recurrence_backward_bytes),
    ),
    "index_scores": Operator(
        forward=_phase(_R.index_scores_flops, _R.index_scores_vector_flops, _R.index_scores_bytes),
        backward=_phase(_R.index_scores_backward_flops, None, _R.index_scores_backward_bytes),
    ),
    "opaque": Operator(
        forward=_phase(roofline.counted_matrix_flops, None, roofline.counted_bytes),
        backward=_phase(_R.twice_matrix_flops, None, _R.twice_bytes),
    ),
    "embedding": Operator(
        forward=_phase(None, None, _E.embedding_bytes), backward=_phase(None, None, _E.embedding_bytes)
    ),
    "cross_entropy": Operator(
        forward=_phase(None, _E.cross_entropy_flops, _E.cross_entropy_bytes),
        backward=_phase(None, _E.cross_entropy_flops, _E.cross_entropy_backward_bytes),
    ),
}

COLLECTIVES: Mapping[str, Formula] = {
    "all_gather": Formula(collective.ring_all_gather_s),
    "reduce_scatter": Formula(collective.ring_reduce_scatter_s),
    "all_reduce": Formula(collective.ring_all_reduce_s),
    "broadcast": Formula(collective.ring_broadcast_s),
    "reduce": Formula(collective.ring_reduce_s),
    "all_to_all": Formula(collective.all_to_all_s),
    "ring_exchange": Formula(collective.ring_exchange_s),
}
