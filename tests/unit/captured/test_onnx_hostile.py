"""Damaged and hostile ONNX files end in one short message: no traceback, no read outside the folder, no blow-up."""

import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from recorded import opaque_nodes  # noqa: E402
from steptime.captured.onnx import (  # noqa: E402
    read_onnx,
)
from steptime.captured.onnx.step import program_of_file  # noqa: E402
from steptime.errors import InputFileError, UserError  # noqa: E402
from suites import examples  # noqa: E402


def info(name, *shape, type=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, type, shape)


def model(nodes, inputs=None, outputs=None, initializers=(), **more):
    inputs = [info("x", 4, 4)] if inputs is None else inputs
    graph = helper.make_graph(nodes, "g", inputs, outputs or [info("y", 4, 4)], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("own", 1)], **more)


def write(path, proto):
    path.write_bytes(proto.SerializeToString())
    return path


def plain():
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], initializers=[weight])


def refused(path, match, **more):
    with pytest.raises(UserError, match=match) as caught:
        read_onnx(path, **more)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a model", b"\x80\x04\x95", b"PK\x03\x04", b"\xff" * 999])
def test_files_that_are_no_model(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(path, "not an ONNX model")


def test_a_missing_file_and_a_folder(tmp_path):
    refused(tmp_path / "none.onnx", "the file does not exist")
    refused(tmp_path, "is a folder")


def test_a_file_over_two_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    refused(path, r"2147483648 bytes[\s\S]*external data")


def test_every_truncation_of_a_model_ends_in_a_message(tmp_path):
    whole = plain().SerializeToString()
    for length in range(len(whole)):
        path = tmp_path / "m.onnx"
        path.write_bytes(whole[:length])
        try:
            read_onnx(path)
        except InputFileError as problem:
            assert str(path) in str(problem)


@given(place=st.integers(0, 2**16), value=st.integers(0, 255))
@settings(max_examples=examples(300))
def test_a_changed_byte_ends_in_a_message_or_a_graph(tmp_path, place, value):
    data = bytearray(plain().SerializeToString())
    data[place % len(data)] = value
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(data))
    try:
        read_onnx(path)
    except UserError as problem:
        assert len(str(problem)) < 1000


@pytest.mark.each(
    "location",
    [
        "/etc/passwd",
        "../secret",
        "a/../../secret",
        "C:\\secret",
        "..\\secret",
        "file:///etc/passwd",
        "http://x/y",
        "a\0b",
    ],
)
def test_external_data_outside_the_folder(tmp_path, location):
    proto = plain()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    refused(write(tmp_path / "m.onnx", proto), "external data must be in the folder of the model")


def external(location, offset="0"):
    """A shape of two whole numbers whose data are in another file."""
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return model([helper.make_node("Reshape", ["x", "s"], ["y"])], outputs=[info("y", 2, 8)], initializers=[tensor])


def test_small_external_numbers_are_read_only_inside_the_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "s.bin").write_bytes(np.array([2, 8], np.int64).tobytes())
    assert read_onnx(write(inside / "m.onnx", external("s.bin"))).graph.outputs[0].type.shape == (2, 8)
    (tmp_path / "outside.bin").write_bytes(np.array([2, 8], np.int64).tobytes())
    (inside / "link.bin").symlink_to(tmp_path / "outside.bin")
    refused(write(inside / "m.onnx", external("link.bin")), "through a link")
    for offset in ("8", "-1", "x", "9" * 40):
        refused(write(inside / "m.onnx", external("s.bin", offset)), "are not in 's.bin'")
    refused(write(inside / "m.onnx", external("none.bin")), "must be known before .* in 'none.bin': is that next to")


VERSIONS = (("", 18), ("own", 1))


def functions(*bodies):
    opsets = [helper.make_opsetid(domain, version) for domain, version in VERSIONS]
    return [helper.make_function("own", name, ["a"], ["z"], nodes, opsets) for name, nodes in bodies]


def test_functions_that_call_themselves(tmp_path):
    call = helper.make_node("F", ["x"], ["y"], domain="own")
    own = functions(("F", [helper.make_node("G", ["a"], ["z"], domain="own")]),
                    ("G", [helper.make_node("F", ["a"], ["z"], domain="own")]))  # fmt: skip
    refused(write(tmp_path / "m.onnx", model([call], functions=own)), "function 'F' calls itself")


