r"""Limits of scale: the largest training run that latency allows, and data movement of a split linear layer.

Latency: a run of $C$ FLOPs has $D/B$ steps, and each step passes $L$ blocks one after the other. No number of devices
makes a block faster than its latency $t$, so the run lasts at least $(D/B) L t$, at any utilisation.

Data movement: one linear layer is split over two tensor axes and a data axis. It multiplies a weight of
$d_\text{in} \times d_\text{out}$ with $b$ tokens. Its input dim is cut into `tp_in` parts, its output dim into
`tp_out`, its tokens into `dp`. The model is optimistic on purpose, so what it calls impossible is impossible:

* compute and every kind of data movement overlap fully, so the slowest resource sets the time;
* pipeline transfers, attention, pointwise operators, the optimiser step and every latency are free;
* on the chip only traffic with device memory counts: weights and their gradients always, activations
  only where backward reads them again;
* the multicast of an all-reduce is free to send, and degrees need not divide the dims.

Source: E. Erdil and D. Schneider-Joseph, "Data movement limits to frontier model training",
arXiv 2411.01137, and the authors' notebook (class `Device`); Epoch, report on scaling until 2030 (August 2024),
latency figures.
"""

from __future__ import annotations

from steptime.num import Num, log2, maximum


def training_flops(parameters: Num, tokens: Num) -> Num:
    r"""FLOPs of a training run: two per weight and token forward, four backward.

    $$C = 6 N D$$

    Args:
        parameters: $N$, trainable parameters.
        tokens: $D$, training tokens.

    Source: J. Kaplan et al., "Scaling laws for neural language models", arXiv 2001.08361, section 2.1.

    >>> training_flops(7e14, 1.4e16)
    5.88e+31
    """
    return 6 * parameters * tokens


def optimal_parameters(compute_flops: Num, tokens_per_parameter: Num) -> Num:
    r"""Parameters of the compute-optimal run.

    $$N = \sqrt{\frac{C}{6 r}}$$

    Args:
        compute_flops: $C$, FLOPs of the run.
        tokens_per_parameter: $r$, 20 for compute-optimal dense models.

    Source: J. Hoffmann et al., "Training compute-optimal large language models", arXiv 2203.15556.

    >>> optimal_parameters(1.2e24, 20)
    100000000000.0
    """
    return (compute_flops / (6 * tokens_per_parameter)) ** 0.5


def optimal_tokens(compute_flops: Num, tokens_per_parameter: Num) -> Num:
    r"""Training tokens of the compute-optimal run.

    $$D = r N = r \sqrt{\frac{C}{6 r}}$$

    Args:
        compute_flops: $C$, FLOPs of the run.
        tokens_per_parameter: $r$, 20 for compute-optimal dense models.

    Source: J. Hoffmann et al., "Training compute-optimal large language models", arXiv 2203.15556.

    >>> optimal_tokens(1.2e24, 20)
    2000000000000.0
    """
    return tokens_per_parameter * optimal_parameters(compute_flops, tokens_per_parameter)


def scaled_with_compute(compute_flops: Num, reference_flops: Num, reference_value: Num, exponent: Num) -> Num:
    r"""A quantity that grows as a power of the compute: batch size, number of blocks.

    $$X = X_0 \Big(\frac{C}{C_0}\Big)^e$$

    Args:
        compute_flops: $C$, FLOPs of the run.
        reference_flops: $C_0$, FLOPs of the reference run.
        reference_value: $X_0$, the quantity in the reference run (any unit; the result has the same).
        exponent: $e$; 1/6 makes it grow as the cube root of the parameters.

    Source: arXiv 2411.01137: batch $2048^2$ tokens and 120 blocks at 1e25 FLOP, exponent 1/6.

    >>> scaled_with_compute(64e25, 1e25, 120, 1 / 6)
    240.0
    """
    return reference_value * (compute_flops / reference_flops) ** exponent


