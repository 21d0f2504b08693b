"""Kernels of a table that name no implementation are predicted as `profile` predicts the same operator of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import InputFileError
from steptime.hardware import load_device
from steptime_lab.calibrate.family import NOT_LAUNCHED
from steptime_lab.scoring import kernels as scoring
from steptime_lab.scoring.plain_kernels import OTHER_NAMES, PLAIN, PlainTimer, dtype_named, operator_named
from steptime_lab.scoring.tables import columns_of_kernels

ATTENTION = {"b": "2", "h_q": "32", "h_kv": "8", "s_q": "1024", "s_kv": "1024", "d_qk": "128", "d_v": "128"}
NORM = {"rows": "8192", "cols": "4096"}
PRODUCT = {"m": "8192", "n": "4096", "k": "2048"}
IMAGE = {
    "batch": "32", "conv_cin": "64", "conv_cout": "128", "conv_kh": "3", "conv_kw": "3", "conv_h": "56",
    "conv_w": "56", "conv_pad": "1",
}  # fmt: skip


def scored(tmp_path: Path, *rows: Mapping[str, str]) -> scoring.Scored:
    full = [{"gpu": "h100", "dtype": "bf16", "latency_us": "100", **row} for row in rows]
    columns = list({name: None for row in full for name in row})
    lines = [",".join(columns), *(",".join(row.get(name, "") for name in columns) for row in full)]
    (tmp_path / "kernels.csv").write_text("\n".join(lines) + "\n")
    return scoring.score_kernels(tmp_path / "kernels.csv")


def modules(torch: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Operator -> a function of PyTorch and its inputs, of the sizes above."""
    F = torch.nn.functional
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    q, k = (torch.empty(2, heads, 1024, 128, dtype=torch.bfloat16) for heads in (32, 8))
    tokens, words = torch.zeros(8192, dtype=torch.int64), torch.empty(32000, 4096, dtype=torch.bfloat16)
    weight = torch.empty(4096, dtype=torch.bfloat16)
    images = torch.empty(32, 64, 56, 56, dtype=torch.bfloat16)
    return {
        "gemm": (lambda a, b: a @ b, (x[:, :2048].contiguous(), x[:2048].contiguous())),
        "layernorm": (lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, weight, weight.clone())),
        "rmsnorm": (lambda x, w: F.rms_norm(x, (4096,), w), (x, weight)),
        "embedding": (F.embedding, (tokens, words)),
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "gelu": (F.gelu, (x,)), "silu": (F.silu, (x,)), "elementwise": (F.relu, (x,)),
        "add": (lambda a, b: a + b, (x, x.clone())), "dropout": (lambda x: F.dropout(x, 0.1, True), (x,)),
        "conv_fwd": (lambda x, w: F.conv2d(x, w, padding=1),
                     (images, torch.empty(128, 64, 3, 3, dtype=torch.bfloat16))),
        "attention_fwd": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                          (q, k, k.clone())),
    }  # fmt: skip


@pytest.mark.slow
def test_a_row_and_a_profile_of_the_same_operator_agree(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from steptime.captured.profiling import profile
    from steptime.captured.record import capture

    shapes = {"gemm": PRODUCT, "attention_fwd": ATTENTION, "conv_fwd": IMAGE}
    cases = modules(torch)
    got = scored(tmp_path, *({"op": op, **shapes.get(op, NORM)} for op in cases))
    for op, row_s, curve in zip(cases, got.score.predicted.seconds, got.score.groups["by_curve"], strict=True):
        function, inputs = cases[op]

        class Module(torch.nn.Module):  # type: ignore[name-defined,misc]
            def forward(self, *given: Any, function: Callable[..., Any] = function) -> Any:
                return function(*given)

        program = capture(Module(), inputs, name=op, training=False, target="cuda", optimizer=None)
        assert row_s == pytest.approx(profile(program, "h100").table.totals.device_s, rel=1e-6), op
        assert curve in ("own", "own, stand-in", "transferred")


@pytest.mark.slow
def test_every_operator_is_timed_on_a_measured_and_on_an_unmeasured_device(tmp_path: Path) -> None:
    sizes = NORM | PRODUCT | ATTENTION | IMAGE | {"batch": "2", "conv_stride": "2"}
    for gpu in ("h100", "h800", "mi300x"):
        got = scored(tmp_path, *({"op": op, "gpu": gpu, **sizes} for op in PLAIN)).score
        assert list(got.predicted.reason) == [""] * len(PLAIN)
        assert (got.predicted.low_s < got.predicted.seconds).all() and (got.predicted.seconds < 1).all()
    assert "roofline" in got.groups["by_curve"]


def test_the_documented_layout_of_attention_needs_no_source(tmp_path: Path) -> None:
    rows = [{"op": "attention_fwd", **ATTENTION},
            {"op": "attention_fwd", "source": "aiconfigurator_attention", **ATTENTION},
            {"op": "attention_bwd", **ATTENTION}]  # fmt: skip
    got = scored(tmp_path, *rows).score.predicted
    assert list(got.reason) == [""] * 3
    assert got.seconds[1] == pytest.approx(got.seconds[0], rel=0.01), "without a framework it is no other kernel"
    assert 1.5 < got.seconds[2] / got.seconds[0] < 5


def test_a_row_that_names_its_implementation_keeps_its_curve(tmp_path: Path) -> None:
    got = scored(tmp_path, {"op": "layernorm", **NORM}, {"op": "layernorm", "source": "vidur", **NORM}).score
    assert list(got.groups["by_curve"]) == ["own, stand-in", "own"]
    assert got.predicted.seconds[1] > 1.5 * got.predicted.seconds[0]
    width = got.predicted.high_s / got.predicted.low_s
    assert width[0] > width[1], "an implementation that is not known makes the band wider"


def test_remarks_of_an_unknown_source_change_nothing(tmp_path: Path) -> None:
    rows = [{"op": "rmsnorm", **NORM, **more} for more in ({}, {"source": "mine", "notes": "warm", "method": "clock"})]
    first, second = scored(tmp_path, *rows).score.predicted.seconds
    assert first == second > 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("given", "op", "dtype"),
    [("MatMul", "gemm", "torch.bfloat16"), ("rms_norm", "rmsnorm", "BF16"), ("layer-norm fwd", "layernorm", "bfloat16"),
     ("Flash Attention", "attention_fwd", "bf16"), ("sdpa_backward", "attention_bwd", "bf16"),
     ("LayerNorm.grad", "layernorm_bwd", "bf16"), ("residual_add", "add", "bf16")],
)  # fmt: skip
def test_the_usual_names_are_read(tmp_path: Path, given: str, op: str, dtype: str) -> None:
    sizes = NORM | PRODUCT | ATTENTION
    first, second = scored(
        tmp_path, {"op": given, "dtype": dtype, **sizes}, {"op": op, **sizes}
    ).score.predicted.seconds
    assert first == second > 0


