"""Work that is done on the host."""

from __future__ import annotations

from steptime.num import Num, maximum

HOST_ADAM_PER_S = 3.9e9
"""Parameters per second that vectorised Adam updates on a host of two sockets (ZeRO-Offload, arXiv 2101.06840, table 4:
10 billion in about 2.6 s)."""
SOCKETS = 2
"""Processors of the host that :data:`HOST_ADAM_PER_S` is of."""
HELD_LAYERS = 2
"""Layers whose activations are on the device when all go to the host: one computes while the other is on its way."""


def host_copy_s(kept_bytes: Num, host_Bps: Num) -> Num:
    r"""Copy of activations between a device and its host, in one direction.

    $$t = A / \beta_h$$

    where $A$ = `kept_bytes` (bytes) and $\beta_h$ = `host_Bps` (bytes/s) is what the link sustains one way.

    Source: count of bytes.

    >>> host_copy_s(4e9, 20e9)
    0.2
    """
    return kept_bytes / host_Bps


def _waited_s(pass_s: Num, copy_s: Num, hides: Num) -> Num:
    """What a copy takes beyond the pass that it hides behind."""
    return maximum(copy_s - hides * pass_s, 0.0)


def lasting_s(pass_s: Num, copy_s: Num, hides: Num) -> Num:
    r"""How long a layer's pass lasts with its copy to the host or back.

    $$t = t_p + \max(t_c - h\,t_p,\ 0)$$

    where the pass computes for $t_p$ = `pass_s`, copies for $t_c$ = `copy_s` (s), and $h$ = `hides` is 1 where both run
    at once, so that the longer of them counts, else 0. What hides behind a layer's pass hides behind all of it.

    Source: definition.

    >>> lasting_s(1.0, 3.0, 1.0), lasting_s(4.0, 3.0, 1.0), lasting_s(1.0, 3.0, 0.0)
    (3.0, 4.0, 4.0)
    """
    return pass_s + _waited_s(pass_s, copy_s, hides)


def exposed_copies_s(copy_s: Num, forward_s: Num, backward_s: Num, hides: Num) -> Num:
    r"""Time that a layer waits for its activations to go to the host and to come back, for one micro-batch.

    $$t = \max(t_c - h\,t_f,\ 0) + \max(t_c - h\,t_b,\ 0)$$

    where $t_c$ = `copy_s` (s) is the copy in one direction, which runs behind the forward pass $t_f$ = `forward_s` of
    the next layer on its way to the host and behind the backward pass $t_b$ = `backward_s` on its way back; $h$ =
    `hides` is 1 where copies and computation overlap, else 0.

    Source: vDNN, Rhu et al., arXiv 1602.08124, section 3: offloading and prefetching behind a neighbour's computation.

    >>> exposed_copies_s(3.0, 1.0, 2.0, 1.0), exposed_copies_s(3.0, 1.0, 2.0, 0.0)
    (3.0, 6.0)
    """
    return _waited_s(forward_s, copy_s, hides) + _waited_s(backward_s, copy_s, hides)


def host_adam_s(parameters: Num, ranks: Num, moved_bytes: Num, updates_per_s: Num, host_Bps: Num) -> Num:
    r"""Optimiser step on the host.

    $$t = \frac{r\,P}{R_h} + \frac{M}{\beta_h}$$

    where each of $r$ = `ranks` devices that share a host owns $P$ = `parameters`, the host updates $R_h$ =
    `updates_per_s` parameters per second (of two sockets :data:`HOST_ADAM_PER_S`), and $M$ = `moved_bytes` (gradients
    down, weights up) cross the link of a device at $\beta_h$ = `host_Bps` (bytes/s).

    Source: ZeRO-Offload, Ren et al., arXiv 2101.06840.

    >>> round(host_adam_s(1e9, 8, 4e9, 3.9e9, 20e9), 2)
    2.25
    """
    return ranks * parameters / updates_per_s + moved_bytes / host_Bps
