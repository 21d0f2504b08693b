"""Number of parameters of a model, matrix by matrix.

Symbols, all of them element counts: L layers, H hidden width, V rows of the token embedding, P rows
of the position table, Q = heads x head_dim, K = kv_heads x head_dim, F width of the MLP, g = 2 for a gated
MLP and 1 otherwise, n_E experts of width F_E in L_E layers, F_S width of the shared experts.
A matrix of shape (rows, columns) has rows x columns parameters; a bias has one per column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from steptime.model.spec import Experts, LatentAttention, LayerKind, LayerOperator, ModelSpec
from steptime.terms import Terms


def parameter_terms(spec: ModelSpec) -> Terms:
    r"""Exact number of parameters, one term per kind of matrix, each summed over all layers.

    .. math::
        N = V H + P H + L [(Q + 2K) H + Q H] + (L - L_E) [g H F + F H]
            + L_E [H n_E + n_E (g H F_E + F_E H) + g H F_S + F_S H] + L n_{norm} H + H + V H

    plus the biases, the norms of queries and keys, attention sinks, layer scales and gates that the specification
    names. The last term, the head, is zero where the head shares the embedding. Latent attention replaces the
    projections of queries, keys and values by its own (see the paths ``layers/attention/q_down``...).
    A model with ``vocab`` 0 and no vision part has only its blocks.

    Returns:
        Terms whose total is the exact count (below 2^53).

    >>> from steptime.model.known import load_catalogue_model
    >>> terms = parameter_terms(load_catalogue_model("gpt2"))
    >>> int(terms.total)
    124439808
    >>> int(terms["embedding/token"]) == 50257 * 768
    True
    """
    terms: dict[str, float] = dict(_embedding(spec))
    if spec.kinds:
        for kind in spec.kinds:
            terms |= {path.replace("layers", f"layers/{kind.name}", 1): n for path, n in _kind(kind).items()}
        terms |= {f"embedding/{each.name}": operator_parameters(each, spec.hidden) for each in spec.stem}
    else:
        terms |= _attention(spec) | _mlp(spec)
        if spec.experts is not None:
            terms |= _experts(spec, spec.experts)
        terms["layers/norms"] = spec.layers * spec.norms_per_layer * spec.norm_width
        terms["layers/scales"] = spec.layers * 2 * spec.hidden * spec.layer_scale
    terms["final_norm"] = spec.norm_width * spec.final_norm
    if spec.vision is not None:
        terms["head"] = spec.vision.head_outputs * (spec.hidden + spec.vision.head_bias)
    else:
        terms["head"] = spec.vocab * (spec.hidden * (not spec.tied_embeddings) + spec.head_bias)
    terms |= _further_tokens(spec)
    return Terms({path: count for path, count in terms.items() if count})


def active_parameter_terms(spec: ModelSpec) -> Terms:
    r"""Parameters that one token meets: :func:`parameter_terms` with :math:`k` of :math:`n_E` experts.

    .. math:: N_{active} = N - \frac{n_E - k}{n_E} N_{routed}

    with :math:`k` experts per token and :math:`N_{routed}` the parameters of all routed experts, those of layers that
    predict further tokens included. Router, shared experts and the whole embedding count in full. A model without
    experts has all parameters active.

    >>> from steptime.model.known import load_catalogue_model
    >>> f"{active_parameter_terms(load_catalogue_model('mixtral-8x7b')).total / 1e9:.1f}"
    '12.9'
    """
    owners = {f"layers/{kind.name}": kind.block.experts for kind in spec.kinds} or {"layers": spec.experts}
    owners["mtp/layers"] = spec.experts
    return _active(parameter_terms(spec), owners)


def _active(terms: Mapping[str, float], owners: Mapping[str, Experts | None]) -> Terms:
    """Terms with the experts that a token chooses, of the layers whose paths start with each owner."""
    terms = dict(terms)
    for owner, experts in owners.items():
        for path in (f"{owner}/experts/up", f"{owner}/experts/down"):
            if experts is not None and path in terms:
                terms[path] = terms[path] / experts.experts * experts.experts_per_token
    return Terms(terms)


def operator_parameters(operator: LayerOperator, hidden: int) -> int:
    """Parameters of one operator in a layer of a hidden width.

    >>> operator_parameters(LayerOperator(name="in", form="into", width=6, bias=True), 4)
    30
    """
    depth = operator.depth or hidden
    return operator.parameters + MATRICES.get(operator.form, _no_matrix)(operator.width, depth, operator.bias)


def _matrix(width: int, depth: int, bias: bool) -> int:
    return width * (depth + bias)


def _no_matrix(width: int, depth: int, bias: bool) -> int:
    return 0


MATRICES = dict.fromkeys(("into", "out", "whole", "up", "narrow"), _matrix)
"""Forms of operators that have a matrix -> its parameters by width, depth and bias."""


def layer_parameters(kind: LayerKind) -> tuple[float, float]:
    """Parameters that a layer of a kind works with, all of them and those that one token meets; shared ones are whole.

    >>> from steptime.model.known import load_catalogue_model
    >>> gpt = load_catalogue_model("gpt2")
    >>> layer_parameters(LayerKind(name="a", block=gpt, mlp=False))[0] == 4 * 768**2 + 4 * 768 + 2 * 768
    True
    """
    terms = Terms(_kind(replace(kind, distinct=0)))
    active = _active(terms, {"layers": kind.block.experts})
    return terms.total / kind.layers, active.total / kind.layers


def _kind(kind: LayerKind) -> dict[str, float]:
    """Parameters of the layers of one kind; shared weights count once."""
    spec, shared = kind.block, kind.own_share
    terms: dict[str, float] = dict(_attention(spec)) if kind.attention else {}
    if kind.mlp:
        terms |= _mlp(spec) | ({} if spec.experts is None else _experts(spec, spec.experts))
    terms["layers/norms"] = kind.layers * kind.norms * spec.norm_width
    terms["layers/scales"] = kind.layers * 2 * spec.hidden * spec.layer_scale
    if shared != 1.0:
        terms = {path: round(count * shared) for path, count in terms.items()}
    for each in kind.operators:
        count = kind.layers * operator_parameters(each, spec.hidden)
        terms[f"layers/{each.name}"] = round(count * shared) if each.shared else count
    return terms


def _embedding(spec: ModelSpec) -> dict[str, int]:
    width = spec.hidden
    positions = spec.max_positions if spec.position == "learned" else 0
    terms = {"embedding/token": spec.vocab * width, "embedding/position": positions * width}
    if spec.vision is not None:
        vision = spec.vision
        terms["embedding/patch"] = (vision.channels * vision.patch_size**2 + vision.patch_bias) * width
        terms["embedding/class_token"] = vision.class_token * width
        terms["embedding/mask_token"] = vision.mask_token * width
    terms["embedding/norm"] = spec.embedding_norm * spec.norm_width
    return terms


def _attention(spec: ModelSpec) -> dict[str, int]:
    if spec.latent is not None:
        return _latent_attention(spec, spec.latent)
    qkv_width = spec.query_width * (1 + spec.attention_gate) + 2 * spec.kv_width
    lacking = spec.kv_width if spec.qkv_bias and not spec.key_bias else 0
    norm_width = {"none": 0, "head": 2 * spec.head_dim, "full": spec.query_width + spec.kv_width}[spec.qk_norm]
    return {
        "layers/attention/qkv": spec.layers * (qkv_width * (spec.hidden + spec.qkv_bias) - lacking),
        "layers/attention/qk_norm": spec.layers * norm_width,
        "layers/attention/sinks": spec.layers * spec.heads * spec.attention_sinks,
        "layers/attention/out": spec.layers * spec.hidden * (spec.query_width + spec.out_bias),
    }


def _latent_attention(spec: ModelSpec, latent: LatentAttention) -> dict[str, int]:
    """Matrices of DeepSeek-V2 (arXiv 2405.04434, section 2.1): W^DQ, W^UQ, W^DKV with W^KR, W^UK with W^UV, W^O."""
    layers, hidden, heads = spec.layers, spec.hidden, spec.heads
    query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    kv_down = latent.kv_lora_rank + latent.qk_rope_head_dim
    kv_up = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    rank = latent.q_lora_rank
    terms = (
        {"layers/attention/q": layers * query * hidden}
        if rank is None
        else {
            "layers/attention/q_down": layers * rank * (hidden + spec.qkv_bias),
            "layers/attention/q_norm": layers * rank,
            "layers/attention/q_up": layers * query * rank,
        }
    )
    return terms | {
        "layers/attention/kv_down": layers * kv_down * (hidden + spec.qkv_bias),
        "layers/attention/kv_norm": layers * latent.kv_lora_rank,
        "layers/attention/kv_up": layers * kv_up * latent.kv_lora_rank,
        "layers/attention/out": layers * hidden * (heads * latent.v_head_dim + spec.out_bias),
    }


def _mlp(spec: ModelSpec) -> dict[str, int]:
    dense = spec.layers - (spec.experts.moe_layers if spec.experts is not None else 0)
    up, down = _mlp_pair(spec, spec.ffn_hidden, spec.mlp_bias)
    return {"layers/mlp/up": dense * up, "layers/mlp/down": dense * down}


def _experts(spec: ModelSpec, experts: Experts) -> dict[str, int]:
    layers, count = experts.moe_layers, experts.experts
    up, down = _mlp_pair(spec, experts.expert_ffn_hidden, experts.expert_bias)
    shared_up, shared_down = _mlp_pair(spec, experts.shared_ffn_hidden, bias=False)
    return {
        "layers/experts/router": layers * count * (spec.hidden + experts.router_bias),
        "layers/experts/up": layers * count * up,
        "layers/experts/down": layers * count * down,
        "layers/experts/shared_up": layers * shared_up,
        "layers/experts/shared_down": layers * shared_down,
        "layers/experts/shared_gate": layers * spec.hidden * experts.shared_gate,
    }


def _mlp_pair(spec: ModelSpec, ffn: int, bias: bool) -> tuple[int, int]:
    """Parameters into and out of a hidden layer of width ``ffn``; the gate counts with the way in."""
    return spec.mlp_inputs * ffn * (spec.hidden + bias), spec.hidden * (ffn + bias)


def _further_tokens(spec: ModelSpec) -> dict[str, int]:
    """Multi-token prediction (arXiv 2412.19437, section 2.2): per depth a 2H x H matrix, two norms and a layer with its
    final norm; embedding and head are those of the model. Where layers differ the further ones have experts."""
    depth = spec.mtp_depth
    if not depth:
        return {}
    experts = None if spec.experts is None else replace(spec.experts, moe_layers=depth)
    layers = replace(spec, mtp_depth=0, layers=depth, experts=experts, vocab=0, position="none", embedding_norm=False)
    norm = spec.norm_width
    whole = {f"mtp/{path}": int(n) for path, n in parameter_terms(layers).items() if path.startswith("layers/")}
    return {"mtp/projection": depth * 2 * spec.hidden**2, "mtp/norms": depth * norm * (2 + spec.final_norm)} | whole
