"""A captured step as a pure graph: it computes what the module does, costs what profile says, and shares nothing
that may not be shared."""

import pytest

torch = pytest.importorskip("torch")

from models.bert import bert  # noqa: E402
from rewritten import H100, F, Of, nn, ops, run, traced  # noqa: E402
from steptime.captured.cost import Timer, cost_table  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.flow import is_opaque  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.kernels import evaluate  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402


def values(found, inputs):
    given = dict(found.weights()) | {f"input.{n}": tensor for n, tensor in enumerate(inputs)}
    return evaluate(found.flow, found.flow.outputs, given)


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_costs_what_profile_says(training):
    module, inputs = bert()
    options = {"optimizer": "adamw"} if training else {}
    found = trace(module, inputs, training=training, target="cuda", **options)
    profiled = cost_table(capture(module, inputs, training=training, target="cuda", fold=False), Timer(device=H100))
    table = cost_table(found.flow.program(), FusedTimer(device=H100))
    assert table.totals.device_s == pytest.approx(profiled.totals.device_s, rel=1e-12)
    assert table.totals.launches == profiled.totals.launches
    assert table.totals.moved_bytes == profiled.totals.moved_bytes


def test_writes_in_place_and_through_views_are_new_values():
    def f(m, x):
        y = x * 2
        z = y[1:]  # a view that is written through, then read as a whole
        z.add_(1)
        y[0].mul_(3)
        return y + y.sum()

    x = torch.randn(3, 4)
    found = traced(f, x)
    assert torch.equal(values(found, [x])[0], run(Of(f), (x,))[0])


def test_two_dropouts_of_the_same_tensor_are_two():
    found = traced(lambda m, x: F.dropout(x * m.w, 0.5) + F.dropout(x * m.w, 0.5), torch.randn(4), training=True,
                   options={"optimizer": None}, w=torch.randn(4))  # fmt: skip
    drawn = [node for node in found.flow.order if node.attribute("draw") is not None]
    assert len(drawn) == 2
    assert [(row.node.op, row.times, row.dead) for row in found.repeats] == [("mul", 1, False)]


def test_what_is_computed_twice_or_read_by_nobody_is_saved():
    def f(m, x):
        x.exp()
        return (x @ m.w) + (x @ m.w)

    found = traced(f, torch.randn(4, 4), w=torch.randn(4, 4))
    assert {(row.node.op, row.times, row.dead) for row in found.repeats} == {("exp", 1, True), ("mm", 1, False)}
    assert ops(found.flow) == ["mm", "add"]


def test_recomputation_is_not_shared_away():
    def f(m, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(m.inner, x, use_reentrant=False)

    inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    found = traced(f, torch.randn(4, 4), training=True, options={"optimizer": None}, inner=inner)
    again = [call for call in found.flow.program().calls if call.recomputed]
    assert [call.node.op for call in again if not call.view] == ["mm", "relu"]
    assert ops(found.flow).count("relu") == 2


torch.library.define("steptime_test::odd", "(Tensor x) -> Tensor")
torch.library.impl("steptime_test::odd", "CPU", lambda x: x.clone())
torch.library.register_fake("steptime_test::odd", torch.empty_like)


def test_opaque_operators_stay_each_of_them_and_are_listed():
    def f(m, x):
        torch.ops.steptime_test.odd(x)
        a, b = torch.ops.steptime_test.odd(x), torch.ops.steptime_test.odd(x)
        return (a + b).relu().relu()

    found = apply_passes(traced(f, torch.randn(4)).flow, H100, everything=True)
    assert [node.op for node in found.after.opaque()] == ["steptime_test::odd"] * 3
    assert "fused" in ops(found.after)


def test_opaque_nodes_are_folded_in_no_constant():
    flow = traced(lambda m, x: x + torch.ops.steptime_test.odd(m.w), torch.randn(4), w=torch.randn(4)).flow
    found = apply_passes(flow, H100, everything=True)
    assert any(is_opaque(node) for node in found.after.order)


def test_peak_follows_from_liveness_with_writes_in_place():
    def f(m, x):
        y = x.exp()  # 4 KB
        y.add_(1)  # over y
        return y.sin()  # 4 KB more

    found = traced(f, torch.randn(1024))
    from steptime.captured.graph.liveness import Liveness

    assert Liveness(found.flow.program()).peak().size_bytes == 3 * 4096  # x, y, z
    plain = traced(lambda m, x: (x.exp() + 1).sin(), torch.randn(1024))
    assert Liveness(plain.flow.program()).peak().size_bytes == 3 * 4096  # x and two of three results


def test_a_constant_that_the_module_makes_keeps_its_numbers():
    x = torch.randn(3)
    found = traced(lambda m, y: y * torch.tensor([1.0, 2.0, 3.0]), x)
    assert torch.equal(values(found, [x])[0], x * torch.tensor([1.0, 2.0, 3.0]))


def test_lists_with_gaps_are_read_back():
    index, x = torch.tensor([1, 0]), torch.randn(3, 2, 4)
    found = traced(lambda m, y, i: y[:, i], x, index)
    assert torch.equal(values(found, [x, index])[0], x[:, index])


def test_training_steps_compute_gradients_and_new_weights():
    module = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    found = trace(module, (x,), training=True, optimizer="sgd")
    results = dict(zip(found.flow.names, values(found, [x]), strict=True))
    module(x).sum().backward()
    with torch.no_grad():
        new = module.weight - 1e-3 * module.weight.grad
    assert torch.allclose(results["weight.new"], new, atol=1e-6) or "weight.new" in results
    assert torch.allclose(results["bias.new"] - module.bias, (results["bias.new"] - module.bias)[0].expand(3))
