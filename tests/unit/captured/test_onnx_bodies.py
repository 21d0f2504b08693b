"""Operators of ONNX with sub-graphs are read through these: the results of ONNX Runtime, and the work of all turns."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from aten_interpreter import evaluate  # noqa: E402
from recorded import opaque_nodes  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.onnx import read_onnx  # noqa: E402
from steptime.errors import UserError  # noqa: E402

BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64
node = helper.make_node


def info(name, *shape, type=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, type, shape)


def body(nodes, inputs, outputs, stored=()):
    return helper.make_graph(nodes, "body", inputs, outputs, stored)


def weight(name, *shape):
    return numpy_helper.from_array(np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32), name)


def number(name, value, type=np.int64):
    return numpy_helper.from_array(np.array(value, type), name)


def made(path, nodes, inputs, outputs, stored=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
    return path


def agreeing(path, **given):
    """The model, once its graph gives what ONNX Runtime does."""
    found, proto = read_onnx(path), onnx.load(str(path))
    runtime = pytest.importorskip("onnxruntime")
    wanted = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, given)
    stored = {each.name: torch.from_numpy(numpy_helper.to_array(each).copy()) for each in proto.graph.initializer}
    stored |= {
        each.name: torch.from_numpy(numpy_helper.to_array(each).copy())
        for outer in proto.graph.node
        for attribute in outer.attribute
        for each in attribute.g.initializer
    }
    sources = stored | found.constants | {name: torch.from_numpy(array) for name, array in given.items()}
    results = evaluate(found.graph.outputs, sources)
    for ours, theirs in zip(results, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)
    assert not opaque_nodes(found)
    return found


def flops(found):
    return sum(work_of(each.node).matrix_flops for each in found.program.calls)


X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
PRODUCT = 2 * 4 * 8 * 8


def loop(path, trips, condition="keep", turn=(), inputs=(), stored=()):
    """``h = tanh(h @ w)`` each turn, and the sum of every ``h``'s rows as a scan output."""
    nodes = [
        node("MatMul", ["h", "w"], ["p"]), node("Tanh", ["p"], ["out"]),
        node("ReduceSum", ["out"], ["row"], keepdims=0), *(turn or [node("Identity", ["go"], ["still"])]),
    ]  # fmt: skip
    given = [info("i", type=INT64), info("go", type=BOOL), info("h", 4, 8)]
    inner = body(nodes, given, [info("still", type=BOOL), info("out", 4, 8), info("row")], [weight("w", 8, 8)])
    outer = node("Loop", [trips, condition, "x"], ["y", "rows"], name="turns", body=inner)
    return made(path, [outer], [info("x", 4, 8), *inputs], [info("y", 4, 8), info("rows", None)], stored)


def test_a_loop_of_a_known_number_of_turns(tmp_path):
    path = loop(tmp_path / "m.onnx", "n", stored=[number("n", 5), number("keep", True, bool)])
    found = agreeing(path, x=X)
    assert (flops(found), found.parameter_count, found.program.assumed) == (5 * PRODUCT, 64, ())


def test_a_loop_stops_at_a_condition_of_its_turn(tmp_path):
    turn = [node("Less", ["i", "last"], ["still"])]
    stored = [number("n", 9), number("last", 2), number("keep", True, bool)]
    found = agreeing(loop(tmp_path / "m.onnx", "n", turn=turn, stored=stored), x=X)
    assert flops(found) == 3 * PRODUCT


def test_a_loop_whose_turns_are_data(tmp_path):
    """One turn where nothing bounds it, else as many as its trip count: both are said."""
    turn = [node("Constant", [], ["low"], value_float=-1e9), node("Greater", ["row", "low"], ["still"])]
    path = loop(tmp_path / "m.onnx", "", "", turn=turn)
    found = read_onnx(path)
    assert flops(found) == PRODUCT
    assert found.program.assumed == ("a while_loop whose condition is data runs its body once (node 'turns')",)
    found = agreeing(loop(tmp_path / "m.onnx", "n", "", turn=turn, stored=[number("n", 3)]), x=X)
    assert flops(found) == 3 * PRODUCT
    assert found.program.assumed == ("a Loop whose condition is data runs to its trip count (node 'turns')",)
    found = read_onnx(loop(tmp_path / "m.onnx", "n", "", inputs=[info("n", type=INT64)]))
    assert flops(found) == PRODUCT
    assert len(found.program.assumed) == 1


