r"""Coefficients of a fabric, and the time of one path over it under one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np

from steptime.cost.collective_schedules import Path
from steptime.num import Num, maximum, soft_maximum

#: The protocols of NCCL: 8-byte words with a flag each, 128-byte lines with a flag each, and bulk copies with fences.
PROTOCOLS: Final = ("ll", "ll128", "simple")
#: Data among the bytes that each sends: 4 of 8, 120 of 128, all.
PAYLOAD: Final = (1 / 2, 120 / 128, 1.0)
Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How a communication library drives one machine; triples stand for `PROTOCOLS`."""

    domain: int
    """Devices in one inner domain."""
    nics: float = 1.0
    """NICs (or host bridges) through which one domain reaches the others."""
    start_s: Three
    """Launch and the first exchange of flags, whatever the size of the group."""
    hop_s: Three
    """One more rank in the chain, inside a domain."""
    known_ranks: float = 0.0
    """Ranks of the largest group inside one domain whose hops all take `hop_s` (in a ring under protocol Simple) or
    `direct_hop_s`; 0: those of any group do."""
    long_hop_s: float = 0.0
    """One more rank in a domain, of a longer ring than that, or of a group over several domains (protocol Simple)."""
    long_direct_hop_s: float = 0.0
    """One partner more in an exchange of more pairs than that."""
    Bps: Three
    """What one rank sends in a ring inside a domain."""
    links_by_group: tuple[float, ...] = ()
    """Share of a rank's links that a group of 2, 3, ... ranks of a domain can use: with links wired pair by pair and
    no switch, a small group cannot use those to the others. Empty: a switch, all of them always."""
    own_steps: float = 0.0
    """Work on a rank's own part, in steps of the ring."""
    ramp_s: float = 0.0
    """Time that long transfers lose until all channels and buffers are in use (protocol Simple)."""
    ramp_bytes: float = 1.0
    """Bytes per rank at which half of `ramp_s` is lost."""
    overlap: float = 1.0
    """How much of the latency of the hops a long pipelined transfer hides (protocol Simple): 1 nothing; 2 as the
    hypotenuse of latency and transfer; infinity all."""
    byte_reduction: float = 1.0
    """Time of reducing 8-bit numbers over time of reducing 16- and 32-bit ones."""
    direct_start_s: Three = (0.0, 0.0, 0.0)
    """What a message, or an exchange of all pairs, costs on top of `start_s`."""
    direct_hop_s: Three = (0.0, 0.0, 0.0)
    """One partner in an exchange of all pairs."""
    direct_share: Three = (1.0, 1.0, 1.0)
    """Bandwidth of a message, or an exchange of all pairs, over that of a ring."""
    direct_own_steps: float = 0.0
    """`own_steps` of an exchange of all pairs."""
    direct_pair_Bps: Three = (0.0, 0.0, 0.0)
    """What one pair of ranks exchanges at most, because short messages use few channels; 0: all channels."""
    wrap_start_s: float = 0.0
    """Host calls and copies that a framework adds to a gather, a scatter or an exchange, but not to an all-reduce."""
    wrap_hop_s: float = 0.0
    """The same for every rank of the group (one list entry each)."""
    wrap_Bps: float = 0.0
    """Rate at which such copies pass over the tensor; 0: there are none."""
    near_message_s: float = 0.0
    """What a message, or an exchange of all pairs, takes longer inside a domain than the rest says."""
    far_message_s: float = 0.0
    """The same of one between domains."""
    switch_start_s: float = 0.0
    """Launch of an all-reduce in the switch."""
    switch_Bps: float = 0.0
    """What one rank sends to a switch that reduces; 0: no such switch."""
    outer_start_s: Three = (0.0, 0.0, 0.0)
    """What a group that spans several domains costs on top of `start_s`."""
    outer_hop_s: Three = (0.0, 0.0, 0.0)
    outer_Bps: Three = (0.0, 0.0, 0.0)
    """What one NIC sends, one direction; 0: no way out of the domain."""
    outer_overlap: float = 0.0
    """`overlap` of a group that spans several domains; 0: as inside one."""
    single_share: float = 1.0
    """Bandwidth of a NIC that sends and receives for one rank alone, over that of one that does either."""
    trees: bool = True
    """Whether the library builds trees between the domains (between nodes; not between pairs of one node)."""
    tree_hop_s: Three = (0.0, 0.0, 0.0)
    """One level of a tree between domains, one way."""
    tree_share: float = 1.0
    """Bandwidth of trees over that of rings."""
    short_chains: bool = False
    """Whether a tree's chain through a domain is no longer than pays
    (:func:`steptime.cost.collective_schedules.short_chains`), or goes through all of its ranks."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, field.name) for field in fields(self)]))

    def __hash__(self) -> int:
        """Made once: a fabric is part of the key of every time that is kept."""
        return self._hash


def fabric_of(coefficients: Mapping[str, Any]) -> Fabric:
    """The fabric of a mapping of its fields (lists become triples).

    >>> fabric_of({"domain": 8, "start_s": [1e-6] * 3, "hop_s": [1e-6] * 3, "Bps": [1e9] * 3}).hop_s
    (1e-06, 1e-06, 1e-06)
    """
    known = {f.name for f in fields(Fabric)}
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in coefficients.items() if k in known}
    return Fabric(**given)


def link_share(fabric: Fabric, inside: Num) -> Num:
    """Share of its links that a rank can use in a group with `inside` members in the domain.

    >>> mesh = {"domain": 4, "start_s": [0] * 3, "hop_s": [0] * 3, "Bps": [1] * 3, "links_by_group": [1 / 3, 2 / 3, 1]}
    >>> link_share(fabric_of(mesh), 3)
    0.6666666666666666
    """
    table = (1.0, 1.0, *fabric.links_by_group)
    if len(table) == 2:
        return 1.0
    last = len(table) - 1
    if isinstance(inside, np.ndarray):
        return np.asarray(table)[np.clip(np.rint(inside), 0, last).astype(np.int64)]
    return table[int(min(max(round(inside), 0), last))]


def mean_hop_s(hop_s: Num, long_hop_s: Num, known_ranks: Num, ranks: Num) -> Num:
    r"""Mean time of a hop in a group of $n$ = `ranks`, of which only the first $k - 1$ take as long as in small groups.

    $$\bar\alpha = \frac{\alpha \min(k - 1, n - 1) + \alpha' \max(n - k, 0)}{n - 1}$$

    where $\alpha$ = `hop_s`, $\alpha'$ = `long_hop_s`, $k$ = `known_ranks`. All hops together never take less in a
    larger group.

    Source: choice of this program; rings of 4 to 72 in one NVLink domain (GB300) follow it, and no straight line.

    >>> mean_hop_s(12.0, 3.0, 8, 8), mean_hop_s(12.0, 3.0, 8, 64)   # 7 hops of 12, and 56 of 3
    (12.0, 4.0)
    """
    beyond = maximum(ranks - known_ranks, 0)
    return hop_s + (long_hop_s - hop_s) * beyond / maximum(ranks - 1, 1)


def transfer_s(
    path: Path,
    start_s: Num,
    inner_hop_s: Num,
    outer_hop_s: Num,
    inner_Bps: Num,
    outer_Bps: Num,
    ramp_s: float = 0.0,
    ramp_bytes: float = 1.0,
    overlap: Num = 1.0,
) -> Num:
    r"""Time of one path under one protocol.

    $$t = \alpha + r \frac{V}{V + V_r} + \big(L^q + W^q\big)^{1/q},\quad L = \alpha_0 h_0 + \alpha_1 h_1,\quad
      W = \max\left(\frac{V_0}{\beta_0}, \frac{V_1}{\beta_1}\right)$$

    where $h$ and $V$ are the hops and bytes of `path` inside (0) and between (1) domains, $\alpha_0, \alpha_1$ =
    `inner_hop_s`, `outer_hop_s`, $\beta_0, \beta_1$ = `inner_Bps` and `outer_Bps` (of all NICs of a domain together),
    $\alpha$ = `start_s`, $r$ = `ramp_s`, $V_r$ = `ramp_bytes`, $V = \max(V_0, V_1)$, $q$ = `overlap` ($q = 1$: latency
    and transfer add up). Levels that work one after the other add: $W = V_0/\beta_0 + V_1/\beta_1$.

    Source: Hockney 1994 for the line; the pipelining of ring steps by the hypotenuse is ours.

    >>> transfer_s(Path(7, 0, 7e9, 0.0), 1e-6, 1e-6, 0.0, 100e9, 1.0)   # 8 us and 70 ms
    0.070008
    """
    inner_s, outer_s = path.inner_bytes / inner_Bps, path.outer_bytes / outer_Bps
    work_s = inner_s + outer_s if path.serial else maximum(inner_s, outer_s)
    chain_s = inner_hop_s * path.inner_hops + outer_hop_s * path.outer_hops
    added = not isinstance(overlap, np.ndarray) and overlap == 1.0
    both_s = chain_s + work_s if added else soft_maximum(chain_s, work_s, overlap)
    if ramp_s == 0.0:
        return start_s + both_s
    moved = maximum(path.inner_bytes, path.outer_bytes)
    return start_s + ramp_s * (moved / (moved + ramp_bytes)) + both_s
