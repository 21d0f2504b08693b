"""Traffic that runs behind passes of layers: what of it shows, by what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from steptime.cost.data_parallel import partly_hidden_s
from steptime.estimate.traffic import Sums
from steptime.num import Num, where


class Hiding(NamedTuple):
    """A formula of what shows of traffic that runs behind passes of layers, and what it is called with."""

    formula: Callable[..., Num]
    arguments: dict[str, Num]
    shown: dict[str, Num]
    """What it is called with where nothing hides."""

    @property
    def least_and_whole_s(self) -> tuple[Num, Num]:
        """What shows where all hides that can, and where nothing does."""
        return self.formula(**self.arguments), self.formula(**self.shown)


class LayerwiseTraffic(NamedTuple):
    """Traffic by layers, behind the computation of other layers."""

    hiding: Hiding
    """How it hides; of a block with and without ZeRO-3 the latter."""
    least_s: Num
    """What shows of it when all hides that can; below all of it, once."""
    whole_s: Num
    exposed_share: Num
    """Share of what could hide that does not."""
    times: Num
    """Times per step."""

    @property
    def exposed_s(self) -> Num:
        """Part of a step that it takes."""
        return partly_hidden_s(self.least_s, self.whole_s, self.exposed_share) * self.times

    @property
    def busy_s(self) -> Num:
        """Time of a step that it takes on the links."""
        return self.whole_s * self.times


class DataParallel(NamedTuple):
    """Traffic over the data-parallel group, embedding and head included."""

    backward: LayerwiseTraffic
    """Traffic beside the backward pass: gradients, and weights that are gathered again; below forward."""
    forward: LayerwiseTraffic
    again_share: Num
    """Part of the former that gathers weights."""
    gradient_s: Num
    """Reduction of gradients."""
    gradient_busy_s: Num
    backward_gather_s: Num
    """Weights gathered again for the backward pass (ZeRO-3)."""
    backward_gather_busy_s: Num
    weight_gather_s: Num
    weight_gather_busy_s: Num

    @property
    def exposed_s(self) -> Num:
        """All that it adds to a step."""
        return self.gradient_s + self.backward_gather_s + self.weight_gather_s

    @property
    def busy_s(self) -> Num:
        """Time on the links."""
        return self.gradient_busy_s + self.backward_gather_busy_s + self.weight_gather_busy_s


def layerwise(once: Hiding, always: Hiding, sharded: Num, exposed_share: Num, times: Num) -> LayerwiseTraffic:
    """Traffic ``once`` per step, where ``sharded`` is 1 ``always`` (ZeRO-3)."""
    hiding = always if np.all(sharded) else once
    least_s, whole_s = hiding.least_and_whole_s
    if hiding is once and np.any(sharded):
        sharded_least_s, sharded_whole_s = always.least_and_whole_s
        least_s, whole_s = where(sharded > 0, sharded_least_s, least_s), where(sharded > 0, sharded_whole_s, whole_s)
    return LayerwiseTraffic(hiding, least_s, whole_s, exposed_share, times)


def shared_out(backward: LayerwiseTraffic, forward: LayerwiseTraffic, again_s: Num) -> DataParallel:
    """Time beside the backward pass by what is sent; ``again_s``: weights that are gathered again, once."""
    exposed_s, busy_s, whole_s = backward.exposed_s, backward.busy_s, backward.whole_s
    again = again_s / where(whole_s > 0, whole_s, 1.0)
    return DataParallel(
        backward=backward, forward=forward, again_share=again,
        gradient_s=exposed_s * (1.0 - again), gradient_busy_s=busy_s * (1.0 - again),
        backward_gather_s=exposed_s * again, backward_gather_busy_s=busy_s * again,
        weight_gather_s=forward.exposed_s, weight_gather_busy_s=forward.busy_s,
    )  # fmt: skip


def behind(formula: Callable[..., Num], arguments: dict[str, Num], behind_s: Num) -> Hiding:
    """Traffic that hides behind passes of layers which take ``behind_s`` each."""
    return Hiding(formula, arguments | {"behind_s": behind_s}, arguments | {"behind_s": 0.0})


def ends(sums: Sums) -> dict[str, Num]:
    """Arguments of the ends of the model."""
    return {"shown_end_s": sums.shown_end_s, "hidden_end_s": sums.hidden_end_s}
