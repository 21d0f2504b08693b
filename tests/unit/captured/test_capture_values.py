"""What Python may read in a capture: values that inputs determine, and what is taken as true of the others."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import captured_modules  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.fake import build  # noqa: E402
from steptime.captured.record.problems import CaptureError  # noqa: E402

X = torch.empty(10, 8)
LENGTHS, MASK = torch.tensor([3, 2, 5]), torch.arange(10) > 3


class Line(torch.nn.Module):
    """A layer, and something done with its output and one more argument."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.line, self.then = torch.nn.Linear(8, 8), then
        self.buffer: Any
        self.register_buffer("buffer", torch.tensor([4, 6]))

    def forward(self, x: Any, given: Any) -> Any:
        return self.then(self.line(x), given, self.buffer)


def recorded(then: Any, given: Any = LENGTHS) -> Any:
    return capture(Line(then), [X, given], optimizer=None)


def parts(y: Any, lengths: Any, _: Any) -> Any:
    return torch.stack([part.sum() for part in y.split(lengths.tolist())])


def items(y: Any, lengths: Any, _: Any) -> Any:
    out = torch.zeros(len(lengths), int(lengths.max()), 8)
    for row, part in enumerate(y.split([n.item() for n in lengths])):
        out[row, : len(part)] = part
    assert out.shape == (3, 5, 8)
    return out


def array(y: Any, lengths: Any, _: Any) -> Any:
    return y[: lengths.numpy().max()]


def of_buffer(y: Any, _given: Any, buffer: Any) -> Any:
    return torch.cat(y.split(buffer.tolist()))


def written_in_place(y: Any, lengths: Any, _: Any) -> Any:
    ends = torch.empty(4, dtype=torch.int64)
    ends.fill_(0)
    ends[1:] = lengths
    ends.cumsum_(0)
    return y[ends[1] : ends.tolist()[3]]


@pytest.mark.parametrize("then", [parts, items, array, of_buffer, written_in_place])
def test_values_that_inputs_determine_are_read(then: Any) -> None:
    assert recorded(then).assumed == ()


@pytest.mark.parametrize("select", [lambda y, m: y[m], lambda y, m: torch.masked_select(y, m[:, None]).view(-1, 8)])
def test_masks_among_the_inputs_decide_shapes(select: Any) -> None:
    program = recorded(lambda y, mask, _: select(y, mask) @ torch.ones(8, 1), MASK)
    assert next(call.node.outputs[0].shape for call in program.calls if call.node.op == "mm") == (6, 1)


def test_what_a_layer_computes_is_not_known() -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        recorded(lambda y, n, _: y if y.sum() > 0 else -y)
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        recorded(lambda y, n, _: y if n.add_(y.sum().long()).sum() > 0 else -y)


def test_floating_point_inputs_are_not_read() -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        recorded(lambda y, x, _: y if x.sum() > 0 else -y, torch.ones(3))


@pytest.mark.each(
    "guard",
    [
        lambda y: not torch.isfinite(y).all(),
        lambda y: torch.isnan(y).any() or torch.isinf(y).any(),
        lambda y: (y != y).any(),
        lambda y: y.abs().eq(float("inf")).sum().item() > 0,
    ],
)
@pytest.mark.each("rows", [10, 2**20])
def test_guards_against_infinite_numbers_are_taken_as_passed(guard: Any, rows: int) -> None:
    def then(y: Any, _given: Any, _buffer: Any) -> Any:
        return y.clamp(-1, 1) if guard(y) else y

    program = capture(Line(then), [torch.empty(rows, 8, device="meta"), LENGTHS], optimizer=None)
    assert "clamp" not in {call.node.op for call in program.calls}
    assert program.assumed
    assert all(f"no number is infinite or undefined ({__file__}:" in text for text in program.assumed)


def raises(y: Any) -> Any:
    if y.min() < 0 or not torch.allclose(y, y + 1):
        problem = f"wrong: {'small' if y.shape[0] else 'empty'}"
        raise ValueError(problem)
    if torch.equal(y, y + 1):
        return y
    raise ValueError


