r"""Data parallelism: exposed traffic, parameter servers, stale parameters, the optimiser step over lists of tensors.

Symbols of parameter servers: $S$ = `size_bytes` is one copy of what is exchanged, spread over $s$ = `servers`; $w$ =
`workers` each have a NIC of $\beta_w$ = `worker_Bps`, each server one of $\beta_s$ = `server_Bps` (bytes/s, one
direction). $\alpha$ = `latency_s`; $o$ = `own_share` is the share that stays on the machine.
"""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum, minimum, where

BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK = 4e7, 1e6
"""Least size of a bucket of gradients, and least for each rank that shares it (Megatron-Core)."""


def free_links_s(pass_s: Num, busy_s: Num) -> Num:
    r"""Part of a pass with which other traffic over the same links can overlap.

    $$t_l = \max(t - t_x,\ 0)$$

    where $t$ = `pass_s` is the pass of one layer and $t_x$ = `busy_s` the time for which its own transfers, overlapped
    or not, keep these links busy: the links inside a fast domain, or those that leave it. Transfers that share links
    take as long together as one after the other.

    Source: conservation of what a link carries.

    >>> free_links_s(3.0, 1.0), free_links_s(1.0, 2.0)
    (2.0, 0.0)
    """
    return maximum(pass_s - busy_s, 0.0)


def exposed_buckets_s(
    one_layer_s: Num,
    layers: Num,
    behind_s: Num,
    bucket: Num,
    chunks: Num,
    stages: Num,
    shown_end_s: Num,
    hidden_end_s: Num,
) -> Num:
    r"""Exposed part of what travels at once, each bucket of layers behind the passes of the others.

    $$t = T_s + \max\Big(b T + \big[(\tfrac{L}{v} - b)(T - t_l) + [T_h - b\,t_l]_+\big]_+,\
      \big[L T - (v-1)\,p\,\tfrac{L}{v}\,t_l\big]_{v>1}\Big)$$

    where $T$ = `one_layer_s` is one layer's part, $L$ = `layers` of the device in $v$ = `chunks` of an interleaved
    pipeline of $p$ = `stages`, $b$ = `bucket` layers travel as one message, and $t_l$ = `behind_s` is what the pass
    of one layer for one micro-batch leaves to overlap it (:func:`free_links_s`). Nothing is left to overlap the last
    bucket and $T_s$ = `shown_end_s`, that of the embedding; $T_h$ = `hidden_end_s`, that of the head, is ready
    first. A chunk but the first has $p$ passes more of each chunk after it to overlap with, and is one bucket; $p = 1$
    for what travels with every micro-batch. Gathered weights are the same seen from the end.

    Source: longest path of compute and links; with $b = v = 1$ and $T_h = 0$ data parallelism of arXiv 2410.00273.
    Megatron-Core, `DistributedDataParallel`: chunks but the first are not split into buckets.

    >>> exposed_buckets_s(3.0, 5, 2.0, 1, 1, 1, 0.0, 0.0), exposed_buckets_s(1.0, 8, 1.0, 2, 2, 4, 0.5, 0.0)
    (7.0, 2.5)
    """
    own = layers / chunks
    b = minimum(bucket, own)
    over_s = (own - b) * (one_layer_s - behind_s) + maximum(hidden_end_s - b * behind_s, 0.0)
    chunk_s = b * one_layer_s + maximum(over_s, 0.0)
    all_s = layers * one_layer_s - (chunks - 1) * stages * own * behind_s
    return shown_end_s + maximum(chunk_s, where(chunks > 1, all_s, 0.0))


def exposed_in_turn_s(all_s: Num, behind_s: Num, sent_share: Num, beside_share: Num) -> Num:
    r"""Exposed part of messages that travel one after the other, each when a pass has made it or before it is read.

    $$t = s\,T - b\,t_l$$

    where $T$ = `all_s` is all traffic, $t_l$ = `behind_s` what the whole pass leaves to overlap it
    (:func:`free_links_s`), $s$ = `sent_share` the share of the traffic that at most the share $b$ = `beside_share`
    of the pass may overlap: of gradients what is made last, of weights what is read first. The longest of all is
    exposed; the last message, which nothing overlaps, always is.

    Source: longest path of compute and links; with equal layers :func:`exposed_buckets_s` of $b = v = 1$.

    >>> max(exposed_in_turn_s(10.0, 8.0, s, b) for s, b in ((0.25, 0.0), (1.0, 0.75)))
    4.0
    """
    return sent_share * all_s - beside_share * behind_s


