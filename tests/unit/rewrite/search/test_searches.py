"""Every search on small graphs whose cheapest form is known by hand, and what a search says of itself."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from rewritten import H100, nn, ops, traced  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.passes import MOVES  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.search.best_first import CLOSED, best_first  # noqa: E402
from steptime.rewrite.search.control import Control  # noqa: E402
from steptime.rewrite.search.parted import Parted  # noqa: E402
from steptime.rewrite.search.presets import SEARCHES as PRESETS  # noqa: E402
from steptime.rewrite.search.presets import Run  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem  # noqa: E402
from steptime.rewrite.search.run import NAMES, Options, searched  # noqa: E402
from steptime.rewrite.search.space import Space  # noqa: E402
from steptime.rewrite.search.split import blocks, movable  # noqa: E402

R = torch.randn
V100 = device_within("v100-sxm2-32gb")


def problem(function, *inputs, weights=None, device=H100, rows=None, **modules):
    """A graph with all moves, or some, and a cost that is the number of launches where no weights are given."""
    flow = traced(function, *inputs, target="cuda", **modules).flow
    moves = tuple(row for row in MOVES if not row.trades_memory and (rows is None or row.name in rows))
    cost = CostModel(prices=Prices(FusedTimer(device=device)), weights=weights or {"launches": 1.0})
    return Problem(flow=flow, moves=moves, cost=cost, on_cuda=True)


def fire():
    """Two convolutions of one tensor, 1x1 and 3x3, whose ReLUs are joined."""
    modules = {"a": nn.Conv2d(16, 64, 1), "b": nn.Conv2d(16, 64, 3, padding=1)}

    def f(m, x):
        return torch.cat([m.a(x).relu(), m.b(x).relu()], 1)

    return f, R(1, 16, 12, 12), modules


def run(name, given, **options):
    return PRESETS[name](Run(problem=given, **options))


def taso(given, **options):
    return run("taso", given, **options)


def exhaustive(given, **options):
    return run("exhaustive", given, **options)


SEARCHES = {
    **{name: functools.partial(run, name) for name in ("metaflow", "taso", "exhaustive", "recommended")},
    "parts only": functools.partial(run, "recommended", small=0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_three_products_of_one_tensor_and_their_sum_are_one_launch(name):
    weights = {each: R(8, 8) for each in "abc"}
    given = problem(lambda m, x: x @ m.a + x @ m.b + x @ m.c, R(4, 8), **weights)
    assert given.start == 5
    found = SEARCHES[name](given)
    assert found.cost == 1
    assert ops(found.flow) == ["mm"]
    assert check(given.flow, found.flow, seeds=1).passed


@pytest.mark.parametrize("name", ["exhaustive", "recommended", "parts only"])
def test_a_fire_module_is_one_convolution_where_launches_count(name):
    function, x, modules = fire()
    given = problem(function, x, **modules)
    found = SEARCHES[name](given)
    assert ops(found.flow) == ["fused"] and "convolution" in str(found.flow.order[-1].attributes)
    assert check(given.flow, found.flow, seeds=1).passed
    # Joined with a ReLU each they cost three, and what has to be undone for one costs more than 1.05 of that.
    assert taso(given).cost == 3


def test_a_kernel_is_enlarged_only_where_a_search_may_pay_first():
    function, x, modules = fire()
    # An operation costs 1e-9 of a launch: enlarging costs 2 x 12^2 x 64 x 16 x 8 operations, about 0.0024.
    rows = ["enlarged kernel", "merged convolutions", "joined maps", "joined slices"]
    given = problem(function, x, weights={"launches": 1.0, "flops": 1e-9}, rows=rows, **modules)
    greedy, relaxed = (taso(given, alpha=alpha, budget=400) for alpha in (1.0, 1.05))
    assert {move.rewrite_pass.name for move in relaxed.path} >= {"enlarged kernel", "merged convolutions"}
    assert "enlarged kernel" not in {move.rewrite_pass.name for move in greedy.path}
    assert relaxed.cost < 2.1 < 3 < greedy.cost
    assert check(given.flow, relaxed.flow, seeds=1).passed


@pytest.mark.parametrize(
    ("row", "function", "modules", "left"),
    [
        ("sum of convolutions", lambda m, x: m.a(x) + m.b(x * 2), {}, ["mul", "cat", "convolution"]),
        ("fewer groups", lambda m, x: m.g(x), {"g": nn.Conv2d(16, 16, 3, groups=4)}, ["convolution"]),
        ("convolution + ReLU", lambda m, x: m.a(x).relu(), {}, ["cudnn_convolution_relu"]),
        ("merged convolutions", lambda m, x: (m.a(x), m.b(x)), {}, ["convolution"]),
        ("joined maps", lambda m, x: torch.cat([x.exp(), (x + 1).exp()], 1), {}, ["add", "cat", "exp"]),
    ],
)
def test_a_move_makes_what_it_says(row, function, modules, left):
    own = {"a": nn.Conv2d(16, 8, 3), "b": nn.Conv2d(16, 8, 3)} | modules
    given = problem(function, R(2, 16, 6, 6), rows=[row], **own)
    space = Space(problem=given)
    (first, *_) = space.candidates(given.flow, given.start)
    made = space.applied(given.flow, *first.matches)
    assert ops(made) == left
    assert check(given.flow, made, seeds=1).passed


def test_every_number_of_groups_keeps_the_result():
    given = problem(lambda m, x: m.g(x), R(1, 16, 6, 6), g=nn.Conv2d(16, 32, 3, groups=8), rows=["fewer groups"])
    space = Space(problem=given)
    found = [space.applied(given.flow, *each.matches) for each in space.candidates(given.flow, 0.0)]
    assert [flow.by_op["convolution"][0].attribute("groups") for flow in found] == [4, 2, 1]
    assert all(check(given.flow, flow, seeds=1).passed for flow in found)


JOINED = {
    "shared weight": (lambda m, x, y: ((x @ m.a).exp(), ((y @ m.a).tanh() @ m.a).exp()), ["cat", "mm", "tanh", "mm"]),
    "sum of products": (lambda m, x, y: (x @ m.b + y @ m.a).exp(), ["cat", "mm", "exp"]),
}


@pytest.mark.parametrize("row", JOINED)
def test_products_are_joined(row):
    """Of three products with one weight, one needs another one's result: only two are joined."""
    function, left = JOINED[row]
    given = problem(function, R(4, 8), R(4, 8), a=R(8, 8), b=R(8, 8), rows=[row])
    space = Space(problem=given)
    (first, *_) = space.candidates(given.flow, given.start)
    made = space.applied(given.flow, *first.matches)
    assert [op for op in ops(made) if op != "exp" or left[-1] == "exp"] == left
    assert check(given.flow, made, seeds=1).passed