def block_width(parameters: Num, layers: Num, hidden_factor: Num) -> Num:
    r"""Model width of a run of `layers` residual blocks.

    $$d = \sqrt{\frac{N}{2 h L}}$$

    A block has $2 h d^2$ parameters: one matrix from $d$ to $h d$ and one back.

    Args:
        parameters: $N$, trainable parameters.
        layers: $L$, residual blocks.
        hidden_factor: $h$, hidden width over model width, attention included (5).

    Source: arXiv 2411.01137, notebook, `ChinchillaOptimalModel`.

    >>> block_width(12e10, 120, 5)
    10000.0
    """
    return (parameters / (2 * hidden_factor * layers)) ** 0.5


def layer_latency_s(matmuls: Num, kernel_s: Num, network_s: Num) -> Num:
    r"""Least seconds of one block, forward and backward, when its products follow each other.

    $$t = k (t_k + t_n)$$

    Args:
        matmuls: $k$, products one after the other; the weight gradients are off the path.
        kernel_s: $t_k$, latency of a kernel (s).
        network_s: $t_n$, latency of the reduction that follows it (s).

    Source: arXiv 2411.01137: 4 products, 4.5 us and 5 us.

    >>> round(layer_latency_s(4, 4.5e-6, 5e-6) * 1e6, 6)
    38.0
    >>> round(layer_latency_s(8, 4.5e-6, 9.2e-6) * 1e6, 6)  # all-reduce of 8 devices on one fast domain
    109.6
    """
    return matmuls * (kernel_s + network_s)


def tree_latency_s(base_s: Num, ranks_inside: Num, inside_s: Num, nodes: Num, between_s: Num) -> Num:
    r"""Latency of one product with its low-latency tree all-reduce over several nodes.

    $$t = t_0 + 2 (n t_i + t_x \log_2 m)$$

    Args:
        base_s: $t_0$, kernel and fixed part of the collective (s).
        ranks_inside: $n$, ranks of the group in one node, on average.
        inside_s: $t_i$, latency of a hop inside the node (s).
        nodes: $m$, nodes of the group.
        between_s: $t_x$, latency of a hop between nodes (s).

    Source: Epoch, report on scaling until 2030 (August 2024), latency wall: 7.4 us, 0.6 us, 5 us.

    >>> round(tree_latency_s(7.4e-6, 2.75, 0.6e-6, 16, 5e-6) * 1e6, 6)
    50.7
    """
    return base_s + 2 * (ranks_inside * inside_s + log2(nodes) * between_s)


def serial_latency_s(tokens: Num, batch_tokens: Num, layers: Num, block_latency_s: Num) -> Num:
    r"""Least seconds of a training run: its steps and blocks one after the other.

    $$T = \frac{D}{B} L t$$

    Args:
        tokens: $D$, training tokens.
        batch_tokens: $B$, tokens per step.
        layers: $L$, blocks that a step passes one after the other.
        block_latency_s: $t$, least seconds of a block, forward and backward.

    Source: arXiv 2411.01137, latency bound.

    >>> serial_latency_s(1e12, 1e6, 100, 1e-4)
    10000.0
    """
    return tokens / batch_tokens * layers * block_latency_s


def latency_wall_flops(
    duration_s: Num,
    block_latency_s: Num,
    reference_batch_tokens: Num,
    reference_layers: Num,
    tokens_per_parameter: Num,
) -> Num:
    r"""FLOPs of the largest compute-optimal run that latency lets end in time, at any utilisation.

    $$C = 6 r \Big(\frac{T B_0}{r L_0 t}\Big)^2$$

    Batch and blocks grow with the same power of the compute, so the power cancels in
    `serial_latency_s` and only their ratio $B_0 / L_0$ is left.

    Args:
        duration_s: $T$, longest allowed duration of the run (s).
        block_latency_s: $t$, least seconds of a block, forward and backward.
        reference_batch_tokens: $B_0$, tokens per step of the reference run.
        reference_layers: $L_0$, blocks of the reference run.
        tokens_per_parameter: $r$, 20 for compute-optimal dense models.

    Source: derived from the run laws of arXiv 2411.01137 ($2048^2$ tokens and 120 blocks), which
    puts the wall near 2e31 FLOP for three months.

    >>> f"{latency_wall_flops(7.889e6, 38e-6, 2048**2, 120, 20):.3g}"
    '1.58e+31'
    """
    parameters = duration_s * reference_batch_tokens / (tokens_per_parameter * reference_layers * block_latency_s)
    return training_flops(parameters, tokens_per_parameter * parameters)


