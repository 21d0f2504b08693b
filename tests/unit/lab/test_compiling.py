"""What compiling gains: buckets found exactly, kernels counted, branches weighed; and the examples of the documents."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from rewritten import H100, F, Of, nn, ops, rewritten, traced  # noqa: E402
from steptime.captured.graph import Nodes, TensorType  # noqa: E402
from steptime.captured.ops import making  # noqa: E402
from steptime.captured.ops.work import stored_elements  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.rewrite.buckets import best_buckets, cost_of, parse_lengths, powers_of_two  # noqa: E402
from steptime.rewrite.engine import apply_passes, metrics  # noqa: E402
from steptime.rewrite.fused import FusedTimer, fused_work, loop_steps  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime_lab.compiling import GUARD_S, Piece, branched, broken, compiled, generated  # noqa: E402


def test_buckets_are_the_best_of_all():
    draw = random.Random(0)
    for _ in range(20):
        sizes = sorted(draw.sample(range(1, 60), 7))
        weights = [draw.random() for _ in sizes]
        shares = {size: weight / sum(weights) for size, weight in zip(sizes, weights, strict=True)}
        options = {"steps": draw.choice([1, 10, 1000]), "compile_s": draw.choice([0.0, 3.0])}

        def time_s(length):
            return 1.0 + 0.02 * length + 0.001 * length**2

        found = best_buckets(shares, 4, time_s, **options)
        for count, best in enumerate(found, 1):
            tops = ((*some, sizes[-1]) for some in itertools.combinations(sizes[:-1], count - 1))
            least = min(cost_of(each, shares, time_s, **options).total_s for each in tops)
            assert best.total_s == pytest.approx(least, rel=1e-12)
            assert len(best.tops) == count


def test_what_buckets_cost_by_hand():
    shares = parse_lengths("100=1,130=1")
    found = cost_of(powers_of_two(shares), shares, float, steps=1, compile_s=10.0)
    assert found.tops == (128, 256)
    assert found.padding == pytest.approx(192 / 115 - 1)
    assert found.compilations == pytest.approx(1.0)  # one step meets one of two buckets
    with pytest.raises(UserError, match="no bucket holds a length of 130"):
        cost_of((128,), shares, float, steps=1, compile_s=0.0)


@pytest.mark.parametrize("text", ["", "x=1", "0=1", "5=-1", "5=nan", "5=0"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(UserError):
        parse_lengths(text)


def test_generated_kernels_and_calls_of_libraries_by_hand():
    def f(m, x):
        y = F.gelu(x @ m.w) * 2  # a product, then one kernel
        return F.layer_norm(y + x, (64,)) @ m.w  # the norm and the sum are in it too

    assert generated(traced(f, torch.randn(8, 64), w=torch.randn(64, 64)).flow) == (1, 2)


def test_loops_of_a_norm_and_of_a_concatenation_are_one_kernel_each():
    def rms(m, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.w  # what is between has one column

    def fire(m, x):
        return torch.cat([(x @ m.a).relu(), (x @ m.b).relu()], -1)  # each is computed where it is put

    assert generated(traced(rms, torch.randn(8, 64), w=torch.randn(64)).flow) == (1, 0)
    assert generated(traced(fire, torch.randn(8, 64), a=torch.randn(64, 8), b=torch.randn(64, 4)).flow) == (1, 2)


def test_compiling_saves_launches_and_graphs_leave_one():
    flow = traced(lambda m, x: (x.exp() + 1).sin() * 2, torch.randn(1024)).flow
    found = compiled(flow, H100)
    assert (found.eager["launches"], found.fused["launches"], found.graphed["launches"]) == (4, 1, 1)
    assert found.graphed["step_time_s"] < found.fused["step_time_s"] < found.eager["step_time_s"]


@pytest.mark.slow
def test_pieces_between_breaks():
    def f(m, x):
        y = x.exp()
        torch._dynamo.graph_break()
        return y.sin() + 1

    pieces = broken(Of(f), (torch.randn(4),))
    assert [piece.operators for piece in pieces] == [1, 2]
    assert all(piece.guards > 0 for piece in pieces)  # counted by PyTorch
    assert "test_compiling.py" in pieces[0].line and not pieces[1].reason


def test_each_weight_of_a_piece_adds_guards_and_each_guard_costs():
    def guards(count):
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        return broken(module, (torch.randn(2, 4),))[0].guards

    assert guards(1) < guards(2) < guards(6)
    flow = traced(lambda m, x: x.exp() + 1, torch.randn(1024)).flow
    few, many = (compiled(flow, H100, pieces=[Piece(operators=2, reason="", line="", guards=n)]) for n in (0, 1000))
    assert many.fused["step_time_s"] - few.fused["step_time_s"] == pytest.approx(1000 * GUARD_S)


def test_branches_on_data_are_weighed():
    def f(m, x):
        if x.sum() > 0:
            x = x @ m.w
        if x.max() > 1:
            x = x @ m.w
        return x

    found = branched(Of(f, w=torch.randn(64, 64)), (torch.randn(64, 64),), H100, 0.25)
    assert sorted(path.probability for path in found.paths) == pytest.approx([0.0625, 0.1875, 0.1875, 0.5625])
    assert found.step_time_s == pytest.approx(sum(p.probability * p.step_time_s for p in found.paths))
    assert found.paths[0].step_time_s > found.paths[-1].step_time_s
    with pytest.raises(UserError, match="no probability"):
        branched(Of(f, w=torch.randn(64, 64)), (torch.randn(64, 64),), H100, 1.5)


# -- the examples of the documents ------------------------------------------------------------------------------------


def test_three_operators_fused_read_and_write_five_tensors_not_nine():
    n = 4096
    found, _ = rewritten(lambda m, a, b, c, d: (a + b) * c + d, *(torch.randn(n) for _ in range(4)))
    prices = Prices(FusedTimer(device=H100))
    before, after = metrics(prices, found.before), metrics(prices, found.after)
    assert before["moved_bytes"] == 9 * 4 * n and after["moved_bytes"] == 5 * 4 * n
    assert before["flops"] == after["flops"] == 3 * n
    assert (before["launches"], after["launches"]) == (3, 1)


def test_a_float4_takes_a_quarter_of_the_steps_at_the_same_traffic():
    assert (loop_steps(256, 1), loop_steps(256, 4), loop_steps(257, 4)) == (256, 64, 65)
    found, _ = rewritten(lambda m, a, b: a + b * 1.5, torch.randn(256), torch.randn(256), everything=True)
    node = next(node for node in found.after.order if node.op == "fused")
    assert fused_work(node).moved_bytes == 3 * 256 * 4


def test_a_slice_by_strides_is_free_and_its_copy_is_not():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((4, 5), "fp32"))
    part = making.slice(nodes, making.slice(nodes, x, 0, 1, 4), 1, 2, 4)
    assert part.type.shape == (3, 2) and part.type.strides == (5, 1)
    timer = FusedTimer(device=H100)
    assert timer.cost(part.node).seconds == 0.0
    copy = timer.cost(making.clone(nodes, part).node)
    assert copy.work.moved_bytes == 2 * 6 * 4 and copy.seconds > 0


def test_a_transpose_is_free_and_a_contiguous_one_moves_it_twice():
    flow = traced(lambda m, x: x.t().contiguous(), torch.randn(64, 32)).flow
    assert Prices(FusedTimer(device=H100)).sums(flow, flow.order).moved_bytes == 2 * 64 * 32 * 4


def test_a_broadcast_row_is_stored_once():
    nodes = Nodes()
    row = nodes.source("input", "b", TensorType((1, 3), "fp32"))
    wide = making.expand(nodes, row, (4, 3))
    assert wide.type.strides == (0, 1) and stored_elements(wide.type) == 3


def test_queries_keys_and_values_are_one_product():
    weights = {name: nn.Linear(64, 64) for name in "qkv"}
    found, applied = rewritten(lambda m, x: m.q(x) * m.k(x) + m.v(x), torch.randn(16, 64), **weights)
    assert "merged siblings" in applied and ops(found.after) == ["addmm", "fused"]


def test_a_batch_norm_goes_into_the_convolution_and_a_sum_into_the_product():
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    found, _ = rewritten(lambda m, x: m.f(x), torch.randn(2, 3, 8, 8), f=block)
    assert ops(found.after) == ["fused"]  # with its activation as the epilogue
    found, _ = rewritten(lambda m, x, y: x @ m.w + y, torch.randn(8, 8), torch.randn(8, 8), w=torch.randn(8, 8))
    assert ops(found.after) == ["addmm"]


def test_a_cuda_graph_leaves_the_time_of_the_device():
    flow = traced(lambda m, x: (x @ m.w).exp() @ m.w, torch.randn(8, 8), w=torch.randn(8, 8)).flow
    found = apply_passes(flow, H100)
    graphed = Prices(FusedTimer(device=H100, graphed=True))
    totals = metrics(graphed, found.after)
    assert totals["host_s"] == 0.0
    assert totals["step_time_s"] == pytest.approx(metrics(found.prices, found.after)["device_s"])
