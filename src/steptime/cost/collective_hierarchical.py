r"""Paths of collectives that work level by level, or in the switches.

Symbols: $S$ = `size_bytes` of the whole tensor; $n$ = `ranks`, of which $t$ = `inside` are in each of $N = n/t$
domains, as in `collective_schedules`.
"""

from __future__ import annotations

from steptime.cost.collective_schedules import Path, log2_ceil
from steptime.num import Num, where


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
    goes out once, $S$ come in, and its share passes once more. The sums of the domains go along a tree meanwhile.

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
