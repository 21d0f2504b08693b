r"""The fastest legal algorithm and protocol of a collective on a fabric, and its time.

A communication library has several algorithms for one collective, and runs each under several protocols, which trade
latency for bandwidth. The time is the minimum over all of them. Symbols as in :mod:`steptime.cost.collective`; an empty
tensor or a group of one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from typing import Any, Final

import numpy as np

from steptime.cost.collective import reduction_s
from steptime.cost.collective_schedules import (
    Path,
    binomial_path,
    binomial_scatter_path,
    bruck_all_to_all_path,
    bruck_path,
    chain_path,
    direct_path,
    double_tree_path,
    doubling_path,
    followed_by,
    hierarchical_all_to_all_path,
    hierarchical_path,
    in_network_all_reduce_path,
    ring_path,
    short_chains,
)
from steptime.num import Num, maximum, minimum, soft_maximum, where

#: The protocols of NCCL: 8-byte words with a flag each, 128-byte lines with a flag each, and bulk copies with fences.
PROTOCOLS: Final = ("ll", "ll128", "simple")
#: Data among the bytes that each sends: 4 of 8, 120 of 128, all.
PAYLOAD: Final = (1 / 2, 120 / 128, 1.0)
Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Coefficients of a communication library on one machine; triples are by protocol, as in `PROTOCOLS`."""

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
    """Bandwidth of one rank in a ring inside a domain."""
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
    """Overlap of the latency of hops in a long pipelined transfer (protocol Simple): 1 none; 2 the hypotenuse of
    latency and transfer; infinity all."""
    byte_reduction: float = 1.0
    """Time of reducing 8-bit numbers over time of reducing 16- and 32-bit ones."""
    direct_start_s: Three = (0.0, 0.0, 0.0)
    """Time of a message, or of an exchange of all pairs, on top of `start_s`."""
    direct_hop_s: Three = (0.0, 0.0, 0.0)
    """One partner in an exchange of all pairs."""
    direct_share: Three = (1.0, 1.0, 1.0)
    """Bandwidth of a message, or an exchange of all pairs, over that of a ring."""
    direct_own_steps: float = 0.0
    """`own_steps` of an exchange of all pairs."""
    direct_pair_Bps: Three = (0.0, 0.0, 0.0)
    """Largest bandwidth of one pair of ranks, because short messages use few channels; 0: all channels."""
    wrap_start_s: float = 0.0
    """Host calls and copies that a framework adds to a gather, a scatter or an exchange, but not to an all-reduce."""
    wrap_hop_s: float = 0.0
    """The same for every rank of the group (one list entry each)."""
    wrap_Bps: float = 0.0
    """Rate at which such copies pass over the tensor; 0: there are none."""
    near_message_s: float = 0.0
    """Additional time of a message, or of an exchange of all pairs, inside a domain."""
    far_message_s: float = 0.0
    """The same of one between domains."""
    switch_start_s: float = 0.0
    """Launch of an all-reduce in the switch."""
    switch_Bps: float = 0.0
    """Bandwidth of one rank to a switch that reduces; 0: the switches do not reduce."""
    outer_start_s: Three = (0.0, 0.0, 0.0)
    """Time of a group that spans several domains on top of `start_s`."""
    outer_hop_s: Three = (0.0, 0.0, 0.0)
    outer_Bps: Three = (0.0, 0.0, 0.0)
    """Bandwidth of one NIC in one direction; 0: no way out of the domain."""
    outer_overlap: float = 0.0
    """`overlap` of a group that spans several domains; 0: as inside one."""
    single_share: float = 1.0
    """Bandwidth of a NIC that sends and receives for one rank alone, over that of one that does either."""
    trees: bool = True
    """True if the library builds trees between the domains (between nodes; not between pairs of one node)."""
    tree_hop_s: Three = (0.0, 0.0, 0.0)
    """One level of a tree between domains, one way."""
    tree_share: float = 1.0
    """Bandwidth of trees over that of rings."""
    short_chains: bool = False
    """True if a tree's chain through a domain has the best length
    (:func:`steptime.cost.collective_schedules.short_chains`); False: it goes through all ranks of the domain."""

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


