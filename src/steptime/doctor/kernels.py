"""What a kernel is, from its name; which axis a collective belongs to, from its process group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: Groups of kernels in the order in which time that several share is given away.
GROUPS: Final = ("attention", "matmul", "optimizer", "memory_bound", "copies")
COMM: Final = "comm"

#: First match wins. Names are those of CUTLASS, cuBLAS, cuDNN, Triton, Transformer Engine, NCCL/RCCL, hipBLASLt.
_RULES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (COMM, re.compile(r"nccl|rccl|deep_ep|userbuffers|all_?reduce_(one|two)_?shot|multimem", re.I)),
    ("copies", re.compile(r"^mem(cpy|set)\b", re.I)),
    ("attention", re.compile(
        r"flash|fmha|sdpa|attention|attn(?!.*norm)|_bwd_kernel_dk|_bwd_kernel_dq|efficient_attention|paged_kv", re.I)),
    ("optimizer", re.compile(
        r"adam|lamb(?!da)|sgd|multi_tensor_apply|multi_tensor_l2norm|foreach|distributed_optim|muon", re.I)),
    ("matmul", re.compile(
        r"gemm|xmma|nvjet|cutlass.*(tensorop|wgmma|sm\d+)|cublas|matmul|_mm_|triton_(tem|mm)|splitKreduce|gemv|conv|"
        r"wgrad|dgrad|implicit_|Cijk_|s\d{4,5}(gemm|cudnn)|bmm", re.I)),
)  # fmt: skip
_COLLECTIVES: Final = (
    ("all_reduce", re.compile(r"all_?reduce", re.I)), ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)), ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("send_recv", re.compile(r"send|recv|p2p", re.I)), ("broadcast", re.compile(r"broadcast", re.I)),
)  # fmt: skip

#: Words of a process group's description, in the order in which they decide.
_AXIS_WORDS: Final = (
    ("pp", {"pp", "pipeline"}), ("ep", {"ep", "expert", "experts"}),
    ("dp", {"dp", "fsdp", "hsdp", "ddp", "data", "optimizer", "shard", "replicate", "zero"}),
    ("tp", {"tp", "tensor"}), ("cp", {"cp", "context", "sequence"}),
)  # fmt: skip
AXES: Final = ("tp", "cp", "ep", "dp", "pp")
UNASSIGNED: Final = "unassigned"


def group_of(name: str) -> str:
    """The group of a kernel; what is not recognised is taken as bound by memory.

    >>> group_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'comm'
    >>> group_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"), group_of("triton_red_fused_add_mul_3")
    ('matmul', 'memory_bound')
    """
    return next((group for group, pattern in _RULES if pattern.search(name)), "memory_bound")


def collective_of(name: str) -> str:
    """The collective that a kernel's or a record's name speaks of.

    >>> collective_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"), collective_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(name)), "other")


def axis_of(description: str, group_size: int | None, collective: str, degrees: Mapping[str, int]) -> str:
    """The mesh axis of a process group.

    Its description decides; then the only axis of more than one rank, of the group's size; then the collective.

    Args:
        description: ``Process Group Description`` of the trace, may be empty.
        group_size: ranks of the group, where known.
        collective: kind of collective.
        degrees: ranks of each axis, where known.

    >>> axis_of("TENSOR_MODEL_PARALLEL_GROUP", 8, "all_gather", {}), axis_of("mesh_dp_shard", None, "all_gather", {})
    ('tp', 'dp')
    """
    words = set(re.split(r"[^a-z]+", description.lower()))
    for axis, known in _AXIS_WORDS:
        if words & known:
            return axis
    wide = [axis for axis in AXES if degrees.get(axis, 1) > 1]
    same = [axis for axis in wide if degrees[axis] == group_size]
    for candidates in (wide, same):
        if len(candidates) == 1:
            return candidates[0]
    if collective == "send_recv" and (not degrees or degrees.get("pp", 1) > 1):
        return "pp"
    if collective == "all_to_all" and "ep" in wide:
        return "ep"
    return UNASSIGNED
