"""Local sizes of a micro-batch under the corrected strategies, and what its ranks exchange at the ends of a region."""

from __future__ import annotations

import numpy as np

from steptime.cost.experts import greatest_imbalance
from steptime.model.spec import Experts, ModelSpec
from steptime.num import Num, ceil_div, minimum, where
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Transfer, over


class Shape:
    """Local sizes of a micro-batch under a tensor axis ``tp`` and a sequence axis."""

    def __init__(self, job: Job, plans: Plans, sequence_axis: str | None) -> None:
        model = job.model
        self.job, self.plans, self.model, self.axis = job, plans, model, sequence_axis
        self.element_bytes, self.mask_bytes = job.precision.element_bytes, job.precision.mask_bytes
        self.hidden, self.seq_len = model.hidden, job.seq_len
        self.attended = job.attended
        self.tp = plans.tp
        ranks: Num = getattr(plans, sequence_axis) if sequence_axis else 1
        self.local = ceil_div(job.seq_len, ranks)
        self.tokens = plans.micro_batch * self.local
        self.sharded_tokens = plans.micro_batch * ceil_div(self.local, tensor_shares(plans))
        """Tokens of the residual stream on one rank: of a sequence shard, or without sequence parallelism all."""
        self.heads, self.kv_heads = ceil_div(model.heads, plans.tp), ceil_div(model.kv_heads, plans.tp)
        self.value_dim = model.head_dim if model.latent is None else model.latent.v_head_dim
        self.query_width = self.heads * self.value_dim
        self.qkv_width = (self.heads + 2 * self.kv_heads) * model.head_dim
        self.ffn = ceil_div(model.ffn_hidden, plans.tp)
        self.ffn_in = self.ffn * model.mlp_inputs
        self.vocab = ceil_div(model.vocab, plans.tp)
        layer_norm = "one_pass_layer_norm" if job.one_pass_norms else "layer_norm"
        rms_norm = "plain_rms_norm" if job.plain_norms else "rms_norm"
        self.norm_kind = layer_norm if model.norm == "layernorm" else rms_norm
        self.norm_weights = 2 if model.norm_bias else 1
        whole = ranks > 1 if job.context == "all_gather" else ranks < 0
        self.gathered_kv = where(whole, 2 * plans.micro_batch * job.seq_len * self.kv_heads * model.head_dim, 0)
        """Keys and values of the whole sequence, where context ranks gather them."""
        self.activation_bytes = self.tokens * model.hidden * self.element_bytes

    def gather(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Before a column-parallel product; without sequence parallelism its input is whole already."""
        return self._sequence(size_bytes, ("all_gather",), ())

    def gather_again(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Backward of a column-parallel product: its input once more, and the gradient of the input."""
        return self._sequence(size_bytes, ("all_gather", "reduce_scatter"), ("all_reduce",))

    def scatter(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """After a row-parallel product."""
        return self._sequence(size_bytes, ("reduce_scatter",), ("all_reduce",))

    def gather_gradient(self, size_bytes: Num) -> tuple[Transfer, ...]:
        """Backward of a row-parallel product."""
        return self._sequence(size_bytes, ("all_gather",), ())

    def _sequence(self, size_bytes: Num, sharded: tuple[str, ...], whole: tuple[str, ...]) -> tuple[Transfer, ...]:
        """The traffic with or without sequence parallelism; in a block of both, each of its size or of none."""
        sp = self.plans.sp
        if not isinstance(sp, np.ndarray):
            return tuple([over("tp", kind, size_bytes) for kind in (sharded if sp else whole)])
        return (
            *(over("tp", kind, size_bytes * sp) for kind in sharded),
            *(over("tp", kind, size_bytes * (1 - sp)) for kind in whole),
        )

    @property
    def dense_share(self) -> float:
        """Share of the layers that have a dense MLP."""
        experts = self.model.experts
        return 1.0 if experts is None else (self.model.layers - experts.moe_layers) / self.model.layers

    @property
    def choices(self) -> int:
        """Experts of a token."""
        return _experts(self.model).experts_per_token

    @property
    def sent_rows(self) -> Num:
        """Copies of this rank's tokens that it sends to experts."""
        return self.sharded_tokens * self.choices

    @property
    def expert_rows(self) -> Num:
        """Rows that the experts of the fullest rank compute; ranks that share an expert gather all of its rows."""
        return self.sent_rows * self.plans.etp * self.expert_load

    @property
    def expert_load(self) -> Num:
        """Rows that the fullest expert rank computes over the mean: its slots, or what the job says if that can be."""
        if self.job.expert_capacity is not None:
            return self.job.expert_capacity
        if self.job.expert_imbalance == 1.0:
            return 1.0
        most = greatest_imbalance(self.choices, self.plans.ep, _experts(self.model).experts)
        return minimum(self.job.expert_imbalance, most)

    @property
    def expert_width(self) -> Num:
        """Local width of one expert."""
        return ceil_div(_experts(self.model).expert_ffn_hidden, self.plans.etp)

    @property
    def expert_in(self) -> Num:
        """Columns of an expert's first product."""
        return self.expert_width * self.model.mlp_inputs


def _experts(model: ModelSpec) -> Experts:
    if model.experts is None:
        raise ValueError("the model has no experts")
    return model.experts


def tensor_shares(plans: Plans) -> Num:
    """Parts into which the tensor ranks cut the sequence between products: ``tp``, or 1."""
    if isinstance(plans.sp, np.ndarray):
        return where(plans.sp > 0, plans.tp, 1)
    return plans.tp if plans.sp else 1
