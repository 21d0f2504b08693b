r"""Data movement and time of one linear layer that is split over two tensor axes and a data axis.

The layer multiplies a weight of $d_\text{in} \times d_\text{out}$ with $b$ tokens. Its input
dim is cut into `tp_in` parts, its output dim into `tp_out`, its tokens into `dp`. The model is
optimistic on purpose, so what it says cannot be done cannot be done:

* compute and every kind of data movement overlap fully, so the slowest resource sets the time;
* pipeline transfers, attention, pointwise operators, the optimiser step and every latency are free;
* on the chip only traffic with device memory counts: weights and their gradients always, activations
  only where backward reads them again;
* the multicast of an all-reduce is free to send, and degrees need not divide the dims.

Source: E. Erdil and D. Schneider-Joseph, "Data movement limits to frontier model training",
arXiv 2411.01137, and the authors' notebook (class `Device`).
"""

from __future__ import annotations

from steptime.num import Num, maximum


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
