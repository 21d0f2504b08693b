"""An update of the weights: the optimiser, and traffic over the data-parallel group of the first stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.cost.data_parallel import adam_step_bytes, layers_per_bucket
from steptime.cost.host import HOST_ADAM_PER_S, host_adam_s, host_copy_s
from steptime.cost.optimizers import matrix_update_s
from steptime.cost.roofline import memory_s
from steptime.estimate.communication import Group, collective_in, group_of
from steptime.estimate.kernels import streamed
from steptime.estimate.machine import Machine
from steptime.estimate.memory import STAGES, kept_of_layer, on_stage, stage_parts
from steptime.estimate.result import PlannedJob
from steptime.model.captured import Sharded, Turn
from steptime.num import Num, maximum, minimum, where
from steptime.plan.job import Job
from steptime.plan.optimizers import MOMENTUM_BYTES, nothing
from steptime.plan.plans import Plans
from steptime.terms import at, call

TRAVELS: Final = ("gradients", "weights")
"""Kinds of parameter traffic."""
PARAMETERS_REGARDLESS = ("micro_batch", "panels", "recompute", "recompute_every")
"""Columns of plans on which :func:`parameter_traffic` does not depend: parameters have the same sizes and groups."""


def parameter_traffic(planned: PlannedJob, machine: Machine) -> dict[str, Any]:
    """Collectives of gradients, weights and momentum on free links, by their names in
    :class:`~steptime.estimate.step_inputs.StepInputs`.
    """
    sent, links, turns = shared_of(planned), dict[str, dict[str, Num]](), dict[str, Any]()
    for name in TRAVELS:
        layer = sent[f"{name}/one_layer"]
        seconds = [sent_s(machine, [one], f"dp_comm/{name}/one_layer") for one in layer]
        one_layer_s = sum(seconds, start=0.0)
        if planned.sizes.sharded is not None and seconds:
            turns[name] = _turns_of(getattr(planned.sizes.sharded, name), seconds)
        messages_s = sum((each_s * one.layers for each_s, one in zip(seconds, layer, strict=True)), start=0.0)
        links[name] = {
            "one_layer_s": one_layer_s,
            # Layers that travel as one message, those of several collectives weighted by their time.
            "bucket": messages_s / one_layer_s
            if name in turns
            else maximum(messages_s / where(one_layer_s > 0, one_layer_s, 1.0), 1.0),
            "shown_end_s": sent_s(machine, sent[f"{name}/embedding"], f"dp_comm/{name}/embedding"),
            "hidden_end_s": sent_s(machine, sent[f"{name}/head"], f"dp_comm/{name}/head"),
        }
    replicas_s = sent_s(machine, sent["gradients/replicas"], "dp_comm/gradients/replicas")
    if "parameters" in planned.job.offload:  # each rank first reads its shard from the host's memory
        with at("offload/parameters/one_layer"):
            layer_s = host_read_s(machine, sent["weights/one_layer"])
        shown_s, hidden_s = (host_read_s(machine, sent[f"weights/{end}"]) for end in ("embedding", "head"))
        more = {"one_layer_s": layer_s, "shown_end_s": shown_s, "hidden_end_s": hidden_s}
        links["weights"] |= {name: links["weights"][name] + more_s for name, more_s in more.items()}
    return {
        "reduce": links["gradients"], "replicas_s": replicas_s, "gather": links["weights"],
        "replicated_s": replicated_s(planned, machine),
        "momentum_gather_s": sent_s(machine, momentum_of(planned), "optimizer/momentum"),
        **({"turns": turns} if turns else {}),
    }  # fmt: skip


def in_turn(shares: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Turns from pairs, one per message: share of a pass that may overlap with it, and its share of the total time.

    A turn has the share of a pass that may overlap with all messages up to it, and their share of the total time;
    messages with the smallest overlap come first.

    >>> in_turn([(0.75, 0.5), (0.0, 0.25), (0.0, 0.25)])
    ((0.0, 0.5), (0.75, 1.0))
    """
    out: dict[float, float] = {}
    total = 0.0
    for beside, share in sorted(shares):
        out[beside] = total = total + share
    return tuple(out.items())


