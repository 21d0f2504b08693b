"""What a rewrite may not touch is left and listed; open sizes and files that reach outside are refused by name."""

import pytest

torch = pytest.importorskip("torch")

from rewritten import H100, nn, traced  # noqa: E402
from steptime.errors import InputFileError, UserError  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.export_onnx import onnx_model  # noqa: E402
from steptime.rewrite.export_torch import graph_module  # noqa: E402
from steptime.rewrite.rewriting import rewritten_of  # noqa: E402
from steptime.rewrite.trace import trace, trace_onnx  # noqa: E402


@torch.library.custom_op("steptime_rewrites::twist", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    """Nobody knows what it computes."""
    return x.flip(0) * 3


@twist.register_fake
def _(x):
    return torch.empty_like(x)


def twisted(m, x):
    y = twist(x.relu().relu()) + twist(x.relu())  # equal arguments: an impure operator may give two results
    return y @ m.a + y @ m.b


def test_an_opaque_operator_is_left_and_listed_with_its_share():
    found = traced(twisted, torch.randn(8, 16), a=torch.randn(16, 4), b=torch.randn(16, 4))
    done = rewritten_of(found, H100, everything=True)
    assert sum("twist" in node.op for node in done.rewritten.after.order) == 2
    (row,) = done.opaque()
    assert row["operator"] == "steptime_rewrites::twist" and row["calls"] == 2
    prices, after = done.prices, done.rewritten.after
    each = next(node for node in after.order if "twist" in node.op)
    whole = prices.sums(after, after.order).device_s
    assert row["share_of_time"] == pytest.approx(2 * prices.cost(after, each).seconds / whole)
    assert 0 < row["share_of_time"] < 1 and row == done.to_json()["opaque"][0]
    assert "common factor" in {step.name for step in done.steps if step.applied}  # around it all is as ever
    assert check(found.flow, after).passed


def test_an_opaque_operator_runs_though_nobody_reads_it_and_is_not_folded():
    def f(m, x):
        twist(m.a)
        return x + 1

    done = rewritten_of(traced(f, torch.randn(4), a=torch.randn(4)), H100, everything=True)
    assert [node.op for node in done.rewritten.after.opaque()] == ["steptime_rewrites::twist"]


def test_an_opaque_operator_is_written_as_python_and_refused_by_name_as_onnx(tmp_path):
    found = traced(twisted, torch.randn(8, 16), a=torch.randn(16, 4), b=torch.randn(16, 4))
    x = torch.randn(8, 16)
    assert torch.allclose(graph_module(found.flow, found.weights())(x), found.module(x), atol=1e-5)
    with pytest.raises(UserError, match="twist"):
        rewritten_of(found, H100, output=tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_shapes_that_depend_on_data_are_refused_by_name():
    class Filter(nn.Module):
        def forward(self, x):
            return x[x > 0].sum()

    with pytest.raises(UserError, match=r"nonzero|data"):
        trace(Filter(), (torch.randn(8),))


def stored(tmp_path):
    onnx = pytest.importorskip("onnx")
    found = traced(lambda m, x: x @ m.w, torch.randn(2, 4), w=torch.randn(4, 3))
    return onnx, onnx_model(found.flow, found.weights()), tmp_path / "model.onnx"


@pytest.mark.quick(without=["dims3"])
@pytest.mark.parametrize("dims", [None, {"tokens": 4}, {"batch": 0}, {"batch": -1}])
def test_open_sizes_are_refused_by_name_unless_given(dims, tmp_path):
    _, model, path = stored(tmp_path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"batch|tokens"):
        trace_onnx(path, dims)
    assert trace_onnx(path, {"batch": 7})[0].flow.inputs[0].type.shape == (7, 4)


@pytest.mark.quick("/etc/passwd")
@pytest.mark.parametrize("place", ["../weights.bin", "/etc/passwd", "sub/../../weights.bin", "link.bin"])
def test_data_outside_the_folder_of_a_file_are_refused(place, tmp_path):
    onnx, model, path = stored(tmp_path)
    (tmp_path.parent / "weights.bin").write_bytes(b"\0" * 48)
    (tmp_path / "link.bin").symlink_to(tmp_path.parent / "weights.bin")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", place
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputFileError, match=r"outside its folder|weights\.bin|passwd"):
        trace_onnx(path)[0].weights()


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x0a\x3a\xff\xff\xff\x7f"])
def test_files_that_are_no_models_are_refused(data, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"model\.onnx"):
        trace_onnx(path)
