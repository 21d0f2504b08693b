"""Proved rules as moves: models as terms and back, matches that keep results, rules of a user."""

import pytest

torch = pytest.importorskip("torch")

from models.bert import bert  # noqa: E402
from models.llama import llama  # noqa: E402
from public_models import rows  # noqa: E402, F401
from rewritten import H100, ops, traced  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.flow import substituted  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.passes import MOVES  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.search.presets import SEARCHES, Run  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402
from steptime_lab.rules.graphs import Terms  # noqa: E402
from steptime_lab.rules.lowering import Lowering  # noqa: E402
from steptime_lab.rules.matching import ways_of  # noqa: E402
from steptime_lab.rules.moves import passes_of, rule_moves, rules_of_file, shipped_ways  # noqa: E402
from steptime_lab.rules.store import shipped  # noqa: E402
from steptime_lab.rules.terms import VARIABLE  # noqa: E402

R = torch.randn


def problem(flow, moves=None, weights=None):
    cost = CostModel(prices=Prices(FusedTimer(device=H100)), weights=weights or {"device_s": 1.0})
    return Problem(flow=flow, moves=rule_moves() if moves is None else moves, cost=cost, on_cuda=True)


def solved(given, name="greedy"):
    found = SEARCHES[name](Run(problem=given))
    assert check(given.flow, found.flow).passed
    assert found.cost <= given.start
    return found


def test_a_common_factor_is_taken_out():
    flow = traced(lambda m, x: x @ m.a + x @ m.b, R(4, 8), a=R(8, 5), b=R(8, 5)).flow
    found = solved(problem(flow))
    assert ops(found.flow) == ["mm"]
    assert any("matmul-distributes" in move.match.what for move in found.path)


def test_a_chain_of_products_has_the_best_order():
    matrices = [R(2, 50), R(50, 40), R(40, 30), R(30, 3)]
    flow = traced(lambda m, *given: given[0] @ (given[1] @ (given[2] @ given[3])), *matrices).flow
    associativity = passes_of(ways_of([shipped().named("matmul-associates")]), "declared")
    found = solved(problem(flow, associativity, weights={"flops": 1.0}), "exhaustive")
    assert found.cost == found.bound == pytest.approx(2 * (2 * 50 * 40 + 2 * 40 * 30 + 2 * 30 * 3))


def cell(merged):
    def f(m, x, h):
        joined = (torch.cat([x, h], 1) @ m.all).split(16, 1) if merged else ()
        gates = joined or [x @ m.w[i] + h @ m.u[i] for i in range(4)]
        return torch.tanh(gates[0]) * torch.sigmoid(gates[1]) + torch.tanh(gates[2]) * torch.sigmoid(gates[3])

    return f


@pytest.mark.slow
def test_a_recurrent_cell_becomes_one_product_as_by_hand():
    w, u, x, h = R(4, 16, 16), R(4, 16, 16), R(3, 16), R(3, 16)
    flow = traced(cell(False), x, h, w=w, u=u).flow
    by_hand = traced(cell(True), x, h, all=torch.cat([torch.cat(list(w), 1), torch.cat(list(u), 1)])).flow
    found = solved(problem(flow, MOVES), "recommended")
    assert found.cost <= problem(by_hand).start * (1 + 1e-9)
    assert ops(found.flow).count("mm") == 1


def of_torchvision(name):
    import torchvision

    return getattr(torchvision.models, name)(), (R(1, 3, 64, 64),)


MODELS = {
    "bert": lambda: bert(layers=1),
    "llama": lambda: llama(layers=1),
    "squeezenet": lambda: of_torchvision("squeezenet1_1"),
    "resnet18": lambda: of_torchvision("resnet18"),
}


def back_again(given, flow, terms):
    """The graph whose operators are all made from their terms, where rules have a term for them."""
    leaves = {each: value for each, value in terms.first.items() if each.op == VARIABLE}
    lowering = Lowering(given.scene(flow), leaves, steady=terms.steady.__contains__)
    values = [node.value() for node in flow.operators if node.outputs and node not in flow.constant]
    made = {old: lowering.value(terms.of(old)) for old in values}
    same = {old: new for old, new in made.items() if old.type == new.type and old != new}
    return substituted(flow, same, given.folds.definitions)


@pytest.mark.quick(without=["resnet18"])
@pytest.mark.parametrize("name", MODELS)
def test_models_become_terms_and_come_back(name):
    module, inputs = MODELS[name]()
    flow = trace(module.eval(), inputs, target="cuda").flow
    terms = Terms(flow)
    nodes = [node for node in flow.operators if node.inputs]
    assert sum(terms.of(node.value()).op != VARIABLE for node in nodes) > 0.7 * len(nodes)
    back = back_again(problem(flow), flow, terms)
    assert back.order != flow.order
    assert check(flow, back, seeds=1).fp64 < 1e-12


def test_rules_hold_for_floats_alone():
    flow = traced(lambda m, x: (x * 2 + x) // 3, torch.arange(6)).flow
    given = problem(flow)
    assert not [match for row in rule_moves() for match in row.find(given.scene(flow))]


def test_rules_as_passes_keep_results():
    flow = traced(lambda m, x, y: ((x + y) @ m.a).relu().t() @ (x @ m.a * 0.5), R(4, 8), R(4, 8), a=R(8, 5)).flow
    given, found = problem(flow), 0
    for row in rule_moves():
        for match in row.find(given.scene(flow)):
            made = substituted(flow, match.replace, given.folds.definitions)
            assert check(flow, made, seeds=1).passed, match.what
            found += 1
    assert found > 10


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
    (row,) = (row for row in rules_of_file(path) if "add" in row.name)
    given = problem(flow)
    (match,) = row.find(given.scene(flow))
    assert ops(substituted(flow, match.replace, {})) == ["exp", "mul"] and match.what.startswith("twice")


def test_an_unsound_rule_is_refused_with_its_counterexample(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(RULE.format(name="wrong", variables="x[m,n] y[m,n]", source="sub(x, y)", target="sub(y, x)"))
    with pytest.raises(UserError, match=r"wrong in .* is unsound"):
        rules_of_file(path)


def test_most_rules_are_usable():
    assert len(shipped_ways()) > 2000
    assert len({way.rule.name for way in shipped_ways()}) > 1500
