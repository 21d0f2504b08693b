"""What replicas send each other, by the volumes of the ZeRO paper, and what each of them holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from machine_without_latencies import machine_of
from steptime.api.models import load_model
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import FORWARD, phase_time
from steptime.estimate.ledger import fullest_stage, memory_terms
from steptime.estimate.machine import machine_of as estimate_machine
from steptime.estimate.memory import stage_memory
from steptime.hardware import load_cluster
from steptime.model.parameters import parameter_terms
from steptime.model.spec import ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, over
from steptime.plan.strategies import CORRECTED

LINK_Bps = 1e11
MACHINE = machine_of(LINK_Bps)
DENSE = load_model("llama2-7b")
EXPERTS = load_model("mixtral-8x7b")


def evaluated(plans: Plans, model: ModelSpec = DENSE, batch: int = 8, **changes: Any) -> Evaluation:
    job = Job(model=model, gpus=int(plans.ranks), global_batch=batch, seq_len=1024, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], overlap=frozenset())  # fmt: skip
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], replace(job, **changes), MACHINE, plans)


def sent_bytes(e: Evaluation) -> float:
    """Bytes that a rank of eight sends in a step, over 7/8."""
    assert sum(e.step.data_busy_s.values()) == pytest.approx(sum(e.step.data_s.values()), rel=1e-12), "nothing overlaps"
    return float(sum(e.step.data_busy_s.values())) * LINK_Bps * 8 / 7


def ends_of(model: ModelSpec) -> int:
    """Parameters of embedding, last norm and head."""
    return 2 * model.vocab * model.hidden + model.hidden


@pytest.mark.each(("zero", "micro_batches", "volume"), [
    (0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 4, 2), (1, 4, 2), (2, 4, 5), (3, 4, 12),
])  # fmt: skip
def test_volume_of_zero(zero: int, micro_batches: int, volume: int) -> None:
    """ZeRO, arXiv 1910.02054, section 7: 2 Psi elements as plain data parallelism up to stage 2, 3 Psi at stage 3.

    With gradients or weights in shards, every micro-batch sends them anew. Embedding and head stay gathered from the
    forward pass to the backward pass, as FSDP keeps its root module.
    """
    e = evaluated(Plans(dp=8, in_dp=8, zero=zero), batch=8 * micro_batches)
    kept = ends_of(DENSE) * micro_batches * (zero == 3)
    assert sent_bytes(e) == pytest.approx(2 * (volume * parameter_terms(DENSE).total - kept), rel=1e-12)


@pytest.mark.parametrize(("shard", "zero"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 3)])
def test_volume_of_shards_with_replicas(shard: int, zero: int) -> None:
    """PyTorch FSDP, arXiv 2304.11277, section 3.2.2: shards are scattered and gathered among ``shard`` ranks, and the
    gradients of one shard are added up over the 8 / ``shard`` that hold the same."""
    e = evaluated(Plans(dp=8, in_dp=8, zero=zero, shard=shard))
    parameters, copies = parameter_terms(DENSE).total, 8 / shard
    kept = ends_of(DENSE) * (zero == 3)
    among = ((3 if zero == 3 else 2) * parameters - kept) * (shard - 1) / shard
    between = 2 * parameters / shard * (copies - 1) / copies
    assert sent_bytes(e) * 7 / 8 == pytest.approx(2 * (among + between), rel=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("single_ring", [False, True])
def test_shards_of_all_ranks_are_no_shards_of_fewer(zero: int, single_ring: bool) -> None:
    """On one ring, and so over one NIC of each node, too; of a block every plan is as it is alone."""
    cluster = load_cluster("dgx-a100-80gb")
    precision = PRECISIONS["bf16"]
    nodes = estimate_machine(cluster, 64, precision, lone_rank_has_all_links=True, calibrated=True)
    plans = Plans(dp=64, in_dp=8, zero=zero)
    e = evaluated(plans, batch=64, single_ring=single_ring)
    block = plans.with_columns({"shard": np.array([0.0, 64.0, 8.0])})
    alone = [evaluate(e.method, e.strategy, e.job, nodes, block.row(i)).step_time_s for i in range(3)]
    assert alone[0] == alone[1] != alone[2]
    assert evaluate(e.method, e.strategy, e.job, nodes, block).step_time_s == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (1, 8)])
def test_an_optimiser_on_the_host_moves_gradients_down_and_weights_up(zero: int, ranks: int) -> None:
    """ZeRO-Offload, arXiv 2101.06840, section 4: 2 bytes of gradient and 2 of weight per parameter that a rank owns;
    table 4: a host updates 10 billion parameters in 2.6 s, for all eight of its devices."""
    e = evaluated(Plans(dp=8, in_dp=8, zero=zero), offload=frozenset({"optimizer"}))
    owned = parameter_terms(DENSE).total / ranks
    assert e.step.optimizer_s == pytest.approx(8 * owned * 2.6e-10 + 4 * owned / MACHINE.host_Bps, rel=0.02)


def test_a_row_without_work_takes_what_it_sends() -> None:
    row = Row(name="sent", block="b", operator="nothing", shape={}, forward=(over("tp", "all_gather", 8e9),))
    late = replace(MACHINE, kernel_latency_s=1.0)
    time = phase_time(row, FORWARD, Plans(tp=8, in_tp=8), late)
    assert time.total_s == pytest.approx(7e9 / LINK_Bps) and time.issued == 0, "no kernel, nothing to issue"


@pytest.mark.parametrize(("ep", "volume"), [(1, 3), (8, 0)])
def test_volume_of_experts(ep: int, volume: int) -> None:
    """Replicas of all experts send them as other weights; experts that nobody else holds are not sent."""
    experts = EXPERTS.layers * 8 * 3 * EXPERTS.hidden * 14336
    e = evaluated(Plans(dp=8, in_dp=8, ep=ep, zero=3), EXPERTS)
    others = parameter_terms(EXPERTS).total - experts
    assert sent_bytes(e) == pytest.approx(2 * (3 * others - ends_of(EXPERTS) + volume * experts), rel=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_weights_are_sent_where_they_are_in_shards(zero: int) -> None:
    """An adapter's weights are reduced and gathered; the frozen ones only gathered, and only by stage 3."""
    e = evaluated(Plans(dp=8, in_dp=8, zero=zero), adapter=Adapter(rank=16))
    frozen, trained = parameter_terms(DENSE).total, float(e.sizes.layer.weights) * DENSE.layers
    assert 0 < trained < 0.01 * frozen
    elements = {1: 2 * trained, 2: 2 * trained, 3: 3 * trained + 2 * frozen - ends_of(DENSE)}[zero]
    assert sent_bytes(e) == pytest.approx(2 * elements, rel=1e-12)


