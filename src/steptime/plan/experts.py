"""Rows of a mixture of experts in place of the MLP.

Tokens of a rank's sequence shard choose experts; their copies go to the ranks of ``ep`` that have them (and are
gathered over ``etp`` where ranks share an expert), pass through two grouped products, and come back. The axes of the
experts divide the ranks of ``tp``, ``cp`` and ``dp`` anew (parallel folding, arXiv 2504.14960). Ranks have equal
numbers of experts; the fullest one has ``Shape.expert_load`` times the mean of the rows. The probabilities weigh the
activation, so that the combination is a plain sum and keeps nothing.
"""

from __future__ import annotations

from dataclasses import replace

from steptime.cost.experts import once_share
from steptime.model.spec import Experts
from steptime.num import Num
from steptime.plan.rows import Row, Transfer, activation, bias, grouped_matmul, matmul, move, over, residual
from steptime.plan.shapes import Shape

BLOCK = "experts"
ROUTER_BYTES = 4.0
"""The router works in fp32."""


def expert_rows(s: Shape, experts: Experts) -> list[Row]:
    """Router, dispatch, experts, combination; the shared expert is the strategy's dense rows."""
    dispatch, combine = _moves(s, experts)
    return [*_router(s, experts), *dispatch, *_products(s, experts), *combine]


def _router(s: Shape, experts: Experts) -> list[Row]:
    tokens, count = s.sharded_tokens, experts.experts
    weights = count * (s.hidden + int(experts.router_bias))
    product = matmul(
        "router", BLOCK, tokens, count, s.hidden, element_bytes=ROUTER_BYTES, kept_elements=0, weights=weights,
    )  # fmt: skip
    scores = tokens * count * ROUTER_BYTES
    choice = Row(
        name="router_top_k", block=BLOCK, operator="top_k",
        shape={"elements": tokens * count, "read_bytes": scores, "written_bytes": scores}, kept_bytes=scores,
    )  # fmt: skip
    kept = tokens * s.hidden * s.element_bytes
    return [replace(product, operator="wide_matmul", kept_bytes=kept, replicated=weights), choice]


def _exchange(s: Shape, experts: Experts) -> tuple[Transfer, ...]:
    """The fullest rank receives more than the mean of what ranks send."""
    size = s.sent_rows * s.expert_load * s.hidden * s.element_bytes
    if s.job.exchange_once:
        size = size * once_share(
            s.choices, s.plans.ep, s.plans.inside("ep"), experts.experts, experts.groups,
            experts.groups_per_token,
        )  # fmt: skip
    return (over("ep", "all_to_all", size),)


def _moves(s: Shape, experts: Experts) -> tuple[list[Row], list[Row]]:
    """The ways to the experts and back: what one sends forward, the other sends backward.

    Copies in the order of their experts; after the exchange once more, where a rank has several experts. ``whole``:
    bytes of the rows of all ranks that share an expert.
    """
    one, sent, whole = (rows * s.hidden * s.element_bytes for rows in (s.sharded_tokens, s.sent_rows, s.expert_rows))
    exchanged = _exchange(s, experts)
    gathered, scattered = (over("etp", "all_gather", whole),), (over("etp", "reduce_scatter", whole),)
    dispatch = [
        move("permute", BLOCK, one, sent, forward=exchanged, backward=exchanged),
        move("sort_by_expert", BLOCK, whole, whole, forward=gathered, backward=scattered),
    ]
    combine = [
        move("sort_back", BLOCK, whole, whole, forward=scattered, backward=gathered),
        move("unpermute", BLOCK, sent, one, forward=exchanged, backward=exchanged),
    ]
    return dispatch, combine


def _products(s: Shape, experts: Experts) -> list[Row]:
    rows, local = s.expert_rows, experts.experts / s.plans.ep
    into, width = s.expert_in, s.expert_width
    out = [
        grouped_matmul("expert_in", BLOCK, rows, into, s.hidden, local, element_bytes=s.element_bytes,
                       kept_elements=rows * s.hidden, weights=local * s.hidden * into),
    ]  # fmt: skip
    if experts.expert_bias:
        out.append(_bias(s, "expert_in_bias", rows, into, local))
    gate = activation("expert_activation", BLOCK, rows * width, element_bytes=s.element_bytes, gated=s.model.gated_mlp)
    out += [
        gate,
        grouped_matmul("expert_out", BLOCK, rows, s.hidden, width, local, element_bytes=s.element_bytes,
                       kept_elements=rows * width, weights=local * width * s.hidden),
    ]  # fmt: skip
    if experts.expert_bias:
        out.append(_bias(s, "expert_out_bias", rows, s.hidden, local))
    return out


def _bias(s: Shape, name: str, rows: Num, width: Num, local: Num) -> Row:
    return replace(bias(name, BLOCK, rows, width, element_bytes=s.element_bytes), weights=local * width, expert=True)


def shared_gate(s: Shape) -> list[Row]:
    """One sigmoid per token on the shared expert's output."""
    tokens = s.sharded_tokens
    product = matmul("shared_gate", BLOCK, tokens, 1, s.hidden, element_bytes=s.element_bytes, kept_elements=0)
    scaled = residual("shared_scale", BLOCK, tokens * s.hidden, element_bytes=s.element_bytes)
    kept = tokens * s.hidden * s.element_bytes
    return [replace(product, operator="wide_matmul", replicated=product.weights), replace(scaled, kept_bytes=kept)]
