r"""Gradients through parameter servers: what workers and servers send, and how long a push and a pull take.

$S$ = `size_bytes` is one copy of what is exchanged, spread over $s$ = `servers`; $w$ = `workers` each have a NIC of
$\beta_w$ = `worker_Bps`, each server one of $\beta_s$ = `server_Bps` (bytes/s, one direction). $\alpha$ = `latency_s`;
$o$ = `own_share` is the share that stays on the machine.
"""

from __future__ import annotations

from steptime.num import Num, maximum, where


def push_s(
    size_bytes: Num, workers: Num, servers: Num, worker_Bps: Num, server_Bps: Num, latency_s: Num, own_share: Num = 0.0
) -> Num:
    r"""Every worker sends its gradients to the servers.

    $$t = \alpha + \max\left(\frac{S (1-o)}{\beta_w},\ \frac{(w - o s) S}{s\,\beta_s}\right)$$

    $o$ = `own_share` is the share that stays on the machine: 0 for servers of their own; $1/w$ for one server
    in every worker ($s = w$), where both directions are then as in a ring. $\alpha$ = `latency_s`.

    Source: Li et al. 2014 (parameter server); the bound of BytePS, Jiang et al. 2020, section 2.

    >>> push_s(1e9, 4, 1, 10e9, 10e9, 0.0)   # four workers, one server: its port takes 4 GB
    0.4
    >>> push_s(1e9, 4, 4, 10e9, 10e9, 0.0, own_share=0.25)
    0.075
    """
    worker_s = size_bytes * (1 - own_share) / worker_Bps
    server_s = (workers - own_share * servers) * size_bytes / (servers * server_Bps)
    return where(size_bytes > 0, latency_s + maximum(worker_s, server_s), 0.0 * worker_s)


def pull_s(
    size_bytes: Num, workers: Num, servers: Num, worker_Bps: Num, server_Bps: Num, latency_s: Num, own_share: Num = 0.0
) -> Num:
    r"""Every worker fetches the parameters: the same bytes in the other direction.

    $$t = t_\mathrm{push}$$

    Source: Li et al. 2014.

    >>> pull_s(1e9, 4, 2, 10e9, 10e9, 0.0)
    0.2
    """
    return push_s(size_bytes, workers, servers, worker_Bps, server_Bps, latency_s, own_share)


def push_pull_s(
    size_bytes: Num, workers: Num, servers: Num, worker_Bps: Num, server_Bps: Num, latency_s: Num, own_share: Num = 0.0
) -> Num:
    r"""A push, then a pull; the same exchange as one all-reduce.

    $$t = t_\mathrm{push} + t_\mathrm{pull}$$

    Source: Li et al. 2014; Jiang et al. 2020.

    >>> push_pull_s(1e9, 4, 4, 10e9, 10e9, 0.0, own_share=0.25)   # a ring all-reduce takes 2 * 3/4 * 0.1 s as well
    0.15
    """
    args = (size_bytes, workers, servers, worker_Bps, server_Bps, latency_s, own_share)
    return push_s(*args) + pull_s(*args)