def exposed_gather_s(one_layer_s: Num, layers: Num, behind_s: Num, shown_end_s: Num, hidden_end_s: Num) -> Num:
    r"""Exposed part of the weights that ZeRO-3 gathers for a forward pass, those of one layer ahead.

    $$t = G_s + G + (L-1)\,[G - t_l]_+ + [G_h - t_l]_+$$

    where $G$ = `one_layer_s` of $L$ = `layers` is gathered behind the pass of the layer before, of which $t_l$ =
    `behind_s` can overlap it (:func:`free_links_s`); $G_s$ = `shown_end_s`, that of the embedding, behind nothing, and
    $G_h$ = `hidden_end_s`, that of the head, behind the last layer.

    Source: longest path of compute and links; PyTorch FSDP2 prefetches one unit.

    >>> exposed_gather_s(3.0, 5, 2.0, 0.5, 4.0)
    9.5
    """
    stalls_s = maximum(layers - 1, 0) * maximum(one_layer_s - behind_s, 0.0)
    return shown_end_s + one_layer_s + stalls_s + maximum(hidden_end_s - behind_s, 0.0)


def exposed_sharded_s(
    reduce_s: Num,
    gather_s: Num,
    replicas_s: Num,
    layers: Num,
    behind_s: Num,
    head_s: Num,
    shown_end_s: Num,
    hidden_end_s: Num,
) -> Num:
    r"""Exposed part of a backward pass that gathers weights again and reduces gradients by layers (ZeRO-3, HSDP).

    $$t = R_s + \max\big(W + R + X,\ R + L X - (L-1)\,t_l\big)$$
    $$W = [G - t_h]_+ + [R_h + G - t_l]_+ + (L-2)\,[R + G - t_l]_+ + [R - t_l]_+ \qquad
      W = [G - t_h]_+ + [R_h - t_l]_+ \ \text{for } L = 1$$

    where $R$ = `reduce_s` reduces the gradients of one of $L$ = `layers` over the ranks that share its weights and
    $G$ = `gather_s` gathers them, both during the pass of another layer, of which $t_l$ = `behind_s` can overlap them
    (:func:`free_links_s`); the weights of the last layer are gathered during that of the head, $t_h$ = `head_s`. $X$ =
    `replicas_s` sums the shard over its replicas, on links and a stream of its own. $R_h$ = `hidden_end_s` and $R_s$ =
    `shown_end_s` reduce what comes before and after the layers: the head and the embedding.

    Source: longest path of compute and links; PyTorch FSDP2 reduces over replicas on a stream of its own.

    >>> exposed_sharded_s(1.0, 2.0, 0.0, 4, 2.0, 2.0, 0.5, 0.0), exposed_sharded_s(1.0, 0.0, 3.0, 4, 2.0, 0.0, 0.0, 0.0)
    (3.5, 7.0)
    >>> exposed_sharded_s(1.0, 2.0, 0.0, 1, 2.0, 0.5, 0.5, 3.0)   # one layer: 0.5 + 1.5 + 1 + 1
    4.0
    """
    several = where(layers > 1, 1.0, 0.0)
    stalls_s = maximum(gather_s - head_s, 0.0)
    stalls_s = stalls_s + maximum(layers - 2, 0) * maximum(reduce_s + gather_s - behind_s, 0.0)
    stalls_s = stalls_s + maximum(hidden_end_s + several * gather_s - behind_s, 0.0)
    stalls_s = stalls_s + several * maximum(reduce_s - behind_s, 0.0)
    beside_s = layers * replicas_s - maximum(layers - 1, 0) * behind_s
    return shown_end_s + reduce_s + maximum(stalls_s + replicas_s, beside_s)


def layers_per_bucket(parameters: Num, ranks: Num, layers: Num) -> Num:
    r"""Layers whose gradients, or weights, travel as one message.

    $$b = \min\Big(\max\Big(\frac{\max(4 \cdot 10^7,\ 10^6\,r)}{P},\ 1\Big),\ \max(L, 1)\Big)$$

    where $P$ = `parameters` of one layer on a rank, $r$ = `ranks` that share them, and $L$ = `layers` on the device.
    The more ranks a ring has, the more hops a message makes, so that few long ones travel.

    Source: Megatron-Core, `DistributedDataParallelConfig.bucket_size`: 40 million parameters by default, and no less
    than 1 million for each rank; DeepSpeed's buckets of 500 million elements are longer still.

    >>> layers_per_bucket(1e7, 8, 32), layers_per_bucket(5e7, 256, 32), layers_per_bucket(5e7, 8, 32)
    (4.0, 5.12, 1.0)
    """
    shared = maximum(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * ranks) / where(parameters > 0, parameters, 1.0)
    return minimum(maximum(shared, 1.0), maximum(layers, 1.0))


