"""Operators of a CPU as a graph calls them: their work by hand, and fits that find what times were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime.cost.regression import resident_matmul_s
from steptime.hardware.profiles import profile_toml, read_profile
from steptime.hardware.records import Curve, Profile
from steptime.measure.machine.linear import MODELS
from steptime.measure.machine.profile import arguments_of
from steptime.measure.machine.torch_ops import copies_of
from steptime.measure.machine.work import Task, cpu_tasks

TODO = cpu_tasks(quick=True)
HAND = [
    ("cpu_two", {"rows": 2, "width": 3}, {"moved_bytes": 72, "steps": 6, "loops": 0, "result_bytes": 24}),
    ("cpu_column", {"rows": 2, "width": 3}, {"moved_bytes": 48, "loops": 2}),
    ("cpu_row_sum", {"rows": 2, "width": 3}, {"moved_bytes": 24, "loops": 2, "result_bytes": 0}),
    ("cpu_view", {"rows": 2, "width": 3}, {"moved_bytes": 0, "steps": 0}),
    (
        "cpu_product", {"m": 2, "n": 3, "k": 4, "groups": 1, "biased": 1, "sets": 8},
        {"matrix_flops": 48, "moved_bytes": 4 * (8 + 12 + 6 + 3), "working_bytes": 32 * 29},
    ),
    (
        "cpu_attention", {"heads": 2, "tokens": 4, "width": 8},
        {"matrix_flops": 2 * 2 * 32 * 8, "vector_flops": 3 * 32 - 8, "moved_bytes": 4 * 4 * 8 * 8 + 4 * 8},
    ),
    (
        "cpu_unfolded",
        {"batch": 1, "channels_in": 2, "channels_out": 3, "side": 4, "kernel": 3, "stride": 1, "groups": 1},
        {"matrix_flops": 2 * 16 * 18 * 3, "vector_flops": 16 * 18, "moved_bytes": 4 * (16 * 5 + 54)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "work"), HAND)
def test_work_by_hand(kind, shape, work) -> None:
    found = arguments_of(Task(kind=kind, dtype="fp32", shape=shape))
    assert {name: found[name] for name in work} == work


def test_tasks_span_rows_and_caches_and_take_the_sets_that_they_say() -> None:
    maps = [task for task in TODO if task.kind == "cpu_exp"]
    sizes = [task.shape["rows"] * task.shape["width"] for task in maps]
    assert min(sizes) < 100 and max(sizes) > 4e5
    products = [task for task in TODO if task.kind == "cpu_product"]
    assert min(task.shape["m"] for task in products) < 4 and {1, 8} <= {copies_of(task, 3e7, 1e9) for task in products}
    assert all(task.shape["kernel"] != 1 for task in TODO if task.kind == "cpu_convolution")


def test_a_fit_of_products_finds_the_cache() -> None:
    tasks = [task for task in TODO if task.kind == "cpu_product"]
    rows = [arguments_of(task) for task in tasks]
    shape = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    known = {
        "latency_s": 2e-6, "group_s": 0.0, "flops_per_s": 1e11, "m_half": 6.0, "n_half": 20.0, "k_half": 7.0,
        "biased_Bps": 1e10, "far_Bps": 8e9, "cache_bytes": 2.0**22,
    }  # fmt: skip
    names = ("m", "n", "k", "groups", "biased", "moved_bytes", "working_bytes")
    seconds = np.asarray(resident_matmul_s(**{name: shape[name] for name in names}, **known))
    found = MODELS["resident_matmul"].fit(shape, seconds)
    assert found == pytest.approx(known, rel=1e-3)


def test_scatter_is_written_and_read(tmp_path: Path) -> None:
    curve = Curve(
        family="short_loops/cpu_exp", dtype="fp32", coefficients={"latency_s": 1e-6}, points=9, median_ape=0.1,
        mean_ape=0.1, bias=0.0, band=(0.9, 1.1), source="x", scatter=0.04,
    )  # fmt: skip
    for each in (curve, replace(curve, scatter=None)):
        path = tmp_path / "p.toml"
        path.write_text(profile_toml(Profile(device="d", curves=(each,))))
        assert read_profile(path).curves == (each,)