def test_functions_that_unfold_without_end(tmp_path):
    bodies = [("F0", [helper.make_node("Relu", ["a"], ["z"])])]
    for n in range(1, 40):
        twice = [
            helper.make_node(f"F{n - 1}", ["a"], ["b"], domain="own"),
            helper.make_node(f"F{n - 1}", ["b"], ["z"], domain="own"),
        ]
        bodies.append((f"F{n}", twice))
    call = helper.make_node("F39", ["x"], ["y"], domain="own")
    refused(write(tmp_path / "m.onnx", model([call], functions=functions(*bodies))), "nodes with its functions inlined")


def test_sub_graphs_nested_without_end(tmp_path):
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "i", [], [info("z", 4, 4)])
    for _ in range(80):
        node = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
        inner = helper.make_graph([node], "i", [], [info("z", 4, 4)])
        if inner.ByteSize() > 2**15:
            break
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    condition = info("c", type=TensorProto.BOOL)
    path = write(tmp_path / "m.onnx", model([node], inputs=[info("x", 4, 4), condition]))
    assert [call.node.op for call in read_onnx(path).program.calls] == ["relu"]
    deep = b""
    for _ in range(300):  # attribute.g.node.attribute.g ... as raw messages
        attribute = _field(6, _field(1, _field(5, deep)))
        deep = attribute
    graph = plain().SerializeToString() + _field(7, _field(1, _field(5, deep)))
    path.write_bytes(graph)
    refused(path, "not an ONNX model, or cut off")


def _field(number, content):
    length, size = len(content), b""
    while True:
        size += bytes([length & 127 | (128 if length > 127 else 0)])
        length >>= 7
        if not length:
            return bytes([number << 3 | 2]) + size + content


def constant(name, values, type=np.int64):
    return numpy_helper.from_array(np.array(values, type), name)


@pytest.mark.each(
    ("nodes", "initializers", "message"),
    [
        ([("Relu", ["nothing"])], [], "'nothing' is read before it is made"),
        ([("Relu", [])], [], "input 0 is missing"),
        ([("MatMul", ["x", "w"])], [constant("w", [[1.0]], np.float32)], "same reduction dim"),
        ([("Conv", ["x", "w"])], [constant("w", np.ones((1, 1, 3, 3)), np.float32)], "are needed for 0 dims"),
        ([("Reshape", ["x", "s"])], [constant("s", [-2, 3])], "invalid shape dimension -2"),
        ([("Reshape", ["x", "s"])], [constant("s", [3, -1])], "invalid for input of size 16"),
        ([("Expand", ["x", "s"])], [constant("s", [3, 5])], "do not broadcast"),
        ([("Transpose", ["x"], {"perm": [0, 7]})], [], "Dimension out of range"),
        ([("Concat", ["x", "x"], {"axis": 9})], [], "dim 9 is outside"),
        ([("Split", ["x", "s"])], [constant("s", [1, 99])], "sum exactly to 4"),
        ([("Softmax", ["x"], {"axis": 5})], [], "dim 5 is outside"),
        ([("AveragePool", ["x"], {"kernel_shape": [2, 2]})], [], "AveragePool"),
        ([("ConstantOfShape", ["s"])], [constant("s", [-5])], "negative sizes"),
        ([("Einsum", ["x", "w"], {"equation": "ab,bc->ac"})], [constant("w", np.ones((3, 3)), np.float32)], "Einsum"),
        ([("Tile", ["x", "s"])], [constant("s", [2])], "Tile"),
        ([("Cast", ["x"], {"to": 99})], [], "element type 99"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_fit(tmp_path, nodes, initializers, message):
    made = [helper.make_node(op, inputs, ["y"], **(rest[0] if rest else {})) for op, inputs, *rest in nodes]
    path = write(tmp_path / "m.onnx", model(made, outputs=[helper.make_empty_tensor_value_info("y")],
                                            initializers=initializers))  # fmt: skip
    refused(path, message)


def test_sizes_without_end_cost_nothing(tmp_path):
    big = 2**30
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["a"]), helper.make_node("Expand", ["one", "s"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, outputs=[info("y", big, big)],
                  initializers=[constant("s", [big, big]), constant("one", 1.0, np.float32)])  # fmt: skip
    assert read_onnx(write(tmp_path / "m.onnx", proto)).graph.outputs[0].type.elements == big**2
    many = [helper.make_node("Range", ["zero", "end", "one"], ["r"]), helper.make_node("Cast", ["r"], ["y"], to=1)]
    ends = [constant("zero", 0), constant("end", 2**55), constant("one", 1)]
    made = read_onnx(write(tmp_path / "m.onnx", model(many, outputs=[info("y", 2**55)], initializers=ends)))
    assert made.graph.outputs[0].type.shape == (2**55,)
    proto.graph.initializer[0].CopyFrom(constant("s", [2**40, 2**40]))
    refused(write(tmp_path / "m.onnx", proto), "Storage size calculation overflowed")


def test_a_very_long_recurrence_is_not_unrolled(tmp_path):
    weights = [constant("w", np.ones((1, 6, 3)), np.float32), constant("r", np.ones((1, 6, 2)), np.float32)]
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=2)
    proto = model([node], [info("x", 10**9, 1, 3)], [info("y", 10**9, 1, 1, 2)], weights)
    assert [each.op for each in opaque_nodes(read_onnx(write(tmp_path / "m.onnx", proto)))] == ["onnx::GRU"]


def test_more_numbers_than_the_shape_has(tmp_path):
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2], raw_data=b"\0" * 24)
    proto = model([helper.make_node("Reshape", ["x", "s"], ["y"])], initializers=[tensor])
    refused(write(tmp_path / "m.onnx", proto), "tensor 's'|cannot reshape")
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[-3], raw_data=b"")
    refused(write(tmp_path / "m.onnx", model([helper.make_node("Reshape", ["x", "s"], ["y"])], initializers=[tensor])),
            "tensor 's'")  # fmt: skip


