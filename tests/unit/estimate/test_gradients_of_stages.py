"""Gradients of the stages of a pipeline, against a schedule played event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from event_player import Key, neighbour, order_of, played
from machine_without_latencies import machine_of
from steptime.api.models import load_model
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

LINK_Bps = 1e11
MACHINE = machine_of(LINK_Bps)
DP, PP = 8, 4


def evaluated(layers: int, vocab: int, batch: int) -> Evaluation:
    model = replace(load_model("llama2-7b"), layers=layers, vocab=vocab)
    job = Job(model=model, gpus=DP * PP, global_batch=batch * DP, seq_len=1024, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], job, MACHINE, Plans(dp=DP, in_dp=DP, pp=PP, zero=1))


def played_s(e: Evaluation) -> float:
    """End of the last reduction, where every stage reduces its gradients when it has done all its passes."""
    inputs, layer, first, last = e.inputs, e.passes["layer"], e.passes["first"], e.passes["last"]
    count = [inputs.first_layers, *[inputs.middle_layers] * (PP - 2), inputs.last_layers]
    step = int(inputs.micro_batches)
    ends = [first, *[None] * (PP - 2), last]
    parts = [e.sizes.first, *[None] * (PP - 2), e.sizes.last]
    time_s = {
        name: [float(n * getattr(layer, name) + (getattr(end, name) if end else 0.0))
               for n, end in zip(count, ends, strict=True)]
        for name in ("forward_s", "backward_s")
    }  # fmt: skip
    weights = [float(n * e.sizes.layer.weights + (part.weights if part else 0.0))
               for n, part in zip(count, parts, strict=True)]  # fmt: skip
    done = passes_of_1f1b(time_s["forward_s"], time_s["backward_s"], step)
    reduce_s = [(DP - 1) / DP * n * e.job.gradient_bytes / LINK_Bps for n in weights]
    return max(end + more for end, more in zip(done, reduce_s, strict=True))


def passes_of_1f1b(forward_s: list[float], backward_s: list[float], count: int) -> list[float]:
    """When each stage ends its last backward pass, messages taking no time."""
    stages = len(forward_s)
    streams: dict[Key, list[Key]] = {s: [(*each, s) for each in order_of(s, stages, count)] for s in range(stages)}
    seconds = {key: (forward_s if key[0] == "F" else backward_s)[key[3]] for keys in streams.values() for key in keys}  # type: ignore[index]
    after = {key: [(*came[0], came[1])] for key in seconds if (came := neighbour(*key, stages, 1)) is not None}  # type: ignore[misc]
    ends = played(streams, seconds, after)
    return [max(ends[key] for key in streams[s]) for s in range(stages)]


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize(("layers", "vocab", "error"), [(32, 32, 1e-9), (32, 128_000, 1e-9), (30, 32, 3e-2)])
def test_what_shows_of_the_reduction_is_the_first_stages(layers: int, vocab: int, error: float, batch: int) -> None:
    """Equal stages; a head that makes the last stage the slowest; middle stages with a layer more than the ends.

    Every stage but the first reduces its gradients while those before it are still in their backward passes. Of the
    third, where no stage waits for one neighbour alone, the closed form of the passes is an upper bound.
    """
    e = evaluated(layers, vocab, batch)
    ours = float(e.step.steady_s + e.step.idle_s + e.step.data_s["gradients"])
    assert e.step.data_s["gradients"] > 0
    assert played_s(e) * (1 - 1e-9) <= ours <= played_s(e) * (1 + error)