def test_a_loop_without_end_stays_opaque(tmp_path):
    path = loop(tmp_path / "m.onnx", "n", stored=[number("n", 2**40), number("keep", True, bool)])
    proto = onnx.load(str(path))
    proto.graph.output[1].type.tensor_type.shape.dim[0].dim_value = 2**40
    path.write_bytes(proto.SerializeToString())
    assert [each.op for each in opaque_nodes(read_onnx(path))] == ["onnx::Loop"]


def branches(path, inputs=(), stored=()):
    small = body([node("Relu", ["x"], ["a"])], [], [info("a", 4, 8)])
    large = body([node("MatMul", ["x", "w"], ["b"])], [], [info("b", 4, 8)])
    outer = node("If", ["c"], ["y"], name="either", then_branch=small, else_branch=large)
    return made(path, [outer], [info("x", 4, 8), *inputs], [info("y", 4, 8)], [weight("w", 8, 8), *stored])


def test_an_if_takes_its_branch_and_else_the_one_with_more_work(tmp_path):
    found = agreeing(branches(tmp_path / "m.onnx", stored=[number("c", True, bool)]), x=X)
    assert [call.node.op for call in found.program.calls] == ["relu"]
    found = read_onnx(branches(tmp_path / "m.onnx", [info("c", type=BOOL)]))
    assert [call.node.op for call in found.program.calls] == ["mm"]
    assert found.program.assumed == ("an If whose condition is data takes the branch with more work (node 'either')",)
    assert found.parameter_count == 64
    # The other branch leaves nothing behind.
    assert sorted(each.name for each in found.program.storages if each.born < 0) == ["c", "w", "x"]


@pytest.mark.each("directions", (0, 1))
def test_a_scan_takes_every_step_of_its_axis(directions, tmp_path):
    """Along the second axis, forward or backward, with outputs along theirs."""
    nodes = [
        node("MatMul", ["h", "w"], ["p"]), node("Add", ["p", "one"], ["s"]), node("Tanh", ["s"], ["out"]),
        node("Neg", ["out"], ["each"]),
    ]  # fmt: skip
    inner = body(nodes, [info("h", 4, 8), info("one", 4, 8)], [info("out", 4, 8), info("each", 4, 8)])
    outer = node(
        "Scan", ["x", "along"], ["y", "all"], body=inner, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[directions], scan_output_axes=[-1], scan_output_directions=[directions],
    )  # fmt: skip
    ends = [info("y", 4, 8), info("all", 4, 8, 6)]
    path = made(tmp_path / "m.onnx", [outer], [info("x", 4, 8), info("along", 4, 6, 8)], ends, [weight("w", 8, 8)])
    found = agreeing(path, x=X, along=np.random.default_rng(2).normal(size=(4, 6, 8)).astype(np.float32))
    assert flops(found) == 6 * PRODUCT
    trained = read_onnx(path, training=True).program
    assert sum(work_of(call.node).matrix_flops for call in trained.calls) == (6 + 6 + 5) * PRODUCT


@pytest.mark.each("known", (True, False))
def test_a_body_that_cannot_be_read_stays_opaque(known, tmp_path):
    """It needs the types of the outputs; without them the error names the node that cannot be read."""
    inner = body([node("Swirl", ["x"], ["a"], domain="own", name="whirl")], [], [info("a", None)])
    other = body([node("Relu", ["x"], ["b"])], [], [info("b", 4, 8)])
    nodes = [node("If", ["c"], ["h"], then_branch=inner, else_branch=other), node("Relu", ["h"], ["y"])]
    types = [info("h", 4, 8)] if known else []
    graph = helper.make_graph(nodes, "g", [info("x", 4, 8), info("c", type=BOOL)], [info("y", 4, 8)], value_info=types)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    if not known:
        with pytest.raises(UserError, match=r"'whirl' \(Swirl\): nothing is known"):
            read_onnx(path)
        return
    found = read_onnx(path)
    assert [call.node.op for call in found.program.calls] == ["onnx::If", "relu"]