def layers(count, width=16):
    """Equal blocks, each three products that can be one, a residual sum and a norm."""

    def f(m, x):
        for n in range(count):
            block = getattr(m, f"b{n}")
            x = block.norm(x + block.q(x).tanh() * block.k(x) + block.v(x))
        return x

    def block():
        own = {"norm": nn.LayerNorm(width)} | {each: nn.Linear(width, width) for each in "qkv"}
        return Holder(own)

    return f, R(4, width), {f"b{n}": block() for n in range(count)}


class Holder(nn.Module):
    def __init__(self, own):
        super().__init__()
        for name, module in own.items():
            setattr(self, name, module)


def test_equal_blocks_are_searched_once_however_many_there_are():
    counts = []
    for count in (3, 6, 12):
        function, x, modules = layers(count)
        given = problem(function, x, **modules)
        parted = Parted(problem=given, control=Control())
        members = blocks(given.flow, movable(given.flow), 30)
        flow, path = parted.each(given.flow, members, exhaustive)
        assert sum(move.count for move in path if move.rewrite_pass.name == "merged siblings") == count
        assert check(given.flow, flow, seeds=1).passed
        counts.append((parted.kinds, parted.graphs))
    assert counts[1] == counts[2]


def test_the_set_of_a_small_graph_closes_and_a_limit_stops_it():
    given = problem(lambda m, x: x @ m.a + x @ m.b, R(4, 8), a=R(8, 8), b=R(8, 8))
    assert exhaustive(given).stop == CLOSED
    cut_short = best_first(given, alpha=float("inf"), budget=1)
    assert (cut_short.stop, cut_short.bound) == ("limit of 1 graphs", None)


def test_a_limit_on_a_metric_is_kept():
    function, x, modules = fire()
    plain = problem(function, x, **modules)
    flops = {"flops": 1.05 * sum(plain.cost.metrics(plain.flow, node)["flops"] for node in plain.flow.operators)}
    given = replace(plain, cost=replace(plain.cost, limits=flops))
    free, kept = taso(plain), taso(given)
    assert free.cost == kept.cost == 3  # two convolutions with their ReLUs, and the concatenation
    enlarged = exhaustive(plain).flow
    assert given.cost.excess(enlarged) > 0
    assert exhaustive(given).cost == 3
    assert not given.cost.excess(kept.flow)