def all_reduce_words(size_words: Num, ranks: Num) -> Num:
    r"""Words that one device sends or receives to all-reduce a vector held whole by each rank.

    $$W = \frac{3 (p - 1) n}{p}$$

    Reduce-scatter sends and receives $(p-1) n/p$ words each; the multicast of the result is
    received, $(p-1) n/p$ more, and is free to send.

    Args:
        size_words: $n$, words of the vector on each rank.
        ranks: $p$, ranks that take part; one rank moves nothing.

    Source: arXiv 2411.01137, notebook, `all_reduce_communication`.

    >>> all_reduce_words(8, 4)
    18.0
    >>> all_reduce_words(8, 1)
    0.0
    """
    return 3 * (ranks - 1) * size_words / ranks


def forward_backward_flops(d_in: Num, d_out: Num, tokens: Num, tp_in: Num, tp_out: Num, dp: Num) -> Num:
    r"""FLOPs of one device for forward and backward over one micro-batch.

    $$F = 6 \, \frac{d_\text{in}}{t_\text{in}} \, \frac{d_\text{out}}{t_\text{out}} \, \frac{b}{d}$$

    Output, weight gradient and input gradient are three products of two FLOPs per weight and token.

    Args:
        d_in: $d_\text{in}$, width of the input (elements).
        d_out: $d_\text{out}$, width of the output (elements).
        tokens: $b$, tokens of the micro-batch over all data ranks.
        tp_in: $t_\text{in}$, ranks that share the input dim.
        tp_out: $t_\text{out}$, ranks that share the output dim.
        dp: $d$, data ranks.

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> forward_backward_flops(8, 4, 10, 2, 2, 5)
    96.0
    """
    return 6 * (d_in / tp_in * (d_out / tp_out) * (tokens / dp))


def forward_backward_memory_words(d_in: Num, d_out: Num, tokens: Num, tp_in: Num, tp_out: Num, dp: Num) -> Num:
    r"""Words between one device and its memory for forward and backward over one micro-batch.

    $$W = 4 N' + d_\text{in}' b' + a(d_\text{out}' b', t_\text{in}) + a(d_\text{in}' b', t_\text{out})$$

    with $d_\text{in}' = d_\text{in}/t_\text{in}$, $d_\text{out}' = d_\text{out}/t_\text{out}$,
    $N' = d_\text{in}' d_\text{out}'$, $b' = b/d$ and $a$ of `all_reduce_words`.
    Weights are read once per pass, weight gradients read and written, input activations read again
    by backward, and what an all-reduce moves passes through memory.

    Args:
        d_in: $d_\text{in}$, width of the input (elements).
        d_out: $d_\text{out}$, width of the output (elements).
        tokens: $b$, tokens of the micro-batch over all data ranks.
        tp_in: $t_\text{in}$, ranks that share the input dim.
        tp_out: $t_\text{out}$, ranks that share the output dim.
        dp: $d$, data ranks.

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> forward_backward_memory_words(8, 4, 10, 1, 1, 1)  # 4 * 32 + 8 * 10
    208.0
    >>> forward_backward_memory_words(16384, 81920, 32768, 8, 40, 32)
    30513561.6
    """
    d_in_local, d_out_local, tokens_local = d_in / tp_in, d_out / tp_out, tokens / dp
    weights = d_in_local * d_out_local
    forward = weights + all_reduce_words(d_out_local * tokens_local, tp_in)
    weight_gradient = d_in_local * tokens_local + 2 * weights
    return forward + weight_gradient + weights + all_reduce_words(d_in_local * tokens_local, tp_out)