def partly_hidden_s(hidden_s: Num, shown_s: Num, share: Num) -> Num:
    r"""Exposed part of traffic of which only a part overlaps with computation.

    $$t = T_h + s\,(T_s - T_h)$$

    where $T_h$ = `hidden_s` is exposed when all that can overlap does, $T_s$ = `shown_s` when nothing overlaps, and
    $s$ = `share` of the difference is exposed after all: streams share units, links and the host.

    Source: interpolation between the two limits.

    >>> partly_hidden_s(1.0, 5.0, 0.25)
    2.0
    """
    return hidden_s + share * (shown_s - hidden_s)


def zero_sent_bytes(weight_bytes: Num, gradient_bytes: Num, ranks: Num, gathers: Num) -> Num:
    r"""Bytes that a rank sends in a step of data parallelism, ring by ring.

    $$V = \frac{N - 1}{N} (G + \max(g W, (1 - g) G))$$

    where $W$ = `weight_bytes`, $G$ = `gradient_bytes` of the whole model, $N$ = `ranks`, and $g$ = `gathers` is how
    often weights are gathered: 0 under plain data parallelism, whose all-reduce is a reduce-scatter and an all-gather
    of gradients; 1 under ZeRO 1 and 2 (new weights); 2 under ZeRO 3 (forward and backward).

    Source: ZeRO, Rajbhandari et al., arXiv 1910.02054, section 7.

    >>> zero_sent_bytes(8.0, 8.0, 4, 0), zero_sent_bytes(8.0, 8.0, 4, 1), zero_sent_bytes(8.0, 8.0, 4, 2)
    (12.0, 12.0, 18.0)
    """
    return (ranks - 1) / ranks * (gradient_bytes + maximum(gathers * weight_bytes, (1 - gathers) * gradient_bytes))


def adam_step_bytes(parameters: Num, state_bytes: Num, gradient_bytes: Num, weight_bytes: Num) -> Num:
    r"""Device-memory traffic of a clipped optimiser step over the parameters that a device owns.

    $$M = P\,(2 s + 4 g + w)$$

    where $P$ = `parameters`, the states of $s$ = `state_bytes` per parameter are read and written and the weight of
    $w$ = `weight_bytes` written. The gradient of $g$ = `gradient_bytes` is read for its norm, read and written to be
    clipped, and read by the update.

    Source: count of the passes over all tensors: norm, scaling, one fused update.

    >>> adam_step_bytes(1, 12, 2, 2)
    34
    """
    return parameters * (2 * state_bytes + 4 * gradient_bytes + weight_bytes)


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


def largest_shard_servers(shard_bytes: Num, size_bytes: Num) -> Num:
    r"""Servers with equal shards that would be as busy as the busiest of servers with unequal ones.

    $$s = S / S_1$$

    where $S$ = `size_bytes` is one copy of what is exchanged and $S_1$ = `shard_bytes` the largest server's part of it.

    Source: definition; the busiest port sets the pace of :func:`push_s`.

    >>> largest_shard_servers(4e9, 8e9)
    2.0
    """
    return size_bytes / shard_bytes


def stale_updates(workers: Num, bound: Num) -> Num:
    r"""Updates by which what a worker reads differs at most from what it would read in bulk-synchronous training.

    $$|A_t| + |B_t| \le 2 s (P - 1)$$

    where $P$ = `workers`, $s$ = `bound` on their staleness in clocks, $A_t$ are updates that the worker does not see
    yet and $B_t$ updates that it sees too early: of each other worker at most $s$ before and $s$ after the clock.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013,
    lemma 1.

    >>> stale_updates(8, 3), stale_updates(8, 0)
    (42, 0)
    """
    return 2 * bound * (workers - 1)


def stale_difference(step: Num, lipschitz: Num, workers: Num, bound: Num) -> Num:
    r"""Bound on the distance between what a worker reads and the parameters of bulk-synchronous training.

    $$\lVert \tilde x_t - x_t \rVert \le 2 s (P - 1)\,\eta\,L$$

    where $\eta$ = `step` is the largest step size among the updates in question, $L$ = `lipschitz` bounds the
    gradients, and the number of updates is :func:`stale_updates` of $P$ = `workers` and $s$ = `bound`. The unit is
    that of the parameters.

    Source: triangle inequality over the updates of Ho et al. 2013, lemma 1.

    >>> stale_difference(0.01, 2.0, 8, 3)
    0.84
    """
    return stale_updates(workers, bound) * step * lipschitz


