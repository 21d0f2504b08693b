"""A schedule that runs on real layers has the predicted bytes and runs, and the gradients of plain autograd."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rematerialisation_executor import chain_of_layers, execute, layers  # noqa: E402
from steptime.captured.fit.layout import schedule_of  # noqa: E402
from steptime.captured.graph.segments import grouped  # noqa: E402
from steptime.captured.rematerialisation.chain import keep_all, solution  # noqa: E402
from steptime.captured.rematerialisation.rotor import front  # noqa: E402

WIDTHS = (96, 160, 64, 256, 128, 96, 32, 200, 64)
BATCH = 512
STACKS = {
    "gelu": (nn.GELU,) * 8,
    "relu": (nn.ReLU,) * 8,
    "mixed": (nn.GELU, nn.ReLU, nn.GELU, nn.GELU, nn.ReLU, nn.ReLU, nn.GELU, nn.ReLU),
}


@pytest.mark.parametrize("name", STACKS)
def test_predicted_bytes_runs_and_gradients_are_the_real_ones(name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = layers(WIDTHS, STACKS[name]), torch.randn(BATCH, WIDTHS[0])
    chain = chain_of_layers(WIDTHS, STACKS[name], BATCH)
    model(data).sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    points = front(chain)
    assert points[0].peak_bytes < 0.8 * points[-1].peak_bytes
    for one in (*points[:: max(1, len(points) // 3)], points[-1], solution(chain, schedule_of(grouped(8, 3)))):
        done = execute(model, chain, data, one.schedule)
        assert max(done.action_bytes) + data.nbytes == pytest.approx(one.peak_bytes, rel=0.01)
        real = [peak + data.nbytes for peak in done.action_bytes]
        assert real == pytest.approx(one.run.action_bytes, rel=0.01)
        assert done.forward_runs == one.run.forward_runs
        for ours, theirs in zip(done.gradients, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_keeping_everything_runs_nothing_twice():
    chain = chain_of_layers(WIDTHS, STACKS["gelu"], BATCH)
    done = execute(layers(WIDTHS, STACKS["gelu"]), chain, torch.randn(BATCH, WIDTHS[0]), keep_all(8))
    assert done.forward_runs == (1,) * 8