def host_read_s(machine: Machine, sent: list[Sent]) -> Num:
    """Time in which a rank reads its shards of some gathered tensors from its host."""
    total: Num = 0.0
    for one in sent:
        kept_bytes = one.times * one.size_bytes / one.group[0]
        total = total + call(host_copy_s, machine.host_basis, kept_bytes=kept_bytes, host_Bps=machine.host_Bps)
    return total


class Sent(NamedTuple):
    """One collective over ranks that hold the same parameters."""

    kind: str
    size_bytes: Num
    group: Group
    senders: Num | None = None
    """Ranks of a domain whose NICs carry what leaves it; None: all."""
    times: Num = 1.0
    layers: Num = 1.0
    """Number of layers whose parts it carries."""


def sent_s(machine: Machine, sent: list[Sent], path: str) -> Num:
    """Time of some collectives, one after the other; ``path``: path on the tape."""
    total: Num = 0.0
    for one in sent:
        with at(path, passes=one.times):
            seconds = collective_in(one.kind, machine, one.size_bytes, one.group, one.senders)
        total = total + one.times * seconds
    return total


def shared_of(planned: PlannedJob) -> dict[str, list[Sent]]:
    """The collectives of :func:`parameter_traffic` over the data-parallel group, by the ends of their paths.

    Gradients are reduced, each shard on its ranks and then over its replicas, and sharded weights are gathered. A layer
    has its share of a bucket, except under ZeRO-3; the embedding has nothing left to overlap with, and the head is
    ready before the layers.
    """
    if planned.sizes.sharded is not None:
        return _of_shardings(planned.sizes.sharded, planned.job)
    job, plans, sizes, stage = planned.job, planned.plans, planned.sizes, stage_parts(planned, "first")
    pools = [("weights", "frozen_bytes", planned.strategy.gradient_axes)]
    if sizes.has("expert_weights") or sizes.has("frozen_expert_bytes"):
        pools.append(("expert_weights", "frozen_expert_bytes", ("edp",)))
    sharded = where(plans.shares("optimizer"), 1.0, 0.0)
    # 1 if embedding and head are one message, with nothing to overlap with: the root unit of ZeRO-3.
    together: Num = 1.0
    if planned.method.calibrated:
        together = where(plans.shares("weights"), 1.0, 0.0) if job.root_unit else 0.0

    def parts(name: str) -> dict[str, Num]:
        first, last = getattr(sizes.first, name), getattr(sizes.last, name)
        return {
            "one_layer": getattr(sizes.layer, name),
            "embedding": first * stage.first + together * last * stage.last,
            "head": (1.0 - together) * last * stage.last,
        }

    found: dict[str, list[Sent]] = {
        f"{what}/{part}": []
        for what in ("gradients", "replicas", "weights")
        for part in ("one_layer", "embedding", "head")
    }
    for trained, frozen, axes in pools:
        every = _group(planned, axes)
        group, copies = _shards(plans, every) if plans.has_shards else (every, None)
        # Ranks of a domain whose NICs carry the traffic of ZeRO; None: all.
        senders = where(plans.shares("weights"), 1, group[1]) if job.single_ring else None
        weights, more = parts(trained), parts(frozen)
        for part, count in weights.items():
            gradient_bytes = count * job.gradient_bytes
            weight_bytes = count * job.precision.element_bytes
            weight_bytes = weight_bytes + more[part] * where(plans.shares("weights"), 1.0, 0.0)  # frozen: ZeRO-3 alone
            reduced = (  # each rank ends with its shard of the sums, and without ZeRO with all of them
                Sent("reduce_scatter", gradient_bytes, group, senders, times=sharded),
                Sent("all_reduce", gradient_bytes, group, times=1.0 - sharded),
            )
            own = {
                "gradients": [one for one in reduced if np.any(one.times)],
                "replicas": [] if copies is None else [Sent("all_reduce", gradient_bytes / group[0], copies)],
                "weights": [Sent("all_gather", weight_bytes, group, senders, sharded)],
            }
            if part == "one_layer" and planned.method.calibrated:
                layers = layers_per_bucket(count, every[0], stage.layers)
                layers = where(plans.shares("weights"), 1.0, layers)
                own = {
                    what: [
                        one._replace(size_bytes=one.size_bytes * layers, times=one.times / layers, layers=layers)
                        for one in some
                    ]
                    for what, some in own.items()
                }
            for what, some in own.items():
                found[f"{what}/{part}"] += some
    for end in ("embedding", "head"):
        found[f"gradients/{end}"] += found.pop(f"replicas/{end}")
    return found | {"gradients/replicas": found.pop("replicas/one_layer")}


