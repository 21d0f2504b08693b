"""Softmax and attention of a capture for CUDA: casts that are a part of a kernel, and attention in single products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.cuda_attention import attended_by_products  # noqa: E402

LABELS = torch.zeros(8, dtype=torch.int64)


class Of(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(64, 100), function

    def forward(self, x: Any) -> Any:
        return self.function(self.linear(x)).sum()


def softmaxes(function: Callable[[Any], Any], **options: Any) -> list[tuple[str, str, str]]:
    """Softmaxes and their gradients with the types of what they read and make, and conversions of their shape."""
    half = options.get("autocast") is None
    module, x = Of(function), torch.empty(8, 64)
    module, x = (module.bfloat16(), x.bfloat16()) if half else (module, x)
    program = capture(module, [x], optimizer=None, target="cuda", **options)
    return [
        (c.node.op.removesuffix("_data"), c.node.inputs[0].type.dtype, c.node.outputs[0].dtype)
        for c in program.calls
        if "softmax" in c.node.op or (c.node.op == "_to_copy" and c.node.outputs[0].shape == (8, 100))
    ]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda z: F.softmax(z, -1), "_softmax"), (lambda z: torch.softmax(z, dim=-1), "_softmax"),
        (lambda z: z.softmax(-1), "_softmax"), (lambda z: F.log_softmax(z, dim=1), "_log_softmax"),
        (lambda z: F.cross_entropy(z, LABELS), "_log_softmax"),
        (lambda z: nn.CrossEntropyLoss(ignore_index=3)(z, LABELS), "_log_softmax"),
    ],
)  # fmt: skip
def test_autocast_widens_inside_the_kernel(function: Callable[[Any], Any], name: str) -> None:
    assert softmaxes(function, autocast="bf16") == [(name, "bf16", "fp32"), (f"{name}_backward", "fp32", "bf16")]


def test_a_type_that_is_asked_for_is_made_inside_the_kernel() -> None:
    found = softmaxes(lambda z: F.softmax(z, -1, dtype=torch.float32))
    assert found == [("_softmax", "bf16", "fp32"), ("_softmax_backward", "fp32", "bf16")]


@pytest.mark.parametrize(
    "function",
    [lambda z: F.softmax(z, -1), lambda z: F.cross_entropy(z, LABELS), lambda z: z.softmax(-1, dtype=torch.bfloat16)],
)
def test_half_precision_stays_where_nothing_widens_it(function: Callable[[Any], Any]) -> None:
    assert {(read, made) for _, read, made in softmaxes(function)} == {("bf16", "bf16")}


def test_smoothed_labels_are_left_to_pytorch() -> None:
    found = softmaxes(lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1), autocast="bf16")
    assert found[0] == ("_to_copy", "bf16", "fp32")


class Biased(nn.Module):
    """Attention with a table of positions by heads, as T5 has it."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        self.table, self.contiguous = nn.Embedding(32, 4), contiguous

    def forward(self, x: Any) -> Any:
        tokens = x.shape[2]
        mask = self.table(torch.zeros(tokens, tokens, dtype=torch.int64)).permute(2, 0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(x, x, x, mask.contiguous() if self.contiguous else mask)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_mask_whose_rows_are_apart_takes_single_products(contiguous: bool) -> None:
    x = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16)
    program = capture(Biased(contiguous=contiguous).bfloat16(), [x], optimizer=None, target="cuda")
    calls = [c.node for c in program.calls]
    fused = [node.op for node in calls if "attention" in node.op]
    products = [node.inputs[0].type.dtype for node in calls if node.op == "bmm"]
    if contiguous:
        assert fused and not products
    else:
        assert not fused and products == ["fp32"] * 3, "forward two, backward one: x has no gradient"


def test_autocast_casts_the_mask_too() -> None:
    program = capture(
        Biased(contiguous=True), [torch.empty(2, 4, 16, 8)], optimizer=None, autocast="bf16", target="cuda"
    )
    (fused,) = [c.node for c in program.calls if c.node.op == "_scaled_dot_product_efficient_attention"]
    assert {value.type.dtype for value in fused.inputs} == {"bf16"} and len(fused.inputs) == 4


def test_the_products_attend_as_pytorch_does() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 16, 8), *(torch.randn(2, 2, 16, 8) for _ in range(2)))
    mask = torch.randn(16, 16, 4).permute(2, 0, 1)
    mask[:, 3] = float("-inf")
    wanted = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(attended_by_products(query, key, value, mask, 0.0, False, None), wanted)
    causal = F.scaled_dot_product_attention(query, query, query, is_causal=True, scale=0.3)
    torch.testing.assert_close(attended_by_products(query, query, query, None, 0.0, True, 0.3), causal)
