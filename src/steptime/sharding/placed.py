"""A choice of shardings as the workload of one device, which is estimated like any other plan.

Operators have their local shapes and the collectives that bring their inputs; traffic of parameters and their gradients
has positions in the passes. All amounts are for one step at one batch: none is a line over the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from steptime.captured.cost import Work, work_of
from steptime.captured.graph import BEFORE, Nodes, Program
from steptime.captured.ops.placement import text_of
from steptime.captured.ops.work import STREAM, KernelCall
from steptime.captured.workload import by_kernel, numbered, operator_of
from steptime.estimate.communication import RING_EXCHANGE, Group
from steptime.model.captured import NOTHING, CapturedModel, Exchange, Line, Operator, Sharded, Turn, line
from steptime.sharding.flow import Link
from steptime.sharding.local import local_node
from steptime.sharding.mesh import Mesh
from steptime.sharding.planner import ShardingPlan, local_bytes

CATEGORIES: Final[Mapping[str, str]] = {
    "parameter": "weights/parameter_bytes",
    "gradient": "gradients/parameter_bytes",
    "state": "optimizer/parameter_bytes",
    "activation": "activations/activation_bytes",
}
"""Category of a recorded tensor -> path of its term."""
WORKING: Final = "working/largest_temporary_bytes"
"""Path of the term of all other memory: inputs, temporaries, scratch of operators."""


def constant(value: float) -> Line:
    """The constant line of a size that is known for one batch only.

    >>> constant(3.0).at(0, 8)
    3.0
    """
    return line([value], [0.0])


def whole_step(program: Program, seq_len: int, dtype: str) -> CapturedModel:
    """The part of a step's workload that does not depend on shardings, without operators.

    Args:
        program: the unsharded step.
        seq_len: tokens of a sample; 1 if samples are not sequences.
        dtype: element type that it computes in.
    """
    flops = [(call.phase, call.recomputed, work_of(call.node)) for call in program.calls if not call.view]
    return CapturedModel(
        name=program.name,
        source=program.source,
        layers=1,
        repeats=False,
        ways=((1, 0),),
        sequence_parallel=False,
        seq_len=seq_len,
        head=(),
        block=(),
        tail=(),
        boundary_bytes=NOTHING,
        working_bytes=(NOTHING,),
        loss_bytes=(NOTHING,),
        model_flops=constant(
            sum(float(work.model_flops) for phase, again, work in flops if phase != "optimizer" and not again)
        ),
        forward_flops={"layers": constant(sum(float(w.matrix_flops) for phase, _, w in flops if phase == "forward"))},
        parameters=program.parameter_count,
        dtype=dtype,
    )


def workload_of(plan: ShardingPlan, whole: CapturedModel) -> CapturedModel:
    """The computation, traffic and memory of one device under a choice of shardings.

    Args:
        plan: the choice.
        whole: the workload of its step (:func:`whole_step`).
    """
    made = _Placed(plan)
    return replace(whole, block=numbered([*made.operators()]), sharded=made.sharded())


@dataclass(frozen=True)
class _Placed:
    """The workload of a choice of shardings."""

    plan: ShardingPlan

    @property
    def mesh(self) -> Mesh:
        return self.plan.built.mesh

    @cached_property
    def first_call(self) -> dict[int, int]:
        """First call of each item."""
        found: dict[int, int] = {}
        for call, item in self.plan.built.flow.of_call.items():
            found.setdefault(item, call)
        return found

    # -- operators ------------------------------------------------------------------------------------------------

    def operators(self) -> Iterator[Operator]:
        """Operators with their collectives, parameters that are updated, and resharding before operators."""
        plan, nodes = self.plan, Nodes()
        flow, silent = plan.built.flow, plan.built.walker.silent
        for number, item in enumerate(flow.items):
            strategy = plan.built.ways[number][int(plan.choice[number])].strategy
            if strategy is not None:
                local = local_node(item.node, strategy, self.mesh.sizes, nodes)
                work = work_of(local, inplace=item.inplace)
                call = flow.program.calls[self.first_call[number]]
                some = bool(work.moved_bytes or work.launches) and any(type.elements for type in local.outputs)
                one = operator_of(flow.program, call, flow.sections, work if some else None)
                sent = (
                    ()
                    if item.node.op in silent
                    else tuple(
                        self.exchange(each.collective, (axis,), each.size_bytes)
                        for axis, each in enumerate(strategy.exchanges)
                        if each is not None
                    )
                )
                one = replace(one, times=item.count, exchanges=tuple(e for each in sent for e in each))
                if some:
                    yield from _by_kernel(one, work)
                elif one.exchanges:
                    yield one
        yield from self._updated()
        for link in flow.links:
            yield from self._moved(link)

    def _updated(self) -> Iterator[Operator]:
        """Parameters that a device updates, as one operator with weights for each module."""
        sums: dict[tuple[str, int], float] = {}
        for number, item in enumerate(self.plan.built.flow.items):
            if item.kind == "update":
                share = float(self.plan.built.shares(number, 0)[int(self.plan.choice[number])])
                key = item.name.removesuffix(" (update)").rpartition(".")[0], item.count
                sums[key] = sums.get(key, 0.0) + share * item.node.outputs[0].elements
        for (name, count), elements in sums.items():
            yield Operator(name=name, group="nothing", backward=False, times=count, weights=constant(elements))

    def _moved(self, link: Link) -> Iterator[Operator]:
        """Collectives and copies that bring a value to its reader; for parameters only the copies (see ``_turns``)."""
        flow = self.plan.built.flow
        target, source = flow.items[link.target], flow.items[link.source]
        steps = [step for leg in self.plan.legs(link) for step in leg.route.steps]
        backward = target.phase != "forward" or source.phase != "forward"
        bare = Operator(name=f"{target.name.replace(': ', '.')}.reshard", group="nothing", backward=backward)
        bare = replace(bare, times=link.count)
        if not flow.of_weights(link):
            sent = tuple(one for _, one in self.sent(link))
            if sent:
                yield replace(bare, exchanges=sent)
        copied = sum(step.size_bytes for step in steps if not step.collective)
        if copied:
            yield from _by_kernel(replace(bare, name=f"{bare.name}.copy", group="pass"), _copied(copied))

    def sent(self, link: Link) -> Iterator[tuple[tuple[int, ...], Exchange]]:
        """Collectives that bring a value to its reader, with their axes."""
        for leg in self.plan.legs(link):
            for step in leg.route.steps:
                axes = tuple(map(self.mesh.axis, step.axes))
                for one in self.exchange(step.kind, axes, step.size_bytes) if step.collective else ():
                    yield axes, one

    def exchange(self, kind: str, axes: tuple[int, ...], size_bytes: float) -> tuple[Exchange, ...]:
        """Exchanges of a collective; a halo is one to each neighbour, a permutation a message to another rank."""
        group, parts = self.mesh.placed(axes), 2 if kind == "halo" else 1
        if group.ranks == 1:
            return ()
        if kind in ("halo", "permute"):
            kind, group = RING_EXCHANGE, Group(2, 2 if group.inside == group.ranks else 1, group.reach)
        return (Exchange(collective=kind, size_bytes=size_bytes / parts, group=group),) * parts

    # -- parameters -----------------------------------------------------------------------------------------------

    def sharded(self) -> Sharded:
        """Traffic of parameters, memory, and placements of parameters."""
        gradients, weights = self._turns()
        return Sharded(
            mesh=dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            placements={name: text_of(each) for name, each in self.plan.parameters.items()},
            gradients=gradients,
            weights=weights,
            memory=self._memory(),
        )

    @cached_property
    def before(self) -> dict[int, float]:
        """Share of a pass's computation that is done before each call."""
        flow, seconds = self.plan.built.flow, self.plan.built.seconds.operators
        out, done = dict[int, float](), {"forward": 0.0, "backward": 0.0}
        for number, call in enumerate(flow.program.calls):
            if call.phase in done:
                out[number] = done[call.phase]
                if (item := flow.of_call.get(number)) is not None:
                    done[call.phase] += float(seconds[item][self.plan.choice[item]]) / flow.items[item].count
        return {n: at / (done[flow.program.calls[n].phase] or 1.0) for n, at in out.items()}

    def _turns(self) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """Traffic of parameters in the backward pass, and before and in the forward pass."""
        found = _Turns(self)
        flow, calls = self.plan.built.flow, self.plan.built.flow.program.calls
        first, last = dict[int, int](), dict[int, int]()
        for number, makers in sorted(flow.made_by.items()):
            for place, maker in enumerate(makers):
                if flow.items[maker[0]].node.op == "parameter":
                    first.setdefault(calls[number].reads[place], number)
                    ends = (*maker, flow.of_call[number], place)
                    found.add(ends, self.before[number], backward=calls[number].phase == "backward")
            last.update(dict.fromkeys(calls[number].writes, number))
        for parameter in flow.program.parameters:
            gradient, update = flow.gradients.get(parameter.name), flow.update_of.get(parameter.name)
            if gradient is not None and update is not None:
                made, read = last.get(gradient.storage, -1), first.get(parameter.storage, -1)
                found.add((*gradient.made, update, 0), 1.0 - self.before.get(made + 1, 1.0), backward=True)
                renewed = (update, 0, flow.of_parameter[parameter.name], 0)
                found.add(renewed, self.before.get(read, 0.0), backward=False)
        return found.of_pass(True), found.of_pass(False)

    def _memory(self) -> dict[str, float]:
        """Bytes that are alive at the moment of the peak, by path of the term."""
        program, local = self.plan.built.flow.program, local_bytes(self.plan.built, self.plan.choice)
        moment, out = int(np.argmax(self.plan.memory_bytes)) - 1, dict[str, float]()
        for number, storage in enumerate(program.storages):
            end = len(program.calls) if storage.freed is None else storage.freed
            if storage.born <= moment <= end or (moment < 0 and storage.born == BEFORE):
                path = CATEGORIES.get(storage.category, WORKING)
                out[path] = out.get(path, 0.0) + float(local[number])
        rest = float(self.plan.memory_bytes.max()) - sum(out.values())
        return out | {WORKING: max(out.get(WORKING, 0.0) + rest, 0.0)}