def stale_step(diameter: Num, lipschitz: Num, workers: Num, bound: Num, update: Num) -> Num:
    r"""Step size under which stale-synchronous descent has the bound of :func:`stale_regret`.

    $$\eta_t = \frac{F}{L \sqrt{2 (s + 1) P\,t}}$$

    where $t$ = `update` counts the updates of all workers from 1; the other symbols stand at :func:`stale_regret`.

    Source: Ho et al. 2013, theorem 1.

    >>> stale_step(1.0, 1.0, 8, 3, 4)
    0.0625
    """
    return diameter / (lipschitz * (2 * (bound + 1) * workers * update) ** 0.5)


def stale_regret(diameter: Num, lipschitz: Num, workers: Num, bound: Num, updates: Num) -> Num:
    r"""Bound on the mean loss under stale-synchronous training above that of the best parameters (convex losses).

    $$\frac{1}{T} \sum_{t=1}^{T} f_t(\tilde x_t) - f(x^*) \le 4 F L \sqrt{\frac{2 (s + 1) P}{T}}$$

    where $F$ = `diameter` with $\tfrac12 \lVert x - x' \rVert^2 \le F^2$ between all parameters that occur, $L$ =
    `lipschitz` bounds the gradients of the convex $f_t$, $P$ = `workers`, $s$ = `bound` on the staleness in clocks,
    $T$ = `updates` of all workers together, and $\tilde x_t$ is what a worker reads. Step sizes are those of
    :func:`stale_step`. With $s = 0$ it is the bound of bulk-synchronous training; without a bound on staleness there is
    none.

    With $\kappa = (s+1)P$ the proof sums, in units of $F L \sqrt{2\kappa/T}$: $1/(2\kappa)$ for the lengths of the
    gradients, 1 for the distance of the start, $2s/(s+1)$ for updates that a worker does not see yet or sees too early
    (:func:`stale_updates`, none older than $\kappa$), and at most $\sqrt{2sP/T}$ for the first $\kappa$ updates. They
    are no more than 4 from $T = 2sP / (1 - 1/(2\kappa))^2$ on; for shorter runs the bound is not proved.

    Source: Ho et al. 2013, theorem 1 (the SSP expectation bound): the form of the bound and of the steps; the constant
    follows from the sum above, which is own.

    >>> stale_regret(1.0, 1.0, 8, 3, 6400)
    0.4
    """
    return 4 * diameter * lipschitz * (2 * (bound + 1) * workers / updates) ** 0.5


CHUNK_ELEMENTS, CHUNKS_PER_LAUNCH = 65536, 320
"""Elements of a chunk, chunks of a launch of kernels over lists (PyTorch, ATen/native/cuda/MultiTensorApply.cuh)."""
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of a launch by the number of lists that it walks over, ibidem: as many as fit into kernel arguments."""


def adam_flops(elements: Num) -> Num:
    r"""Vector operations of a step of Adam: $F = 13x$ (two averages 6, corrections 2, root, division, step, decay 2).

    where $x$ = `elements` are the parameters of the step.

    Source: count of operations, Kingma and Ba, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter, arXiv 1711.05101.

    >>> adam_flops(2)
    26
    """
    return 13 * elements


def list_launches(tensors: Num, elements: Num, tensors_per_launch: Num) -> Num:
    r"""Kernels that one operator over lists of tensors launches: $n = \max(\lceil t/t_0\rceil, \lceil x/(c\,l)\rceil)$.

    where $t$ = `tensors` of a list, at most $t_0$ = `tensors_per_launch` of them in one launch, $x$ = `elements`
    altogether in chunks of $c$ = 65,536, $l$ = 320 chunks in one launch (:data:`CHUNK_ELEMENTS`,
    :data:`CHUNKS_PER_LAUNCH`).

    Source: PyTorch 2.13, ATen/native/cuda/MultiTensorApply.cuh.

    >>> list_launches(100, 1e6, 48), list_launches(2, 100e6, 48)
    (3, 5.0)
    """
    return maximum(ceil_div(tensors, tensors_per_launch), ceil_div(elements, CHUNK_ELEMENTS * CHUNKS_PER_LAUNCH))
