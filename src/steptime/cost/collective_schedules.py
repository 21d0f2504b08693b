r"""Paths of collective algorithms: hops in sequence, and bytes through the ports of the busiest rank and domain.

A group of $n$ = `ranks` has $t$ = `inside` members in each of $N = n/t$ domains (nodes, NVLink domains, pairs behind
one PCIe switch). $S$ = `size_bytes` is always the whole tensor: gathered, to be scattered, to be reduced or to be
broadcast; for an all-to-all what one rank sends in all, its own part included. Every function returns a
:class:`Path`; :mod:`steptime.cost.collective_algorithms` turns it into a time.

$\kappa$ = `own_steps` is the work on the rank's own part (the copy from the input to the output buffer), in units of
one step of the ring; 0 in the textbook formulas.
"""

from __future__ import annotations

from typing import NamedTuple

from steptime.num import Num, ceil, floor, log2, maximum, minimum, where


class Path(NamedTuple):
    """The critical path of one algorithm."""

    inner_hops: Num
    """Messages in sequence inside a domain."""
    outer_hops: Num
    """Messages in sequence between domains."""
    inner_bytes: Num
    """Bytes that a rank sends inside its domain."""
    outer_bytes: Num
    """Bytes that leave a domain."""
    serial: bool = False
    """True if the two levels work one after the other (hierarchical) and not at the same time (ring, tree)."""


def log2_ceil(n: Num) -> Num:
    r"""Rounds of a doubling algorithm, $\lceil \log_2 n \rceil$ for $n \ge 1$.

    >>> log2_ceil(1), log2_ceil(8), log2_ceil(9)
    (0, 3, 4)
    """
    return ceil(log2(maximum(n, 1)) - 1e-9)


def log2_floor(n: Num) -> Num:
    r"""Doublings that fit, $\lfloor \log_2 n \rfloor$ for $n \ge 1$.

    >>> log2_floor(1), log2_floor(8), log2_floor(9)
    (0, 3, 3)
    """
    return floor(log2(maximum(n, 1)) + 1e-9)


def ring_path(size_bytes: Num, ranks: Num, inside: Num, own_steps: Num = 0.0, passes: Num = 1) -> Path:
    r"""Ring all-gather or reduce-scatter (`passes` = 1), ring all-reduce (`passes` = 2).

    $$h_0 = p (n - N),\quad h_1 = p (N - 1),\quad V_0 = \frac{S}{n} \big(p (n-1) + \kappa\big),\quad
      V_1 = \frac{S}{n}\, p (n-1)$$

    with $p$ = `passes`: the chain of one chunk crosses every link once per pass, $N - 1$ of them between domains;
    every rank forwards $n - 1$ parts of $S/n$ per pass. Its own part never leaves the domain.

    Source: Thakur et al. 2005, sections 4.1 and 4.5; Patarasuk and Yuan 2009.

    >>> ring_path(8.0, 8, 8)
    Path(inner_hops=7.0, outer_hops=0.0, inner_bytes=7.0, outer_bytes=0.0, serial=False)
    """
    domains = ranks / inside
    moved = size_bytes / ranks * (passes * (ranks - 1))
    own = where(ranks > 1, size_bytes / ranks * own_steps, 0.0 * moved)
    return Path(
        passes * (ranks - domains),
        passes * (domains - 1),
        where(inside > 1, moved + own, 0.0 * moved),
        where(domains > 1, moved, 0.0 * moved),
    )


def chain_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Pipelined chain broadcast or reduction: all of the tensor passes every link once.

    $$h_0 = n - N,\quad h_1 = N - 1,\quad V_0 = V_1 = S$$

    Source: pipelined broadcast, Thakur et al. 2005; the broadcast of NCCL.

    >>> chain_path(8.0, 4, 4).inner_bytes
    8.0
    """
    domains = ranks / inside
    zero = 0.0 * size_bytes
    return Path(
        ranks - domains,
        domains - 1,
        where(inside > 1, size_bytes, zero),
        where(domains > 1, size_bytes, zero),
    )


def double_tree_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Double binary tree all-reduce: chains inside the domains, two complementary trees between them.

    $$h_0 = 2 (t - 1),\quad h_1 = 2 \lceil \log_2 N \rceil,\quad V_0 = 2 S \frac{t-1}{t},\quad
      V_1 = 2 S \frac{N-1}{N}$$

    Every half of the tensor goes up one tree and down again, over $N - 1$ edges; a domain that is an inner node of one
    tree is a leaf of the other, so all domains send about as much.

    Source: Sanders, Speck and Traff 2009; NCCL 2.4 (double binary trees).

    >>> double_tree_path(1.0, 16, 4)[:2]
    (6, 4)
    """
    domains = ranks / inside
    return Path(
        2 * (inside - 1),
        2 * log2_ceil(domains),
        2 * size_bytes * (inside - 1) / inside,
        2 * size_bytes * (domains - 1) / domains,
    )