def alpha_beta_gamma_s(
    path: Path, added: Num, inner_hop_s: Num, outer_hop_s: Num, inner_Bps: Num, outer_Bps: Num, memory_Bps: Num
) -> tuple[Num, Num, Num]:
    r"""Latency, transfer and arithmetic of one path: a collective takes their sum in the textbook's model.

    $$t = \alpha\,h + V / \beta + \gamma\,V_r$$

    where $\alpha\,h + V / \beta$ is :func:`transfer_s` of `path` without a start (its hops alone, then its bytes alone)
    and $\gamma\,V_r$ is :func:`steptime.cost.collective.reduction_s` of $V_r$ = `added` bytes at `memory_Bps`.

    Source: Chan et al., Collective communication: theory, practice, and experience, 2007, section 3.

    >>> alpha_beta_gamma_s(ring_path(8e9, 8, 8, passes=2), 7e9, 1e-6, 1.0, 100e9, 1.0, 3e12)
    (1.4e-05, 0.14, 0.007)
    """
    links = inner_hop_s, outer_hop_s, inner_Bps, outer_Bps
    latency_s = transfer_s(path._replace(inner_bytes=0.0, outer_bytes=0.0), 0.0, *links)
    return latency_s, transfer_s(path._replace(inner_hops=0, outer_hops=0), 0.0, *links), reduction_s(added, memory_Bps)


Maker = Callable[[Num, Num, Num, float], Path]

_GATHER: Final[dict[str, Maker]] = {
    "ring": lambda s, n, t, k: ring_path(s, n, t, k),
    "doubling": lambda s, n, t, k: doubling_path(s, n, t),
    "bruck": lambda s, n, t, k: bruck_path(s, n, t),
    "direct": lambda s, n, t, k: direct_path(s, n, t, k),
    "hierarchical": lambda s, n, t, k: hierarchical_path(s, n, t),
}
#: Minimum spanning trees of what has no root: to a root and from it.
_TO_ROOT: Final[Mapping[str, Maker]] = {
    "all_gather": lambda s, n, t, k: followed_by(binomial_scatter_path(s, n, t), binomial_path(s, n, t)),
    "reduce_scatter": lambda s, n, t, k: followed_by(binomial_path(s, n, t), binomial_scatter_path(s, n, t)),
    "all_reduce": lambda s, n, t, k: followed_by(binomial_path(s, n, t), binomial_path(s, n, t)),
}
_ROOTED: Final[dict[str, Maker]] = {
    "chain": lambda s, n, t, k: chain_path(s, n, t),
    "binomial": lambda s, n, t, k: binomial_path(s, n, t),
    "ring": lambda s, n, t, k: ring_path(s, n, t, k, 2),
}
_PARTS: Final[dict[str, Maker]] = {
    "binomial": lambda s, n, t, k: binomial_scatter_path(s, n, t),
    "direct": lambda s, n, t, k: direct_path(s, n, t, k),
    "ring": lambda s, n, t, k: ring_path(s, n, t, k),
}
#: Every algorithm of every collective.
ALGORITHMS: Final[Mapping[str, Mapping[str, Maker]]] = {
    "p2p": {"direct": lambda s, n, t, k: Path(where(t > 1, 1.0, 0.0), where(t > 1, 0.0, 1.0), *_one_message(s, t))},
    "broadcast": _ROOTED,
    "reduce": _ROOTED,
    "scatter": _PARTS,
    "gather": _PARTS,
    "all_gather": {**_GATHER, "binomial": _TO_ROOT["all_gather"]},
    "reduce_scatter": {
        **{name: maker for name, maker in _GATHER.items() if name != "bruck"},
        "binomial": _TO_ROOT["reduce_scatter"],
    },
    "all_reduce": {
        "binomial": _TO_ROOT["all_reduce"],
        "ring": lambda s, n, t, k: ring_path(s, n, t, k, 2),
        "tree": lambda s, n, t, k: double_tree_path(s, n, t),
        "switch": lambda s, n, t, k: in_network_all_reduce_path(s, n, t),
        "doubling": lambda s, n, t, k: doubling_path(s, n, t, 2),
        "hierarchical": lambda s, n, t, k: hierarchical_path(s, n, t, 2),
    },
    "all_to_all": {
        "direct": lambda s, n, t, k: direct_path(s, n, t, k),
        "bruck": lambda s, n, t, k: bruck_all_to_all_path(s, n, t),
        "hierarchical": lambda s, n, t, k: hierarchical_all_to_all_path(s, n, t),
    },
}
#: What NCCL and its relatives implement; the minimum is over these unless others are asked for.
LIBRARY: Final[Mapping[str, tuple[str, ...]]] = {
    "p2p": ("direct",),
    "broadcast": ("chain",),
    "reduce": ("chain",),
    "scatter": ("direct",),
    "gather": ("direct",),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "all_reduce": ("ring", "tree", "switch"),
    "all_to_all": ("direct",),
}
SIMPLE: Final = PROTOCOLS.index("simple")
"""The protocol for large messages."""
NO_LINK_Bps: Final = 1e-9
"""Stands for the bandwidth between domains of a fabric that has none: what crosses takes next to forever."""
#: An all-reduce done as a reduce-scatter and an all-gather.
TWO_PHASES: Final = "reduce_scatter+all_gather"
#: Kinds whose results a framework copies in or out of a list of tensors.
WRAPPED: Final = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
LEAST_HOP_S: Final = 1e-12
"""No hop is taken for shorter where a ratio of two is formed."""
_REDUCES: Final = {"reduce": 1.0, "reduce_scatter": 1.0, "all_reduce": 0.5}


