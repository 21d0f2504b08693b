"""The defects of the published code as named switches: true keeps one, false corrects it.

All statements about the code are about the repository ``ShashankSubramanian/transformer-perf-estimates`` (commit
54278b0, October 2024), which belongs to arXiv 2410.00273. Symbols: $b$ = micro-batch (sequences), $l$ = sequence
length, $e$ = hidden width, $m_1$ = tensor-parallel ranks, $m_2$ = ranks of the sequence axis, $E$ = bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any


def _kept(fix: str) -> Any:
    """A switch that is on; ``fix`` says in one line what turning it off does."""
    return field(default=True, metadata={"fix": fix})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defects:
    """Which defects are kept; all of them by default, which is the published code to twelve digits."""

    summa_norm_width: bool = _kept("SUMMA norms are e/m1 wide, not l/m1")
    """The code hands the two norms of a SUMMA layer rows of $l/m_1$ elements, where a shard of the hidden dimension has
    $e/m_1$. Work, traffic, weights, kept bytes and the message between pipeline stages follow.
    The fix uses $e/m_1$."""
    free_slow_stage_links: bool = _kept("messages between stages pay for slow links too")
    """Where several stages share a fast domain, the code asks for the time of a message among one rank, which is zero,
    for the links that leave the domain. The fix charges them latency and bandwidth like any other link."""
    all_reduce_charged_once: bool = _kept("an all-reduce is two trips around the ring everywhere")
    """The code doubles the volume of an all-reduce only where its group both spans domains and shares them, and the
    latency never. The fix charges a reduce-scatter and an all-gather, each with its latency, for every group."""
    unsharded_row_biases: bool = _kept("biases after row-parallel products run on the sequence shard")
    r"""In 1D the code adds the two biases after row-parallel products to the whole activation $b\,l\,e$ on every rank,
    though the product's output was scattered over the sequence; in context parallelism it shards one over the sequence
    and the other over the hidden dimension. The fix runs each on $b\,l/(m_1 m_2)\,e$."""
    free_replicated_gradients: bool = _kept("gradients of replicated biases and norm weights are reduced")
    """Norm weights and sequence-sharded biases are the same on all ranks of an axis, whose gradients are partial sums;
    the code never reduces them. The fix adds one all-reduce over that axis per step."""
    local_key_reads: bool = _kept("backward attention reads the gathered keys and values")
    """The code gathers $K$ and $V$ for the backward pass but counts the reads of the local rows alone. The fix counts
    the reads of all $l$ rows."""
    no_causal_mask: bool = _kept("causal attention works on l(l+1)/2 pairs, not on l^2")
    """The code computes all $l^2$ (query, key) pairs for language models too. The fix counts $l(l+1)/2$ for a causal
    model with fused attention, and leaves other models as they are."""
    lone_rank_one_link: bool = _kept("a group with one rank per domain has all links of that rank")
    """The number of network links per device is not applied to groups with one rank in each domain, nor to messages
    between stages. The fix applies it. It is 1 in all systems of the paper, where this changes nothing."""
    whole_inputs_kept: bool = _kept("sharded inputs are kept and gathered again in backward")
    r"""Column-parallel products keep their gathered input, $b\,l\,e\,E$ on every rank. The fix keeps the shard,
    $1/m_1$ of it, and gathers it again in the backward pass: one all-gather more for each of the two products."""
    attention_output_kept_twice: bool = _kept("fused attention leaves its output to the projection to keep")
    """Fused attention keeps its output and the output projection keeps it again as its input. The fix counts it
    once."""
    no_optimizer_time: bool = _kept("the optimiser's own pass over its states takes time")
    """The step ends with the gradients' reduction. The fix adds the time to read and write the optimiser's states."""
    exact_filling: bool = _kept("a fast domain may be filled in part")
    """The code lists only placements that fill a fast domain exactly, so a domain of 72 and a power of two of devices
    have none. The fix lists the largest placements that fit, as the corrected space does."""
    equal_stages: bool = _kept("pipeline stages may differ by one layer")
    """The code takes only numbers of stages that divide the layers. The fix takes all up to the number of layers."""
    equal_shares: bool = _kept("shares of the batch may be uneven")
    """The code takes only replicas that divide the batch and micro-batches that divide a replica's share. The fix
    rounds the share and the number of micro-batches up."""

    def without(self, *names: str) -> Defects:
        """These defects without some of them.

        >>> Defects().without("no_causal_mask").no_causal_mask
        False
        """
        return replace(self, **dict.fromkeys(names, False))


FIXES: dict[str, str] = {f.name: f.metadata["fix"] for f in fields(Defects)}
"""Switch -> what turning it off does, in one line."""

NONE = Defects().without(*FIXES)
"""Every defect corrected."""
