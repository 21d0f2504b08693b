"""Closed forms of a step against the same passes and transfers played event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from event_player import Key, neighbour, order_of, order_of_zero_bubble, played
from machine_without_latencies import machine_of
from steptime.api.models import load_model
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.work import Pass
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

DP = 8
HIDDEN = frozenset({"dp"})
RATES = [1e13, 1e12, 3e11, 1e11]
"""Rates at which collectives of a layer take from a tenth of its backward pass to several of it."""


def evaluated(
    plans: Plans, count: int, link_Bps: float = 1e12, layers: int = 32, vocab: int = 1, **changes: Any
) -> Evaluation:
    machine = machine_of(link_Bps, memory_Bps=1e13, fast_domain=64)
    model = replace(load_model("llama2-7b"), layers=layers, vocab=vocab)
    job = Job(model=model, gpus=int(plans.dp) * int(plans.pp), global_batch=count * int(plans.dp), seq_len=1024,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"], overlap=HIDDEN)  # fmt: skip
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], replace(job, **changes), machine, plans)


def of_part(part: Pass, splits: bool = False) -> dict[str, float]:
    """Seconds of the passes of a part of the model."""
    weights_s = float(part.weights_s) if splits else 0.0
    return {"F": float(part.forward_s), "B": float(part.backward_s) - weights_s, "W": weights_s}


def of_chunk(e: Evaluation, splits: bool = False) -> dict[str, float]:
    """Seconds of the passes of one virtual stage."""
    layers = float(e.inputs.middle_layers) / float(e.plans.vpp)
    return {kind: layers * each for kind, each in of_part(e.passes["layer"], splits).items()}


def of_whole(seconds: list[dict[str, float]]) -> list[dict[str, float]]:
    """The same stages where the gradients of weights are a part of the backward pass."""
    return [{"F": stage["F"], "B": stage["B"] + stage["W"]} for stage in seconds]


def passes_s(e: Evaluation, order: Callable[[int], list[Any]], seconds: list[dict[str, float]]) -> float:
    """Longest time that a stage takes from its first pass to its last, messages taking none; seconds by stage."""
    stages, chunks = int(e.plans.pp), int(e.plans.vpp)
    streams: dict[Key, list[Key]] = {s: [(each, s) for each in order(s)] for s in range(stages)}
    taken = {key: seconds[key[1]][key[0][0]] for keys in streams.values() for key in keys}  # type: ignore[index]
    after = {key: [one] for key in taken if (one := neighbour(*key[0], key[1], stages, chunks)) is not None}  # type: ignore[index]
    ends = played(streams, taken, after)
    return max(ends[keys[-1]] - ends[keys[0]] + taken[keys[0]] for keys in streams.values())


def pipeline_s(e: Evaluation, order: Callable[[int], list[Any]], seconds: dict[str, float]) -> float:
    """The same where all stages are equal: the first is busy or waits from the beginning to the end."""
    return passes_s(e, order, [seconds] * int(e.plans.pp))


@pytest.mark.each("vpp", [1, 2, 4])
@pytest.mark.each(("pp", "rounds"), [(2, 1), (2, 8), (4, 1), (4, 2), (4, 8), (8, 1), (8, 2)])
def test_bubble_of_equal_stages(pp: int, rounds: int, vpp: int) -> None:
    """With as many micro-batches as stages, and with many; embedding and head have next to nothing to do."""
    count = pp * rounds
    e = evaluated(Plans(pp=pp, vpp=vpp), count)
    whole_s = pipeline_s(e, lambda s: order_of(s, pp, count, vpp), of_chunk(e))
    assert float(e.step.steady_s + e.step.idle_s) == pytest.approx(whole_s, rel=2e-3)


DEPTHS = {"zb-h1": 1, "zb-h2": 2}


@pytest.mark.each("schedule", DEPTHS)
@pytest.mark.each("vocab", [1, 32_000, 128_000])
@pytest.mark.each(("pp", "rounds"), [(2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 2)])
def test_bubble_of_zero_bubble_schedules(pp: int, rounds: int, vocab: int, schedule: str) -> None:
    """With a head that makes the last stage the slowest, too: it fills its waits with passes as long as its own."""
    count = pp * rounds
    e = evaluated(Plans(pp=pp), count, schedule=schedule, vocab=vocab)
    seconds = [of_chunk(e, splits=True) for _ in range(pp)]
    for s, part in ((0, e.passes["first"]), (pp - 1, e.passes["last"])):
        seconds[s] = {kind: seconds[s][kind] + more for kind, more in of_part(part, splits=True).items()}
    whole_s = passes_s(e, lambda s: order_of_zero_bubble(s, pp, count, DEPTHS[schedule]), seconds)
    assert float(e.step.steady_s + e.step.idle_s) == pytest.approx(whole_s, rel=2e-3)
    assert whole_s < 0.97 * passes_s(e, lambda s: order_of(s, pp, count), of_whole(seconds))


def waited(stage: int, stages: int, count: int) -> list[Key]:
    """1F1B of a stage that waits for each message, one to and one from a neighbour at once (Megatron's without
    interleaving): a message by the link it takes and the micro-batches that go forward and backward."""
    warm, last = min(stages - 1 - stage, count), stages - 1
    order: list[Key] = []

    def message(link: int, forward: int | None, backward: int | None) -> None:
        if 0 <= link < last:
            order.append(("X", link, forward, backward))

    for i in range(warm):
        message(stage - 1, i, None)
        order.append(("F", i, stage))
        message(stage, i, None)
    message(stage - 1, warm, None)
    for i in range(count - warm):
        order.append(("F", warm + i, stage))
        message(stage, warm + i, i)
        order.append(("B", i, stage))
        message(stage - 1, warm + i + 1 if warm + i + 1 < count else None, i)
    for i in range(count - warm, count):
        message(stage, None, i)
        order.append(("B", i, stage))
        message(stage - 1, None, i)
    return order


@pytest.mark.each("link_Bps", [1e11, 1e10])
@pytest.mark.each(("pp", "rounds"), [(4, 1), (4, 8), (8, 1), (8, 4)])
def test_messages_that_stages_wait_for(pp: int, rounds: int, link_Bps: float) -> None:
    """The closed form charges three messages more than stages wait for, of some 2 (n + p)."""
    count = pp * rounds
    e = evaluated(Plans(pp=pp), count, link_Bps)
    seconds, step = of_chunk(e) | {"X": float(e.step.stage_link_s)}, e.step
    streams: dict[Key, list[Key]] = {s: waited(s, pp, count) for s in range(pp)}
    whole_s = max(played(streams, {k: seconds[k[0]] for keys in streams.values() for k in keys}, {}).values())  # type: ignore[index]
    ours_s = float(step.steady_s + step.idle_s + step.pipeline_comm_s + step.bubble_links_s)
    assert seconds["X"] > 0 and ours_s == pytest.approx(whole_s + 3 * seconds["X"], rel=2e-3)


def replica_s(e: Evaluation) -> float:
    """A replica without stages: gathers in its first forward passes, reductions in its last backward passes.

    Part 0 is the embedding, the last the head, whose passes the model has beside those of its layers.
    """
    parts, count, step = int(e.inputs.first_layers) + 2, int(e.inputs.micro_batches), e.step
    compute: list[Key] = []
    for i in range(count):
        compute += [("F", i, n) for n in range(parts)] + [("B", i, n) for n in reversed(range(parts))]
    compute += [("end", 0, 0)]
    traffic = e.inputs
    sent: list[Key] = [("G", 0, n) for n in range(parts)] + [("R", 0, n) for n in reversed(range(parts))]
    seconds = {"F": step.behind_forward_s, "B": step.behind_backward_s, "end": 0.0}
    seconds |= {"G": traffic.gather["one_layer_s"], "R": traffic.reduce["one_layer_s"]}
    taken = {k: float(seconds[k[0]]) for k in (*compute, *sent)}  # type: ignore[index]
    for n, name, passes in ((0, "shown_end_s", e.passes["first"]), (parts - 1, "hidden_end_s", e.passes["last"])):
        taken |= {("R", 0, n): float(traffic.reduce[name])}
        taken |= {("G", 0, n): float(traffic.gather[name])}
        for i in range(count):
            taken |= {("F", i, n): float(passes.forward_s), ("B", i, n): float(passes.backward_s)}
    after: dict[Key, list[Key]] = {("F", 0, n): [("G", 0, n)] for n in range(parts)}
    after |= {("R", 0, n): [("B", count - 1, n)] for n in range(parts)}
    return max(played({"compute": compute, "links": sent}, taken, after).values())


@pytest.mark.each("vocab", [1, 128_000])
@pytest.mark.each("link_Bps", RATES)
@pytest.mark.each("zero", [0, 1])
@pytest.mark.each("count", [1, 4])
def test_traffic_of_replicas(count: int, zero: int, link_Bps: float, vocab: int) -> None:
    """Layer by layer; the head's is ready first and needed last, so that the layers hide it as far as they can."""
    e = evaluated(Plans(dp=DP, in_dp=DP, zero=zero), count, link_Bps, vocab=vocab)
    ours_s = float(e.step.steady_s + sum(e.step.data_s.values()))
    assert ours_s == pytest.approx(replica_s(e), rel=2e-3)


