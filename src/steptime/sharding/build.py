r"""The sharding problem of a captured step on a mesh: time of operators, time of resharding, and memory.

Item $v$ with strategy $o$ takes $c_v[o] = n_v\,(t(\text{local shapes}) + t(\text{exchange}))$ seconds, where $n_v$ is
the number of times it runs in a step and $t$ the time model of ``steptime profile``. The time between two items is the
least over all sequences of resharding and views: with $D_i[a, b]$ the seconds from placement $a$ to $b$ of the $i$-th
tensor on the way and $V_i[a, b] = 0$ where view $i$ takes $a$ to $b$, else infinite,
$M = D_0 \otimes V_1 \otimes D_1 \otimes \dots$ in the (min, +) algebra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import numpy as np

from steptime.captured.cost import Timer
from steptime.captured.graph import Nodes, TensorType
from steptime.captured.ops import labelled_by
from steptime.captured.ops.norms import batch_dims
from steptime.captured.ops.placement import R, Sharding, divides, local_shape, shard
from steptime.num import Array
from steptime.sharding.flow import Flow, Item, Link, Look, root_of, start_of_memory
from steptime.sharding.local import local_node
from steptime.sharding.mesh import Mesh
from steptime.sharding.options import Strategy, signature, strategies
from steptime.sharding.problem import Edge, Moment, Node, Problem
from steptime.sharding.reshard import costs

MOMENTS = 6
"""Number of points in time, in addition to the start of the step, at which memory is limited at first."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run an item on all axes of a mesh: shardings of its inputs and of its outputs."""

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    strategy: Strategy | None = None
    """The strategy of an operator; None for other items."""


def shardings_of(type: TensorType, sizes: Sequence[int]) -> tuple[Sharding, ...]:
    """Every sharding of a tensor without partial sums; the fully replicated one comes first."""
    found: list[Sharding] = [()]
    for _ in sizes:
        found = [(*start, each) for start in found for each in (R, *(shard(dim) for dim in range(type.rank)))]
    return tuple(each for each in found if divides(type.shape, each, sizes))


def share_of(type: TensorType, sharding: Sharding, sizes: Sequence[int]) -> float:
    """Share of a tensor on one device: that of the largest piece; 1 for a partial sum."""
    return prod(local_shape(type.shape, sharding, sizes)) / max(type.elements, 1)


def exchange_s(strategy: Strategy, mesh: Mesh) -> float:
    """Seconds of communication inside an operator."""
    total = 0.0
    for axis, exchange in enumerate(strategy.exchanges):
        if exchange is None:
            continue
        if exchange.collective == "halo":
            total += 2.0 * float(mesh.message_s((axis,), exchange.size_bytes / 2))
        else:
            total += float(mesh.collective_s(exchange.collective, (axis,), exchange.size_bytes))
    return total


