"""Measured graphs as arrays: features and analytic times of their pieces on a device, and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from steptime.captured.cost.table import bare, issue_s
from steptime.captured.cost.timing import Timer, described_work
from steptime.cost.host import issued_s
from steptime.estimate.learned import ISSUERS
from steptime.num import Array, Num
from steptime_lab.learned.measuring import Graph
from steptime_lab.learned.sketch import Piece, Sketch


class Described(NamedTuple):
    """One piece on a device."""

    operator: str
    numbers: tuple[float, ...]
    device_s: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Pieces of many graphs, one row each."""

    operators: tuple[str, ...]
    """Time model of each row."""
    numbers: Array
    """Features, (rows, features)."""
    device_s: Array
    """Analytic time of one call, (rows,)."""
    host_s: Array
    """Time of the host for one call, (rows,)."""
    count: Array
    """Calls, (rows,)."""
    issuer: Array
    """Issuer as an index into :data:`steptime.estimate.learned.ISSUERS`, (rows,)."""
    graph: Array
    """Number of the graph, (rows,)."""
    measured_s: Array
    """Measured time of each graph, (graphs,)."""
    sharpness: float
    """Exponent that combines the times of device and host; 1: their sum."""
    families: tuple[str, ...]
    """Family of each graph, (graphs,)."""
    machines: tuple[str, ...]
    """Device that each graph ran on, (graphs,)."""

    @property
    def analytic_s(self) -> Array:
        """Analytic time of each graph."""
        return self.total_s(1.0, 1.0)

    def total_s(self, device_factors: Num, host_factors: Num) -> Array:
        """Time of each graph with the device and host times of each row multiplied by factors."""
        device, host = (
            np.bincount(self.graph, seconds * self.count * factors, len(self.measured_s))
            for seconds, factors in ((self.device_s, device_factors), (self.host_s, host_factors))
        )
        return np.asarray(issued_s(device, 1.0, host, self.sharpness))

    def only(self, graphs: Array) -> Rows:
        """Rows of the graphs with these numbers, renumbered in the given order."""
        places = np.full(len(self.measured_s), -1)
        places[graphs] = np.arange(len(graphs))
        keep = places[self.graph] >= 0
        return Rows(
            operators=tuple(np.array(self.operators, object)[keep]),
            numbers=self.numbers[keep],
            device_s=self.device_s[keep],
            host_s=self.host_s[keep],
            count=self.count[keep],
            issuer=self.issuer[keep],
            graph=places[self.graph[keep]],
            measured_s=self.measured_s[graphs],
            sharpness=self.sharpness,
            families=tuple(self.families[n] for n in graphs),
            machines=tuple(self.machines[n] for n in graphs),
        )


def piece_on(piece: Piece, timer: Timer) -> Described:
    """A piece of work on a device: its time model, its features and its analytic times."""
    work = piece.work
    cost = timer.time(piece.op, work)
    machine = timer.machine(cost.dtype)
    operator, numbers = described_work(work, cost.seconds, machine)
    return Described(operator, tuple(float(number) for number in numbers), cost.seconds, cost.host_s)


def rows_of(graphs: Sequence[tuple[Sketch, Timer, float, str]]) -> Rows:
    """Rows of graphs, each a sketch, the timer of its device, its measured time (s) and its family."""
    found: list[Described] = []
    count: list[float] = []
    owner, issued = list[int](), list[int]()
    known: dict[tuple[int, str], Described] = {}
    for number, (drawn, timer, _, _) in enumerate(graphs):
        keys = [(id(timer), repr(piece)) for piece in drawn.pieces]
        for (at, issuer), calls in drawn.counts.items():
            one = known.get(keys[at])
            if one is None:
                one = known[keys[at]] = piece_on(drawn.pieces[at], timer)
            launches = float(drawn.pieces[at].work.launches)
            host_s = issue_s(one.host_s, launches, bare(ISSUERS[issuer], timer), timer)
            found.append(one._replace(host_s=float(host_s)))
            count.append(float(calls))
            issued.append(issuer)
            owner.append(number)
    return Rows(
        operators=tuple(one.operator for one in found),
        numbers=np.array([one.numbers for one in found]),
        device_s=np.array([one.device_s for one in found]),
        host_s=np.array([one.host_s for one in found]),
        count=np.array(count),
        issuer=np.array(issued),
        graph=np.array(owner),
        measured_s=np.array([each[2] for each in graphs]),
        sharpness=graphs[0][1].sharpness,
        families=tuple(each[3] for each in graphs),
        machines=tuple(each[1].device.name for each in graphs),
    )


def rows_here(graphs: Sequence[Graph], timer: Timer) -> Rows:
    """Rows of graphs that were measured on this machine."""
    return rows_of([(g.sketch, timer, g.seconds, g.family) for g in graphs])
