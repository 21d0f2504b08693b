"""Matrix operations of one step of models with several kinds of layers: recorded modules, rows, and what differs.

The modules of `transformers` run without the kernels that training has, so some of their operators compute the same in
another way; each of these has a name and a formula in :data:`DIFFERENCES`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from models.layered import BATCH, NARROW, TOKENS, module_of
from steptime.captured.cost import work_of
from steptime.captured.record.step import capture
from steptime.estimate.operators import OPERATORS
from steptime.formats.huggingface import read_huggingface
from steptime.model.spec import LayerKind, LayerOperator, ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

PHASES = ("forward", "backward")
T = BATCH * TOKENS
Amounts = tuple[float, float]
"""Operations that the module has more than the rows, forward and backward."""


def spec_of(family: str, folder: Path) -> ModelSpec:
    """Our reading of the narrow configuration of a family."""
    path = folder / "config.json"
    path.write_text(json.dumps(NARROW[family] | {"model_type": family}), encoding="utf-8")
    return read_huggingface(path)[0]


def rows_flops(spec: ModelSpec) -> dict[str, float]:
    """Matrix operations of the rows of one micro-batch, by phase."""
    job = Job(model=spec, gpus=1, global_batch=BATCH, seq_len=TOKENS, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    block = CORRECTED.strategies["1d"].block(job, Plans(micro_batch=BATCH))
    found: Counter[str] = Counter()
    for times, rows in ((spec.layers, block.layer), (1, block.first), (1, block.last)):
        for row in rows:
            for phase in PHASES:
                formula = getattr(OPERATORS[row.operator], phase).matrix_flops
                found[phase] += 0 if formula is None else float(formula(row.shape) * row.share) * times
    return dict(found)


def _images(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sequences that begin with the tokens of an image each."""
    ids[:, :16] = 3
    return {"input_ids": ids, "pixel_values": torch.zeros(BATCH, 3, 56, 56, dtype=torch.bfloat16)}


INPUTS: Mapping[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "t5": lambda ids: {"input_ids": ids, "decoder_input_ids": ids.clone()},
    "bart": lambda ids: {"input_ids": ids, "decoder_input_ids": ids.clone()},
    "whisper": lambda ids: {
        "input_features": torch.zeros(BATCH, 16, 128, dtype=torch.bfloat16), "decoder_input_ids": ids},
    "llava": _images,
}  # fmt: skip
"""Family -> arguments of its module, where they are others than token ids."""


@cache
def module_flops(family: str) -> Mapping[str, float]:
    """Matrix operations of the recorded module, by phase."""
    module = module_of(NARROW[family] | {"model_type": family}).to(torch.bfloat16)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    program = capture(
        module,
        INPUTS.get(family, lambda ids: {"input_ids": ids})(ids),
        optimizer=None,
        target="cuda",
        loss=lambda out: out.logits.float().sum(),
    )
    found: Counter[str] = Counter()
    for call in program.calls:
        found[call.phase] += 0 if call.view else work_of(call.node).matrix_flops
    return {phase: float(found[phase]) for phase in PHASES}


def _convolution(op: LayerOperator) -> dict[str, Amounts]:
    flops = 2.0 * BATCH * (TOKENS + op.size["kernel"] - 1) * op.width * op.size["kernel"]
    return {"a convolution is a product": (flops, 2 * flops)}


def _selective_scan(op: LayerOperator) -> dict[str, Amounts]:
    flops = 2.0 * T * op.width * op.size["state"]
    return {"states are summed by products, token by token": (flops, 2 * flops)}


