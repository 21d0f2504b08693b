"""FX to graph to FX and ONNX to graph to ONNX change nothing; what is written computes what the module does."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402

from models.bert import bert  # noqa: E402
from models.llama import llama  # noqa: E402
from models.suite import SMALL, SUITE  # noqa: E402
from public_models.rows import load_torchvision  # noqa: E402
from rewritten import H100, leaves, nn, run, traced  # noqa: E402
from steptime.captured.ops import VIEWS  # noqa: E402
from steptime.errors import InputFileError, UserError  # noqa: E402
from steptime.rewrite.checking import Check, require_same  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.export_onnx import onnx_model  # noqa: E402
from steptime.rewrite.export_torch import graph_module, python_text, structure  # noqa: E402
from steptime.rewrite.kernels import random_contents  # noqa: E402
from steptime.rewrite.rewriting import rewrite, rewritten_of  # noqa: E402
from steptime.rewrite.trace import trace, trace_onnx  # noqa: E402

load_torchvision()


def hugging_face_bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=99, **sizes)
    return transformers.BertModel(config), {"input_ids": torch.randint(0, 99, (2, 16))}


def swin():
    timm = pytest.importorskip("timm")
    made = timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24, img_size=64, window_size=4
    )
    return made, (torch.randn(1, 3, 64, 64),)


MODELS = {**SMALL, "BERT of transformers": hugging_face_bert, "Swin": swin}


@cache
def traced_model(name):
    """A model, its inputs, its trace and what it computes."""
    module, inputs = MODELS[name]()
    module.eval()
    return module, inputs, trace(module, inputs), run(module, inputs)


def test_the_suite_has_the_published_sizes():
    """Parameters as the papers' implementations have them; the norms' and the block's by hand."""
    published = {
        "ResNet-50": 25_557_032,
        "ResNeXt-50": 25_028_904,
        "NasNet-A": 88_753_150,
        "NasRNN": 16 * 512 * 512,
        "BERT": 109_482_240,
        "Inception-v3": 27_161_264,
        "SqueezeNet": 1_235_496,
        "CSRNet": 16_263_489,
        "Llama block": 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096,
    }
    assert set(published) == set(SUITE) == set(SMALL)
    for name, count in published.items():
        with torch.device("meta"):
            module, _ = SUITE[name]()
        assert sum(weight.numel() for weight in module.parameters()) == count, name


def largest_error(expected, got):
    scale = [max(float(a.abs().max()), 1e-30) for a in expected]
    return max(float((a - torch.as_tensor(b)).abs().max()) / s for a, b, s in zip(expected, got, scale, strict=True))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_fx_to_graph_to_fx_is_exact(name):
    _, inputs, found, expected = traced_model(name)
    made = graph_module(found.flow, found.weights())
    tensors = tuple(leaves(inputs))
    got = run(made, tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert structure(trace(made, tensors).flow) == structure(found.flow)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", MODELS)
def test_the_written_python_file_computes_what_the_module_does(name):
    module, inputs, found, expected = traced_model(name)
    after = apply_passes(found.flow, H100).after
    space = {}
    exec(compile(python_text(after), name, "exec"), space)
    made = space["Rewritten"]({**module.state_dict(), **found.weights()})
    assert largest_error(expected, run(made, tuple(leaves(inputs)))) < 1e-5
    assert space["INPUTS"] == [f"input.{n}" for n in range(len(leaves(inputs)))]


def computed(flow):
    """Operators without views, which every reading adds around a product of more than two dims."""
    return sorted((node.op, *map(str, node.outputs)) for node in flow.operators if node.op not in VIEWS)


@pytest.mark.quick("NasRNN")
@pytest.mark.parametrize("name", MODELS)
def test_onnx_to_graph_to_onnx_is_exact(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    _, inputs, found, expected = traced_model(name)

    def outputs(model):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        given = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), leaves(inputs), strict=True)}
        return session.run(None, given)

    first, path = onnx_model(found.flow, found.weights()), tmp_path / "first.onnx"
    path.write_bytes(first.SerializeToString())
    read, _ = trace_onnx(path)
    second = onnx_model(read.flow, read.weights())
    (tmp_path / "second.onnx").write_bytes(second.SerializeToString())
    again, _ = trace_onnx(tmp_path / "second.onnx")
    assert computed(again.flow) == computed(read.flow)
    before, after = outputs(first), outputs(second)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert largest_error(expected, before) < 1e-5
    rewritten = onnx_model(apply_passes(read.flow, H100).after, read.weights())
    assert largest_error(expected, outputs(rewritten)) < 1e-5


