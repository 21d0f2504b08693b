"""Equality saturation: known algebra, known optima, real models as terms and back, rules of a user."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from models.bert import bert  # noqa: E402
from models.llama import llama  # noqa: E402
from public_models import rows  # noqa: E402, F401
from rewritten import nn, ops, traced  # noqa: E402
from saturated import problem, solved  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.passes import PASSES  # noqa: E402
from steptime.rewrite.rules.store import shipped  # noqa: E402
from steptime.rewrite.saturation.matching import ways_of  # noqa: E402
from steptime.rewrite.saturation.moves import passes_of, rule_moves, rules_of_file, shipped_ways  # noqa: E402
from steptime.rewrite.saturation.siblings import SIBLINGS  # noqa: E402
from steptime.rewrite.saturation.trip import represented, round_trip  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

R = torch.randn


def test_a_common_factor_is_taken_out():
    flow = traced(lambda m, x: x @ m.a + x @ m.b, R(4, 8), a=R(8, 5), b=R(8, 5)).flow
    out = solved(problem(flow))
    assert ops(out.found.flow) == ["mm"]
    assert out.found.gap < 1e-9
    assert out.applied["matmul-distributes"]


def least_products(sizes):
    """Multiply-adds of the best order of a chain of matrices, by the O(n^3) program."""
    n = len(sizes) - 1
    best = {(i, i): 0 for i in range(n)}
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            best[i, j] = min(best[i, k] + best[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j))
    return best[0, n - 1]


@pytest.mark.parametrize("n", [8, 12, 16])
def test_a_chain_of_products_has_the_best_order(n):
    sizes = [2 + (7 * i * i + 3 * i) % 19 for i in range(n + 1)]
    matrices = [R(a, b) for a, b in pairwise(sizes)]
    flow = traced(lambda m, *given: left(given), *matrices).flow
    associativity = passes_of(ways_of([shipped().named("matmul-associates")]), "declared")
    out = solved(problem(flow, associativity, weights={"flops": 1.0}))
    assert out.found.cost == pytest.approx(2 * least_products(sizes))
    assert out.found.bound == pytest.approx(out.found.cost)
    assert out.found.stop.startswith("saturated; the graph is the best of all that the rules reach")


def left(given):
    made = given[0]
    for each in given[1:]:
        made = made @ each
    return made


def cell(merged):
    def f(m, x, h):
        joined = (torch.cat([x, h], 1) @ m.all).split(16, 1) if merged else ()
        gates = joined or [x @ m.w[i] + h @ m.u[i] for i in range(4)]
        return torch.tanh(gates[0]) * torch.sigmoid(gates[1]) + torch.tanh(gates[2]) * torch.sigmoid(gates[3])

    return f


def test_a_recurrent_cell_becomes_one_product_as_by_hand():
    w, u, x, h = R(4, 16, 16), R(4, 16, 16), R(3, 16), R(3, 16)
    flow = traced(cell(False), x, h, w=w, u=u).flow
    by_hand = traced(cell(True), x, h, all=torch.cat([torch.cat(list(w), 1), torch.cat(list(u), 1)])).flow
    out = solved(problem(flow))
    assert out.found.cost <= problem(by_hand).start * (1 + 1e-9)
    assert out.found.gap < 1e-6
    assert ops(out.found.flow).count("mm") == 1


def of_torchvision(name):
    import torchvision

    return getattr(torchvision.models, name)(), (R(1, 3, 64, 64),)


MODELS = {
    "bert": lambda: bert(layers=1),
    "llama": lambda: llama(layers=1),
    "squeezenet": lambda: of_torchvision("squeezenet1_1"),
    "resnet18": lambda: of_torchvision("resnet18"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_become_terms_and_come_back(name):
    module, inputs = MODELS[name]()
    flow = trace(module.eval(), inputs, target="cuda").flow
    back = round_trip(flow)
    assert back.order != flow.order
    assert check(flow, back, seeds=1).fp64 < 1e-12
    assert represented(flow) > 0.7


def test_fire_modules_merge_their_convolutions():
    module, inputs = of_torchvision("squeezenet1_1")
    flow = trace(module.eval(), inputs, target="cuda").flow
    out = solved(problem(flow))
    assert ops(out.found.flow).count("convolution") == ops(flow).count("convolution") - 8


def test_siblings_merge_at_once_and_only_where_none_needs_another():
    def f(m, x):
        a, b, c = m.a(x), m.b(x), m.c(x)
        return a, b, c, m.a(c[:, :4])

    conv = {"a": nn.Conv2d(4, 6, 1), "b": nn.Conv2d(4, 5, 3, padding=1), "c": nn.Conv2d(4, 7, 5, padding=2)}
    given = problem(traced(f, R(2, 4, 8, 8), **conv).flow)
    (match,) = SIBLINGS.find(given.scene(given.flow))
    assert len(match.replace) == 3
    (kernel,) = {value.node.inputs[0].node.inputs[1].type.shape for value in match.replace.values()}
    assert kernel == (18, 4, 5, 5)
    chain = problem(traced(lambda m, x: (x @ m.w) @ m.w, R(8, 8), w=R(8, 8)).flow)
    assert not list(SIBLINGS.find(chain.scene(chain.flow)))


def test_rules_hold_for_floats_alone():
    flow = traced(lambda m, x: (x * 2 + x) // 3, torch.arange(6)).flow
    given = problem(flow)
    assert not [match for row in rule_moves() for match in row.find(given.scene(flow))]
    assert solved(given).found.flow.order == flow.order


def test_rules_as_passes_keep_results():
    from steptime.rewrite.flow import substituted

    flow = traced(lambda m, x, y: ((x + y) @ m.a).relu().t() @ (x @ m.a * 0.5), R(4, 8), R(4, 8), a=R(8, 5)).flow
    given, found = problem(flow), 0
    for row in rule_moves():
        for match in row.find(given.scene(flow)):
            made = substituted(flow, match.replace, given.folds.definitions)
            assert check(flow, made, seeds=1).passed, match.what
            found += 1
    assert found > 10


def test_a_limit_of_launches_is_kept():
    flow = traced(lambda m, x: (x @ m.a).relu() + (x @ m.b).relu(), R(4, 8), a=R(8, 5), b=R(8, 5)).flow
    given = problem(flow, weights={"moved_bytes": 1.0}, limits={"launches": 4.0})
    out = solved(problem(flow, weights={"moved_bytes": 1.0}))
    assert sum(given.cost.metrics(flow, node)["launches"] for node in flow.order) > 4
    tight = saturated_flow(given)
    assert sum(given.cost.metrics(tight, node)["launches"] for node in tight.order) <= 4
    assert given.cost.of_graph(tight) >= out.found.cost


def saturated_flow(given):
    from steptime.rewrite.saturation import saturate

    found = saturate(given)
    assert check(given.flow, found.flow).passed
    return found.flow


RULE = """
[[rule]]
name = "{name}"
variables = "{variables}"
source = "{source}"
target = "{target}"
"""


def test_rules_of_a_file_are_certified(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULE.format(name="twice", variables="x[m,n]", source="add(x, x)", target="scale[2](x)"))
    flow = traced(lambda m, x: x.exp() + x.exp(), R(4, 8)).flow
    out = solved(problem(flow, rules_of_file(path)))
    assert ops(out.found.flow) == ["exp", "mul"] or out.found.cost == problem(flow).start
    assert out.applied["twice"] == 1


def test_an_unsound_rule_is_refused_with_its_counterexample(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(RULE.format(name="wrong", variables="x[m,n] y[m,n]", source="sub(x, y)", target="sub(y, x)"))
    with pytest.raises(UserError, match=r"wrong in .* is unsound"):
        rules_of_file(path)


def test_passes_and_rules_are_one_search():
    module, inputs = llama(layers=1)
    flow = trace(module.eval(), inputs, target="cuda").flow
    rules = solved(problem(flow)).found
    both = solved(problem(flow, (*PASSES, *rule_moves()))).found
    assert both.cost < rules.cost
    assert both.gap < 1e-6


def test_most_rules_are_usable():
    assert len(shipped_ways()) > 2000
    assert len({way.rule.name for way in shipped_ways()}) > 1500
