r"""Closed forms for the largest training run that latency allows, and for compute-optimal runs.

A run of $C$ FLOPs has $D/B$ steps, and each step passes $L$ blocks one after the other.
No number of devices makes a block faster than its latency $t$, so the run lasts at least
$(D/B) L t$. More devices do not help beyond that: it is a wall, at any utilisation.

Source: E. Erdil and D. Schneider-Joseph, "Data movement limits to frontier model training",
arXiv 2411.01137; Epoch, report on scaling until 2030 (August 2024), latency figures.
"""

from __future__ import annotations

from steptime.num import Num, log2


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
