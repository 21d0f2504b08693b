"""A sharded step has the host, the overhead of the framework and a band, as a planned one has."""

from __future__ import annotations

from math import inf

import pytest

torch = pytest.importorskip("torch")


def test_a_sharded_step_waits_for_its_host() -> None:
    """Small operators are issued one by one on every device, whatever their shardings."""
    from torch import nn

    from steptime import capture
    from steptime.sharding.shard import shard

    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    program = capture(module, (torch.randn(32, 64),), optimizer="adamw", training=True, target="cuda",
                      loss=lambda y: y.square().mean())  # fmt: skip
    given = {"gpus": 4, "mesh": "4", "memory_bytes": inf}
    generic, ideal = (shard(program, "dgx-h100", framework=name, **given) for name in (None, "ideal"))
    assert generic.estimate.time.group("host") > 0 == ideal.estimate.time.group("host")
    assert ideal.step_s >= ideal.best.step_s * (1 - 1e-9)
    record = generic.to_json()
    low, high = record["step_time_band_s"]
    assert low < generic.step_s < high and generic.estimate.time.group("overhead") > 0