def sharded_s(e: Evaluation) -> float:
    """ZeRO-3 with one layer gathered ahead; the weights of the last layer stay for its backward pass.

    Shards are summed over their replicas on links of their own, if there are any.
    """
    layers, count, step = int(e.inputs.first_layers), int(e.inputs.micro_batches), e.step
    compute: list[Key] = []
    sent: list[Key] = []
    after: dict[Key, list[Key]] = {}
    summed: list[Key] = []
    for i in range(count):
        for n in range(layers):
            compute.append(("F", i, n))
            sent.append(("G", i, n))
            after["F", i, n] = [("G", i, n)]
            ahead: list[Key] = [("F", i, n - 2)] if n > 1 else [("X", i - 1, 0)] if i else []
            after["G", i, n] = ahead
        for n in reversed(range(layers)):
            compute.append(("B", i, n))
            sent += [("A", i, n - 1)] * (n > 0) + [("R", i, n)]
            summed.append(("X", i, n))
            after["X", i, n] = [("R", i, n)]
            after["R", i, n] = [("B", i, n)]
            after["B", i, n] = [("A", i, n)] * (n < layers - 1) + [("R", i, n + 2)] * (n < layers - 2)
            after["A", i, n - 1] = [("F", i, layers - 1) if n == layers - 1 else ("B", i, n + 1)]
        after.pop(("A", i, -1))
    traffic = e.inputs
    seconds = {"F": step.behind_forward_s, "B": step.behind_backward_s, "R": traffic.reduce["one_layer_s"]}
    seconds |= {"G": traffic.gather["one_layer_s"], "A": traffic.gather["one_layer_s"], "X": traffic.replicas_s}
    taken = {k: float(seconds[k[0]]) for k in (*compute, *sent, *summed)}  # type: ignore[index]
    return max(played({"compute": compute, "links": sent, "others": summed}, taken, after).values())


