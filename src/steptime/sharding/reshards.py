"""Resharded tensors of a choice, and partial sums that are better added later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steptime.captured.ops.placement import P, R, Sharding, text_of
from steptime.num import Array
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Link
from steptime.sharding.paths import legs_of
from steptime.sharding.problem import options_s
from steptime.sharding.reshard import Step

ROUNDING: Final = 1e-9
"""Share by which an option must be faster to replace another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """One tensor that is resharded on its way from the item that makes it to one that reads it."""

    source: str
    target: str
    made: Sharding
    read: Sharding
    looks: tuple[str, ...]
    """Views on the way."""
    steps: tuple[Step, ...]
    """Steps in the order in which they run: before, between and after the views."""
    seconds: float
    """Seconds in a step, of all equal blocks together."""

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.steps))
        return f"{self.source} -> {self.target}: {text_of(self.made)} to {text_of(self.read)}: {steps}"


def keeping_terms(built: Built, choice: Array) -> Array:
    """The choice in which replicated linear operators take partial sums instead, where that takes less time.

    Three projections of one tensor give three gradients as partial sums, whose sum is then reduced once.
    """
    problem, out = built.problem(), choice.copy()
    reads: dict[tuple[int, int], list[Link]] = defaultdict(list)
    for link in built.flow.links:
        reads[link.target, link.input].append(link)
    for number, ways in enumerate(built.ways):
        now = ways[out[number]]
        if now.strategy is None:
            continue
        made = [
            [built.ways[link.source][out[link.source]].outputs[link.output] for link in reads[number, place]]
            for place in range(len(now.inputs))
        ]
        others = [n for n, way in enumerate(ways) if _in_terms(now, way, made)]
        if others:
            seconds = options_s(problem, out, number)
            best = min(others, key=lambda n: float(seconds[n]))
            if seconds[best] < seconds[out[number]] * (1 - ROUNDING):
                out[number] = best
    return out


def _in_terms(now: Way, other: Way, made: Sequence[Sequence[Sharding]]) -> bool:
    """True if the other option only has partial sums in place of replication, and its inputs are made as such."""
    if now == other or any(
        pair[0] != pair[1] and pair != (R, P)
        for a, b in zip((*now.inputs, *now.outputs), (*other.inputs, *other.outputs), strict=True)
        for pair in zip(a, b, strict=True)
    ):
        return False
    return all(
        before == after or all(each[axis] == P for each in made[place])
        for place, (a, b) in enumerate(zip(now.inputs, other.inputs, strict=True))
        for axis, (before, after) in enumerate(zip(a, b, strict=True))
    )


def reshards_of(built: Built, choice: Array) -> tuple[Reshard, ...]:
    """All links of a choice that take time, the longest first."""
    found = [each for link in built.flow.links if (each := _of_link(built, choice, link)) is not None]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _of_link(built: Built, choice: Array, link: Link) -> Reshard | None:
    items = built.flow.items
    source, target = built.ways[link.source][choice[link.source]], built.ways[link.target][choice[link.target]]
    made = source.outputs[link.output]
    read = (target.outputs if items[link.target].kind == "source" else target.inputs)[link.input]
    seconds = link.count * built.link_s(link, made, read)
    if not seconds:
        return None
    legs = legs_of(items[link.source].node.outputs[link.output], link.looks, made, read, built.mesh)
    return Reshard(
        source=items[link.source].name,
        target=items[link.target].name,
        made=made,
        read=read,
        looks=tuple(look.node.op for look in link.looks),
        steps=tuple(step for leg in legs for step in leg.route.steps),
        seconds=seconds,
    )
