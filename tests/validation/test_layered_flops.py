"""Products of modules of `transformers` with several kinds of layers: those of the rows, and named differences.

`benchmarks/layers.md` has all families; here are the ones that are recorded fast.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from models.layered_flops import PHASES, differences, module_flops, rows_flops, spec_of

FAST = ("mamba2", "nemotron_h", "falcon_h1", "minimax", "deepseek_v32", "bart", "whisper", "llava")


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("family", FAST)
def test_products_are_those_of_the_module(family: str, tmp_path: Path) -> None:
    spec = spec_of(family, tmp_path)
    more, ours = differences(spec), rows_flops(spec)
    seen = {phase: ours[phase] + sum(amounts[place] for amounts in more.values()) for place, phase in enumerate(PHASES)}
    assert seen == module_flops(family)


def test_differences_are_small_next_to_the_step(tmp_path: Path) -> None:
    """None of the names stands for the bulk of a step."""
    for family in FAST[:4]:
        spec = spec_of(family, tmp_path)
        assert sum(abs(forward) for forward, _ in differences(spec).values()) < 0.05 * rows_flops(spec)["forward"]