def short_chains(path: Path, ranks: Num, inside: Num, longest: Num) -> Path:
    r"""The path of a double binary tree whose chains are no longer than pays; more of the way is tree instead.

    $$h_0 = 2 (c - 1),\quad h_1 = 2 \lceil \log_2 (n / c) \rceil,\quad V_0 = 2 S \frac{n - 1}{n}\Big|_{t>1},\quad
      c = 2^{\lfloor \log_2 \max(1, \min(t, c_m)) \rfloor}$$

    where $c_m$ = `longest`: $2 \alpha_1 / \alpha_0$ where a level of the tree takes $\alpha_1$ and a rank of the chain
    $\alpha_0$ (s), since the $c$ ranks that lengthen a chain from $c$ to $2 c$ save one level. A rank sends $V_0$, be
    its neighbours of the chain or of the tree. So no group is slower for lying nearer together.

    Source: definition; NCCL runs one chain through all ranks of a node, which is the same where nodes are small.

    >>> short_chains(double_tree_path(64.0, 64, 64), 64, 64, 10.0)[:3]   # chains of 8, and 8 of them
    (14, 6, 126.0)
    """
    chain = 2 ** log2_floor(minimum(inside, maximum(longest, 1.0)))
    twice = path.inner_bytes * (inside / where(inside > 1, inside - 1, 1))
    return path._replace(
        inner_hops=2 * (chain - 1), outer_hops=2 * log2_ceil(ranks / chain), inner_bytes=twice * (ranks - 1) / ranks
    )


def binomial_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Binomial (minimum spanning) tree broadcast or reduction: the whole tensor in every round, not pipelined.

    $$h_0 = \lceil \log_2 t \rceil,\quad h_1 = \lceil \log_2 N \rceil,\quad V_0 = S h_0,\quad V_1 = S h_1$$

    Source: Thakur et al. 2005, section 4.3; Chan et al. 2007 (minimum spanning tree).

    >>> binomial_path(1.0, 8, 8).inner_bytes
    3.0
    """
    inner, outer = log2_ceil(inside), log2_ceil(ranks / inside)
    return Path(inner, outer, size_bytes * inner, size_bytes * outer, serial=True)


def binomial_scatter_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Binomial tree scatter or gather: half of what is left in every round.

    $$h_0 = \lceil \log_2 t \rceil,\quad h_1 = \lceil \log_2 N \rceil,\quad
      V_1 = S \frac{N-1}{N},\quad V_0 = \frac{S}{N} \cdot \frac{t-1}{t}$$

    Source: Thakur et al. 2005; Chan et al. 2007.

    >>> binomial_scatter_path(8.0, 8, 8).inner_bytes
    7.0
    """
    domains = ranks / inside
    return Path(
        log2_ceil(inside),
        log2_ceil(domains),
        size_bytes / domains * (inside - 1) / inside,
        size_bytes * (domains - 1) / domains,
        serial=True,
    )


def doubling_path(size_bytes: Num, ranks: Num, inside: Num, passes: Num = 1) -> Path:
    r"""Recursive doubling all-gather, recursive halving reduce-scatter, both for an all-reduce (`passes` = 2).

    $$h_0 = p \lceil \log_2 t \rceil,\quad h_1 = p \lceil \log_2 N \rceil,\quad
      V_0 = p\, S \frac{t-1}{n},\quad V_1 = p\, t\, S \frac{N-1}{N}$$

    The rounds between domains move $S (N-1)/N$ per rank (nearest partners first in the gather, last in the scatter),
    $t$ ranks of a domain at a time. For $n$ that is no power of two see `bruck_path`.

    Source: Thakur et al. 2005, sections 4.1, 4.2 and 4.5 (Rabenseifner).

    >>> doubling_path(8.0, 8, 8).inner_hops, doubling_path(8.0, 8, 8).inner_bytes
    (3, 7.0)
    """
    domains = ranks / inside
    return Path(
        passes * log2_ceil(inside),
        passes * log2_ceil(domains),
        passes * size_bytes * (inside - 1) / ranks,
        passes * inside * size_bytes * (domains - 1) / domains,
        serial=True,
    )