def _ssd(op: LayerOperator) -> dict[str, Amounts]:
    heads, width, state, groups, chunk = (op.size[key] for key in ("heads", "head_dim", "state", "groups", "chunk"))
    chunks = -(-TOKENS // chunk)
    repeated = 2.0 * T * chunk * state * (heads - groups)
    passed = 2.0 * BATCH * heads * (chunks + 1) ** 2 * width * state
    again = 2.0 * T * (chunk * groups * state + heads * width * state)
    return {
        "matrices of a group are repeated for each head": (repeated, 2 * repeated),
        "states pass from every chunk to every other": (passed, 2 * passed),
        "kernels make scores and states again": (0.0, -again),
    }


def _delta_rule(op: LayerOperator) -> dict[str, Amounts]:
    heads, keys, values, chunk = (op.size[name] for name in ("heads", "key_dim", "value_dim", "chunk"))
    solved, state = 2.0 * T * heads * chunk * (keys + values), 2.0 * BATCH * heads * chunk * keys * values
    whole = T * heads * (chunk * (6 * keys + 4 * values) + 6 * keys * values)
    return {
        "a triangular system is solved in place of products with its inverse": (-solved, -solved),
        "kernels make again all but the inverse": (0.0, -whole),
        "first and last state have no gradients": (0.0, -4 * state),
    }


def _decayed_columns(op: LayerOperator) -> dict[str, Amounts]:
    """A delta rule with a decay of each column (Kimi-Linear)."""
    scores = 4.0 * T * op.size["heads"] * op.size["chunk"] * op.size["key_dim"]
    _, *others = _delta_rule(op).items()
    return dict(others) | {"decayed scores are summed row by row": (-scores, -2 * scores)}


def _linear_attention(op: LayerOperator) -> dict[str, Amounts]:
    heads, keys, values, chunk = (op.size[name] for name in ("heads", "key_dim", "value_dim", "chunk"))
    again = 2.0 * T * heads * keys * (chunk + values)
    return {
        "kernels make scores and states again": (0.0, -again),
        "first and last state have no gradients": (0.0, -6.0 * BATCH * heads * chunk * keys * values),
    }


def _index_scores(op: LayerOperator) -> dict[str, Amounts]:
    pair, top = 2.0 * op.size["heads"] * (op.size["head_dim"] + 1), op.size["top_k"]
    chosen = T * (top - top * (top - 1) / (2 * TOKENS))
    return {
        "the indexer scores later keys too": (pair * T * (TOKENS - 1) / 2, 0.0),
        "the loss of the model has no gradient for the indexer": (0.0, -2 * pair * chosen),
    }


def _index_product(op: LayerOperator) -> dict[str, Amounts]:
    if not op.name.startswith("index_"):
        return {}
    products = 2.0 * T * op.width * (op.depth or NARROW["deepseek_v32"]["hidden_size"])
    return {"the loss of the model has no gradient for the indexer": (0.0, -2 * products)}


DIFFERENCES: Mapping[str, Callable[[LayerOperator], dict[str, Amounts]]] = {
    "convolution": _convolution,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
    "delta_rule": _delta_rule,
    "linear_attention": _linear_attention,
    "index_scores": _index_scores,
    "whole": _index_product,
}
"""Form of an operator -> what the module has more, for one layer."""


def _dense_mask(kind: LayerKind) -> dict[str, Amounts]:
    """A mask as a tensor, of which no kernel skips anything."""
    block = kind.block
    if not kind.attention or not block.window or not block.windowed_layers:
        return {}
    window, values = min(block.window, TOKENS), block.head_dim if block.latent is None else block.latent.v_head_dim
    seen = T * (window - window * (window - 1) / (2 * TOKENS))
    widths = 2.0 * block.heads * (block.head_dim + values)
    # Five products in the backward pass: three of the width of keys, two of that of values.
    backward = 2.0 * block.heads * (3 * block.head_dim + 2 * values)
    return {
        "a mask is a tensor, and nothing of it is skipped": (
            widths * (T * TOKENS - seen), backward * T * TOKENS - 2.5 * widths * seen),
    }  # fmt: skip


def _first_products(spec: ModelSpec) -> dict[str, Amounts]:
    """Products of images and sounds, whose gradient nobody asks for."""
    flops = sum(2.0 * BATCH * op.tokens * op.width * op.depth for op in spec.stem if op.name in _OF_INPUTS)
    return {"inputs have no gradient": (0.0, -flops)}


_OF_INPUTS = ("encoder_convolution_1", "image_patches")


def _scores_with_bias(kind: LayerKind) -> dict[str, Amounts]:
    """T5 adds a bias to scores, which no causal kernel takes."""
    block, masked = kind.block, BATCH * TOKENS * (TOKENS - 1) / 2
    if kind.name != "decoder" or block.position != "none":
        return {}
    flops = 4.0 * masked * block.heads * block.head_dim
    return {"a mask is a tensor, and nothing of it is skipped": (flops, 2.5 * flops)}


def _discarded(kind: LayerKind) -> dict[str, Amounts]:
    """LLaVA reads what the last layer but one of the tower returned; the last one runs forward alone."""
    if kind.name != "image":
        return {}
    block, rows = kind.block, BATCH * kind.tokens
    products = 2.0 * rows * block.hidden * (4 * block.hidden + 2 * block.ffn_hidden) * 2
    attention = 4.0 * rows * kind.tokens * block.hidden * 2.5
    return {"the last layer of the tower has no gradient": (0.0, -(products + attention) / kind.layers)}


def differences(spec: ModelSpec) -> dict[str, Amounts]:
    """What the module has more than the rows, by name."""
    found: Counter[tuple[str, int]] = Counter()
    for kind in spec.kinds:
        table = dict(DIFFERENCES)
        if any(op.name == "decay_up" for op in kind.operators):
            table["delta_rule"] = _decayed_columns
        each = [
            _dense_mask(kind),
            _scores_with_bias(kind),
            _discarded(kind),
            *(table[op.form](op) for op in kind.operators if op.form in table),
        ]
        for name, amounts in ((name, amounts) for one in each for name, amounts in one.items()):
            for phase, amount in enumerate(amounts):
                found[name, phase] += kind.layers * amount
    whole = {name: (found[name, 0], found[name, 1]) for name, _ in found}
    return whole | _first_products(spec)
