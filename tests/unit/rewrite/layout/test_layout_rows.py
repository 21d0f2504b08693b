"""Each row of the table of layouts, by bytes that can be worked out by hand, and the graphs that come of it."""

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from layout_cases import cost_model, moved  # noqa: E402
from rewritten import H100, F, nn, ops, traced  # noqa: E402
from steptime.captured.graph import TensorType  # noqa: E402
from steptime.captured.ops import ROWS  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.layout.laid import with_layouts  # noqa: E402
from steptime.rewrite.layout.model import Layouts, _Built  # noqa: E402
from steptime.rewrite.layout.rows import TABLE  # noqa: E402
from steptime.rewrite.layout.strides import dense, layout_of, name_of, order_of, turned, typed  # noqa: E402

R = torch.randn
V100 = device_within("v100-sxm2-16gb")


def extra(function, *inputs, device=V100, fixed=False, target="cuda", **weights):
    """Bytes beyond the kernels' own, where copies that are left out save theirs."""
    flow = traced(function, *inputs, target=target, **weights).flow
    layouts = moved(flow, device)
    return layouts.cost(flow, fixed=fixed) - layouts.model.of_graph(flow)


def mm(shape):
    return torch.zeros(shape)


#: What is run -> inputs, and the bytes that layouts add (copies: 2 x 4 bytes an element) or save.
BY_HAND = {
    "products take transposes": (lambda m, x, y: x.t() @ y.t(), [mm((8, 4)), mm((6, 8))], 0),
    "a stride in both dims is copied": (lambda m, x, y: x[:, ::2] @ y, [mm((8, 8)), mm((4, 6))], 8 * 4 * 8),
    "softmax by columns is copied": (lambda m, x: torch.softmax(x.t(), -1), [mm((8, 4))], 8 * 32),
    "layer norm by columns is copied": (lambda m, x: F.layer_norm(x.t(), (8,)), [mm((8, 4))], 8 * 32),
    "a copy for a product is left out": (lambda m, x, y: x.t().contiguous() @ y, [mm((8, 4)), mm((8, 6))], -8 * 32),
    "a copy after a product is left out": (lambda m, x, y: (x @ y).t().contiguous(), [mm((8, 4)), mm((4, 6))], -8 * 48),
    "a sum reads one operand across": (lambda m, x, y: x + y.t(), [mm((8, 4)), mm((4, 8))], 8 * 32),
    "a row that is broadcast has no order": (lambda m, x, y: x + y, [mm((8, 4)), mm((4,))], 0),
    "reductions take any order": (lambda m, x: x.t().sum(0), [mm((8, 4))], 0),
    "parts that are joined are read across": (lambda m, x, y: torch.cat([x, y.t()]), [mm((8, 4)), mm((4, 8))], 8 * 32),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_row_costs_what_it_says(name):
    function, inputs, expected = BY_HAND[name]
    assert extra(function, *inputs) == expected


def conv(dtype):
    return nn.Conv2d(4, 8, 3, padding=1, bias=False).to(dtype)


def test_tensor_cores_convert_images_by_channel_before_and_after():
    x = torch.zeros(2, 4, 6, 6, dtype=torch.float16)
    elements = 2 * 4 * 36 + 2 * 8 * 36
    given = {"fixed": True, "f": conv(torch.float16)}
    assert extra(lambda m, x: m.f(x), x, **given) == 2 * 2 * elements
    assert extra(lambda m, x: m.f(x), x.float(), fixed=True, f=conv(torch.float32)) == 0  # CUDA cores work on NCHW
    assert extra(lambda m, x: m.f(x), x.float(), fixed=True, f=conv(torch.float32), device=H100) == 2 * 4 * elements
    p100 = device_within("p100-pcie-16gb")
    assert extra(lambda m, x: m.f(x), x, device=p100, **given) == 0  # fp16, but no tensor cores


def test_cpus_like_channels_last_where_there_are_few():
    cpu = replace(V100, architecture="cpu")
    for channels, elements in ((3, 3 * 36 + 8 * 36), (8, 0)):
        f = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        given = {"fixed": True, "device": cpu, "target": "cpu", "f": f}
        assert extra(lambda m, x: m.f(x), torch.zeros(1, channels, 6, 6), **given) == 2 * 4 * elements


def test_images_by_channel_stay_and_cost_nothing_on_tensor_cores():
    x = torch.zeros(2, 4, 6, 6, dtype=torch.float16).to(memory_format=torch.channels_last)
    f = conv(torch.float16).to(memory_format=torch.channels_last)
    assert extra(lambda m, x: m.f(x).relu(), x, f=f) == 0


def chain(m, x):
    return m.c(m.b(m.a(x).relu()).relu()).relu() + 1


def three(dtype):
    return {n: nn.Conv2d(8, 8, 3, padding=1).to(dtype) for n in "abc"}


@pytest.mark.parametrize(
    ("dtype", "device", "copies"), [("float16", V100, 2), ("float32", V100, 0), ("bfloat16", H100, 2)]
)
def test_a_chain_of_convolutions_moves_at_both_ends_where_tensor_cores_run(dtype, device, copies):
    given = getattr(torch, dtype)
    flow = traced(chain, torch.zeros(8, 8, 32, 32, dtype=given), target="cuda", **three(given)).flow
    laid = with_layouts(flow, cost_model(flow, device, {"device_s": 1.0}))
    assert len(laid.copies()) == copies
    names = {name for counts in laid.layouts.values() for name in counts}
    assert names == ({"NHWC"} if copies else set())
    assert check(flow, laid.flow).passed


def test_resnet_50_lies_by_channels_last_on_tensor_cores_and_stays_on_cuda_cores():
    from models.resnet import ResNet

    for dtype, moves in ((torch.float16, True), (torch.float32, False)):
        module = ResNet(blocks=(2, 2, 2, 2)).to(dtype)
        flow = traced(lambda m, x: m.f(x), torch.zeros(16, 3, 96, 96, dtype=dtype), target="cuda", f=module).flow
        laid = with_layouts(flow, cost_model(flow, V100, {"device_s": 1.0}))
        convolutions = [node for node in laid.flow.order if node.op == "convolution"]
        last = [name_of(node.outputs[0], layout_of(node.outputs[0])) == "NHWC" for node in convolutions]
        assert all(last) if moves else not any(last)
        # The images come in by channel and go out as one pixel each, which has no order: one copy, not two.
        assert [each.of for each in laid.copies()] == (["input"] if moves else [])
        assert (laid.gain > 0) == moves


@pytest.mark.slow
def test_resnet_50_as_the_documents_say():
    from models.resnet import ResNet

    flow = traced(lambda m, x: m.f(x), torch.zeros(32, 3, 224, 224).half(), target="cuda", f=ResNet().half()).flow
    for device, before_ms, after_ms in ((H100, 2.33, 1.885), (V100, 9.50, 7.006)):
        found = apply_passes(flow, device)
        laid = with_layouts(found.after, cost_model(found.after, device))
        assert (1e3 * laid.fixed, 1e3 * laid.cost) == pytest.approx((before_ms, after_ms), rel=5e-3)
        assert [(each.of, each.layout) for each in laid.copies()] == [("input", "NHWC")]


def test_the_new_graph_costs_what_was_promised():
    for function, inputs, weights in GRAPHS:
        flow = traced(function, *inputs, target="cuda", **weights).flow
        model = cost_model(flow, V100)
        laid = with_layouts(flow, model)
        assert Layouts.under(model).cost(laid.flow, fixed=True) == pytest.approx(laid.cost, rel=1e-9)
        assert laid.cost <= laid.fixed and laid.bound == pytest.approx(laid.cost)
        assert check(flow, laid.flow).passed


def heads(m, x):
    b, t, c = x.shape
    q, k, v = (f(x).view(b, t, 4, c // 4).transpose(1, 2).contiguous() for f in (m.q, m.k, m.v))
    y = torch.softmax(q @ k.transpose(2, 3).contiguous() / 3.0, -1) @ v
    return m.o(y.transpose(1, 2).contiguous().view(b, t, c))


GRAPHS = [
    (heads, [R(2, 16, 32)], {n: nn.Linear(32, 32) for n in "qkvo"}),
    (heads, [R(1, 16, 32)], {n: nn.Linear(32, 32) for n in "qkvo"}),
    (chain, [R(2, 8, 6, 6)], three(torch.float32)),
    (lambda m, x, w: torch.softmax((m.a(x)).t().contiguous(), -1) @ x, [R(8, 16), R(4)], {"a": nn.Linear(16, 4)}),
    (lambda m, x, y: torch.cat([x.t(), y]).t().contiguous().exp() + x.mean(), [R(8, 4), R(4, 8)], {}),
    (lambda m, x, y: torch.bmm(y, x.transpose(1, 2)).transpose(1, 2).contiguous(), [R(3, 5, 4), R(3, 5, 4)], {}),
    (lambda m, x: (x[:, 1:5] * 2).t().contiguous().unbind(0)[1] + x.select(1, 0), [R(6, 8)], {}),
]  # fmt: skip


def test_the_best_of_all_assignments_is_chosen():
    for function, inputs, weights in GRAPHS[2:]:
        flow = traced(function, *inputs, target="cuda", **weights).flow
        owner = moved(flow, V100)
        problem = _Built.of(owner, flow, False).problem
        sizes = [range(len(options)) for options in problem.vertices]
        count = 1
        for size in sizes:
            count *= len(size)
        if count <= 20_000:
            assert owner.cost(flow) == pytest.approx(min(map(problem.total, itertools.product(*sizes))))


def test_a_result_keeps_its_layout():
    flow = traced(lambda m, x, y: x @ y, R(8, 4), R(4, 6), target="cuda").flow
    laid = with_layouts(flow, cost_model(flow, V100))
    assert [value.type for value in laid.flow.outputs] == [value.type for value in flow.outputs]


def test_transposed_products_are_written_as_products_of_transposes():
    flow = traced(lambda m, x, y: torch.softmax((x @ y).t(), -1), R(8, 4), R(4, 6), target="cuda").flow
    laid = with_layouts(flow, cost_model(flow, V100))
    assert not laid.copies() and ops(laid.flow) == ["mm", "_softmax"]
    product = next(node for node in laid.flow.order if node.op == "mm")
    assert product.outputs[0].shape == (6, 8)
    assert check(flow, laid.flow).passed


def test_conversions_are_nodes_that_can_be_written():
    from steptime.rewrite.export_onnx import onnx_model
    from steptime.rewrite.export_torch import graph_module

    def read_twice(m, x):
        y = (x * 2).t()
        return torch.softmax(y, -1) + torch.log_softmax(y, -1)

    x = R(64, 32)
    flow = traced(read_twice, x, target="cuda").flow
    laid = with_layouts(flow, cost_model(flow, V100, {"device_s": 1.0}))
    assert [(each.of, each.layout, each.by) for each in laid.copies()] == [("t", "row-major", "")]  # once for both
    assert ops(laid.flow).count("clone") == 1
    with torch.no_grad():
        assert torch.equal(graph_module(laid.flow, {})(x), read_twice(None, x))
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(onnx_model(laid.flow, {}).SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert torch.allclose(torch.from_numpy(found), read_twice(None, x), atol=1e-5)


def test_training_graphs_keep_their_results():
    f = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
    options = {"optimizer": "sgd"}
    flow = traced(lambda m, x: m.f(x).relu().sum(), torch.zeros(2, 4, 6, 6), training=True, options=options, f=f).flow
    laid = with_layouts(flow, cost_model(flow, H100, {"device_s": 1.0}))
    assert laid.cost <= laid.fixed and check(flow, laid.flow).passed


def test_every_word_of_layouts_has_its_entry():
    assert {row.layouts for row in ROWS} == {*TABLE, "recorded"}
    assert all(entry.says and entry.source for entry in TABLE.values())


def test_names_and_orders_of_strides():
    type = TensorType((2, 3, 4, 5), "fp32")
    for order in itertools.permutations(range(4)):
        assert order_of(dense(type.shape, order)) == order
        assert layout_of(typed(type, dense(type.shape, order))) == dense(type.shape, order)
    assert name_of(type, turned(type.shape)) == "column-major"
    assert name_of(type, dense(type.shape, (0, 2, 1, 3))) == "order 0 2 1 3"
    assert name_of(type, (120, 40, 10, 2)) == "strided"
    assert name_of(TensorType((2, 8, 1, 1), "fp32"), (8, 1, 0, 0)) == "NCHW"  # one pixel has no order
