"""Rows of kernels that no training step launches: which they are, and that neither curves nor fits know them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from steptime.estimate.further_kernels import CURVES
from steptime.estimate.kernels import ROLES
from steptime.hardware.profiles import load_profile, profile_names
from steptime.measure.table import Table
from steptime.plan.job import PRECISIONS
from steptime_lab.calibrate.family import NOT_LAUNCHED, RULES, launched
from steptime_lab.calibrate.gemm import FAMILY, truths
from steptime_lab.calibrate.kernel_families import FAMILIES, all_cells
from steptime_lab.scoring.left_out import Fitted, kernels_left_out

AIC, BF16, CACHE = "aiconfigurator_attention", "bfloat16", "fw=vllm;kv_dtype=fp8;window=0;step=0"
SIZES = {
    "m": 512.0, "n": 512.0, "k": 512.0, "rows": 512.0, "cols": 1024.0, "b": 2.0, "h_q": 8.0, "h_kv": 8.0, "s_q": 512.0,
    "s_kv": 512.0, "d_qk": 64.0, "d_v": 64.0, "latency_us": 40.0,
}  # fmt: skip


def table(*rows: Mapping[str, str]) -> Table:
    texts = ("source", "gpu", "op", "dtype", "method", "kernel", "notes")
    columns = {name: np.array([row.get(name, "") for row in rows], dtype=object) for name in texts}
    numbers = {name: np.full(len(rows), value) for name, value in SIZES.items()}
    return Table({**columns, **numbers, "gpu": np.full(len(rows), "h100", dtype=object)})


def attention(source: str, kernel: str, notes: str, dtype: str) -> dict[str, str]:
    return {"op": "attention_fwd", "source": source, "kernel": kernel, "notes": notes, "dtype": dtype}


@pytest.mark.each(
    ("row", "kept"),
    [
        (attention(AIC, "fa3", "fw=sglang;ver=1;kv_dtype=bfloat16;window=0", BF16), True),
        (attention(AIC, "flash_attention_v4", "fw=sglang;non-causal(encoder)", "bf16"), True),
        (attention(AIC, "vllm_flashinfer_trtllmprefill", "fw=vllm;kv_dtype=bfloat16;step=0", BF16), True),
        (attention(AIC, "vllm_flash_attn", "fw=vllm;kv_dtype=fp8;window=0", "fp8"), True),
        (attention(AIC, "vllm_flash_attn", CACHE, BF16), False),
        (attention(AIC, "vllm_flash_attn", CACHE, "mxfp8"), True),
        (attention(AIC, "torch_flow", "fw=trtllm;kv_dtype=fp8;window=0", "fp8"), False),
        (attention(AIC, "vllm_triton_attn", "fw=vllm;kv_dtype=fp8;window=0", "fp8"), False),
        (attention(AIC, "vllm_flashinfer_trtllmdecode", "fw=vllm;kv_dtype=bfloat16;step=0", BF16), False),
        (attention(AIC, "flashinfer", "fw=sglang;kv_dtype=bfloat16;step=0", BF16), False),
        (attention("llmservingsim", "", "model=x", "bf16"), True),
        (attention("llmservingsim", "", "v0;model=x", "bf16"), False),
        (attention("cudnn_frontend", "cudnn", "mask=no_mask", BF16), True),
        (attention("someone", "triton", "fw=trtllm;kv_dtype=fp8", BF16), True),
        ({"op": "attention_bwd", "source": AIC, "kernel": "triton"}, True),
        ({"op": "gemm", "dtype": "sq"}, False),
        ({"op": "gemm", "dtype": "fp8", "source": "aiconfigurator_gemm", "notes": "fw=trtllm"}, True),
        ({"op": "gemm", "dtype": "fp8_block", "source": "aiconfigurator_gemm"}, False),
        ({"op": "gemm", "dtype": "fp8_block"}, True),
        ({"op": "conv_fwd", "dtype": "int8", "source": "deepbench"}, False),
        ({"op": "elementwise", "dtype": "int8"}, True),
        ({"op": "elementwise", "source": "aiconfigurator_moe_misc"}, False),
        ({"op": "embedding", "source": "llmservingsim"}, False),
        ({"op": "layernorm_bwd", "source": "cudnn_frontend", "kernel": "cudnn"}, False),
        ({"op": "layernorm_bwd", "source": "cudnn_frontend", "kernel": "pytorch"}, True),
        ({"op": "softmax", "source": "liger_kernel", "kernel": "softmax/liger"}, False),
        ({"op": "softmax", "source": "neusight"}, True),
    ],
)
def test_what_a_training_step_launches(row: Mapping[str, str], kept: bool) -> None:
    assert launched(table(row, {"op": "gemm"})).tolist() == [kept, True]


def test_every_rule_is_of_operators_that_have_a_family() -> None:
    """Rows of all other operators are left out for that alone."""
    trained = FAMILY.ops.union(*(family.ops for family in FAMILIES))
    assert all(trained & set(rule.ops) and rule.what for rule in RULES)


def read_by_estimates() -> set[str]:
    by_shape = {family for _, families in CURVES.values() for family in families}
    return by_shape | {family for curves in ROLES.values() for family, _ in curves} | {
        "gemm", "attention_fwd", "attention_bwd",
    }  # fmt: skip


def test_the_catalogue_has_no_curve_that_no_estimate_reads() -> None:
    read = read_by_estimates()
    dtypes = {"any"} | {dtype for p in PRECISIONS.values() for dtype in (p.matrix_dtype, p.attention_dtype)}
    curves = [(name, c) for name in profile_names() for c in load_profile(name).curves]  # type: ignore[union-attr]
    assert len(curves) > 500
    assert [(name, c.family, c.dtype) for name, c in curves if c.family not in read or c.dtype not in dtypes] == []


def test_every_family_that_is_fitted_is_read_by_an_estimate() -> None:
    assert {family.name for family in (FAMILY, *FAMILIES)} == read_by_estimates()


def test_fits_leave_out_what_no_training_step_launches() -> None:
    kept = attention(AIC, "fa3", "fw=sglang", BF16)
    rows = table(
        kept, attention(AIC, "triton", "fw=sglang", BF16),
        {"op": "gemm", "dtype": "fp8", "source": "aiconfigurator_gemm"},
        {"op": "gemm", "dtype": "fp8_block", "source": "aiconfigurator_gemm"},
    )  # fmt: skip
    assert [cell.rows.tolist() for cell in all_cells(rows)] == [[0]]
    assert [truth.rows.tolist() for truth in truths(rows)] == [[2]]
    reasons = kernels_left_out(rows, Fitted.none(rows.rows), None)
    (named,) = [reason for reason in reasons if reason.startswith(NOT_LAUNCHED)]
    assert "attention_fwd of aiconfigurator" in named and "gemm of aiconfigurator_gemm" in named
    assert (reasons[named], sum(reasons.values())) == (2, 4)