SLICES: Final = 1024
"""Slices into which a step without layers is cut; a bucket carries several."""


def _of_shardings(sharded: Sharded, job: Job) -> dict[str, list[Sent]]:
    """The collectives of parameters under a choice of shardings; the whole step counts as one layer.

    Messages of one kind to the same ranks travel together in buckets.
    """
    found: dict[str, list[Sent]] = {f"{what}/{end}": [] for what in TRAVELS for end in ("embedding", "head")}
    found["gradients/replicas"] = []
    for what in TRAVELS:
        each_bytes = job.gradient_bytes if what == "gradients" else job.precision.element_bytes
        sent = found[f"{what}/one_layer"] = []
        for turns in _kinds(getattr(sharded, what)):
            one, size = turns[0].exchange, sum(turn.size_bytes for turn in turns)
            share = layers_per_bucket(size / each_bytes / SLICES, one.group.ranks, SLICES) / SLICES
            sent.append(Sent(one.collective, size * share, one.group, times=1.0 / share, layers=share))
    return found


def _kinds(turns: Iterable[Turn]) -> list[list[Turn]]:
    """Messages grouped by kind and size of the group of ranks."""
    out: dict[tuple[object, ...], list[Turn]] = {}
    for turn in turns:
        group = turn.exchange.group
        out.setdefault((turn.exchange.collective, group.ranks, group.inside), []).append(turn)
    return list(out.values())


def _turns_of(turns: Iterable[Turn], seconds: Sequence[Num]) -> tuple[tuple[float, float], ...]:
    """Turns of a pass, from the time of each kind of message."""
    shares, whole_s = list[tuple[float, float]](), float(sum(seconds))
    for kind, kind_s in zip(_kinds(turns), seconds, strict=True):
        size = sum(turn.size_bytes for turn in kind)
        for turn in kind:
            share = float(kind_s) / whole_s * turn.exchange.size_bytes / size
            shares += [(beside, share) for beside in turn.beside]
    return in_turn(shares)


def _group(planned: PlannedJob, axes: tuple[str, ...]) -> Group:
    """The ranks of some axes that hold the same parameters, both copies of a mirrored stage included."""
    held = planned.job.stages_held
    ranks, inside, reach = group_of(planned.plans, axes)
    return Group(ranks * held, inside * where(planned.copies_near, held, 1), reach)


def _shards(plans: Plans, group: Group) -> tuple[Group, Group]:
    """One group of shards, and the group of replicas of one shard."""
    ranks, inside, reach = group
    own = plans.sharing_ranks(ranks)
    own_inside = minimum(own, inside)
    first, copies = Group(own, own_inside), Group(ranks / own, maximum(inside / own_inside, 1))
    if reach is None:
        return first, copies
    nodes = own / own_inside
    return first._replace(reach=lambda: reach().shards(nodes)[0]), copies._replace(
        reach=lambda: reach().shards(nodes)[1]
    )


def replicated_s(planned: PlannedJob, machine: Machine) -> Num:
    """Reduction of the gradients of weights that tensor-parallel ranks replicate, on the first stage."""
    if not planned.method.share_replicated_gradients:
        return 0.0 * planned.plans.tp
    plans, parameters = planned.plans, on_stage(planned, "replicated", stage_parts(planned, "first"))
    size_bytes = parameters * planned.job.gradient_bytes * where(plans.sp > 0, 1.0, 0.0)
    sent = Sent("all_reduce", size_bytes, group_of(plans, (planned.strategy.replicated_axis,)))
    return sent_s(machine, [sent], "dp_comm/replicated_weights")


def layer_copy_s(planned: PlannedJob, machine: Machine) -> Num:
    """Copy time of a layer's activations to the host, or back, for one micro-batch; 0 if they stay on the device."""
    if "activations" not in planned.job.offload:
        return 0.0
    sizes = planned.sizes
    kept_bytes = kept_of_layer(sizes.layer.kept_bytes, sizes.boundary_bytes, planned.plans)
    with at("offload/activations/one_layer"):
        return call(host_copy_s, machine.host_basis, kept_bytes=kept_bytes, host_Bps=machine.host_Bps)


