"""Recurrent layers of libraries have dims: sequences are apart, gradients of weights are terms of a sum over them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from steptime.captured.ops.placement import P, R, shard  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.sharding.options import options  # noqa: E402

BATCH, STEPS = 8, 5


class Recurrent(torch.nn.Module):
    """The sum of all states of a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(torch.nn, kind)(16, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].sum()


def split_by(op: str, program, dim: str):
    node = next(call.node for call in program.calls if call.node.op == op)
    return next(each for each in options(node) if each.dim == dim)


def program_of(kind: str):
    return capture(Recurrent(kind), (torch.zeros(BATCH, STEPS, 16),), loss="own", training=True, target="cpu", name="m")


def test_an_lstm_is_split_by_sequences():
    program = program_of("LSTM")
    forward, backward = (split_by(f"mkldnn_rnn_layer{way}", program, "batch") for way in ("", "_backward"))
    assert (forward.inputs[0], forward.units, forward.exchange) == (shard(1), BATCH, None)
    assert forward.inputs[1:5] == (R, R, R, R)  # weights and biases
    assert forward.outputs[:3] == (shard(1), shard(0), shard(0))
    assert backward.outputs == (shard(1), P, P, P, P, shard(0), shard(0))


def test_every_operator_of_a_gru_is_split_by_sequences_or_features():
    unsplit = {call.node.op for call in program_of("GRU").calls if call.node.inputs and len(options(call.node)) == 1}
    of_numbers = {"_local_scalar_dense", "lift_fresh", "detach", "expand", "ones_like", "_foreach_add"}
    assert unsplit <= of_numbers
