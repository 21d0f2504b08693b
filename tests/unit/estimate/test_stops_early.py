"""Recomputation of whole layers that ends with the last tensor which the backward pass reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from steptime import api
from steptime.api.models import load_model
from steptime.estimate.evaluate import forward_flops_per_sequence, recomputed_flops_per_step
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job, with_habits
from steptime.plan.plans import FULL_RECOMPUTE, Plans
from steptime.plan.strategies import CORRECTED

FULL = {"tp": 2, "dp": 4, "recompute": "full"}


def _job(name: str, framework: str = "torchtitan", **changes: Any) -> Job:
    job = Job(model=load_model(name), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], **changes)  # fmt: skip
    return with_habits(job, framework)


def _left_out(job: Job) -> list[str]:
    block = CORRECTED.strategy("1d").block(job, Plans(tp=2, dp=4))
    return [row.name for row in block.layer if not row.runs_again]


class _Products(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("reentrant", "again"), [(True, 3), (False, 2)])
def test_pytorch_without_reentrant_leaves_out_the_last_product(reentrant: bool, again: int) -> None:
    """A gated MLP: three products forward, six backward, and those that run again."""
    weights = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 8)]
    gate, up, down = (w.requires_grad_() for w in weights)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    with _Products() as products:
        out: Any = checkpoint(mlp, torch.randn(4, 8, requires_grad=True), use_reentrant=reentrant)
        out.sum().backward()
    assert products.calls["aten.mm.default"] == 3 + 6 + again


@pytest.mark.parametrize(
    ("name", "framework", "left_out"),
    [
        ("llama3-8b", "torchtitan", ["mlp_out", "mlp_residual"]), ("llama3-8b", "maxtext", ["mlp_out", "mlp_residual"]),
        ("llama3-8b", "megatron-core", []),
        ("gpt3-175b", "torchtitan", []),  # the mask of a dropout is made after the product
        ("mixtral-8x7b", "torchtitan", []),  # the router reads what experts return
    ],
)  # fmt: skip
def test_what_follows_the_last_kept_tensor_does_not_run_again(name: str, framework: str, left_out: list[str]) -> None:
    assert _left_out(_job(name, framework)) == left_out


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [("linear", ["mlp_out_adapter_up", "mlp_residual"]), ("attention", ["mlp_out", "mlp_residual"])],
)
def test_an_adapter_reads_its_input_after_the_frozen_product(targets: str, left_out: list[str]) -> None:
    assert _left_out(_job("llama3-8b", adapter=Adapter(rank=8, targets=targets))) == left_out


def test_quantised_products_are_left_out_but_not_their_input() -> None:
    assert _left_out(replace(_job("llama3-8b"), precision=PRECISIONS["fp8-te"])) == ["mlp_out", "mlp_residual"]


def test_time_flops_and_terms_agree() -> None:
    job: dict[str, Any] = {"gpus": 8, "global_batch": 8, "plan": FULL}
    early = api.estimate("llama3-8b", "dgx-h100", **job, framework="torchtitan")
    assert not [path for path in early.time if "recompute/mlp_out" in path or "recompute/mlp_residual" in path]
    assert [path for path in early.time if "recompute/mlp_in" in path]
    assert sum(early.time.values()) == pytest.approx(early.step_time_s, rel=1e-12)
    low, high = early.step_time_bracket_s
    assert low < early.step_time_s < high
    whole, stopped = _job("llama3-8b", "megatron-core"), _job("llama3-8b")
    product = 2.0 * 4096 * 4096 * 14336 * 32 * stopped.global_batch
    saved = recomputed_flops_per_step(whole, FULL_RECOMPUTE) - recomputed_flops_per_step(stopped, FULL_RECOMPUTE)
    assert saved == pytest.approx(product)
    assert recomputed_flops_per_step(whole, FULL_RECOMPUTE) == 8 * forward_flops_per_sequence(whole)["layers"]


def test_every_fourth_layer_saves_a_fourth() -> None:
    stopped = _job("llama3-8b")
    one = recomputed_flops_per_step(stopped, FULL_RECOMPUTE)
    assert recomputed_flops_per_step(stopped, FULL_RECOMPUTE, 4) == one / 4
