"""The profile of a program and its roofline plot say what its cost table holds."""

import re

import pytest

from steptime.errors import UserError
from steptime.estimate.graph import Timer, cost_table
from steptime.hardware.library import load_device
from steptime.surface.report.profile import basis_line, coverage_line, print_profile, total_lines
from steptime.workload.graph import Call, Nodes, Program, TensorType


@pytest.fixture(scope="module")
def table():
    """Two layers of a product and a map; an operator that nobody knows."""
    nodes, calls = Nodes(), []
    x = nodes.source("input", "x", TensorType((2048, 1024), "bf16"))
    for i in range(2):
        w = nodes.source("parameter", f"w{i}", TensorType((1024, 1024), "bf16"))
        mm = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((2048, 1024), "bf16")])
        gelu = nodes.apply("gelu", {"self": mm.value()}, outputs=[TensorType((2048, 1024), "bf16")])
        calls += [Call(mm, "forward", f"h.{i}.fc", (), ()), Call(gelu, "forward", f"h.{i}.act", (), ())]
        x = gelu.value()
    y = nodes.source("input", "y", TensorType((2048, 1024), "fp32"))
    odd = nodes.apply("mystery", {"self": y}, outputs=[TensorType((2048, 1024), "bf16")])
    calls.append(Call(odd, "backward", "", (), ()))
    program = Program(name="two layers", calls=tuple(calls), storages=())
    return cost_table(program, Timer(device=load_device("h100-sxm")))


def test_profile_lists_modules_operators_and_phases(table, capsys):
    print_profile(table)
    out = capsys.readouterr().out
    assert "two layers on NVIDIA H100" in out
    lines = [line.split() for line in out.splitlines()]
    names = [words[0] for words in lines if words]
    for name in ("(model)", "h.*.fc", "(outside", "mm", "gelu", "mystery", "forward", "backward"):
        assert name in names, name
    assert "h.0.fc" not in names
    assert next(words for words in lines if words[:1] == ["mm"])[1] == "2"
    print_profile(table, show_all=True)
    assert "h.0.fc" in capsys.readouterr().out


def test_totals_line_has_mfu_and_hfu(table):
    lines = total_lines(table)
    assert "MFU" in lines[1] and "HFU" in lines[1]
    assert "8.59 GFLOP" in lines[1]
    assert "5 launches" in lines[0]


def test_coverage_line_names_what_is_unknown(table):
    line = coverage_line(table)
    assert line.startswith("coverage: 80.0 % of 5 calls")
    assert re.search(r"mystery \(1 calls, \d+\.\d % of the traffic\)", line)


def test_basis_line_names_curves(table):
    assert "fitted curve gemm bf16" in basis_line(table)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_roofline_has_roofs_points_and_labels(table, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from steptime.surface.report.roofline import write_roofline

    path = write_roofline(table, tmp_path / f"roof.{suffix}")
    assert path.stat().st_size > 1000
    if suffix == "svg":
        text = path.read_text(encoding="utf-8")
        for word in ("bf16 matrix", "vector", "mm ", "gelu ", "product", "map"):
            assert word in text, word
        assert "fp32 matrix" not in text, "no product runs in fp32"
        again = write_roofline(table, tmp_path / "again.svg")
        assert again.read_bytes() == path.read_bytes()


def test_roofline_refuses_other_suffixes(table, tmp_path):
    from steptime.surface.report.roofline import write_roofline

    with pytest.raises(UserError, match=r"roof\.xyz: a plot is not written as '\.xyz'"):
        write_roofline(table, tmp_path / "roof.xyz")
