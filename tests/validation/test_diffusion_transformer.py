"""A diffusion transformer of the catalogue, made narrow, and the recorded module: parameters and products."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from models.dit import DiT  # noqa: E402
from models.layered_flops import PHASES, rows_flops  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.model import load_catalogue_model, parameter_terms  # noqa: E402
from steptime.model.kinds import Modulation, with_kinds  # noqa: E402
from steptime.model.spec import LayerKind, ModelSpec  # noqa: E402

LAYERS, HIDDEN, HEADS, TOKENS, BATCH = 3, 64, 4, 128, 2


def narrow() -> ModelSpec:
    """DiT-B/2 with fewer, narrower layers and 128 patches."""
    full = load_catalogue_model("dit-b-2")
    widths, tokens = {768: HIDDEN, 2 * 768: 2 * HIDDEN}, {256: TOKENS}
    tables = {"positions": TOKENS * HIDDEN, "classes": 1001 * HIDDEN}
    stem = tuple(
        replace(op, width=widths.get(op.width, op.width), tokens=tokens.get(op.tokens, op.tokens),
                parameters=tables.get(op.name, 0))
        for op in full.stem
    )  # fmt: skip
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS, "head_dim": HIDDEN // HEADS,
             "ffn_hidden": 4 * HIDDEN, "seq_len": TOKENS}  # fmt: skip
    block = replace(full.kinds[0].block, **sizes)
    kind = LayerKind(name="block", block=block, operators=Modulation().operators(block))
    return with_kinds(replace(full, **sizes, stem=stem), [kind], ["block"] * LAYERS)


def test_the_module_of_the_paper_has_the_parameters_of_the_row() -> None:
    with torch.device("meta"):
        module = DiT(28, 1152, 16, 256)
    count = sum(each.numel() for each in module.parameters())
    assert count == parameter_terms(load_catalogue_model("dit-xl-2")).total == 675_129_632


def test_products_are_those_of_the_module() -> None:
    spec, module = narrow(), DiT(LAYERS, HIDDEN, HEADS, TOKENS).to(torch.bfloat16)
    assert sum(each.numel() for each in module.parameters()) == parameter_terms(spec).total
    inputs = (torch.zeros(BATCH, TOKENS, 16, dtype=torch.bfloat16), torch.zeros(BATCH, 256, dtype=torch.bfloat16),
              torch.zeros(BATCH, dtype=torch.int64))  # fmt: skip
    program = capture(module, inputs, optimizer=None, target="cuda", loss=lambda out: out.float().sum())
    seen = dict.fromkeys(PHASES, 0.0)
    for call in program.calls:
        seen[call.phase] += 0.0 if call.view else work_of(call.node).matrix_flops
    ours = rows_flops(spec)
    # Latents and the features of the time have no gradients.
    inputs_flops = 2 * BATCH * (TOKENS * 16 + 256) * HIDDEN
    assert seen == {"forward": ours["forward"], "backward": ours["backward"] - inputs_flops}
