"""Work that is done on the host."""

from __future__ import annotations

from steptime.num import Num

HOST_ADAM_PER_S = 3.9e9
"""Parameters per second that vectorised Adam updates on a host of two sockets (ZeRO-Offload, arXiv 2101.06840, table 4:
10 billion in about 2.6 s)."""
HOST_LINK_BPS = 20e9
"""Sustained bandwidth between a device and its host: PCIe 4.0 x16 at 0.65 of 32 GB/s; assumed."""


def host_adam_s(parameters: Num, ranks: Num, moved_bytes: Num) -> Num:
    r"""Optimiser step on the host.

    $$t = \frac{r\,P}{R_h} + \frac{M}{\beta_h}$$

    where each of $r$ = `ranks` devices of a host owns $P$ = `parameters`, the host updates $R_h$ =
    :data:`HOST_ADAM_PER_S` parameters per second, and $M$ = `moved_bytes` (gradients down, weights up) cross the link
    of a device at $\beta_h$ = :data:`HOST_LINK_BPS`.

    Source: ZeRO-Offload, Ren et al., arXiv 2101.06840.

    >>> round(host_adam_s(1e9, 8, 4e9), 2)
    2.25
    """
    return ranks * parameters / HOST_ADAM_PER_S + moved_bytes / HOST_LINK_BPS