def least_plus(a: Array, b: Array) -> Array:
    """Product of two matrices in the (min, +) algebra.

    >>> least_plus(np.array([[0.0, 5.0]]), np.array([[3.0], [1.0]])).tolist()
    [[3.0]]
    """
    out = np.full((a.shape[0], b.shape[1]), inf)
    for k in range(a.shape[1]):
        np.minimum(out, a[:, k, None] + b[None, k, :], out=out)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time of all options of items and of pairs of items, divided by what can overlap."""

    operators: tuple[Array, ...]
    """By item and option: computation."""
    inside: tuple[Array, ...]
    """By item and option: communication inside operators, and resharding of values that go to the next block."""
    moved: Mapping[tuple[int, int], Array]
    """By pair of items and their options: resharding of activations and of their gradients."""
    data: Mapping[tuple[int, int], Array]
    """By pair of items and their options: resharding of weights and their gradients, the data-parallel traffic."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The sharding problem of a step, with the meaning of its options."""

    flow: Flow
    mesh: Mesh
    ways: tuple[tuple[Way, ...], ...]
    """Options of each item."""
    unknown: tuple[int, ...]
    """Items that no dim of the mesh can divide; every device runs them whole."""
    seconds: Seconds
    moments: tuple[Moment, ...]
    limit_bytes: float
    walker: _Builder

    def problem(self, overlap: float | None = None, share: float = 1.0) -> Problem:
        r"""The problem in which all times add up, or a relaxation of the problem with overlap.

        With overlap a step takes $T = r + (1 - s)(c + d) + s \max(c, d)$ seconds: $c$ is computation, $d$ the traffic
        of weights and their gradients, $s$ the share that may overlap, and $r$ the rest. For each $\lambda$ from 0 to 1
        the sum $r + (1 - s \lambda)\,c + (1 - s + s \lambda)\,d$ is at most $T$, so its minimum is a lower bound.

        Args:
            overlap: $\lambda$; None: nothing overlaps, $r + c + d$.
            share: $s$.
        """
        of_computing, of_data = (
            (1.0, 1.0) if overlap is None else (1.0 - share * overlap, 1.0 - share + share * overlap)
        )
        seconds, pairs = self.seconds, dict(self.seconds.moved)
        for pair, matrix in seconds.data.items():
            scaled = np.multiply(matrix, of_data, out=np.full_like(matrix, inf), where=np.isfinite(matrix))
            pairs[pair] = pairs[pair] + scaled if pair in pairs else scaled
        each = zip(_names(self.flow.items), seconds.operators, seconds.inside, self.walker.tags, strict=True)
        return Problem(
            nodes=tuple(
                Node(name=name, cost_s=of_computing * operator + inside, tags=tags)
                for name, operator, inside, tags in each
            ),
            edges=tuple(Edge(u=u, v=v, cost_s=matrix) for (u, v), matrix in pairs.items()),
            moments=self.moments,
            limit_bytes=self.limit_bytes,
        )

    def parts_s(self, choice: Array) -> tuple[float, float, float]:
        """Seconds of a choice: computation, weights and their gradients, all others."""
        computing = sum(float(each[option]) for each, option in zip(self.seconds.operators, choice, strict=True))
        inside = sum(float(each[option]) for each, option in zip(self.seconds.inside, choice, strict=True))
        moved, data = (
            sum(float(matrix[choice[u], choice[v]]) for (u, v), matrix in pairs.items())
            for pairs in (self.seconds.moved, self.seconds.data)
        )
        return computing, data, inside + moved

    def shares(self, item: int, place: int) -> Array:
        """Share of an output of an item that a device has, by option."""
        return self.walker.shares(item, place)

    def link_s(self, link: Link, made: Sharding, read: Sharding) -> float:
        """Seconds of a link from the sharding that was made to the one that is read, once."""
        return float(self.walker.chain(link, [made], [read])[0, 0])

    def only(self, options: Mapping[int, Iterable[int]], pairs: Mapping[tuple[int, int], Array] | None = None) -> Built:
        """The same problem with only the given options of items, and only the pairs of options that a mask allows."""
        inside, moved = list(self.seconds.inside), dict(self.seconds.moved)
        for item, allowed in options.items():
            legal = np.isin(np.arange(len(inside[item])), list(allowed))
            inside[item] = np.where(legal, inside[item], inf)
        for pair, mask in (pairs or {}).items():
            moved[pair] = np.where(mask, moved[pair], inf)
        return replace(self, seconds=replace(self.seconds, inside=tuple(inside), moved=moved))

    def with_moments(self, calls: Sequence[int]) -> Built:
        """The same problem with memory limited at further calls."""
        return replace(self, moments=(*self.moments, *(self.walker.moment(call) for call in calls)))


def built(
    flow: Flow,
    mesh: Mesh,
    timer: Timer,
    limit_bytes: float = inf,
    moments: Sequence[int] | None = None,
    *,
    plain_norms: bool = False,
    update_s: Callable[[float], float] | None = None,
    bucket_bytes: float = 0.0,
) -> Built:
    """The problem of a step on a mesh.

    Args:
        flow: the step.
        mesh: devices and links.
        timer: time models of the device.
        limit_bytes: memory that a device has for tensors.
        moments: calls at which memory is limited; None: those where the unsharded step needs most.
        plain_norms: batch norms take the statistics of each device's part, and exchange nothing.
        update_s: time of the optimiser by the number of elements that a device updates; None: as it was recorded.
        bucket_bytes: least size of a message of gradients or weights, of which each tensor pays its share; 0: each
            tensor is a message of its own.
    """
    silent = labelled_by(batch_dims) if plain_norms else frozenset()
    return _Builder(flow, mesh, timer, silent, update_s, bucket_bytes).built(limit_bytes, moments)