def collective_s(
    kind: str,
    size_bytes: Num,
    ranks: Num,
    inside: Num,
    fabric: Fabric,
    *,
    groups: Num = 1,
    oversubscription: Num = 1.0,
    longer_hop_s: Num = 0.0,
    nics: Num | None = None,
    element_bytes: Num = 2,
    algorithms: Sequence[str] | None = None,
) -> tuple[Num, Any, Any]:
    r"""Time of a collective, the algorithm and the protocol that reach it.

    $$t = \min_{a,\,p}\; t_{a,p}(S, n, t)$$

    over the algorithms `algorithms` and the three protocols, with $t_{a,p}$ = `transfer_s` of the path of $a$.

    Args:
        kind: a key of `ALGORITHMS`.
        size_bytes: $S$; for ``p2p`` the message.
        ranks: $n$.
        inside: $t$, ranks in each domain; for ``p2p`` 2 within one domain, 1 between two.
        fabric: the machine.
        groups: such groups in each domain that communicate at once and share its NICs.
        oversubscription: bandwidth into the network over bandwidth across it.
        longer_hop_s: what a hop between domains takes longer on the mean than on the links that were fitted.
        nics: NICs that a domain has (rails); default those of the fabric. A group uses at most one per rank.
        element_bytes: size of one number; switches do not add up 8-bit ones.
        algorithms: those of `ALGORITHMS` to choose from; default what NCCL has (`LIBRARY`), and of an all-reduce
            its two phases one after the other.

    Returns:
        Seconds, name of the algorithm, name of the protocol; arrays of them if any argument is an array.

    Source: the choice of NCCL by its own cost model (tuning.cc) is idealised as the true minimum.
    """
    names, times = candidate_s(
        kind,
        size_bytes,
        ranks,
        inside,
        fabric,
        groups=groups,
        oversubscription=oversubscription,
        longer_hop_s=longer_hop_s,
        nics=nics,
        element_bytes=element_bytes,
        algorithms=algorithms,
    )
    return _least(names, times, size_bytes, ranks)


def least_s(
    kind: str,
    size_bytes: Num,
    ranks: Num,
    inside: Num,
    fabric: Fabric,
    *,
    groups: Num = 1,
    oversubscription: Num = 1.0,
    longer_hop_s: Num = 0.0,
    nics: Num | None = None,
    element_bytes: Num = 2,
) -> Num:
    """The time of `collective_s` alone, which costs less for many candidates; same arguments.

    >>> line = Fabric(domain=8, start_s=(1e-6,) * 3, hop_s=(1e-6,) * 3, Bps=(1e9, 2e9, 4e9))
    >>> least_s("all_gather", 8e9, 8, 8, line)   # 7/8 of 2 s, and 8 us
    1.750008
    """
    _, times = candidate_s(
        kind,
        size_bytes,
        ranks,
        inside,
        fabric,
        groups=groups,
        oversubscription=oversubscription,
        longer_hop_s=longer_hop_s,
        nics=nics,
        element_bytes=element_bytes,
    )
    return where((size_bytes > 0) & (ranks > 1), reduce(minimum, times), 0.0)