@pytest.mark.each("shard", [0, 2, 4])
@pytest.mark.each("link_Bps", RATES)
@pytest.mark.each("count", [1, 4])
def test_traffic_of_fully_sharded_replicas(count: int, link_Bps: float, shard: int) -> None:
    """The closed form gathers the last layer again for its backward pass too, behind that of the head."""
    e = evaluated(Plans(dp=DP, in_dp=DP, zero=3, shard=shard), count, link_Bps)
    whole_s = sharded_s(e)
    over_s = float(e.step.steady_s + sum(e.step.data_s.values())) - whole_s
    again_s = count * max(float(e.inputs.gather["one_layer_s"]) - float(e.passes["last"].backward_s), 0.0)
    assert -2e-3 * whole_s <= over_s <= 2e-3 * whole_s + again_s


def piped_replica_s(e: Evaluation) -> float:
    """1F1B whose stages all gather from the start and each reduce behind their own last passes.

    The first chunk of a stage layer by layer; others, which have the passes of all chunks to hide behind, at once.
    """
    stages, count, chunks = int(e.plans.pp), int(e.inputs.micro_batches), int(e.plans.vpp)
    layers = int(e.inputs.first_layers) // chunks
    streams: dict[Key, list[Key]] = {}
    after: dict[Key, list[Key]] = {}
    step, traffic = e.step, e.inputs
    seconds = {"F": step.behind_forward_s, "B": step.behind_backward_s}
    seconds |= {"G": traffic.gather["one_layer_s"], "R": traffic.reduce["one_layer_s"]}
    taken: dict[Key, float] = {}
    for s in range(stages):
        compute: list[Key] = []
        for kind, i, c in order_of(s, stages, count, chunks):
            passed = list(range(layers)) if kind == "F" else list(reversed(range(layers)))
            compute += [(kind, i, c, s, n) for n in passed]
            source = neighbour(kind, i, c, s, stages, chunks)
            if source is not None:
                (came, _, chunk), where = source
                after[kind, i, c, s, passed[0]] = [(came, i, chunk, where, layers - 1 if came == "F" else 0)]
        sent: list[Key] = []
        for kind, order in (("G", range(chunks)), ("R", reversed(range(chunks)))):
            for c in order:
                parts = list(range(layers)) if kind == "G" else list(reversed(range(layers)))
                messages = [[n] for n in parts] if c == 0 else [parts]
                for carried in messages:
                    key = (kind, 0, c, s, carried[-1])
                    sent.append(key)
                    taken[key] = float(seconds[kind]) * len(carried)
                    if kind == "R":
                        after[key] = [("B", count - 1, c, s, carried[-1])]
                    for n in carried if kind == "G" else ():
                        after.setdefault(("F", 0, c, s, n), []).append(key)
        taken |= {k: float(seconds[k[0]]) for k in compute}  # type: ignore[index]
        streams |= {("compute", s): compute, ("links", s): sent}
    return max(played(streams, taken, after).values())


@pytest.mark.each("link_Bps", RATES)
@pytest.mark.each("vpp", [1, 2, 4])
@pytest.mark.each(("pp", "rounds"), [(2, 1), (4, 2), (8, 1)])
def test_traffic_of_replicas_with_stages(pp: int, rounds: int, vpp: int, link_Bps: float) -> None:
    """What the other stages send is hidden while the pipeline fills and drains."""
    e = evaluated(Plans(dp=DP, in_dp=DP, pp=pp, vpp=vpp, zero=1), pp * rounds, link_Bps, layers=32)
    ours_s = float(e.step.steady_s + e.step.idle_s + sum(e.step.data_s.values()))
    assert ours_s == pytest.approx(piped_replica_s(e), rel=2e-3 if vpp == 1 else 1e-2)