@dataclass(kw_only=True)
class _Ends:
    """Distinct shardings of one input or output of an item, and which of them each option has."""

    shardings: list[Sharding]
    of_option: Array


Pairs = dict[tuple[int, int], Array]


class _Builder:
    def __init__(
        self,
        flow: Flow,
        mesh: Mesh,
        timer: Timer,
        silent: frozenset[str],
        update_s: Callable[[float], float] | None,
        bucket_bytes: float,
    ) -> None:
        self.flow, self.mesh, self.timer, self.silent, self.update_s = flow, mesh, timer, silent, update_s
        self.bucket_bytes = bucket_bytes
        self.sizes = mesh.sizes
        self.nodes = Nodes()
        self.unknown: list[int] = []
        self._shares: dict[tuple[int, int], Array] = {}
        self._ends: dict[tuple[int, bool, int], _Ends] = {}
        self._chains: dict[object, Array] = {}
        self._operators: dict[object, tuple[Array, ...]] = {}
        found: list[tuple[Way, ...]] = []
        for number, item in enumerate(flow.items):  # a copy comes after what makes and reads it
            found.append(self._ways_of_copy(number, found) if item.kind == "copy" else self._ways_of(number, item))
        self.ways = tuple(found)

    def built(self, limit_bytes: float, moments: Sequence[int] | None) -> Built:
        """The problem with its times and moments."""
        each = [self._seconds(item, ways) for item, ways in zip(self.flow.items, self.ways, strict=True)]
        moved, data, own = self._matrices()
        calls = start_of_memory(self.flow, MOMENTS) if moments is None else moments
        return Built(
            flow=self.flow,
            mesh=self.mesh,
            ways=self.ways,
            unknown=tuple(self.unknown),
            seconds=Seconds(
                operators=tuple(operator for operator, _ in each),
                inside=tuple(inside + own.get(number, 0.0) for number, (_, inside) in enumerate(each)),
                moved=moved,
                data=data,
            ),
            moments=tuple(self.moment(call) for call in calls),
            limit_bytes=limit_bytes,
            walker=self,
        )

    @cached_property
    def tags(self) -> tuple[Array, ...]:
        """Tags of each item (:attr:`~steptime.sharding.problem.Node.tags`)."""
        return tuple(_tags(ways) for ways in self.ways)

    # -- options --------------------------------------------------------------------------------------------------

    def _ways_of(self, number: int, item: Item) -> tuple[Way, ...]:
        type = item.node.outputs[0] if item.node.outputs else TensorType((), "fp32")
        if item.kind == "source":
            return tuple(Way((), (each,)) for each in shardings_of(type, self.sizes))
        if item.kind == "update":
            return tuple(Way((each,), (each,)) for each in shardings_of(type, self.sizes))
        found = strategies(item.node, self.sizes)
        if len(found) == 1:
            self.unknown.append(number)
        return tuple(Way(each.inputs, each.outputs, each) for each in found)

    def _ways_of_copy(self, number: int, ways: Sequence[Sequence[Way]]) -> tuple[Way, ...]:
        """Options of a copy: replicated, or a sharding that its maker gives or one of its readers takes."""
        found = [(R,) * len(self.sizes)]
        for link in self.flow.links:
            if link.target == number:
                found += [way.outputs[link.output] for way in ways[link.source]]
            elif link.source == number:
                asked = dict.fromkeys(way.inputs[link.input] for way in ways[link.target])
                for look in reversed(link.looks):
                    each = strategies(look.node, self.sizes)
                    asked = dict.fromkeys(one.inputs[0] for one in each if one.outputs[look.output] in asked)
                found += asked
        return tuple(Way((each,), (each,)) for each in dict.fromkeys(found))

    def _seconds(self, item: Item, ways: Sequence[Way]) -> tuple[Array, Array]:
        """Seconds of each option in all equal blocks together: computation, and communication inside."""
        nothing = np.zeros(len(ways))
        if item.kind in ("source", "copy"):
            return nothing, nothing
        if item.kind == "update":
            type, (launched_s, streamed_s) = item.node.outputs[0], self.optimizer_s
            shares = np.array([share_of(type, way.outputs[0], self.sizes) for way in ways])
            return nothing, item.count * type.elements * (launched_s + streamed_s * shares)
        values = item.node.inputs
        # The first and last of equal blocks have items of their own, which cost the same.
        looks = tuple(tuple(look.node.op for look in root_of(value)[1]) for value in values)
        key = (signature(item.node), item.inplace, tuple(map(values.index, values)), looks)
        if key not in self._operators:
            each = zip(*(self._operator_s(item, way) for way in ways), strict=True)
            self._operators[key] = tuple(np.array(part) for part in each)
        computing, inside = self._operators[key]
        return item.count * computing, item.count * inside

    def _operator_s(self, item: Item, way: Way) -> tuple[float, float]:
        if way.strategy is None:
            return 0.0, 0.0
        local = local_node(item.node, way.strategy, self.sizes, self.nodes)
        seconds = self.timer.cost(local, inplace=item.inplace).seconds
        factor = 0.0 if item.node.op in self.silent else self.timer.factors.get("tensor_links", 1.0)
        return float(seconds), factor * exchange_s(way.strategy, self.mesh)

    @cached_property
    def optimizer_s(self) -> tuple[float, float]:
        """Seconds of the update per element: the part that no sharding shortens, and the rest without sharding."""
        elements = sum(item.count * item.node.outputs[0].elements for item in self.flow.items if item.kind == "update")
        if self.update_s is not None and elements:
            whole_s, least_s = self.update_s(elements), self.update_s(elements / self.mesh.devices)
            streamed_s = (whole_s - least_s) / (1 - 1 / self.mesh.devices) if self.mesh.devices > 1 else whole_s
            return (whole_s - streamed_s) / elements, streamed_s / elements
        calls = [self.flow.program.calls[number] for number in self.flow.optimizer_calls]
        costs = [self.timer.cost(call.node, inplace=call.inplace) for call in calls if not call.view]
        launched_s = sum(
            min(each.seconds, float(self.timer.machine(each.dtype).kernel_latency_s * each.work.launches))
            for each in costs
        )
        whole_s = sum(each.seconds for each in costs)
        return launched_s / max(elements, 1), (whole_s - launched_s) / max(elements, 1)

    # -- edges ----------------------------------------------------------------------------------------------------

    def _matrices(self) -> tuple[Pairs, Pairs, dict[int, Array]]:
        """Seconds between two items for activations and for weights, and from an item to itself in the next block."""
        moved: Pairs = {}
        data: Pairs = {}
        own: dict[int, Array] = {}
        for link in self.flow.links:
            source, target = self._end(link.source, False, link.output), self._end(link.target, True, link.input)
            of_weights = self.flow.of_weights(link)
            factor = self.timer.factors.get("data_links" if of_weights else "tensor_links", 1.0)
            chain = link.count * factor * self.chain(link, source.shardings, target.shardings)
            if link.source == link.target:
                diagonal = chain[source.of_option, target.of_option]
                own[link.source] = own.get(link.source, 0.0) + diagonal
                continue
            pairs = data if of_weights else moved
            matrix = chain[np.ix_(source.of_option, target.of_option)]
            u, v = sorted((link.source, link.target))
            pairs[u, v] = pairs.get((u, v), 0.0) + (matrix if u == link.source else matrix.T)
        return moved, data, own

    def _end(self, item: int, is_input: bool, place: int) -> _Ends:
        key = (item, is_input, place)
        found = self._ends.get(key)
        if found is None:
            reads = is_input and self.flow.items[item].kind != "source"  # a new parameter has the sharding of the old
            each = [(way.inputs if reads else way.outputs)[place] for way in self.ways[item]]
            known = list(dict.fromkeys(each))
            number = {sharding: n for n, sharding in enumerate(known)}
            found = self._ends[key] = _Ends(shardings=known, of_option=np.array([number[one] for one in each], int))
        return found

    def chain(self, link: Link, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Array:
        """Seconds from each sharding of a value to each that its reader takes, through all views between them."""
        type, shares = self.flow.items[link.source].node.outputs[link.output], 1.0
        if self.bucket_bytes and self.flow.of_weights(link):
            shares = max(self.bucket_bytes / max(type.size_bytes, 1), 1.0)
        key = (type, link.looks, tuple(sources), tuple(targets), shares)
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = self._walked(type, link.looks, sources, targets, shares) / shares
        return found

    def _walked(
        self,
        type: TensorType,
        looks: Sequence[Look],
        sources: Sequence[Sharding],
        targets: Sequence[Sharding],
        times: float,
    ) -> Array:
        """Seconds of :meth:`chain` for a tensor whose elements are larger by the factor ``times``."""
        reached: Array | None = None
        here: Sequence[Sharding] = sources
        for look in looks:
            inputs, outputs, pairs = self._look(look)
            step = costs(type.shape, type.element_bytes * times, here, inputs, self.mesh)
            known = list(dict.fromkeys(outputs))
            view = np.full((len(inputs), len(known)), inf)
            for place, output in pairs:
                view[place, known.index(output)] = 0.0
            step = least_plus(step, view)
            reached = step if reached is None else least_plus(reached, step)
            here, type = known, look.node.outputs[look.output]
        last = costs(type.shape, type.element_bytes * times, here, targets, self.mesh)
        return last if reached is None else least_plus(reached, last)

    def _look(self, look: Look) -> tuple[list[Sharding], list[Sharding], list[tuple[int, Sharding]]]:
        """Shardings of a view's input, those of its output, and pairs of both (place of the input, output)."""
        found = strategies(look.node, self.sizes)
        inputs = list(dict.fromkeys(each.inputs[0] for each in found))
        pairs = [(inputs.index(each.inputs[0]), each.outputs[look.output]) for each in found]
        return inputs, [output for _, output in pairs], pairs

    # -- memory ---------------------------------------------------------------------------------------------------

    def moment(self, call: int) -> Moment:
        """Bytes of one device while a call runs."""
        found = self.flow.moment(call)
        by_item: dict[int, Array] = {}
        for kept in found.kept:
            shares = self.shares(kept.item, kept.output)
            by_item[kept.item] = by_item.get(kept.item, 0.0) + kept.size_bytes * shares
        return Moment(name=found.name, entries=tuple(by_item.items()), fixed_bytes=found.fixed_bytes)

    def shares(self, item: int, place: int) -> Array:
        """Share of an item's output or input (:attr:`~steptime.sharding.flow.Item.widest`) on a device, by option."""
        key = item, place
        if key not in self._shares:
            node, ways = self.flow.items[item].node, self.ways[item]
            type = node.outputs[place] if place >= 0 else node.inputs[-1 - place].type
            lie = [way.outputs[place] if place >= 0 else way.inputs[-1 - place] for way in ways]
            self._shares[key] = np.array([share_of(type, each, self.sizes) for each in lie])
        return self._shares[key]


def _names(items: Sequence[Item]) -> list[str]:
    """A name for each item, numbered where several have one."""
    seen: dict[str, int] = defaultdict(int)
    out = []
    for item in items:
        seen[item.name] += 1
        out.append(item.name if seen[item.name] == 1 else f"{item.name} ({seen[item.name]})")
    return out


def _tags(ways: Sequence[Way]) -> Array:
    """A number for each option and axis; equal numbers mean equal placements, 0 that everything is replicated."""
    known: dict[object, int] = {}
    out = []
    for way in ways:
        axes = list(zip(*way.inputs, *way.outputs, strict=True)) if way.inputs or way.outputs else []
        out.append(
            [0 if all(each.replicated for each in axis) else known.setdefault(axis, len(known) + 1) for axis in axes]
        )
    return np.array(out, int)