def items_checked(y: Any) -> Any:
    norm = y.norm().item() * 2
    if norm > 10 or -norm > 3:
        raise ValueError("diverged")
    return y * (1 / norm)


@pytest.mark.each("check", [captured_modules.asserts, raises, items_checked])
def test_checks_of_values_are_taken_as_passed(check: Any) -> None:
    program = recorded(lambda y, _given, _buffer: check(y).tanh())
    assert "tanh" in {call.node.op for call in program.calls}
    assert "a check of values passes" in program.assumed[-1]


def test_a_tensor_is_equal_to_itself() -> None:
    program = recorded(lambda y, n, _: y if torch.equal(y, y.detach()) else y.tanh())
    assert "tanh" not in {call.node.op for call in program.calls}
    assert [text.partition(" (")[0] for text in program.assumed] == ["no number is infinite or undefined"]


@pytest.mark.each(
    "reads",
    [
        lambda y: y if torch.equal(y, y + 1) else -y,
        lambda y: y if y.sum().item() > 1 else -y,
        lambda y: y[: int(y.sum().item())],
        lambda y: y.tanh() if y.sum().item() else y,
        lambda y: y[:, : max(y.sum().item(), 2)],
    ],
)
def test_a_value_that_decides_what_runs_is_not_taken_as_anything(reads: Any) -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        recorded(lambda y, _given, _buffer: reads(y))


def test_a_random_number_that_decides_a_branch_is_one_half() -> None:
    program = recorded(lambda y, n, _: y if torch.rand([]) < 0.1 else y.tanh())
    assert "tanh" in {call.node.op for call in program.calls}
    assert [text.partition(" (")[0] for text in program.assumed] == ["a random number is 0.5"]


def test_integers_without_values_are_ones_and_said_to_be() -> None:
    program = recorded(lambda y, n, _: y[: n.sum()], torch.empty(3, dtype=torch.int64, device="meta"))
    assert [text.partition(" (")[0] for text in program.assumed] == ["integer inputs without values are ones"]


def test_a_module_may_convert_itself_to_what_it_is() -> None:
    class Converts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = self.line(x)
            return self.line.to(torch.float32)(y)

    assert capture(Converts(), [X]).parameter_count == 72


def test_integers_have_values_when_a_factory_makes_them() -> None:
    made = build(lambda: (torch.tensor([[1, 8, 8]]), torch.ones(3, dtype=torch.bool), torch.ones(3)))
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu", "meta"]
    assert made[0].tolist() == [[1, 8, 8]]


OFFSETS = torch.tensor([3, 5, 10], dtype=torch.int32)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this PyTorch has no grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_in_any_type_are_those_of_a_real_run(dtype: Any) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 8, 16, dtype=dtype))

        def forward(self, x: Any, offsets: Any) -> Any:
            return torch.nn.functional.grouped_mm(x, self.weight, offs=offsets).pow(2).mean()

    x = torch.ones(10, 8, dtype=dtype, requires_grad=True)
    program = capture(Experts(), [x, OFFSETS], optimizer=None)
    products = [call.node for call in program.calls if call.node.op == "_grouped_mm"]
    assert [node.outputs[0].shape for node in products] == [(10, 16), (3, 8, 16), (10, 8)]
    for node in products:
        work = work_of(node)
        assert work.family == "product"
        assert work.matrix_flops == 2 * 10 * 8 * 16
    module = Experts()
    module(x, OFFSETS).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == products[1].outputs[0].shape


@pytest.mark.parametrize("padding", ["valid", "same", (0, 1)])
def test_paddings_of_one_number_hold_for_every_side(padding: Any) -> None:
    module = torch.nn.Conv2d(3, 8, 15, padding=padding)
    program = capture(module, (torch.randn(2, 3, 32, 32),), loss=lambda output: output.sum())
    first = next(call for call in program.calls if call.node.op == "convolution")
    assert tuple(first.node.outputs[0].shape) == tuple(module(torch.randn(2, 3, 32, 32)).shape)