class Placed(nn.Module):
    """A table of positions, and zeros that are added."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x):
        return self.table(torch.arange(x.shape[1])) + x + torch.zeros(8)


def test_new_tensors_lie_where_the_input_does():
    """On a GPU the module of a graph may make nothing on the CPU."""
    x = torch.randn(2, 16, 8)
    flow = trace(Placed(), (x,)).flow
    made = graph_module(flow, random_contents(flow))
    with FakeTensorMode(), torch.no_grad():
        for name, weight in list(made.named_parameters()):
            setattr(made, name, nn.Parameter(torch.empty(weight.shape, device="cuda"), requires_grad=False))
        assert made(torch.empty(x.shape, device="cuda")).device.type == "cuda"


FILLED = ("Constant", "Cast")
"""What a number is written as."""


@pytest.mark.slow
def test_products_by_head_are_written_as_such():
    """A runtime finds the number and the softmax behind them only where no reshape stands between."""
    found = traced(lambda m, q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v, *(torch.randn(2, 3, 5, 16) for _ in "qkv"))
    kinds = [node.op_type for node in onnx_model(found.flow, found.weights()).graph.node if node.op_type not in FILLED]
    assert kinds == ["Transpose", "MatMul", "Div", "Softmax", "MatMul"]


def test_weights_keep_their_names(tmp_path):
    found = traced(lambda m, x: m.f(x), torch.randn(2, 4), f=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = onnx_model(found.flow, found.weights())
    assert {tensor.name for tensor in model.graph.initializer} >= {"f.0.weight", "f.0.bias", "f.1.running_mean"}
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    _, read = trace_onnx(tmp_path / "model.onnx")
    assert {each.name for each in read.program.parameters} == {"f.0.weight", "f.0.bias", "f.1.weight", "f.1.bias"}
    assert read.outputs == found.flow.names


def test_a_file_is_checked_first_and_written_whole(tmp_path):
    found = traced(lambda m, x: (m.f(x) * 2).exp() + x, torch.randn(2, 4), f=nn.Linear(4, 4))
    path = tmp_path / "out.py"
    path.write_text("before")
    made = rewritten_of(found, H100, output=path)
    assert made.checked.passed and "class Rewritten" in path.read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.py"]


def test_a_graph_that_differs_is_not_written(tmp_path, monkeypatch):
    import steptime.rewrite.rewriting as room

    path = tmp_path / "out.py"
    path.write_text("before")
    monkeypatch.setattr(room, "check", lambda before, after: Check(fp64=1e-3, fp32=1e-3, seeds=1))
    with pytest.raises(UserError, match=r"differs from the original by 1.0e-03"):
        rewritten_of(traced(lambda m, x: x + 1, torch.randn(4)), H100, output=path)
    assert path.read_text() == "before"
    require_same(Check(fp64=1e-11, fp32=None, seeds=1))


def test_outputs_that_cannot_be_are_refused_before_the_work(tmp_path):
    found = traced(lambda m, x: x + 1, torch.randn(4))
    for name, message in (("out.txt", "must end in"), ("none/out.py", "no folder")):
        with pytest.raises(UserError, match=message):
            rewritten_of(found, H100, output=tmp_path / name)


def test_training_steps_are_written_as_python_and_not_as_onnx(tmp_path):
    found = trace(nn.Linear(4, 3), (torch.randn(5, 4),), training=True, optimizer="sgd")
    assert rewritten_of(found, H100, output=tmp_path / "step.py").checked.passed
    with pytest.raises(UserError, match="training step"):
        rewritten_of(found, H100, output=tmp_path / "step.onnx")


def cubed(output):
    """The output where it is a loss, else the sum of cubes: a plain sum has no gradient through a norm."""
    return (
        output if isinstance(output, torch.Tensor) and not output.dim() else sum(part.pow(3).sum() for part in output)
    )


@pytest.mark.quick("BERT-sgd")
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    "build", [lambda: bert(layers=1), lambda: llama(layers=1, targets=True)], ids=["BERT", "Llama"]
)
def test_training_steps_of_transformers_are_written_whole(build, optimizer, tmp_path):
    """Loss, gradients and updated weights are those of the original, memory being the objective."""
    module, inputs = build()
    found = trace(module, inputs, training=True, optimizer=optimizer, loss=cubed)
    done = rewritten_of(found, H100, objective="memory", output=tmp_path / "step.py")
    assert done.checked.passed
    space = {}
    exec(compile((tmp_path / "step.py").read_text(), "step", "exec"), space)
    updated = {f"{name}.new" for name, _ in module.named_parameters()}
    assert "loss" in space["OUTPUTS"] and updated <= set(space["OUTPUTS"])


@pytest.mark.each("meta", (False, True))
def test_labels_that_a_loss_closes_over_are_inputs_of_the_step(meta, tmp_path):
    """Also where a factory made them without values."""
    module, x, wanted = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 2, 1, 0, 2])
    labels = torch.empty_like(wanted, device="meta") if meta else wanted
    found = trace(
        module, (x,), training=True, optimizer="sgd", loss=lambda out: nn.functional.cross_entropy(out, labels)
    )
    assert rewritten_of(found, H100, output=tmp_path / "step.py").checked.passed
    space = {}
    exec(compile((tmp_path / "step.py").read_text(), "step", "exec"), space)
    assert space["INPUTS"] == ["input.0", "loss.labels"]
    outputs = space["Rewritten"](module.state_dict())(x, wanted)
    loss = dict(zip(space["OUTPUTS"], outputs, strict=True))["loss"]
    torch.testing.assert_close(loss, nn.functional.cross_entropy(module(x), wanted).detach())


@pytest.mark.slow
def test_an_operator_without_a_row_is_refused_by_name(tmp_path):
    found = traced(lambda m, x: torch.linalg.matrix_exp(x), torch.randn(3, 3))
    with pytest.raises(UserError, match="cannot be written as ONNX"):
        rewritten_of(found, H100, output=tmp_path / "out.onnx")


def test_open_sizes_and_data_outside_the_folder_are_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    found = traced(lambda m, x: x @ m.w, torch.randn(2, 4), w=torch.randn(4, 3))
    model = onnx_model(found.flow, found.weights())
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    (tmp_path / "open.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="batch"):
        trace_onnx(tmp_path / "open.onnx")
    assert trace_onnx(tmp_path / "open.onnx", {"batch": 2})[0].flow.inputs[0].type.shape == (2, 4)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../weights.bin"
    (tmp_path / "outside.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputFileError, match=r"weights\.bin"):
        trace_onnx(tmp_path / "outside.onnx")


def test_weights_in_another_file_of_the_folder_are_read(tmp_path):
    onnx = pytest.importorskip("onnx")
    found = traced(lambda m, x: x @ m.w, torch.randn(2, 4), w=torch.randn(4, 3))
    model = onnx_model(found.flow, found.weights())
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.data", size_threshold=0)
    read, _ = trace_onnx(tmp_path / "big.onnx")
    assert (next(iter(read.weights().values())) == found.weights()["w"].numpy()).all()
    (tmp_path / "big.data").write_bytes(b"")
    with pytest.raises(InputFileError, match="are not in"):
        read.weights()


@pytest.mark.quick(without=["0.7071-f2"])
@pytest.mark.parametrize(("constant", "dtype"), [(0.70710678, "f4"), (0.7071, "f2")])
def test_a_gelu_with_a_rounded_number_is_written(constant: float, dtype: str, tmp_path: Path) -> None:
    """A file stores 1 / sqrt(2) in its own type: the GELU that stands for it is nearer to the formula."""
    onnx = pytest.importorskip("onnx")
    make, of = onnx.helper, onnx.numpy_helper.from_array
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        make.make_node("Mul", ["x", "c"], ["s"]), make.make_node("Erf", ["s"], ["e"]),
        make.make_node("Add", ["e", "one"], ["p"]), make.make_node("Mul", ["x", "p"], ["q"]),
        make.make_node("Mul", ["q", "half"], ["y"]),
    ]  # fmt: skip
    numbers = [of(np.array(v, dtype), n) for n, v in (("c", constant), ("one", 1.0), ("half", 0.5))]
    ends = [[make.make_tensor_value_info(name, element, [8, 64])] for name in "xy"]
    graph = make.make_graph(nodes, "gelu", *ends, numbers)
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)]), str(tmp_path / "gelu.onnx"))
    found = rewrite(str(tmp_path / "gelu.onnx"), "h100-sxm", output=tmp_path / "out.onnx")
    assert [step.name for step in found.steps if step.applied and not step.tidy] == ["GELU"]
    assert found.checked is not None and 1e-10 < found.checked.fp64 < found.checked.limit < 1e-2
