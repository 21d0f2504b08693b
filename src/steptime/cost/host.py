"""Work of the host: issuing operators, overheads that grow with the job, copies to host memory, Adam on the host."""

from __future__ import annotations

from steptime.num import Num, log2, maximum, minimum, soft_maximum, where

SHARPNESS = 8.0
"""Exponent of the soft maximum of device and host: within 9 % of the larger where both are equal."""
IN_TURN = 1.0
"""Exponent for a device that is its own host and issues each operator before it computes it: both times add up."""


def issued_s(device_s: Num, operators: Num, host_s: Num, sharpness: Num = SHARPNESS) -> Num:
    r"""Time of a chain of operators that a host issues one by one while the device works.

    $$t = \left(t_d^{\,p} + (n\,\tau)^{p}\right)^{1/p}$$

    a soft maximum of $t_d$ = `device_s` (s), the time of the device, and $n\,\tau$: $n$ = `operators` issued at
    $\tau$ = `host_s` (s) each. $p$ = `sharpness`: 8 where the host works while the device does, which then waits for
    some operators and not for others where both are nearly equal; 1 on a processor that issues its own work
    (:data:`IN_TURN`).

    Source: own; a queue that the host fills and the device empties.

    >>> round(issued_s(2e-3, 10, 1e-5), 9), issued_s(1e-4, 0, 1e-5), round(issued_s(1.0, 1, 1.0), 4)   # equal: 2^(1/8)
    (0.002, 0.0001, 1.0905)
    >>> issued_s(2e-3, 10, 1e-5, IN_TURN)
    0.0021
    """
    host: Num = operators * host_s
    if isinstance(host, float) and not host:
        return device_s
    return soft_maximum(device_s, host, sharpness)


def issue_wait_s(device_s: Num, operators: Num, host_s: Num, sharpness: Num = SHARPNESS) -> Num:
    r"""Part of :func:`issued_s` in which the device waits for the host.

    $$t = \left(t_d^{\,p} + (n\,\tau)^{p}\right)^{1/p} - t_d$$

    where $t_d$ = `device_s` (s) is the time of the device, $n$ = `operators` are issued at $\tau$ = `host_s` (s) each
    and $p$ = `sharpness`.

    Source: own.

    >>> round(issue_wait_s(2e-3, 10, 1e-5), 9), round(issue_wait_s(1e-3, 300, 1e-5), 6)
    (0.0, 0.002)
    """
    return maximum(issued_s(device_s, operators, host_s, sharpness) - device_s, 0.0)


def router_wait_s(routers: Num, wait_s: Num, captured: Num = 0.0, captured_wait: Num = 1.0) -> Num:
    r"""Time that a device waits for the host at the routers of experts.

    $$t = n\, \tau\, c^{g}$$

    where each of $n$ = `routers` costs $\tau$ = `wait_s` (s): where the sizes of the experts' products are known on the
    device only, the host has to read them before it can go on. Meanwhile the device has no work, and then waits for
    each operator that the host issues until the first long one. With $g$ = `captured` = 1 router and preprocessing are
    one graph, and the share $c$ = `captured_wait` of it is left. Routers at which the host reads nothing are not of
    these (:attr:`steptime.plan.job.Job.reads_sizes`).

    Source: own; fitted per framework.

    >>> router_wait_s(4, 1e-3), router_wait_s(4, 1e-3, 1.0, 0.5)
    (0.004, 0.002)
    """
    return routers * wait_s * captured_wait**captured


def stage_issue_s(micro_batches: Num, virtual_stages: Num, stages: Num, stage_s: Num) -> Num:
    r"""Time that the host of a pipeline stage loses between micro-batches.

    $$t = n\, v\, \tau \big|_{p > 1}$$

    where $n$ = `micro_batches` pass $v$ = `virtual_stages` of this rank, each start costing $\tau$ = `stage_s` (s), in
    a pipeline of $p$ = `stages`.

    Source: own; fitted per framework.

    >>> stage_issue_s(8, 2, 2, 1e-3), stage_issue_s(8, 1, 1, 1e-3)
    (0.016, 0.0)
    """
    return micro_batches * virtual_stages * stage_s * where(stages > 1, 1.0, 0.0)


HOOKED = 50
"""Tensors of parameters of a rank from which :func:`step_overhead_s` has its fitted value: three quarters of the ranks
in the runs that it was fitted to have as many or more (median 128)."""


def step_overhead_s(step_s: Num, devices: Num, tensors: Num) -> Num:
    r"""Time of a step that no work explains: what the ranks do together once a step.

    $$t = \tau \min\!\left(\frac{k}{k_0},\,1\right) \Big|_{n > 1}$$

    where $\tau$ = `step_s` (s) is fitted per framework. With $n$ = `devices` above one the host visits each of the
    $k$ = `tensors` of parameters of a rank to hook its gradient, copy it into a bucket and take its norm, and all ranks
    meet for the norm, the loss and their timers; $k_0$ = :data:`HOOKED`. One device does none of this: loading of data
    and logging run behind the device.

    Source: own.

    >>> step_overhead_s(0.01, 8, 200), step_overhead_s(0.01, 8, 25), step_overhead_s(0.01, 1, 200)
    (0.01, 0.005, 0.0)
    """
    return step_s * minimum(tensors / HOOKED, 1.0) * where(devices > 1, 1.0, 0.0)


NODE = 8
"""Devices of one node, as a rule: they need no network between them."""


def growth_s(work_s: Num, devices: Num, growth: Num) -> Num:
    r"""Additional time of a step on many devices: the slowest of them, and links shared with others.

    $$t = T\, g \log_2 \max(n / 8, 1)$$

    where $T$ = `work_s` is the time with all devices equal, $n$ = `devices` and $g$ = `growth` per doubling.

    Source: own; the expected maximum of $n$ similar times grows with $\log n$.

    >>> growth_s(2.0, 64, 0.01), growth_s(2.0, 8, 0.01)
    (0.06, 0.0)
    """
    return work_s * growth * log2(maximum(devices, NODE) / NODE)


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
    """Time of a copy beyond the pass with which it overlaps."""
    return maximum(copy_s - hides * pass_s, 0.0)


def lasting_s(pass_s: Num, copy_s: Num, hides: Num) -> Num:
    r"""Duration of a layer's pass with its copy to the host or back.

    $$t = t_p + \max(t_c - h\,t_p,\ 0)$$

    where the pass computes for $t_p$ = `pass_s`, copies for $t_c$ = `copy_s` (s), and $h$ = `hides` is 1 where both run
    at once, so that the longer of them counts, else 0. What overlaps with a layer's pass overlaps with all of it.

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