Ends = tuple[int, int, int, int]
"""Source and output, target and input of a link."""


class _Turns:
    """Messages of parameters, grouped where they are equal."""

    def __init__(self, placed: _Placed) -> None:
        self.placed = placed
        self.links = {(one.source, one.output, one.target, one.input): one for one in placed.plan.built.flow.links}
        self.sent: dict[Ends, list[tuple[tuple[int, ...], Exchange]]] = {}
        self.found: dict[tuple[object, ...], tuple[Exchange, list[float]]] = {}

    def add(self, ends: Ends, done: float, *, backward: bool) -> None:
        """Add the messages that a link sends once, at the point where a share of the pass is done."""
        if ends not in self.sent:
            link = self.links.get(ends)
            self.sent[ends] = [] if link is None else list(self.placed.sent(link))
        for axes, one in self.sent[ends]:
            key = backward, one.collective, axes, one.size_bytes
            self.found.setdefault(key, (one, []))[1].append(round(done, 6))

    def of_pass(self, backward: bool) -> tuple[Turn, ...]:
        """The messages of one pass."""
        return tuple(Turn(one, tuple(at)) for key, (one, at) in self.found.items() if key[0] == backward)


def _by_kernel(one: Operator, work: Work) -> Iterator[Operator]:
    """An operator divided into its kernels, each of which runs as often as the operator."""
    for each in by_kernel(one, work, lambda value, _: constant(float(value(work)))):
        yield replace(each, times=one.times)


def _copied(size_bytes: float) -> Work:
    """A pass over memory in which half of the bytes are read and half are written."""
    shape = {"read_bytes": size_bytes / 2, "written_bytes": size_bytes / 2}
    return Work(
        family="move", moved_bytes=size_bytes, launches=1.0, kernels=(KernelCall(operator=STREAM, shape=shape),)
    )