def candidate_s(
    kind: str,
    size_bytes: Num,
    ranks: Num,
    inside: Num,
    fabric: Fabric,
    *,
    groups: Num = 1,
    oversubscription: Num = 1.0,
    longer_hop_s: Num = 0.0,
    nics: Num | None = None,
    element_bytes: Num = 2,
    algorithms: Sequence[str] | None = None,
) -> tuple[list[tuple[str, str]], list[Num]]:
    """Every algorithm and protocol that `collective_s` chooses from, and the time of each; same arguments."""
    made = ALGORITHMS[kind]
    names: list[tuple[str, str]] = []
    times: list[Num] = []
    lanes = _lanes(inside, fabric.nics if nics is None else nics, groups, oversubscription)
    for name in LIBRARY[kind] if algorithms is None else algorithms:
        if (name == "switch" and not fabric.switch_Bps) or (name == "tree" and not fabric.trees):
            continue
        own = fabric.direct_own_steps if name == "direct" else fabric.own_steps
        path = _reduced(made[name](size_bytes, ranks, inside, own), kind, element_bytes, fabric)
        message = size_bytes / ranks if name == "direct" and kind != "p2p" else 0.0
        if name == "switch":
            names.append((name, "simple"))
            times.append(_switch(path, ranks, inside, element_bytes, lanes, longer_hop_s, fabric))
            continue
        for p, protocol in enumerate(PROTOCOLS):
            names.append((name, protocol))
            times.append(_time(_paired(path, message, p, fabric), name, p, inside, ranks, lanes, longer_hop_s, fabric))
    if kind == "all_reduce" and algorithms is None:
        names.append((TWO_PHASES, "simple"))
        shared = (groups, oversubscription, longer_hop_s, nics, element_bytes)
        times.append(_two_phases(size_bytes, ranks, inside, fabric, *shared))
    return names, _wrapped(kind, times, size_bytes, ranks, fabric)


def _wrapped(kind: str, times: list[Num], size_bytes: Num, ranks: Num, fabric: Fabric) -> list[Num]:
    """Times with the copies of the framework around them."""
    if not fabric.wrap_Bps or kind not in WRAPPED:
        return times
    extra = fabric.wrap_start_s + fabric.wrap_hop_s * ranks + size_bytes / fabric.wrap_Bps
    return [time + extra for time in times]


def _paired(path: Path, message_bytes: Num, p: int, fabric: Fabric) -> Path:
    """Bytes of an exchange that one pair, on its few channels, moves as slowly as that many over all channels."""
    pair_Bps = fabric.direct_pair_Bps[p]
    if not pair_Bps:
        return path
    as_slow = message_bytes * (fabric.Bps[p] * fabric.direct_share[p] / pair_Bps)
    return path._replace(inner_bytes=where(path.inner_bytes > 0, maximum(path.inner_bytes, as_slow), path.inner_bytes))


def _two_phases(
    size_bytes: Num,
    ranks: Num,
    inside: Num,
    fabric: Fabric,
    groups: Num,
    oversubscription: Num,
    longer_hop_s: Num,
    nics: Num | None,
    element_bytes: Num,
) -> Num:
    """Time of a reduce-scatter and an all-gather."""
    first, second = (
        least_s(
            kind,
            size_bytes,
            ranks,
            inside,
            fabric,
            groups=groups,
            oversubscription=oversubscription,
            longer_hop_s=longer_hop_s,
            nics=nics,
            element_bytes=element_bytes,
        )
        for kind in ("reduce_scatter", "all_gather")
    )
    return first + second


def _lanes(inside: Num, nics: Num, groups: Num, oversubscription: Num) -> Num:
    """NICs that one group has in each domain."""
    return minimum(inside, nics / groups) / oversubscription


def _one_message(size_bytes: Num, inside: Num) -> tuple[Num, Num]:
    zero = 0.0 * size_bytes
    return where(inside > 1, size_bytes, zero), where(inside > 1, zero, size_bytes)


def _reduced(path: Path, kind: str, element_bytes: Num, fabric: Fabric) -> Path:
    """Slower steps where 8-bit numbers are reduced."""
    if kind not in _REDUCES or fabric.byte_reduction == 1.0:
        return path
    factor = where(element_bytes < 2, 1 + (fabric.byte_reduction - 1) * _REDUCES[kind], 1.0)
    return path._replace(inner_bytes=path.inner_bytes * factor, outer_bytes=path.outer_bytes * factor)


