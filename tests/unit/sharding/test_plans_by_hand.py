"""Plans of a perceptron that can be worked out by hand: how it lies, what moves, and what memory holds."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch")

from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.ops.placement import text_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.sharding.shard import Sharded, shard  # noqa: E402

BATCH, WIDTH, INNER, DEVICES = 64, 4096, 16384, 8
WEIGHTS_BYTES = 4 * 2 * WIDTH * INNER


@cache
def program() -> Program:
    with torch.device("meta"):
        module = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, INNER, bias=False), torch.nn.ReLU(), torch.nn.Linear(INNER, WIDTH, bias=False)
        )
    return capture(module, (torch.empty(BATCH, WIDTH, device="meta"),), optimizer="adamw", loss="sum", fold=True)


def plan(mesh: str, **further: bool) -> Sharded:
    return shard(program(), "dgx-h100", gpus=DEVICES, mesh=mesh, **further)


def test_columns_then_rows_on_one_axis_with_no_more_than_the_loss_to_sum() -> None:
    """A large model and few samples: no weight and no activation moves."""
    for mesh in ("data=1,model=8", "data=8"):
        found = plan(mesh, overlaps=False)
        last = [text_of(each).split()[-1] for each in found.best.parameters.values()]
        assert last == ["S(0)", "S(1)"]
        assert [each.collective for each in found.best.transfers] == ["all_reduce"]
        assert found.best.transfers[0].size_bytes == 4, "the loss"


def test_an_axis_of_one_device_changes_nothing() -> None:
    alone, both = plan("data=8", overlaps=False).best, plan("data=1,model=8", overlaps=False).best
    assert both.step_s == pytest.approx(alone.step_s) and both.memory_bytes.max() == alone.memory_bytes.max()


def test_memory_is_weights_gradients_two_states_and_the_square_root_of_one() -> None:
    peak = plan("data=1,model=8", overlaps=False).best.memory_bytes.max()
    activations = 4 * BATCH * (2 * WIDTH + 2 * INNER)
    held = 5 * WEIGHTS_BYTES / DEVICES
    assert held <= peak <= held + activations
