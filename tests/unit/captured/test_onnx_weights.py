"""What an ONNX file stores is told apart as the module has it: parameters, buffers and constants."""

import contextlib
import io
import json
import logging

import pytest

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402

from steptime.captured.onnx import program_of_file, read_onnx  # noqa: E402
from steptime.captured.profiling import profile  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Language(nn.Module):
    """Tied embedding, equal norms and biases, a table of positions that is a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embed.weight
        for block in self.blocks:
            nn.init.zeros_(block[1].bias)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("inv_freq", torch.linspace(0, 1, 16))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x * torch.cos(self.inv_freq * x[:, :1]))
        return self.head(x)


class Shared(nn.Module):
    """One layer that is called three times, and layers that are equal copies of one another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 48)
        self.back = nn.Linear(48, 32)
        self.copy = nn.Linear(48, 32)
        self.copy.load_state_dict(self.back.state_dict())

    def forward(self, x):
        for _ in range(3):
            x = self.back(self.layer(x).relu())
        return self.copy(self.layer(x))


class Vision(nn.Module):
    """Convolutions with batch normalisation, the second filled with zeros, and a classifier without a trained bias."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.fc(self.other(self.second(x)).mean((2, 3)))


class Grouped(nn.Module):
    """Group normalisations as U-Nets have them, whose exporter shares the ones and zeros of an instance norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.second, self.other = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.third, self.whole = nn.Conv2d(32, 32, 1), nn.GroupNorm(32, 32)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.first(x)))
        return self.whole(self.third(x + self.other(self.second(x))))


INPUTS = {
    Grouped: lambda: torch.randn(2, 3, 16, 16),
    Language: lambda: torch.randint(0, 50, (2, 8)),
    Shared: lambda: torch.randn(4, 32),
    Vision: lambda: torch.randn(2, 3, 12, 12),
}
TRAINING = torch.onnx.TrainingMode.TRAINING
FORMS = {
    "folded": {"dynamo": False, "do_constant_folding": True},
    "whole": {"dynamo": False, "do_constant_folding": False},
    "kept": {"dynamo": False, "do_constant_folding": True, "keep_initializers_as_inputs": True},
    "training": {"dynamo": False, "do_constant_folding": False, "training": TRAINING},
    "dynamo": {"dynamo": True, "optimize": True, "external_data": False},
    "external": {"dynamo": True, "optimize": True, "external_data": True},
}


def exported(path, made, form, *, half=False):
    torch.manual_seed(0)
    module, given = made(), INPUTS[made]()
    module = module.train(form == "training")
    if half:
        module, given = module.half(), given.half() if given.is_floating_point() else given
    options = FORMS[form]
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            opset = 18 if options["dynamo"] else 17
            torch.onnx.export(module, (given,), str(path), input_names=["x"], opset_version=opset, **options)
    finally:
        logging.disable(logging.NOTSET)
    return module


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.quick("Language-folded-False", "Language-kept-True", "Shared-whole-False")
@pytest.mark.each(
    ("made", "form", "half"),
    [
        (Language, "folded", False), (Language, "whole", False), (Language, "kept", True),
        (Language, "training", False),
        (Language, "dynamo", False), (Language, "external", True),
        (Shared, "folded", False), (Shared, "whole", False), (Shared, "kept", False), (Shared, "dynamo", False),
        (Vision, "training", False), (Grouped, "dynamo", False), (Grouped, "external", True),
    ],
)  # fmt: skip
def test_parameters_and_buffers_agree_with_the_module(made, form, half, tmp_path):
    module = exported(tmp_path / "model.onnx", made, form, half=half)
    model = read_onnx(tmp_path / "model.onnx")
    assert model.parameter_count == model.stored["parameters"].elements == count(module.parameters())
    assert model.stored["parameters"].size_bytes == model.parameter_count * (2 if half else 4)
    floating = count(buffer for buffer in module.buffers() if buffer.is_floating_point())
    assert model.stored["buffers"].elements in (floating, floating + 2)  # with the two numbers of batches
    program = program_of_file(tmp_path / "model.onnx")
    assert sum(each.elements for each in program.parameters if each.trained) == model.parameter_count