def bruck_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Bruck all-gather: $\lceil \log_2 n \rceil$ rounds for any $n$; every rank sends to far partners in all of them.

    $$h_1 = \lceil \log_2 n \rceil\big|_{N>1},\quad h_0 = \lceil \log_2 n \rceil\big|_{N=1},\quad
      V = S \frac{n-1}{n}$$

    and $t$ times as much leaves a domain. Source: Bruck et al. 1997; Thakur et al. 2005, section 4.1.

    >>> bruck_path(9.0, 9, 9).inner_hops
    4
    """
    return _far_rounds(log2_ceil(ranks), size_bytes * (ranks - 1) / ranks, ranks / inside, inside)


def bruck_all_to_all_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""Bruck all-to-all: $\lceil \log_2 n \rceil$ rounds of half the data each.

    $$h_1 = \lceil \log_2 n \rceil\big|_{N>1},\quad h_0 = \lceil \log_2 n \rceil\big|_{N=1},\quad
      V = \frac{S}{2} \lceil \log_2 n \rceil$$

    and $t$ times as much leaves a domain.

    Source: Bruck et al. 1997; Thakur et al. 2005, section 4.4.

    >>> bruck_all_to_all_path(8.0, 8, 8).inner_bytes
    12.0
    """
    rounds = log2_ceil(ranks)
    return _far_rounds(rounds, size_bytes / 2 * rounds, ranks / inside, inside)


def _far_rounds(rounds: Num, moved: Num, domains: Num, inside: Num) -> Path:
    """Rounds in which every rank sends, all within one domain or, of several, all out of it."""
    zero = 0.0 * moved
    return Path(
        where(domains > 1, 0 * rounds, rounds),
        where(domains > 1, rounds, 0 * rounds),
        where(domains > 1, zero, moved),
        where(domains > 1, inside * moved, zero),
    )


def direct_path(size_bytes: Num, ranks: Num, inside: Num, own_steps: Num = 0.0) -> Path:
    r"""All pairs at once: every rank sends its part to each of the others (all-to-all; direct gather and scatter).

    $$h_0 = t - 1,\quad h_1 = n - t,\quad V_0 = \frac{S}{n} (t - 1 + \kappa),\quad V_1 = t\,S \frac{n-t}{n}$$

    The hops are messages that a rank posts, not a chain. Source: Thakur et al. 2005, section 4.4 (pairwise exchange).

    >>> direct_path(8.0, 8, 4)[2:4]
    (3.0, 16.0)
    """
    return Path(
        inside - 1,
        ranks - inside,
        where(ranks > 1, size_bytes / ranks * (inside - 1 + own_steps), 0.0 * size_bytes),
        inside * size_bytes * (ranks - inside) / ranks,
    )


def hierarchical_path(size_bytes: Num, ranks: Num, inside: Num, passes: Num = 1) -> Path:
    r"""All-gather or reduce-scatter by rings on each level (`passes` = 1), all-reduce (`passes` = 2).

    $$h_0 = p (t - 1),\quad h_1 = p (N - 1),\quad V_0 = p\,S \frac{t-1}{t},\quad V_1 = p\,S \frac{N-1}{N}$$

    Inside a domain everything passes once; between domains $t$ rings, one per member, carry $S/t$ each. The levels
    work one after the other.

    Source: hierarchical all-reduce of Goyal et al. 2017 and of BlueConnect, Cho et al. 2019.

    >>> hierarchical_path(8.0, 8, 4)[:4]
    (3, 1.0, 6.0, 4.0)
    """
    domains = ranks / inside
    return Path(
        passes * (inside - 1),
        passes * (domains - 1),
        passes * size_bytes * (inside - 1) / inside,
        passes * size_bytes * (domains - 1) / domains,
        serial=True,
    )


