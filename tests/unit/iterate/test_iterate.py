"""Iterations of sparse loops: arrays by level by hand, matrices, products against simulated caches, real kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.errors import UserError
from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.iterate.cli import PROFILE
from steptime_lab.iterate.loop import algorithm_names, array_bytes, loop_of, served_bytes
from steptime_lab.iterate.machine import COEFFICIENTS, Work, fitted, read_profile
from steptime_lab.iterate.matrices import FAMILIES, gathers, matrix_of, streamed_share
from steptime_lab.iterate.run import iteration, structure_of, works_of

KNOWN = read_profile(PROFILE)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_symmetric_with_a_diagonal(family):
    found = matrix_of(f"{family}:500")
    dense = np.zeros((found.rows, found.rows), dtype=bool)
    dense[np.repeat(np.arange(found.rows), np.diff(found.starts)), found.columns] = True
    assert (dense == dense.T).all() and dense.diagonal().all() and dense.sum() == found.nonzeros


def test_arrays_that_fit_are_served_near_and_others_by_memory():
    loop = loop_of("power")  # spmv x y; norm y; scale y; copy y x
    sizes = {"matrix": 1000.0, "x": 10.0, "y": 10.0}
    near = served_bytes(loop, sizes, [1e6, 1e7])
    assert all(levels == (0.0, 0.0) for levels in near)
    far = served_bytes(loop, sizes, [1.0, 100.0])
    # The matrix passes between two touches of x and of y; what is written counts twice.
    assert far[0] == (0.0, 1000.0 + 10.0 + 2 * 10.0)
    assert far[1] == (10.0, 0.0)  # the norm of what the product has written


def test_bytes_of_arrays_by_hand():
    assert array_bytes(loop_of("lanczos-full"), 100, 700, 5) == {
        "v": 800, "before": 800, "w": 800, "matrix": 700 * 12 + 400, "basis": 4000,
    }  # fmt: skip


def test_gathers_of_a_random_matrix_miss_where_x_does_not_fit():
    matrix = matrix_of("random:4000")
    small, large = hierarchy("1KiB:2,4KiB:4,16KiB:4"), hierarchy("64KiB:8,256KiB:8,8MiB:16")
    missed, found = gathers(matrix, small), gathers(matrix, large)
    assert missed[-1] > 0.3 * matrix.nonzeros > 1000 * found[-1]
    assert streamed_share(matrix_of("stencil-3d:4000")) > 0.9


def test_a_fit_finds_the_coefficients_that_made_the_times():
    random = np.random.default_rng(0)
    true = {name: float(random.uniform(0.5, 2)) * 1e-9 for name in COEFFICIENTS}
    works = []
    for matrix in ("random:3000", "stencil-2d:3000", "banded:5000", "power-law:20000"):
        shape = structure_of(matrix_of(matrix), "zen4")
        for name in algorithm_names():
            works += works_of(loop_of(name), shape, "zen4", 7, 1e-3)
    seconds = [sum(true[name] * count for name, count in work.counts().items()) for work in works]
    found, left = fitted(works, seconds)
    again = [sum(found[name] * count for name, count in work.counts().items()) for work in works]
    assert left < 1e-6 and again == pytest.approx(seconds, rel=1e-6)


def test_an_iteration_is_the_sum_of_its_kernels():
    found = iteration("cg", "stencil-2d:10000", KNOWN)
    assert found.time_s == pytest.approx(sum(kernel.time_s for kernel in found.kernels))
    assert [kernel.op for kernel in found.kernels] == ["spmv", "dot", "axpy", "axpy", "dot", "scale", "axpy"]
    dot = Work(op="dot", elements=10_000, level_bytes=(0.0, 0.0))
    by_hand = KNOWN.values["call_s"] + 10_000 * KNOWN.values["dot_element_s"]
    assert KNOWN.seconds(dot) == pytest.approx(by_hand)
    json.dumps(found.to_json())


@pytest.mark.slow
def test_reorthogonalisation_costs_two_passes_over_the_basis():
    plain, full = (
        iteration(name, "stencil-3d:50000", KNOWN, vectors=30).time_s for name in ("lanczos", "lanczos-full")
    )
    few = iteration("lanczos-full", "stencil-3d:50000", KNOWN, vectors=3).time_s
    assert plain < few < full


def test_nodes_share_rows_and_send_what_others_have():
    whole, parts = (iteration("lanczos", "stencil-2d:40000", KNOWN, nodes=n, cluster="dgx-h100") for n in (1, 4))
    assert parts.halo_rows == 2 * 200 and whole.halo_rows == 0
    assert sum(k.sent_s for k in whole.kernels) == 0
    assert [k.op for k in parts.kernels if k.sent_s] == ["spmv", "dot", "norm"]


LOOP = 'arrays = ["x", "y"]\n[[kernels]]\nop = "spmv"\nreads = ["x"]\nwrites = ["y"]\n'


def test_a_loop_of_ones_own(tmp_path):
    path = tmp_path / "loop.toml"
    path.write_text(LOOP)
    assert [k.op for k in iteration(str(path), "banded:1000", KNOWN).kernels] == ["spmv"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LOOP.replace("spmv", "spm"), "'spm' is no kernel"),
        (LOOP.replace('reads = ["x"]', 'reads = ["z"]'), "'z' is no array"),
        (LOOP.replace('reads = ["x"]', 'reads = ["x", "y"]'), "spmv reads 1 arrays"),
        ('arrays = []\n', "no list of names"),
        ('arrays = ["x"]\n', "kernels"),
        ("colour = 1\n" + LOOP, "is no field"),
        (LOOP.replace("spmv", "project").replace('reads = ["x"]', 'reads = ["x", "y"]').replace('writes = ["y"]', ""),
         "do not go together"),
    ],
)  # fmt: skip
def test_a_loop_that_is_none_is_refused(tmp_path, text, told):
    path = tmp_path / "loop.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        loop_of(str(path))


HEAD = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + "2 3 1\n1 1 1\n", "is 2 x 3"),
        (HEAD + "2 2 1\n1 2 1\n", "is not symmetric"),
        ("nothing\n", "no MatrixMarket file"),
        ("%%MatrixMarket matrix array real general\n2 2\n1\n2\n2\n1\n", "dense"),
    ],
)
def test_a_file_of_no_matrix_is_refused(tmp_path, text, told):
    path = tmp_path / "a.mtx"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        matrix_of(str(path))


def test_a_file_is_a_matrix(tmp_path):
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real symmetric\n3 3 3\n1 1 2\n2 1 -1\n3 3 1\n")
    found = matrix_of(str(path))
    assert (found.rows, found.nonzeros, found.columns.tolist()) == (3, 4, [0, 1, 0, 2])


@pytest.mark.parametrize("text", ["random:1", "random:x", "foo:10", "absent.mtx", "random:99999999999"])
def test_a_name_of_no_matrix_is_refused(text):
    with pytest.raises(UserError):
        matrix_of(text)


def test_a_profile_that_is_none_is_refused(tmp_path):
    path = tmp_path / "p.json"
    for text in ("{}", "[", json.dumps({"processor": "zen4"})):
        path.write_text(text)
        with pytest.raises(UserError, match="no profile"):
            read_profile(path)


def test_kernels_are_timed_and_a_profile_written(monkeypatch):
    from steptime_lab.iterate import measure

    monkeypatch.setattr(measure, "REPEATS", 2)
    rows = measure.measured("zen4", sizes=(2000,), families=("banded", "random", "stencil-2d"))
    found, left_out = measure.profile_of(rows, "zen4")
    assert len(left_out) == 6 and found.rows == sum(len(row.seconds) for row in rows) and found.error < 10
    with pytest.raises(UserError, match="too few"):
        measure.profile_of(rows[:2], "zen4")


def test_the_command():
    done = CliRunner().invoke(main, ["iterate", "lanczos", "--matrix", "banded:1000", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["rows"] == 1000
    refused = CliRunner().invoke(main, ["iterate", "lanczos", "--matrix", "banded:1000", "--nodes", "4"])
    assert refused.exit_code and "need links" in refused.output + refused.stderr


HEAD = "%%MatrixMarket matrix coordinate real symmetric\n"
RUN = "import sys; from steptime.__main__ import run; sys.argv[1:1] = ['iterate', 'cg', '--matrix']; run()"


@pytest.mark.quick("cut")
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("1 1 1\n1 1 4.0x", 2, "'x' among its numbers"),
        ("4 4 4\n1 1 4.0\n2 2 1.0\n3 3 1.0\n4 4 2.0 ", 0, "4 elements"),
        ("4 4 4\r\n1 1 4.0\r\n2 2 1.0\r\n3 3 1.0\r\n4 4 2.0\r", 0, "4 elements"),
        ("4 4 4\n1 1 4.0\n2 2 1.0\n3 3 1.0\n4 4", 2, "is no MatrixMarket file"),
        ("", 2, "is no MatrixMarket file"),
    ],
    ids=["letter", "blank at the end", "carriage returns", "cut", "empty"],
)
def test_a_matrix_file_that_ends_oddly_is_read_or_refused(tmp_path, text, code, said):
    """In a process of its own: SciPy's reader ended the process at such a file."""
    pytest.importorskip("scipy")
    path = tmp_path / "a.mtx"
    path.write_bytes((HEAD + text).encode())
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "500"},
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