def test_without_the_library_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(write(tmp_path / "m.onnx", plain()), r"pip install 'steptime\[onnx\]'")


def test_without_pytorch_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(write(tmp_path / "m.onnx", plain()), r"reading an ONNX file needs PyTorch[\s\S]*'steptime\[torch\]'")


def test_inputs_that_are_no_tensors(tmp_path):
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [4])
    node = helper.make_node("SequenceLength", ["x"], ["y"])
    refused(write(tmp_path / "m.onnx", model([node], [sequence])), "input 'x' is not a tensor")
    text = info("x", 4, type=TensorProto.STRING)
    refused(write(tmp_path / "m.onnx", model([helper.make_node("Identity", ["x"], ["y"])], [text])), "element type 8")


@pytest.mark.parametrize("wrong", [{"dilations": [-1, 1]}, {"dilations": [0, 0]}, {"strides": [0, 1]}])
def test_windows_that_step_backwards_or_not_at_all(tmp_path, wrong):
    kernel = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "k")
    node = helper.make_node("Conv", ["x", "k"], ["y"], **wrong)
    proto = model([node], [info("x", 1, 3, 8, 8)], [info("y", 1, 4, 8, 8)], [kernel])
    refused(write(tmp_path / "m.onnx", proto), "does not fit")


def test_a_model_without_weights_names_the_option_of_the_command_and_of_python(tmp_path):
    proto = model([helper.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(UserError, match="give --inference, in Python training=False"):
        program_of_file(write(tmp_path / "m.onnx", proto))


def whole(name, *shape):
    return info(name, *shape, type=TensorProto.INT64)


@pytest.mark.each(
    ("node", "inputs", "message"),
    [
        (("Gemm", ["x", "x"], {}), [info("x", 4)], r"must be 2D.*\n.*inputs: x fp32\[4\], x fp32\[4\]; attr"),
        (("ScatterND", ["x", "i", "x"], {}), [info("x"), whole("i")], r"do not fit it \(Index.*\n.*x fp32\[\], i int"),
        (("LRN", ["x", "x"], {}), [info("x", 4)], "LRN"),
        (("SequenceAt", ["x", ""], {}), [info("x", 4)], r"no sequence\n.*: x fp32\[4\], nothing; attributes: none"),
        (("GatherND", ["x", "i"], {}), [info("x", 4), whole("i", 2, 2**40)], "1099511627776, but its data have 1 dims"),
        (("ScatterND", ["x", "i", "x"], {}), [info("x", 4), whole("i", 2, 2**40)], "1099511627776, but .* 1 dims"),
        (("SplitToSequence", ["x"], {}), [info("x", 2**40)], "1099511627776 tensors is too long"),
        (("If", ["c"], {"else_branch": helper.make_graph([], "e", [], [])}), [info("x")], "it has no then_branch"),
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_read_is_shown_with_its_inputs(tmp_path, node, inputs, message):
    op, names, attributes = node
    made = helper.make_node(op, names, ["y"], **attributes)
    unknown = [helper.make_empty_tensor_value_info("y")]
    proto = model([made], inputs, unknown, [constant("c", True, np.bool_)])
    refused(write(tmp_path / "m.onnx", proto), message)