def hierarchical_all_to_all_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""All-to-all in two phases: inside the domain by destination rail, then along the rails.

    $$h_0 = t - 1,\quad h_1 = N - 1,\quad V_0 = S \frac{t-1}{t},\quad V_1 = t\,S \frac{N-1}{N}$$

    The same bytes leave a domain as in the direct exchange, in $t$ times fewer messages.

    Source: the two-dimensional all-to-all of Tutel, Hwang et al. 2023.

    >>> hierarchical_all_to_all_path(8.0, 8, 4).outer_bytes
    16.0
    """
    domains = ranks / inside
    return Path(
        inside - 1,
        domains - 1,
        size_bytes * (inside - 1) / inside,
        inside * size_bytes * (domains - 1) / domains,
        serial=True,
    )


def in_network_all_reduce_path(size_bytes: Num, ranks: Num, inside: Num) -> Path:
    r"""All-reduce in the switches of each domain (NVLink SHARP), a double tree between the domains.

    $$h_0 = 2\big|_{t>1},\quad h_1 = 2 \lceil \log_2 N \rceil,\quad V_0 = S \Big(1 + \frac1t\Big),\quad
      V_1 = 2 S \frac{N-1}{N}$$

    Every rank reads $S/t$ that the switch has added up, and writes it back for the switch to multicast: its own $S$
    goes out once, $S$ come in, and its share passes again. The sums of the domains go along a tree meanwhile.

    Source: Klenk et al. 2020 (in-network reduction in an NVLink switch); the NVLSTree of NCCL 2.18.

    >>> in_network_all_reduce_path(8.0, 8, 8).inner_bytes
    9.0
    """
    domains = ranks / inside
    zero = 0.0 * size_bytes * inside
    return Path(
        where(inside > 1, 2.0, 0.0) + zero,
        2 * log2_ceil(domains) + zero,
        where(inside > 1, size_bytes * (1 + 1 / inside), zero),
        2 * size_bytes * (domains - 1) / domains,
    )


def followed_by(first: Path, second: Path) -> Path:
    r"""Two collectives, one after the other, each level in its turn: hops and bytes add up.

    $$h = h_1 + h_2, \qquad V = V_1 + V_2$$

    where $h_1, V_1$ are the hops and bytes of `first` and $h_2, V_2$ of `second`, on each level. By minimum
    spanning trees an all-gather is a gather and a broadcast, a reduce-scatter a reduction and a scatter, an all-reduce
    a reduction and a broadcast.

    Source: Chan et al. 2007, section 4.2.

    >>> followed_by(binomial_path(8.0, 8, 8), binomial_path(8.0, 8, 8))[:3]
    (6, 0, 48.0)
    """
    return Path(
        first.inner_hops + second.inner_hops,
        first.outer_hops + second.outer_hops,
        first.inner_bytes + second.inner_bytes,
        first.outer_bytes + second.outer_bytes,
        serial=True,
    )


def added_bytes(kind: str, algorithm: str, size_bytes: Num, ranks: Num, inside: Num) -> Num:
    r"""Bytes of partial sums that the busiest rank adds up, one after the other.

    $$V = S \frac{n-1}{n} \ \text{(rings, halvings, levels)}, \qquad
      V = S \big(\lceil \log_2 t \rceil + \lceil \log_2 N \rceil\big) \ \text{(minimum spanning tree)}, \qquad
      V = S \ \text{(chain, double tree)}$$

    where a group of $n$ = `ranks` has $t$ = `inside` in each of $N$ domains; nothing where a switch adds (`algorithm`),
    and where `kind` is no reduction. A tree that is not pipelined adds the whole tensor in every round.

    Source: Chan et al. 2007, tables 1 and 3; the terms with gamma.

    >>> added_bytes("all_reduce", "ring", 8.0, 8, 8), added_bytes("reduce", "binomial", 8.0, 8, 8)
    (7.0, 24.0)
    """
    if kind not in ("reduce", "reduce_scatter", "all_reduce") or algorithm == "switch":
        return 0.0 * size_bytes
    if algorithm == "binomial":
        return size_bytes * (log2_ceil(inside) + log2_ceil(ranks / inside))
    if algorithm in ("chain", "tree"):
        return where(ranks > 1, size_bytes, 0.0 * size_bytes)
    return size_bytes * (ranks - 1) / ranks