def forward_backward_network_words(d_in: Num, d_out: Num, tokens: Num, tp_in: Num, tp_out: Num, dp: Num) -> Num:
    r"""Words that one device sends or receives for forward and backward over one micro-batch.

    $$W = a\Big(\frac{d_\text{out}}{t_\text{out}} \frac{b}{d}, t_\text{in}\Big)
        + a\Big(\frac{d_\text{in}}{t_\text{in}} \frac{b}{d}, t_\text{out}\Big)$$

    with $a$ of `all_reduce_words`: forward reduces the output over the ranks that share the
    input dim, backward the input gradient over those that share the output dim.

    Args:
        d_in: $d_\text{in}$, width of the input (elements).
        d_out: $d_\text{out}$, width of the output (elements).
        tokens: $b$, tokens of the micro-batch over all data ranks.
        tp_in: $t_\text{in}$, ranks that share the input dim.
        tp_out: $t_\text{out}$, ranks that share the output dim.
        dp: $d$, data ranks.

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> forward_backward_network_words(16384, 81920, 32768, 8, 40, 32)
    11639193.6
    """
    tokens_local = tokens / dp
    return all_reduce_words(d_out / tp_out * tokens_local, tp_in) + all_reduce_words(
        d_in / tp_in * tokens_local, tp_out
    )


def flops_s(flops: Num, width_bytes: Num, flops_per_s_8bit: Num, utilization: Num) -> Num:
    r"""Seconds that the matrix units need.

    $$t = \frac{F w}{u R_8}$$

    The peak of a width of $w$ bytes is taken as $R_8 / w$: half as fast at twice the width.

    Args:
        flops: $F$, FLOPs.
        width_bytes: $w$, bytes per word.
        flops_per_s_8bit: $R_8$, dense peak at 8 bits (FLOP/s).
        utilization: $u$, share of the peak that is sustained (0 to 1).

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> flops_s(8e12, 2, 20e12, 0.8)
    1.0
    """
    return (flops * width_bytes) / (utilization * flops_per_s_8bit)


def memory_s(words: Num, width_bytes: Num, memory_Bps: Num, utilization: Num) -> Num:
    r"""Seconds that device memory needs.

    $$t = \frac{W w}{u B_m}$$

    Args:
        words: $W$, words moved.
        width_bytes: $w$, bytes per word.
        memory_Bps: $B_m$, memory bandwidth (bytes/s).
        utilization: $u$, share of the bandwidth that is sustained (0 to 1).

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> memory_s(4e9, 2, 10e9, 0.8)
    1.0
    """
    return (words * width_bytes) / (utilization * memory_Bps)


def network_s(words: Num, width_bytes: Num, network_Bps: Num) -> Num:
    r"""Seconds that the network needs; throttling does not touch it, so no utilisation enters.

    $$t = \frac{W w}{B_n}$$

    Args:
        words: $W$, words sent and received.
        width_bytes: $w$, bytes per word.
        network_Bps: $B_n$, network bandwidth, both directions together (bytes/s).

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> network_s(4e9, 2, 8e9)
    1.0
    """
    return (words * width_bytes) / network_Bps


