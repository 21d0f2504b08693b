"""What layers with states keep for the backward pass: by the kernels of mamba_ssm and of flash-linear-attention."""

from __future__ import annotations

import pytest

from steptime.model import load_catalogue_model
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED


def kept_per_token(name: str, tokens: int = 1024) -> float:
    """Elements per token that the mixer of the first kind of layers keeps, from its product in to its product out."""
    job = Job(model=load_catalogue_model(name), gpus=1, global_batch=1, seq_len=tokens, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    kind = job.model.kinds[0].name
    rows = [row for row in CORRECTED.strategies["1d"].block(job, Plans()).layer if row.kind == kind]
    inner = [row for row in rows if row.block == "mixer" and not row.name.endswith(("_input_norm", "_in"))]
    return sum(float(row.kept_bytes) for row in inner) / 2 / tokens


@pytest.mark.each(
    ("name", "elements"),
    [
        # What the product in returned (gate and inputs of 5120 channels), the output before the gate, the narrow one.
        ("mamba-2.8b", 3 * 5120 + 160 + 2 * 16),
        # The product in (8192 for the gate, 8192 + 2 x 8 x 128 inputs, 128 step sizes), the output before the gate, and
        # the input of the product out.
        ("codestral-mamba-7b", 4 * 8192 + 2 * 8 * 128 + 128),
        # No kernel of the whole layer: convolution's input and output, step size, output and gate, input of the product
        # out, and the narrow tensor before and after its norms.
        ("jamba-v0.1", 6 * 8192 + 2 * 288),
        # Inputs of the convolution; queries, keys and values of 32 heads, decay and step, a column of the inverse;
        # output and gate of the norm, input of the product out.
        ("qwen3-next-80b-a3b", 8192 + 32 * (3 * 128 + 2 + 64) + 3 * 4096),
    ],
)
def test_what_a_mixer_keeps(name: str, elements: int) -> None:
    assert kept_per_token(name) == elements
