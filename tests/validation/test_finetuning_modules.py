"""What the formulas say of fine-tuning against captures of the modules of transformers themselves."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from bench_finetuning import Case, captured_bytes, predicted_bytes

DIMS = (3, 512, 1408, 8, 8, 8000, 512, 2)

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft's calls into transformers
]


@pytest.mark.quick("checkpoints")
@pytest.mark.parametrize(
    "case",
    [
        Case(name="full", dims=DIMS),
        Case(name="checkpoints", dims=DIMS, checkpoints=True),
        pytest.param(
            Case(name="lora", dims=DIMS, tuned="lora"),
            marks=pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"),
        ),
    ],
    ids=lambda case: case.name,
)
def test_live_tensors_are_those_of_the_real_modules(case: Case) -> None:
    assert predicted_bytes(case) == pytest.approx(captured_bytes(case), rel=0.02)
