"""Time models of attention, memory-bound and other kernels: limits, monotony, arrays, how rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from steptime.cost.attention import keys_of_tiles, tiled_attention_s
from steptime.cost.convolution import convolution_s
from steptime.cost.memory_bound import cached_Bps, memory_bound_s
from steptime.cost.recurrent import recurrent_s
from steptime.hardware import load_device
from steptime.measure.table import Table
from steptime_lab.calibrate.family import Coefficient, KernelFamily, readable
from steptime_lab.calibrate.fitting import fit
from steptime_lab.calibrate.kernel_curves import Cell, borrowed, cells, curves_of, generic_curves, weak_priors
from steptime_lab.calibrate.kernel_families import BY_DTYPE, BYTES_ONLY, FAMILIES

NUMBERS = ("m", "n", "k", "batch", "b", "h_q", "h_kv", "s_q", "s_kv", "d_qk", "d_v", "rows", "cols", "numel")
CONV = ("conv_cin", "conv_cout", "conv_kh", "conv_kw", "conv_h", "conv_w", "conv_stride", "conv_pad", "latency_us")
TEXTS = ("source", "gpu", "op", "dtype", "method", "kernel", "notes")

ATTENTION = {
    "batch": 4,
    "heads": 32,
    "kv_heads": 8,
    "queries": 4096,
    "keys": 4096,
    "causal": 1,
    "window": 0,
    "pair_flops": 512,
    "moved_bytes": 1.7e8,
    "matrix_flops_per_s": 989e12,
    "vector_flops_per_s": 67e12,
    "memory_Bps": 3.35e12,
    "sm_count": 132,
    "launch_s": 1e-5,
    "efficiency": 0.8,
    "softmax_flops": 20.0,
    "memory_efficiency": 0.8,
    "tail": 0.5,
    "overlap": 2.0,
    "fill_keys": 100.0,
    "window_keys": 100.0,
    "packing": 1.0,
    "serial_passes": 0.5,
    "tile_rows": 128,
}
MEMORY = {
    "moved_bytes": 1e9,
    "rows": 1e4,
    "reread_bytes": 0.0,
    "vector_flops": 1e8,
    "memory_Bps": 2e12,
    "l2_bytes": 4e7,
    "vector_flops_per_s": 2e13,
    "launch_s": 3e-6,
    "floor_s": 4e-6,
    "efficiency": 0.8,
    "cache_gain": 2.0,
    "cache_share": 0.5,
    "row_bytes": 10.0,
    "reread": 0.5,
    "vector_cost": 1.0,
    "most_rows": 1e9,
}
CONVOLUTION = {
    "rows": 50176,
    "columns": 64,
    "depth": 576,
    "moved_bytes": 2e7,
    "winograd_taps": 1.0,
    "matrix_flops_per_s": 1.4e13,
    "memory_Bps": 9e11,
    "sm_count": 80,
    "launch_s": 1e-5,
    "efficiency": 0.6,
    "memory_efficiency": 0.7,
    "tail": 0.5,
    "tile": 64,
    "start_depth": 50.0,
    "winograd": 1.5,
}
RECURRENT = {
    "batch": 32,
    "hidden": 1024,
    "gates": 4,
    "steps": 25,
    "element_bytes": 4,
    "matrix_flops_per_s": 1.4e13,
    "memory_Bps": 9e11,
    "launch_s": 1e-5,
    "step_s": 1e-5,
    "efficiency": 0.5,
    "batch_half": 20.0,
    "weight_reuse": 2.0,
    "products": 1.0,
}
MODELS = [
    (tiled_attention_s, ATTENTION),
    (memory_bound_s, MEMORY),
    (convolution_s, CONVOLUTION),
    (recurrent_s, RECURRENT),
]


def table(**columns: Any) -> Table:
    rows = max(len(v) for v in columns.values())
    numbers = {n: np.asarray(columns.get(n, [np.nan] * rows), np.float64) for n in (*NUMBERS, *CONV)}
    texts = {n: np.asarray(columns.get(n, [""] * rows), dtype=object) for n in TEXTS}
    return Table(numbers | texts)


@pytest.mark.parametrize(("formula", "numbers"), MODELS)
def test_arrays_mean_what_numbers_mean(formula: Any, numbers: Mapping[str, float]) -> None:
    scalar = formula(**numbers)
    assert isinstance(scalar, float) and scalar > 0
    arrays = formula(**{name: np.array([value, value], np.float64) for name, value in numbers.items()})
    np.testing.assert_allclose(arrays, scalar, rtol=1e-12)


@pytest.mark.each(("formula", "numbers"), MODELS)
@pytest.mark.each("name", ["memory_Bps", "matrix_flops_per_s", "efficiency"])
def test_a_faster_device_is_never_slower(formula: Any, numbers: dict[str, float], name: str) -> None:
    if name in numbers:
        assert formula(**numbers | {name: 1.5 * numbers[name]}) <= formula(**numbers)


@pytest.mark.each(("formula", "numbers"), MODELS)
@pytest.mark.each("name", ["batch", "queries", "keys", "moved_bytes", "rows", "steps", "launch_s"])
def test_more_work_is_never_faster(formula: Any, numbers: dict[str, float], name: str) -> None:
    if name in numbers and not (name == "queries" and "keys" in numbers):
        assert formula(**numbers | {name: 2 * numbers[name]}) >= formula(**numbers)


@pytest.mark.each("queries", [1, 100, 128, 129, 1000])
@pytest.mark.each("window", [0, 64, 300])
def test_keys_of_tiles_is_the_sum_over_tiles(queries: int, window: int) -> None:
    keys, rows, extra = queries + 500, 128, 16
    cap = min(keys, window + rows + extra) if window else keys
    tiles = [min(500 + (j + 1) * rows, cap) for j in range(-(-queries // rows))]
    mean, longest = keys_of_tiles(queries, keys, 1, window, extra, rows)
    assert mean == pytest.approx(np.mean(tiles))
    assert longest == max(tiles)


def test_a_causal_mask_halves_a_long_sequence() -> None:
    long = ATTENTION | {"queries": 65536, "keys": 65536, "moved_bytes": 0.0, "fill_keys": 0.0, "launch_s": 0.0}
    assert tiled_attention_s(**long) / tiled_attention_s(**long | {"causal": 0}) == pytest.approx(0.5, abs=0.01)


def test_a_window_makes_long_sequences_linear() -> None:
    one = tiled_attention_s(
        **ATTENTION | {"queries": 32768, "keys": 32768, "window": 512, "launch_s": 0.0, "moved_bytes": 0.0}
    )
    two = tiled_attention_s(
        **ATTENTION | {"queries": 65536, "keys": 65536, "window": 512, "launch_s": 0.0, "moved_bytes": 0.0}
    )
    assert two / one == pytest.approx(2.0, abs=0.05)


def test_one_more_block_than_processors_costs_a_wave() -> None:
    full = ATTENTION | {
        "batch": 1,
        "heads": 132,
        "kv_heads": 132,
        "queries": 128,
        "keys": 128,
        "causal": 0,
        "tail": 1.0,
        "moved_bytes": 0.0,
        "launch_s": 0.0,
    }
    assert tiled_attention_s(**full | {"heads": 133, "kv_heads": 133}) / tiled_attention_s(**full) == pytest.approx(2.0)


def test_memory_bound_limits() -> None:
    assert memory_bound_s(**MEMORY | {"moved_bytes": 0.0, "rows": 0, "vector_flops": 0}) == pytest.approx(
        (3e-6**4 + 4e-6**4) ** 0.25
    )
    large = memory_bound_s(**MEMORY | {"moved_bytes": 1e12})
    assert large == pytest.approx(1e12 / (0.8 * 2e12), rel=1e-3)
    assert cached_Bps(1e3, 2e12, 4e7, 0.8, 3.0, 0.5) == pytest.approx(6e12, rel=1e-6)


def test_families_are_told_apart() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    assert {f.name for f in BY_DTYPE}.isdisjoint(f.name for f in BYTES_ONLY)
    for family in FAMILIES:
        assert all(c.low <= c.start <= c.high for c in family.coefficients), family.name


def test_rows_become_arguments() -> None:
    rows = table(
        source=["neusight", "vidur", "deepbench"],
        op=["softmax", "elementwise", "rnn_bwd_data"],
        dtype=["fp32", "fp16", "fp32"],
        notes=["opname=softmax;split=train", "vidur op=mlp_act;model=x;tp=1", "train;cell=LSTM;hidden=512;sheet=x"],
        rows=[100, 10, np.nan],
        cols=[2048, 64, np.nan],
        numel=[204800, 640, np.nan],
        b=[np.nan, np.nan, 16],
    )
    known = {f.name: f for f in FAMILIES}
    softmax = known["softmax"].shape(rows)
    assert softmax["moved_bytes"][0] == 2 * 204800 * 4 and softmax["reread_bytes"][0] == 204800 * 4
    assert list(readable(softmax)) == [True, False, False]
    assert known["activation"].shape(rows)["moved_bytes"][1] == 1.5 * 640 * 2
    cell = {name: values[2] for name, values in known["rnn_bwd_data"].shape(rows).items()}
    assert cell == {"batch": 16, "hidden": 512, "gates": 4, "steps": 25, "element_bytes": 4, "products": 1}


def test_attention_becomes_arguments() -> None:
    heads = {"b": [2, 2], "h_q": [8, 8], "h_kv": [2, 2], "s_q": [512, 512], "s_kv": [512, 512], "d_qk": [128, 128]}
    rows = table(
        op=["attention_fwd", "attention_bwd"], dtype=["bfloat16", "fp8"], d_v=[128, 128],
        notes=["fw=vllm;kv_dtype=bfloat16;window=64", "mask=no_mask"], **heads,
    )  # fmt: skip
    known = {f.name: f for f in FAMILIES}
    forward, backward = (known[op].shape(rows) for op in ("attention_fwd", "attention_bwd"))
    assert (forward["causal"].tolist(), forward["window"].tolist()) == ([1.0, 0.0], [64.0, 0.0])
    assert forward["moved_bytes"].tolist() == [2 * 256 * (8 + 2) * 512 * size for size in (2, 1)]
    assert backward["moved_bytes"].tolist() == [2 * moved for moved in forward["moved_bytes"]]
    assert (forward["pair_flops"][0], backward["pair_flops"][0]) == (512, 1280)


def synthetic(device: str, rows: int = 60) -> Table:
    """Norms measured on a device whose coefficients are known."""
    numbers = np.random.default_rng(7)
    tokens, width = 2 ** numbers.integers(4, 16, rows), 2 ** numbers.integers(8, 14, rows)
    family = next(f for f in FAMILIES if f.name == "layernorm")
    columns = {
        "source": ["vidur"] * rows,
        "gpu": [device] * rows,
        "op": ["layernorm"] * rows,
        "dtype": ["fp16"] * rows,
        "method": ["kernel_time_kineto_median"] * rows,
        "notes": ["vidur op=x;tp=1"] * rows,
        "rows": tokens,
        "cols": width,
        "numel": tokens * width,
    }
    shape = family.shape(table(**columns))
    truth = {c.name: c.start for c in family.coefficients} | {"efficiency": 0.7, "launch_s": 2e-6}
    seconds = family.predict(shape, family.device(load_device(device), "fp16"), truth)
    return table(**columns, latency_us=np.asarray(seconds) * 1e6)


def only_cell(rows: Table) -> Cell:
    (cell,) = cells(rows, [f for f in FAMILIES if f.name == "layernorm"], by_dtype=False)
    return cell


def test_a_fit_finds_the_coefficients_it_was_made_with() -> None:
    cell = only_cell(synthetic("a100-80gb"))
    assert (cell.device.name, cell.dtype, cell.timer, cell.enough) == ("a100-sxm-80gb", "any", "kernel", True)
    values = fit(cell.family, cell.shape, cell.arguments(), cell.measured_s, priors=weak_priors(cell.family))
    assert values["efficiency"] == pytest.approx(0.7, rel=0.02)
    assert np.max(np.abs(cell.held_out(3) / cell.measured_s - 1)) < 0.05


def test_few_rows_lean_on_the_most_alike_device() -> None:
    curves = curves_of([only_cell(synthetic("a100-80gb")), only_cell(synthetic("t4"))])
    few = only_cell(synthetic("h100").take(np.arange(9)))
    assert not few.enough and few.some
    known = borrowed(curves, few)
    assert known is not None and known.coefficients == curves["a100-sxm-80gb"][0].coefficients
    near = few.near(known).curve(folds=3)
    assert near.median_ape < 0.1
    (generic,) = generic_curves({d: c for d, c in curves.items() if d != "generic"})
    assert generic.kind == "assumed" and generic.points == 120


def test_a_tile_is_chosen_from_the_table() -> None:
    family = KernelFamily(
        name="x",
        ops=frozenset({"x"}),
        formula=lambda n, tile_rows, a: a * np.ceil(n / tile_rows) * tile_rows,
        shape=lambda t: {"n": t.number("n")},
        device=lambda d, dtype: {},
        coefficients=(
            Coefficient(name="tile_rows", start=128, low=128, high=128),
            Coefficient(name="a", start=1, low=0.1, high=9),
        ),
    )
    n = np.arange(10.0, 400.0, 7.0)
    rows = table(gpu=["h100"] * len(n), op=["x"] * len(n), n=n, latency_us=1e6 * np.ceil(n / 64) * 64)
    (cell,) = cells(rows, [family], by_dtype=True)
    assert cell.with_best_tile().fixed == {"tile_rows": 64.0}
