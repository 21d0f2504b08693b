"""Random graphs of maps, products, views, norms and writes in place: whatever passes do to them, the results stay."""

import random

import pytest

torch = pytest.importorskip("torch")

from rewritten import H100, Of, run, traced  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.engine import apply_passes, metrics  # noqa: E402
from steptime.rewrite.export_torch import graph_module  # noqa: E402

N = 8
WEIGHTS = {name: torch.randn(N, N) / N**0.5 for name in ("w", "v")} | {"row": torch.randn(N)}


def unary(draw):
    return draw.choice(
        [
            torch.sigmoid,
            torch.tanh,
            lambda x: x + 0,
            lambda x: x * 1.0,
            lambda x: x * 0.5,
            lambda x: x - x.mean(-1, keepdim=True),
            lambda x: torch.softmax(x, -1),
            lambda x: x.t(),
            lambda x: x.t().contiguous(),
            lambda x: x.reshape(2, 4, N).reshape(N, N),
            lambda x: x.clone().add_(1.0),
            lambda x: torch.cat([x[:3], x[3:]]),
            lambda x: x.to(torch.float32).clone(),
            lambda x: x * x.sigmoid(),
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
            lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476)),
            lambda x: x.view(N, 2, 4).transpose(0, 1).reshape(N, N),
        ]
    )


def binary(draw):
    return draw.choice([torch.add, torch.sub, torch.mul, torch.mm, torch.maximum, lambda a, b: a + b @ b])


def weighted(draw, module):
    return draw.choice(
        [
            lambda x: x @ module.w,
            lambda x: x @ module.v,
            lambda x: x @ module.w + x @ module.v,
            lambda x: x @ module.w + module.row,
            lambda x: (x @ module.w) * 0.5,
            lambda x: (x @ module.w) @ module.v,
            lambda x: x * module.row + module.w.exp(),
            lambda x: x @ module.w.t() + x,
        ]
    )


def graph(seed):
    """A function of two matrices that makes some 15 steps, the same ones whenever it is called."""

    def f(module, x, y):
        draw = random.Random(seed)
        values = [x, y]
        for _ in range(draw.randint(6, 16)):
            kind = draw.random()
            if kind < 0.4:
                made = unary(draw)(draw.choice(values))
            elif kind < 0.7:
                made = binary(draw)(draw.choice(values), draw.choice(values))
            else:
                made = weighted(draw, module)(draw.choice(values))
            values.append(made / (made.abs().mean() + 1.0) if draw.random() < 0.2 else torch.tanh(made))
        return values[-1], values[draw.randrange(2, len(values))]

    return f


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("seed", range(40))
def test_all_passes_keep_the_results_of_inference(seed):
    inputs = torch.randn(N, N), torch.randn(N, N)
    found = traced(graph(seed), *inputs, **WEIGHTS)
    expected = run(Of(graph(seed), **WEIGHTS), inputs)
    exact = run(graph_module(found.flow, found.weights()), inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, exact, strict=True))
    done = apply_passes(found.flow, H100, everything=True)
    assert check(done.before, done.after, seeds=1).passed
    made = run(graph_module(done.after, found.weights()), inputs)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(expected, made, strict=True))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("objective", ["time", "memory", "launches"])
def test_what_is_applied_by_default_lowers_the_objective_and_keeps_training(seed, objective):
    def loss(module, x, y):
        a, b = graph(seed)(module, x, y)
        return (a * b).sum() + (x @ module.w + module.row).tanh().sum()

    options = {"optimizer": "sgd"}
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    found = traced(loss, torch.randn(N, N), torch.randn(N, N), training=True, options=options, **weights)
    done = apply_passes(found.flow, H100, objective=objective)
    before, after = metrics(done.prices, done.before), metrics(done.prices, done.after)
    name = {"time": "step_time_s", "memory": "peak_bytes", "launches": "launches"}[objective]
    assert after[name] <= before[name] * (1 + 1e-9)
    assert check(done.before, done.after, seeds=1).passed
