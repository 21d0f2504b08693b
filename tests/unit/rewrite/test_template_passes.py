"""Every pass on the smallest graph that it matches, and on one that lacks its condition; results equal in fp64."""

import pytest

torch = pytest.importorskip("torch")

from rewritten import H100, nn, ops, rewritten, traced  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import device_names, device_within  # noqa: E402
from steptime.rewrite.engine import apply_passes, metrics  # noqa: E402
from steptime.rewrite.measuring import around, paired  # noqa: E402
from steptime.rewrite.passes import PASSES  # noqa: E402
from steptime.rewrite.scene import Folds, Scene  # noqa: E402

R = torch.randn


def conv(**more):
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, **more), nn.BatchNorm2d(8))


def written_out_attention(m, q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) / 4.0
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def layer_norm(m, x):
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5) * m.w + m.b


def rms_norm(m, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.w


def tanh_gelu(m, x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


#: Pass -> a function, its inputs, its weights, and the operators that are left.
CASES = {
    "constant folding": (lambda m, x: x + m.w.exp(), [R(4)], {"w": R(4)}, ["add"]),
    "common subexpression": (lambda m, x, y: (x + y).exp() * (y + x), [R(4), R(4)], {}, ["add", "exp", "mul"]),
    "identity": (lambda m, x: ((x + 0) * 1).relu().relu() / 1, [R(4)], {}, ["relu"]),
    "stacked views": (lambda m, x: x.view(2, 6).view(3, 4).exp(), [R(12)], {}, ["exp"]),
    "slice of concatenation": (lambda m, x, y: torch.cat([x, y])[4:].exp(), [R(4), R(6)], {}, ["exp"]),
    "view elimination": (
        lambda m, x, y: torch.bmm(x.transpose(1, 2).contiguous(), y), [R(3, 8, 4), R(3, 8, 5)], {}, ["bmm"]
    ),
    "conv + batch norm": (lambda m, x: m.f(x), [R(2, 4, 6, 6)], {"f": conv()}, ["convolution"]),
    "common factor": (lambda m, x: x @ m.a + x @ m.b, [R(4, 8)], {"a": R(8, 5), "b": R(8, 5)}, ["mm"]),
    "scale into weight": (lambda m, x: (x @ m.a) * 3.0, [R(4, 8)], {"a": R(8, 5)}, ["mm"]),
    "reassociation": (lambda m, a, b, c: a @ b @ c, [R(64, 4), R(4, 64), R(64, 4)], {}, ["mm", "mm"]),
    "matmul + add": (lambda m, x, y: x @ m.a + y, [R(4, 8), R(4, 5)], {"a": R(8, 5)}, ["addmm"]),
    "joined rows": (
        lambda m, x: torch.stack([(row @ m.a).exp() for row in x.unbind(0)]), [R(3, 2, 8)], {"a": R(8, 5)},
        ["mm", "exp", "exp", "exp", "stack"],
    ),
    "merged siblings": (
        lambda m, x: (m.q(x) * m.k(x), m.v(x)), [R(4, 8)],
        {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "v": nn.Linear(8, 2)}, ["addmm", "mul"],
    ),
    "softmax": (
        lambda m, x: (x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True),
        [R(4, 8)], {}, ["_softmax"],
    ),
    "layer norm": (layer_norm, [R(4, 8)], {"w": R(8), "b": R(8)}, ["native_layer_norm"]),
    "RMS norm": (rms_norm, [R(4, 8)], {"w": R(8)}, ["_fused_rms_norm"]),
    "GELU": (tanh_gelu, [R(4, 8)], {}, ["gelu"]),
    "SiLU": (lambda m, x: x * x.sigmoid(), [R(4, 8)], {}, ["silu"]),
    "attention": (
        written_out_attention, [R(2, 3, 5, 16), R(2, 3, 5, 16), R(2, 3, 5, 16)], {},
        ["_scaled_dot_product_flash_attention_for_cpu"],
    ),
    "convolution + activation": (
        lambda m, x, y: (m.f(x) + y).relu(), [R(2, 4, 6, 6), R(2, 8, 6, 6)], {"f": nn.Conv2d(4, 8, 3, padding=1)},
        ["fused"],
    ),
    "element-wise chain": (lambda m, x, y, z: (x + y) * z, [R(4), R(4), R(4)], {}, ["fused"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_pass_makes_what_it_says(name):
    function, inputs, weights, left = CASES[name]
    found, applied = rewritten(function, *inputs, passes=[name], everything=True, **weights)
    assert name in applied
    assert ops(found.after) == left


def test_every_pass_but_recomputation_has_a_case():
    assert {row.name for row in PASSES} - set(CASES) == {"recompute when fused"}


#: Pass -> a function that looks like its pattern and lacks its condition.
LACKING = {
    "constant folding": (lambda m, x: x + torch.rand(4) * m.w, [R(4)], {"w": R(4)}),  # random
    "common subexpression": (lambda m, x, y: (x - y).exp() * (y - x), [R(4), R(4)], {}),  # does not commute
    "identity": (lambda m, x: (x + 1) * 2, [R(4)], {}),
    "stacked views": (lambda m, x: x.view(2, 6).exp().view(3, 4), [R(12)], {}),  # a map lies between
    "slice of concatenation": (lambda m, x, y: torch.cat([x, y])[3:].exp(), [R(4), R(6)], {}),  # across the seam
    "view elimination": (lambda m, x: x.t().contiguous().exp(), [R(8, 4)], {}),  # a map gives its input's strides on
    "conv + batch norm": (lambda m, x: m.f[1](m.f[0](x)) + m.f[0](x).sum(), [R(2, 4, 6, 6)], {"f": conv()}),
    "common factor": (lambda m, x, y: x @ m.a + y @ m.b, [R(4, 8), R(4, 8)], {"a": R(8, 5), "b": R(8, 5)}),
    "scale into weight": (lambda m, x, y: (x @ y) * 3.0, [R(4, 8), R(8, 5)], {}),  # no weight
    "reassociation": (lambda m, a, b, c: a @ b @ c, [R(4, 64), R(64, 4), R(4, 64)], {}),  # the order is the best
    "matmul + add": (lambda m, x, y: (x @ m.a).exp() + y, [R(4, 8), R(4, 5)], {"a": R(8, 5)}),
    "joined rows": (lambda m, x: x[0] @ m.a + x[2] @ m.a, [R(4, 2, 8)], {"a": R(8, 5)}),  # not every step
    "merged siblings": (lambda m, x, y: x @ m.a + y @ m.b, [R(4, 8), R(4, 8)], {"a": R(8, 5), "b": R(8, 5)}),
    "softmax": (lambda m, x: x.exp() / x.exp().sum(0, keepdim=True), [R(4, 8)], {}),  # another dim
    "layer norm": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), [R(4, 8)], {}
    ),
    "RMS norm": (lambda m, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6), [R(4, 8)], {}),
    "GELU": (lambda m, x: 0.5 * x * (1 + torch.erf(x * 0.70)), [R(4, 8)], {}),  # another number
    "SiLU": (lambda m, x, y: x * y.sigmoid(), [R(4), R(4)], {}),
    "attention": (
        lambda m, q, k, v: torch.softmax((q @ k.transpose(-1, -2) + 1 * v @ v.transpose(-1, -2)) * 2, -1) @ v,
        [R(2, 3, 5, 16)] * 3, {},
    ),
    "convolution + activation": (
        lambda m, x: (lambda y: y.relu() + y)(m.f(x)), [R(2, 4, 6, 6)], {"f": nn.Conv2d(4, 4, 3, padding=1)}
    ),  # the convolution is read twice
    "element-wise chain": (lambda m, x, y: (x.exp() @ y).sin(), [R(4, 4), R(4, 4)], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
def test_without_its_condition_a_pass_does_nothing(name):
    function, inputs, weights = LACKING[name]
    _, applied = rewritten(function, *inputs, passes=[name], everything=True, **weights)
    assert name not in applied


def test_weights_are_no_constants_in_training():
    module = {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "f": conv()}
    found = traced(lambda m, x, y: m.q(x).sum() + m.k(x).sum() + m.f(y).sum(), R(4, 8), R(2, 4, 6, 6), training=True,
                   options={"optimizer": "sgd"}, **module)  # fmt: skip
    applied = {step.name for step in apply_passes(found.flow, H100, everything=True).steps if step.applied}
    assert not applied & {"merged siblings", "conv + batch norm", "scale into weight"}


def test_conv_and_batch_norm_fold_in_groups_and_without_a_bias():
    for more in ({"groups": 2}, {"bias": False}, {"stride": 2, "dilation": 2}):
        found, applied = rewritten(lambda m, x: m.f(x), R(2, 4, 9, 9), passes=["conv + batch norm"], f=conv(**more))
        assert "conv + batch norm" in applied and ops(found.after) == ["convolution"]


def test_lora_in_the_weight_is_one_product():
    def f(m, x):
        return x @ m.w + (x @ m.a @ m.b) * 0.5

    weights = {"w": R(64, 64), "a": R(64, 4), "b": R(4, 64)}
    found, _ = rewritten(f, R(16, 64), **weights)
    assert ops(found.after) == ["mm"]


def test_attention_takes_a_mask_and_a_scale_under_it():
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    inputs = [R(2, 3, 5, 16), R(2, 3, 5, 16), R(2, 3, 5, 16), mask]
    found, _ = rewritten(written_out_attention, *inputs, passes=["attention"], everything=True)
    node = next(node for node in found.after.order if node.op.startswith("_scaled"))
    assert node.attribute("scale") == 0.25 and node.input("attn_mask") is not None


def test_a_fused_kernel_reads_inputs_once_and_writes_what_others_read():
    def f(m, x, y):
        s = x + y
        return (s * x).exp(), s @ y

    found, _ = rewritten(f, R(4, 4), R(4, 4), passes=["element-wise chain"], everything=True)
    node = next(node for node in found.after.order if node.op == "fused")
    assert len(node.inputs) == 2 and len(node.outputs) == 2


def test_a_residual_sum_and_the_norm_behind_it_are_one_kernel():
    def f(m, x, y):
        s = x + y
        return m.n(s), s

    found, applied = rewritten(f, R(64, 512), R(64, 512), n=nn.LayerNorm(512))
    assert "element-wise chain" in applied and ops(found.after) == ["fused"]
    moved = metrics(found.prices, found.after)["moved_bytes"]
    assert moved == 4 * (4 * 64 * 512 + 2 * 512)  # reads x, y and two rows, writes the sum and the norm


@pytest.mark.slow
def test_an_epilogue_costs_what_the_convolution_does():
    found, _ = rewritten(
        lambda m, x: m.f(x).relu(), R(8, 64, 56, 56), everything=True, f=nn.Conv2d(64, 64, 3, padding=1)
    )
    before, after = (metrics(found.prices, flow) for flow in (found.before, found.after))
    assert (before["launches"] - after["launches"]) == 1
    assert before["moved_bytes"] - after["moved_bytes"] == 2 * 4 * 8 * 64 * 56 * 56
    conv = next(node for node in found.before.order if node.op == "convolution")
    assert after["device_s"] == pytest.approx(found.prices.timer.cost(conv).seconds, rel=1e-9)


def test_a_chain_that_leaves_and_comes_back_is_two_kernels():
    def f(m, x):
        y = x.exp()
        return y + (y * 2 @ m.w) * 3

    found, _ = rewritten(f, R(4, 4), passes=["element-wise chain"], everything=True, w=R(4, 4))
    assert ops(found.after).count("fused") == 2


def test_merged_siblings_keep_what_reads_them():
    def f(m, x):
        q, k = m.q(x).view(2, 3, 4, 2).transpose(1, 2), m.k(x).view(2, 3, 4, 2).transpose(1, 2)
        return q.reshape(2, 24) + k.reshape(2, 24)

    _, applied = rewritten(f, R(2, 3, 8), everything=True, q=nn.Linear(8, 8), k=nn.Linear(8, 8))
    assert "merged siblings" in applied


def test_what_is_measured_alone_has_inputs_of_the_module_and_of_the_boundary():
    """An input that a runtime took for a constant would be folded before the clock starts."""
    flow = traced(lambda m, x, y: x @ m.a + (y.exp() @ m.a), R(4, 8), R(4, 8), a=R(8, 5)).flow
    row = next(row for row in PASSES if row.name == "common factor")
    (match,) = row.find(Scene(flow=flow, folds=Folds(), on_cuda=False))
    before, after = around(flow, match)
    assert [value.node.attribute("name") for value in before.inputs] == ["input.0", "boundary.0"]
    assert before.inputs == after.inputs and ops(before) == ["mm", "mm", "add"] and ops(after) == ["add", "mm"]
    assert all(seconds > 0 for seconds in paired(before, after, 0.0))


def test_a_gain_within_the_doubt_is_left_unless_asked_for():
    inputs, weights = [R(4096, 4096)], {"a": R(4096, 4096), "b": R(4096, 4096)}
    flow = traced(lambda m, x: (x @ m.a, x @ m.b), *inputs, **weights).flow
    sizes = {step.name: step for step in apply_passes(flow, H100, passes=["merged siblings"]).steps}
    step = sizes["merged siblings"]
    low, high = step.change.band_s
    assert low <= step.change.gain_s <= high
    assert step.applied == (low > 0)
    assert any(s.applied for s in apply_passes(flow, H100, passes=["merged siblings"], everything=True).steps)


def test_memory_is_an_objective_of_training_steps():
    def f(m, x):
        h = x @ m.w
        return ((h * 2).sigmoid() * h).sin().sum()

    found = traced(f, R(512, 64), training=True, options={"optimizer": None}, w=R(64, 64))
    by_time = apply_passes(found.flow, H100)
    by_memory = apply_passes(found.flow, H100, objective="memory")
    peak = by_time.prices.peak_bytes
    assert peak(by_memory.after) < peak(by_time.after) <= peak(found.flow)
    assert "recompute when fused" in {step.name for step in by_memory.steps if step.applied}


def test_rms_norm_is_left_on_a_device_without_the_kernel():
    cpu = next(device for device in map(device_within, device_names()) if not device.runs_cuda)
    flow = traced(rms_norm, R(4, 8), w=R(8)).flow
    assert not apply_passes(flow, cpu, passes=["RMS norm"], everything=True).steps


def test_unknown_passes_and_objectives_are_refused():
    flow = traced(lambda m, x: x + 1, R(4)).flow
    with pytest.raises(UserError, match="no pass 'gelu'"):
        apply_passes(flow, H100, passes=["gelu"])
    with pytest.raises(UserError, match="objective"):
        apply_passes(flow, H100, objective="speed")