def linear_layer_forward_backward_s(
    d_in: Num,
    d_out: Num,
    tokens: Num,
    tp_in: Num,
    tp_out: Num,
    dp: Num,
    width_bytes: Num,
    flops_per_s_8bit: Num,
    memory_Bps: Num,
    network_Bps: Num,
    utilization: Num,
) -> Num:
    r"""Seconds of forward and backward over one micro-batch: the slowest of three resources.

    $$t = \max\Big(\frac{F w}{u R_8}, \frac{W_m w}{u B_m}, \frac{W_n w}{B_n}\Big)$$

    with $F$ of `forward_backward_flops`, $W_m$ of `forward_backward_memory_words`,
    $W_n$ of `forward_backward_network_words`.

    Args:
        d_in: width of the input (elements).
        d_out: width of the output (elements).
        tokens: tokens of the micro-batch over all data ranks.
        tp_in: ranks that share the input dim.
        tp_out: ranks that share the output dim.
        dp: data ranks.
        width_bytes: $w$, bytes per word.
        flops_per_s_8bit: $R_8$, dense peak at 8 bits (FLOP/s).
        memory_Bps: $B_m$, memory bandwidth (bytes/s).
        network_Bps: $B_n$, network bandwidth, both directions together (bytes/s).
        utilization: $u$, share of peak and memory bandwidth that is sustained (0 to 1).

    Source: arXiv 2411.01137, notebook, `linear_layer_fwd_bwd_secs`.

    >>> linear_layer_forward_backward_s(
    ...     16384, 81920, 2048**2 / 128, 8, 40, 32, 2, 1979e12, 3352e9, 900e9, 0.8)
    3.2554072481051035e-05
    """
    shape = (d_in, d_out, tokens, tp_in, tp_out, dp)
    compute = flops_s(forward_backward_flops(*shape), width_bytes, flops_per_s_8bit, utilization)
    memory = memory_s(forward_backward_memory_words(*shape), width_bytes, memory_Bps, utilization)
    network = network_s(forward_backward_network_words(*shape), width_bytes, network_Bps)
    return maximum(compute, maximum(memory, network))


def linear_layer_end_of_batch_s(
    d_in: Num,
    d_out: Num,
    tp_in: Num,
    tp_out: Num,
    dp: Num,
    width_bytes: Num,
    memory_Bps: Num,
    network_Bps: Num,
    utilization: Num,
) -> Num:
    r"""Seconds to all-reduce the weight gradients over the data ranks, once per step.

    $$t = \max\Big(\frac{a(N', d) w}{u B_m}, \frac{a(N', d) w}{B_n}\Big), \quad
        N' = \frac{d_\text{in} d_\text{out}}{t_\text{in} t_\text{out}}$$

    with $a$ of `all_reduce_words`.

    Args:
        d_in: $d_\text{in}$, width of the input (elements).
        d_out: $d_\text{out}$, width of the output (elements).
        tp_in: $t_\text{in}$, ranks that share the input dim.
        tp_out: $t_\text{out}$, ranks that share the output dim.
        dp: $d$, data ranks.
        width_bytes: $w$, bytes per word.
        memory_Bps: $B_m$, memory bandwidth (bytes/s).
        network_Bps: $B_n$, network bandwidth, both directions together (bytes/s).
        utilization: $u$, share of the memory bandwidth that is sustained (0 to 1).

    Source: arXiv 2411.01137, notebook, `linear_layer_end_of_batch_secs`.

    >>> linear_layer_end_of_batch_s(16384, 81920, 8, 40, 32, 2, 3352e9, 900e9, 0.8)
    2.7088213333333335e-05
    """
    words = all_reduce_words(d_in / tp_in * (d_out / tp_out), dp)
    return maximum(memory_s(words, width_bytes, memory_Bps, utilization), network_s(words, width_bytes, network_Bps))