@pytest.mark.parametrize(("ep", "held"), [(1, 8), (8, 0)])
def test_stage_3_holds_two_whole_layers(ep: int, held: int) -> None:
    """FSDP, arXiv 2304.11277: the layer that runs and the one that is prefetched; experts without replicas are there
    anyway."""
    e = evaluated(Plans(dp=8, in_dp=8, ep=ep, zero=3), EXPERTS)
    expert = 3 * EXPERTS.hidden * 14336
    layer = (parameter_terms(EXPERTS).total - ends_of(EXPERTS)) / EXPERTS.layers
    backward = stage_memory(e, "first").phases["backward"]
    gathered = backward["working/backward/gathered_weights_bytes"].value
    assert gathered == 2 * (2 * (layer - 8 * expert + held * expert) + ends_of(EXPERTS))


@pytest.mark.parametrize(("inside", "fast"), [(1, 0), (2, 2), (4, 3)])
def test_messages_between_stages(inside: int, fast: int) -> None:
    """Four stages have three links, of which ``fast`` lie in a domain; forward and back once per micro-batch."""
    one = replace(MACHINE, fast_Bps=4 * LINK_Bps)
    e = evaluated(Plans(pp=4, in_pp=inside), batch=16)
    e = evaluate(e.method, e.strategy, e.job, one, e.plans)
    message = 2 * 1024 * DENSE.hidden
    mean_s = message * (fast / 4 + (3 - fast)) / 3 / LINK_Bps
    assert e.step.pipeline_comm_s == pytest.approx(2 * 16 * mean_s, rel=1e-12)
    assert e.step.bubble_links_s == pytest.approx(2 * 3 * mean_s, rel=1e-12)


def of_layers(name: str, layers: int, with_experts: int) -> ModelSpec:
    """A model cut to so many layers."""
    model = load_model(name)
    assert model.experts is not None
    return replace(model, layers=layers, experts=replace(model.experts, moe_layers=with_experts))


@pytest.mark.each("pp", [1, 2, 4, 5])
@pytest.mark.each("with_experts", [17, 20])
@pytest.mark.each("name", ["deepseek-v3", "mixtral-8x7b"])
def test_stages_hold_the_model(name: str, with_experts: int, pp: int) -> None:
    """Three layers without experts stand first, as those of DeepSeek-V3."""
    model = of_layers(name, 20, with_experts)
    e = evaluated(Plans(pp=pp, zero=0), model, batch=64)

    def held(stage: str) -> float:
        calls = stage_memory(e, stage).held
        return sum(float(calls[f"{part}/parameter_bytes"].value) for part in ("weights", "expert_weights"))

    stages = [held("first"), *[held("middle")] * max(pp - 2, 0), *[held("last")] * (pp > 1)]
    assert sum(stages) == pytest.approx(2 * parameter_terms(model).total, rel=1e-12)


@pytest.mark.each("pp", [1, 4])
@pytest.mark.each("with_experts", [10, 17, 20])
@pytest.mark.each("name", ["deepseek-v3", "mixtral-8x7b"])
def test_memory_terms_of_layers_of_two_kinds_add_up(name: str, with_experts: int, pp: int) -> None:
    e = evaluated(Plans(pp=pp), of_layers(name, 20, with_experts), batch=64)
    assert memory_terms(e, fullest_stage(e)).total == pytest.approx(float(e.peak_bytes), rel=1e-12)


@pytest.mark.parametrize(("layers", "pp", "split"), [(19, 5, (4, 4, 3)), (18, 5, (3, 4, 3)), (20, 5, (4, 4, 4)),
                                                     (20, 1, (20, 20, 20))])  # fmt: skip
def test_a_micro_batch_passes_every_layer_once(layers: int, pp: int, split: tuple[int, int, int]) -> None:
    e = evaluated(Plans(pp=pp), replace(DENSE, layers=layers))
    inputs, ends = e.inputs, e.passes["first"].both_s + e.passes["last"].both_s
    assert (inputs.first_layers, inputs.middle_layers, inputs.last_layers) == split
    assert float(e.step.stage_s["all_stages_s"]) == pytest.approx(
        layers * float(e.passes["layer"].both_s) + float(ends)
    )
