"""Exact extraction against every choice, on random e-graphs; random expressions keep their results."""

import random
from itertools import product

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from rewritten import traced  # noqa: E402
from saturated import problem, solved  # noqa: E402
from steptime.rewrite.saturation.egraph import LEAF, EGraph, Sort  # noqa: E402
from steptime.rewrite.saturation.extraction import choices_of, disjoint_bound, extract, greedy, selected, total  # noqa: E402

ROW = Sort((4,), "fp32")


def random_graph(draw):
    """Some classes with several e-nodes each, circles included."""
    graph = EGraph()
    classes = [graph.add((LEAF, (n,), ()), ROW) for n in range(2)]
    for number in range(draw.randint(4, 9)):
        children = tuple(draw.choice(classes) for _ in range(draw.randint(1, 2)))
        classes.append(graph.add((f"op{number}", (), children), ROW))
    for _ in range(draw.randint(1, 5)):
        graph.union(draw.choice(classes[2:]), draw.choice(classes[2:]))
    graph.rebuild()
    return graph, [graph.find(each) for each in draw.sample(classes[2:], 2)]


def cheapest(graph, roots, price):
    """The least cost of all choices without circles."""
    numbers = list(graph.classes)
    best = float("inf")
    for nodes in product(*(list(graph.classes[number].all()) for number in numbers)):
        chosen, needed, stack, circle = dict(zip(numbers, nodes, strict=True)), set(), list(roots), False
        while stack:
            number = stack.pop()
            if number not in needed:
                needed.add(number)
                stack += [graph.find(child) for child in chosen[number][2]]
        left = set(needed)
        while left and not circle:
            ready = {n for n in left if not {graph.find(c) for c in chosen[n][2]} & left}
            circle = not ready
            left -= ready
        if not circle:
            best = min(best, sum(price(chosen[number])[0] for number in needed))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_extraction_is_the_best_of_all_choices(seed):
    draw = random.Random(seed)
    graph, roots = random_graph(draw)
    costs = {}

    def price(node):
        return (0.0 if node[0] == LEAF else costs.setdefault(node, draw.choice([0.0, 1.0, 2.0, 3.5, 7.0])),)

    for number in graph.classes:
        for node in graph.classes[number].all():
            price(node)
    choices = choices_of(graph, roots, price, {})
    found = extract(choices, 10.0)
    best = cheapest(graph, roots, price)
    assert disjoint_bound(choices) <= best + 1e-9
    assert found.cost == pytest.approx(best)
    assert found.bound == pytest.approx(found.cost)
    assert total(selected(choices, greedy(choices))) >= found.cost - 1e-9


def expression(seed):
    """A function of two matrices and weights, the same one whenever it is called."""

    def f(m, x, y):
        draw = random.Random(seed)
        values = [x, y]
        for _ in range(draw.randint(5, 10)):
            a, b = draw.choice(values), draw.choice(values)
            made = draw.choice(
                [
                    lambda a, b: a + b,
                    lambda a, b: a - b,
                    lambda a, b: a * b,
                    lambda a, b: a @ b * 0.25,
                    lambda a, b: a @ m.w,
                    lambda a, b: a @ m.v + m.row,
                    lambda a, b: a @ m.w + b @ m.v,
                    lambda a, b: a.t(),
                    lambda a, b: -a,
                    lambda a, b: torch.relu(a),
                    lambda a, b: torch.maximum(a, b),
                    lambda a, b: torch.softmax(a, -1),
                    lambda a, b: torch.cat([a[:3], b[3:]]),
                    lambda a, b: a.view(2, 4, 8).transpose(0, 1).reshape(8, 8),
                    lambda a, b: a - a.mean(-1, keepdim=True),
                    lambda a, b: a.sum(0) * b,
                ]
            )(a, b)
            values.append(torch.tanh(made) if draw.random() < 0.3 else made / 4)
        return values[-1], values[-2]

    return f


@pytest.mark.parametrize("seed", range(30))
def test_random_expressions_keep_their_results(seed):
    weights = {"w": torch.randn(8, 8), "v": torch.randn(8, 8), "row": torch.randn(8)}
    flow = traced(expression(seed), torch.randn(8, 8), torch.randn(8, 8), **weights).flow
    solved(problem(flow), seconds=2.0)