def latency_wall_parameters(
    duration_s: Num,
    block_latency_s: Num,
    tokens_per_parameter: Num,
    reference_parameters: Num,
    reference_batch_tokens: Num,
    batch_growth: Num,
    reference_layers: Num,
    layer_growth: Num,
) -> Num:
    r"""Parameters of the largest run that latency lets end in time, where batch and blocks grow with different powers.

    $$N = N_0 \Big(\frac{T B_0}{r N_0 L_0 t}\Big)^{1 / (1 + \lambda - \beta)}$$

    A model of $N$ parameters has $L_0 (N / N_0)^\lambda$ blocks, trains on $r N$ tokens and takes
    $B_0 (N / N_0)^\beta$ of them in a step; $N$ solves `serial_latency_s` $= T$.

    Args:
        duration_s: $T$, longest allowed duration of the run (s).
        block_latency_s: $t$, least seconds of a block, forward and backward.
        tokens_per_parameter: $r$, training tokens per parameter.
        reference_parameters: $N_0$, parameters of the reference model.
        reference_batch_tokens: $B_0$, its tokens per step.
        batch_growth: $\beta$, power of the parameters with which the batch grows.
        reference_layers: $L_0$, its blocks.
        layer_growth: $\lambda$, power of the parameters with which blocks grow.

    Source: derived from the run laws of arXiv 2411.01137 and of Epoch, "Can AI scaling continue through 2030?".

    >>> f"{latency_wall_parameters(2.33e7, 120e-6, 20, 175e9, 6e7, 0, 96, 0.27):.2g}"
    '6.6e+14'
    """
    ratio = duration_s * reference_batch_tokens
    ratio = ratio / (tokens_per_parameter * reference_parameters * reference_layers * block_latency_s)
    return reference_parameters * ratio ** (1 / (1 + layer_growth - batch_growth))


def hierarchical_all_reduce_words(size_words: Num, inside: Num, domains: Num, passes: Num) -> tuple[Num, Num]:
    r"""Words that a device moves on fast and on slow links in a hierarchical all-reduce, both directions together.

    $$V_f = k n \frac{p - 1}{p}, \qquad V_s = k \frac{n}{p} \frac{q - 1}{q}$$

    Vectors are first reduced inside the fast domains, so that each device exchanges a $p$-th of the sum with $q - 1$
    others, and gathered last.

    Args:
        size_words: $n$, words that each device reduces.
        inside: $p$, ranks in one fast domain.
        domains: $q$, fast domains.
        passes: $k$, times that the data passes a device: 3 as in `all_reduce_words`, 2 where the network reduces.

    Source: arXiv 2411.01137, notebook, for one level.

    >>> hierarchical_all_reduce_words(8, 4, 2, 2)
    (12.0, 2.0)
    >>> hierarchical_all_reduce_words(8, 4, 1, 3) == (all_reduce_words(8, 4), 0.0)
    True
    """
    return passes * size_words * (inside - 1) / inside, passes * size_words / inside * (domains - 1) / domains


def interleaved_batch_s(first_s: Num, phase_s: Num, step_s: Num, layers: Num, stages: Num, micro_batches: Num) -> Num:
    r"""Seconds of a batch through a pipeline that is interleaved block by block, seen from its first stage.

    $$T = t_1 + \Big(\frac{L}{P} - 1\Big) t_p + (m - 1) t + 2 (P - 1) t$$

    All but one layer of a stage take a phase of $m$ micro-batches and the reduction of their gradients, which overlaps
    with the phase; one layer stands at the boundary; the bubble is one block per stage.

    Args:
        first_s: $t_1$, a micro-batch of a layer with the reduction of its gradients (s).
        phase_s: $t_p$, all micro-batches of a layer with that reduction (s).
        step_s: $t$, a micro-batch of a layer, forward and backward (s).
        layers: $L$, linear layers.
        stages: $P$, stages of the pipeline.
        micro_batches: $m$, micro-batches of a stage.

    Source: D. Schneider-Joseph, ml_par_sim, run_optimizer2.ipynb (predecessor of arXiv 2411.01137).

    >>> interleaved_batch_s(2.0, 9.0, 1.0, 8, 2, 8)
    38.0
    """
    return first_s + (layers / stages - 1) * phase_s + (micro_batches - 1) * step_s + 2 * (stages - 1) * step_s