def _time(path: Path, name: str, p: int, inside: Num, ranks: Num, lanes: Num, longer_hop_s: Num, fabric: Fabric) -> Num:
    """Time under one protocol."""
    spans = where(ranks > inside, 1.0, 0.0)
    direct = name == "direct"
    start = fabric.start_s[p] + spans * fabric.outer_start_s[p]
    if direct:
        start = start + fabric.direct_start_s[p] + where(spans > 0, fabric.far_message_s, fabric.near_message_s)
    hop, outer_hop = _hops(name, p, spans, ranks, fabric)
    outer_hop = outer_hop + longer_hop_s
    share = fabric.direct_share[p] if direct else 1.0
    outer_share = fabric.tree_share if name == "tree" else share
    single = where(inside > 1, 1.0, fabric.single_share)
    if name == "tree" and fabric.short_chains:
        path = short_chains(path, ranks, inside, 2 * outer_hop / maximum(hop, LEAST_HOP_S))
    simple = p == SIMPLE
    return transfer_s(
        path,
        start,
        hop,
        outer_hop,
        fabric.Bps[p] * share * link_share(fabric, inside),
        _outer_Bps(p, outer_share, fabric) * single * lanes,
        fabric.ramp_s if simple else 0.0,
        fabric.ramp_bytes,
        _overlap(spans, fabric) if simple else 1.0,
    )


def _outer_Bps(p: int, share: float, fabric: Fabric) -> float:
    """Bandwidth of one NIC under a protocol, times ``share`` against a ring; at most that of any in long transfers.

    A share that was fitted inside a domain may exceed what the links between domains have.
    """
    most_Bps = max(fabric.outer_Bps) * max(fabric.direct_share[SIMPLE], 1.0)
    return min(fabric.outer_Bps[p] * share, most_Bps) or NO_LINK_Bps


def _hops(name: str, p: int, spans: Num, ranks: Num, fabric: Fabric) -> tuple[Num, Num]:
    """A hop inside a domain and one between domains under one protocol."""
    known = fabric.known_ranks
    if name == "direct":
        hop: Num = fabric.direct_hop_s[p]
        hop = mean_hop_s(hop, fabric.long_direct_hop_s, known, ranks) if known else hop
        return hop, hop
    hop, outer_hop = fabric.hop_s[p], (fabric.tree_hop_s if name == "tree" else fabric.outer_hop_s)[p]
    if known and p == SIMPLE:
        inside_s = hop if name == "tree" else mean_hop_s(hop, fabric.long_hop_s, known, ranks)
        hop = where(spans > 0, fabric.long_hop_s, inside_s)
    return hop, outer_hop


def _overlap(spans: Num, fabric: Fabric) -> Num:
    """Overlap of latency in a long transfer, for a group inside one domain or over several."""
    return where(spans > 0, fabric.outer_overlap, fabric.overlap) if fabric.outer_overlap else fabric.overlap


def _switch(
    path: Path, ranks: Num, inside: Num, element_bytes: Num, lanes: Num, longer_hop_s: Num, fabric: Fabric
) -> Num:
    """Time of an all-reduce in the switches of the domains; infinite where they cannot do it."""
    start = fabric.switch_start_s + where(ranks > inside, fabric.outer_start_s[SIMPLE], 0.0)
    outer_Bps = (fabric.outer_Bps[SIMPLE] or NO_LINK_Bps) * lanes
    time = transfer_s(path, start, 0.0, fabric.tree_hop_s[SIMPLE] + longer_hop_s, fabric.switch_Bps, outer_Bps)
    legal = (inside > 2) & (element_bytes >= 2)
    return where(legal, time, np.inf)


def _least(names: list[tuple[str, str]], times: list[Num], size_bytes: Num, ranks: Num) -> tuple[Num, Any, Any]:
    """The smallest of the times and what it is of."""
    nothing = (size_bytes <= 0) | (ranks <= 1) if _any_array(size_bytes, ranks) else size_bytes <= 0 or ranks <= 1
    if not any(isinstance(t, np.ndarray) for t in times):
        best = min(range(len(times)), key=times.__getitem__)
        return (0.0 if nothing else float(times[best])), *names[best]
    stacked = np.stack(np.broadcast_arrays(*times))
    chosen = np.argmin(stacked, axis=0)
    labels = np.array(names, dtype=object)
    seconds = np.where(nothing, 0.0, np.min(stacked, axis=0))
    return seconds, labels[chosen, 0], labels[chosen, 1]


def _any_array(*values: Num) -> bool:
    return any(isinstance(v, np.ndarray) for v in values)
