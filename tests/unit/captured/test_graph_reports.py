"""The profile of a program and its roofline plot say what its cost table holds."""

import re

import pytest

from steptime.captured.cost import Group, Timer, cost_table
from steptime.captured.graph import Call, Nodes, Program, TensorType
from steptime.captured.report.profile import basis_line, coverage_line, folded, print_profile, total_lines
from steptime.hardware.library import load_device
from steptime.report.text import short_operator, short_path


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


def _group(name, depth, seconds):
    return Group(name=name, depth=depth, calls=1, flops=0, vector_flops=0, moved_bytes=0, launches=1, seconds=seconds)


def test_small_members_of_a_module_are_one_row_and_nothing_is_lost():
    tree = [
        _group("(model)", 0, 10.0), _group("a", 1, 9.97), _group("a.x", 2, 9.9), _group("a.x.deep", 3, 0.02),
        _group("a.y", 2, 0.04), _group("a.y.deep", 3, 0.04), _group("a.z", 2, 0.03), _group("b", 1, 0.03),
        _group("(loss)", 0, 5.0),
    ]  # fmt: skip
    rows = [(group.name, group.depth, round(group.seconds, 9)) for group in folded(tree, 0.05)]
    assert rows == [
        ("(model)", 0, 10.0), ("a", 1, 9.97), ("a.x", 2, 9.9), ("a.x.deep", 3, 0.02), ("(2 others)", 2, 0.07),
        ("b", 1, 0.03), ("(loss)", 0, 5.0),
    ]  # fmt: skip


def test_calls_outside_modules_are_told_apart_by_where_they_run():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((64, 64), "fp32"))
    relu = nodes.apply("relu", {"self": x}, outputs=[TensorType((64, 64), "fp32")])
    places = [
        ("forward", ""), ("forward", "layers.0.attn.q"), ("forward", ""), ("backward", ""),
        ("backward", "layers.0.attn.q"), ("backward", ""), ("optimizer", ""),
    ]  # fmt: skip
    calls = tuple(Call(relu, phase, module, (), ()) for phase, module in places)
    timer = Timer(device=load_device("h100-sxm"))
    groups = cost_table(Program(name="p", calls=calls, storages=()), timer).by_module(2, folded=True)
    assert [(group.name, group.calls, group.depth) for group in groups] == [
        ("(model)", 2, 0), ("layers", 2, 1), ("layers.0", 2, 2), ("layers.0.attn", 2, 3),
        ("(loss)", 2, 0), ("(optimizer)", 1, 0), ("(outside modules)", 2, 0),
    ]  # fmt: skip
    forward = cost_table(Program(name="p", calls=calls[:3], storages=()), timer).by_module()
    assert [group.name for group in forward][-1] == "(outside modules)"
    bare = tuple(Call(relu, phase, "", (), ()) for phase in ("forward", "backward", "optimizer"))
    groups = cost_table(Program(name="p", calls=bare, storages=()), timer).by_module()
    assert [(group.name, group.calls) for group in groups] == [("(model)", 2), ("(optimizer)", 1)]


def test_layers_that_run_something_else_keep_their_numbers():
    nodes = Nodes()
    x, wide = (nodes.source("input", n, TensorType((n, n), "fp32")) for n in (64, 512))
    small, large = (nodes.apply("relu", {"self": v}, outputs=[v.type]) for v in (x, wide))
    ran = [("net.0.act", small), ("net.1.act", large), ("net.2.act", large), ("net.3.act", small)]
    calls = [Call(node, phase, path, (), ()) for phase in ("forward", "backward") for path, node in ran]
    calls = calls[:-1]  # nobody asks for the gradient of one layer's input
    timer = Timer(device=load_device("h100-sxm"))
    groups = cost_table(Program(name="p", calls=tuple(calls), storages=()), timer).by_module(2, folded=True)
    assert [(group.name, group.calls) for group in groups] == [
        ("(model)", 7), ("net", 7), ("net.0,3", 3), ("net.0,3.act", 3), ("net.1-2", 4), ("net.1-2.act", 4),
    ]  # fmt: skip


def test_long_names_stay_on_one_line(capsys):
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((64, 64), "fp32"))
    name = "_a_very_long_operator_name_of_some_library_without_an_end_backward"
    call = nodes.apply(name, {"self": x}, outputs=[TensorType((64, 64), "fp32")])
    path = "the_model.with_a_tower.of_many_layers.self_attention.query_projection"
    program = Program(name="p", calls=(Call(call, "forward", path, (), ()),), storages=())
    print_profile(cost_table(program, Timer(device=load_device("h100-sxm"))), depth=9)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("%")]
    named = [line.split()[0] for line in rows]
    assert any(word.endswith(".._backward") for word in named)
    assert "..query_projection" in named
    for room in range(12, 60):
        assert len(short_operator(name, room)) <= room and len(short_path(path, room)) <= room


def test_totals_line_has_mfu_and_hfu(table):
    lines = total_lines(table)
    assert "MFU" in lines[1] and "HFU" in lines[1]
    assert "8.59 GFLOP" in lines[1]
    assert "5 launches" in lines[0]


def test_a_causal_mask_is_named_where_there_is_attention(table):
    assert "causal" not in total_lines(table)[1]


def test_coverage_line_names_what_is_unknown(table):
    line = coverage_line(table)
    assert line.startswith("coverage: 80.0 % of 5 calls")
    assert re.search(r"mystery \(1 call, \d+\.\d % of the traffic\)", line)


def test_basis_line_names_curves(table):
    assert "fitted curve gemm bf16" in basis_line(table)