def test_names_that_a_family_has_are_not_taken_for_others() -> None:
    assert all(name not in scoring.OPS for names in OTHER_NAMES.values() for name in names)
    assert all(operator_named(op) == op for op in PLAIN) and operator_named("fused_moe") == "fused_moe"
    assert dtype_named("nvfp4") == "nvfp4"


@pytest.mark.slow
def test_a_hint_says_what_to_write(tmp_path: Path) -> None:
    rows = [{"op": "sort", **NORM}, {"op": "rmsnorm", "rows": "4096"}, {"op": "gemm", **PRODUCT, "dtype": "float7"}]
    found = scored(tmp_path, *rows).to_json()
    assert found["skipped"] == {NOT_LAUNCHED: 1, scoring.NO_SHAPE: 2}
    assert all(op in found["hints"][NOT_LAUNCHED] for op in ("sort", *PLAIN))
    assert "rmsnorm needs rows cols" in found["hints"][scoring.NO_SHAPE]
    assert "gemm needs m n k batch=1" in found["hints"][scoring.NO_SHAPE]
    assert scored(tmp_path, {"op": "gemm", **PRODUCT}).to_json()["hints"] == {}


def test_columns_and_times_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text("device,op,precision,m,n,k,time_ms\nh100,gemm,bf16,4096,4096,4096,0.25\n")
    got = scoring.score_kernels(tmp_path / "k.csv").score
    assert got.measured_s[0] == pytest.approx(250e-6) and got.predicted.reason[0] == ""


def test_sizes_that_are_no_sizes_are_not_timed() -> None:
    timer, device = PlainTimer.fresh(), load_device("h100")
    for bad in (0.0, -1.0, 1.5, float("nan"), float("inf")):
        assert timer.cost(device, "layernorm", "bf16", {"rows": 8.0, "cols": bad}) is None
    assert timer.cost(device, "layernorm", "fp8", {"rows": 8.0, "cols": 8.0}) is None
    assert {row["op"] for row in columns_of_kernels()} == set(PLAIN)


@pytest.mark.quick("time_ms-0.1")
@pytest.mark.parametrize(
    ("column", "cell"),
    [("time_ms", "0.1"), ("latency_s", "1e-4"), ("duration_ns", "100000"), ("duration_us", "100"), ("Time (ms)", "0.1"),
     ("Latency_us", "100")],
)  # fmt: skip
def test_times_in_their_unit(tmp_path: Path, column: str, cell: str) -> None:
    """Durations of profilers, in nanoseconds, and names with a capital or brackets were not found."""
    (tmp_path / "t.csv").write_text(f"GPU,op,dtype,M,n,k,{column}\nh100,gemm,bf16,8192,4096,2048,{cell}\n")
    found, same = scoring.score_kernels(tmp_path / "t.csv"), scored(tmp_path, {"op": "gemm", **PRODUCT})
    assert found.score.measured_s.tolist() == pytest.approx([1e-4], rel=1e-12)
    assert found.score.predicted.seconds.tolist() == same.score.predicted.seconds.tolist()


@pytest.mark.parametrize("column", ["time", "latency", "mean_ms", "cuda_time_total"])
def test_a_time_without_name_or_unit_is_told_what_is_wanted(tmp_path: Path, column: str) -> None:
    (tmp_path / "t.csv").write_text(f"gpu,op,dtype,m,n,k,{column}\nh100,gemm,bf16,8192,4096,2048,100\n")
    with pytest.raises(InputFileError, match=f"it has .*{column}; times stand in time_us, latency_us or duration_us"):
        scoring.score_kernels(tmp_path / "t.csv")