@pytest.mark.slow
def test_what_folding_takes_from_batch_normalisation_is_said(tmp_path):
    module = exported(tmp_path / "model.onnx", Vision, "dynamo")
    found = profile(str(tmp_path / "model.onnx"), "h100-sxm").to_json()
    assert found["parameters"] == count(module.parameters()) - 32  # weight and bias of two normalisations
    assert [note for note in found["notes"] if "batch normalisation" in note and "32 more" in note]
    assert found["stored"]["buffers"]["elements"] == 0
    json.dumps(found)


def test_convolutions_that_the_file_does_not_explain_are_named(tmp_path):
    module = exported(tmp_path / "model.onnx", Vision, "folded")
    model = read_onnx(tmp_path / "model.onnx")
    assert model.parameter_count == count(module.parameters()) - 16  # a bias in place of weight and bias
    assert "onnx::Conv_" in " ".join(model.notes)
    assert "may have more" in " ".join(model.notes)


def test_a_table_that_was_cut_while_folding_is_named(tmp_path):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = nn.Embedding(40, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x + self.table(torch.arange(8)))

    INPUTS[Positions] = lambda: torch.randn(2, 8, 16)
    module = exported(tmp_path / "model.onnx", Positions, "dynamo")
    model = read_onnx(tmp_path / "model.onnx")
    assert model.parameter_count == count(module.parameters()) - (40 - 8) * 16
    assert any("from table.weight" in note for note in model.notes)


def test_a_name_that_ends_in_a_number_is_no_second_call(tmp_path):
    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc_1, self.fc_2 = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.fc_2.load_state_dict(self.fc_1.state_dict())

        def forward(self, x):
            return self.fc_2(self.fc_1(x).relu())

    INPUTS[Numbered] = lambda: torch.randn(4, 32)
    module = exported(tmp_path / "model.onnx", Numbered, "folded")
    assert read_onnx(tmp_path / "model.onnx").parameter_count == count(module.parameters())


def test_a_tensor_that_two_norms_share_has_the_name_of_the_one_of_its_role(tmp_path):
    """By hand: ones made of constants are no parameter, and a folded scale stands for a scale, not for a bias."""
    numpy, helper = onnx.numpy_helper, onnx.helper
    np = pytest.importorskip("numpy")
    call = "%{} : [num_users=1] = call_function[target=group_norm](args = (%x, 2, %p_{}_weight, %p_{}_bias))"
    nodes = []
    for name, source, result in (("a", "x", "y"), ("b", "y", "z")):
        made = [
            helper.make_node("Reshape", [source, "groups"], [f"{name}1"]),
            helper.make_node("InstanceNormalization", [f"{name}1", "ones", "zeros"], [f"{name}2"]),
            helper.make_node("Reshape", [f"{name}2", "whole"], [f"{name}3"]),
            helper.make_node("Mul", [f"{name}3", "val_1"], [f"{name}4"]),
            helper.make_node("Add", [f"{name}4", "val_2"], [result]),
        ]
        for node in made:
            node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call.format(result, name, name))
        nodes += made
    tensors = {
        "groups": np.array([1, 2, -1]), "whole": np.array([1, 4, 3, 3]), "ones": np.ones(2, "f4"),
        "zeros": np.zeros(2, "f4"), "val_1": np.ones((4, 1, 1), "f4"), "val_2": np.zeros((4, 1, 1), "f4"),
    }  # fmt: skip
    image = [1, 4, 3, 3]
    graph = helper.make_graph(
        nodes, "norms", [helper.make_tensor_value_info("x", 1, image)], [helper.make_tensor_value_info("z", 1, image)],
        [numpy.from_array(value, name) for name, value in tensors.items()],
    )  # fmt: skip
    lines = [f"p_{n}_{role}: PARAMETER target='{n}.{role}'" for n in "ab" for role in ("weight", "bias")]
    graph.metadata_props.add(
        key="pkg.torch.export.ExportedProgram.graph_signature", value="\n".join(["# inputs", *lines])
    )
    for name, source in (("val_1", "a.weight"), ("val_2", "a.bias"), ("ones", "val_0"), ("zeros", "val_0")):
        value = helper.make_tensor_value_info(name, 1, list(tensors[name].shape))
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=f"['{source}', 'val_9']")
        graph.value_info.append(value)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(tmp_path / "norms.onnx"))
    model = read_onnx(tmp_path / "norms.onnx")
    assert model.parameter_count == 16
    assert dict(model.stored)["buffers"].elements == 0