def test_options_that_nobody_knows_are_refused():
    flow = traced(lambda m, x: x.relu().relu(), R(4)).flow
    for options, word in (
        (Options(search="tasso"), "taso"),
        (Options(weights={"second": 1.0}), "device_s"),
        (Options(alpha=0.9), "alpha"),
        (Options(budget=0), "budget"),
        (Options(limits={"flops": -1.0}), "not negative"),
    ):
        with pytest.raises(UserError) as error:
            searched(flow, H100, options)
        assert word in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize("name", NAMES)
def test_each_search_by_name_keeps_the_result_and_its_bound(name):
    function, x, modules = layers(2)
    flow = traced(function, x, target="cuda", **modules).flow
    found = searched(flow, V100, Options(search=name, everything=True))
    assert check(flow, found.rewritten.after, seeds=1).passed
    assert found.found.cost <= found.start * (1 + 1e-9)
    assert found.found.bound in (None, found.found.cost)


def test_moves_within_the_doubt_are_left_out_of_the_graph():
    """fewer groups on an H100: less time by the model, by less than its doubt."""
    convs = {"g": nn.Conv2d(256, 256, 3, padding=1, groups=32, bias=False)}
    flow = traced(lambda m, x: (m.g(x).relu() @ x).tanh(), R(8, 256, 28, 28), target="cuda", **convs).flow
    careful = searched(flow, H100, Options())
    everything = searched(flow, H100, Options(everything=True))
    assert everything.found.cost <= careful.found.cost
    doubtful = [step for step in careful.rewritten.steps if not step.applied]
    assert all(step.why == "the gain is within the doubt" for step in doubtful)
    left = [node.op for node in careful.rewritten.after.operators]
    assert all(step.name != "convolution + ReLU" for step in doubtful) or "relu" in left


def test_memory_at_its_peak_can_be_the_cost():
    def f(m, x):
        return (x.exp() + 1).tanh() * 2

    flow = traced(f, R(64, 64), target="cuda").flow
    found = searched(flow, H100, Options(objective="memory"))
    assert found.found.cost < found.start
    assert ops(found.rewritten.after) == ["fused"]


def test_operators_are_timed_here_and_each_kind_once():
    flow = traced(lambda m, x: (x @ m.a).exp() + (x @ m.b).exp(), R(16, 16), a=R(16, 16), b=R(16, 16)).flow
    found = searched(flow, H100, Options(measured=True, search="greedy"))
    assert 0 < found.found.cost <= found.start
    assert found.weights == {"measured_s": 1.0}


def test_an_interrupt_gives_the_best_so_far():
    control = Control()
    seen = []

    def report(what, graphs, cost):
        seen.append(cost)
        control.interrupted = len(seen) >= 2

    control.report = report
    function, x, modules = fire()
    found = taso(problem(function, x, **modules), control=control)
    assert found.stop == "interrupted"
    assert found.cost <= seen[-1]


RULE = """
[[rule]]
name = "{name}"
variables = "x[m,n] y[m,n] z[m,n]"
source = "add(mul(x, z), mul(y, z))"
target = "{target}"
"""


def test_a_users_rules_are_moves_once_they_are_proved(tmp_path):
    flow = traced(lambda m, x, y, z: x * z + y * z, R(64, 64), R(64, 64), R(64, 64)).flow
    path = tmp_path / "rules.toml"
    alone = Options(search="taso", everything=True, passes=("constant folding",))
    path.write_text(RULE.format(name="factored", target="mul(add(x, y), z)"))
    plain, ruled = (searched(flow, H100, each) for each in (alone, replace(alone, rules=str(path))))
    assert (ops(plain.rewritten.after), ops(ruled.rewritten.after)) == (["mul", "mul", "add"], ["add", "mul"])
    assert "factored" in ruled.rewritten.steps[0].what
    path.write_text(RULE.format(name="wrong", target="add(mul(x, y), z)"))
    with pytest.raises(UserError, match=r"wrong in .* is unsound: shapes x .* values"):
        searched(flow, H100, replace(alone, rules=str(path)))
    with pytest.raises(UserError, match="rules are moves; template makes none"):
        searched(flow, H100, Options(search="template", rules="shipped"))


def test_mutants_are_moves_of_a_search():
    flow = traced(lambda m, x, w: torch.bmm(x, w.expand(32, 512, 512)), R(32, 1, 512), R(512, 512)).flow
    alone = Options(search="taso", everything=True, weights={"device_s": 1.0})
    plain, mutated = (searched(flow, H100, replace(alone, mutants=on)) for on in (False, True))
    assert ("bmm" in ops(plain.rewritten.after), "bmm" in ops(mutated.rewritten.after)) == (True, False)
    assert mutated.found.cost < plain.found.cost