def optimizer_bytes(planned: PlannedJob, owned: Num) -> Num:
    """Memory traffic of the optimiser for ``owned`` parameters of a rank."""
    update, moved_bytes = planned.job.optimizer.matrices, _updated_bytes(planned.job, owned)
    if update is None:
        return moved_bytes
    more_bytes = (update.element_bytes - planned.job.optimizer.state_bytes) * owned_of(planned, "matrices")
    return moved_bytes + 2 * (more_bytes + owned_of(planned, "matrix_state_bytes"))


def optimizer_time_s(planned: PlannedJob, owned: Num, machine: Machine) -> Num:
    """Time of the optimiser's pass over its tensors on the device; 0 if the host runs it."""
    if "optimizer" in planned.job.offload:
        return 0.0
    with at("optimizer/device"):
        return _pass_s(machine, optimizer_bytes(planned, owned))


def update_s(job: Job, owned: Num, machine: Machine) -> Num:
    """Time of the optimiser's pass over ``owned`` parameters on the device, without further states of matrices."""
    return _pass_s(machine, _updated_bytes(job, owned))


def _updated_bytes(job: Job, owned: Num) -> Num:
    state_bytes = job.optimizer.bytes_per_parameter(master_weights=job.precision.master_weights)
    return adam_step_bytes(owned, state_bytes, job.gradient_bytes, job.precision.element_bytes)


def _pass_s(machine: Machine, moved_bytes: Num) -> Num:
    """Time of a pass over tensors in memory; 0 without tensors."""
    fitted = streamed(machine.models, moved_bytes)
    if fitted is None:
        return call(memory_s, moved_bytes=moved_bytes, memory_Bps=machine.memory_Bps)
    return where(moved_bytes > 0, fitted.seconds, 0.0)


def host_optimizer_time_s(job: Job, owned: Num, machine: Machine) -> Num:
    """Time of the optimiser on the host; 0 if the device runs it."""
    if "optimizer" not in job.offload:
        return 0.0
    with at("optimizer/host"):
        return call(
            host_adam_s, machine.host_basis, parameters=owned, ranks=machine.host_ranks,
            moved_bytes=owned * (job.gradient_bytes + job.precision.element_bytes),
            updates_per_s=HOST_ADAM_PER_S, host_Bps=machine.host_Bps,
        )  # fmt: skip


def owned_of(planned: PlannedJob, pool: str) -> Num:
    """Share of a rank in a pool, experts included, on the stage with most of it.

    All stages update at once, when the norm of all gradients is known; the step ends with the last of them. 0 if the
    method leaves the optimiser out.
    """
    plans, sizes = planned.plans, planned.sizes
    if not planned.method.optimizer_step:
        return 0.0 * plans.dp
    most: Num = 0.0
    for name in STAGES:
        parts = stage_parts(planned, name)
        owned = on_stage(planned, pool, parts) / plans.shards("optimizer", planned.gradient_ranks)
        if sizes.has(f"expert_{pool}"):
            shards = plans.shards("optimizer", planned.expert_ranks)
            owned = owned + on_stage(planned, f"expert_{pool}", parts) / shards
        most = maximum(most, owned)
    return most


def matrix_time_s(planned: PlannedJob, machine: Machine) -> Num:
    """Time of products in the optimiser's step; ranks that shard its states divide the matrices."""
    update = planned.job.optimizer.matrices
    if update is None or update.flops is nothing:
        return 0.0
    flops = owned_of(planned, "matrix_flops")
    with at("optimizer/matrices"):
        return call(matrix_update_s, flops=flops, flops_per_s=machine.matrix_flops_per_s)


def momentum_of(planned: PlannedJob) -> list[Sent]:
    """Collectives that gather the momentum of whole matrices, if ranks shard the states of the optimiser."""
    update, plans = planned.job.optimizer.matrices, planned.plans
    if update is None or not update.gathered or not planned.method.optimizer_step:
        return []
    shares, stage = where(plans.shares("optimizer"), 1.0, 0.0), stage_parts(planned, "first")
    pools = ("matrices", planned.strategy.gradient_axes), ("expert_matrices", ("edp",))
    sent = []
    for pool, axes in pools:
        if planned.sizes.has(pool):
            whole = _group(planned, axes)
            group = _shards(plans, whole)[0] if plans.has_shards else whole
            sent.append(Sent("all_gather", MOMENTUM_BYTES * on_stage(planned, pool, stage), group, times=shares))
    return sent
