"""Families of what is left: expert blocks, grouped products, served layers, recurrent layers, single benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from steptime.cost.memory_bound import memory_bound_s
from steptime.cost.moe_time import experts_touched, grouped_products_s
from steptime.cost.recurrent import recurrent_s
from steptime.estimate.kernels import NVFP4_BYTES
from steptime.hardware.records import Device
from steptime.lab.calibrate import attention, memory_bound
from steptime.lab.calibrate.family import Coefficient, KernelFamily, rows_like
from steptime.lab.calibrate.memory_bound import GENERIC, element_bytes, of_a_model, only
from steptime.lab.calibrate.served import MODELS, SERVED, products
from steptime.lab.calibrate.table import Table
from steptime.num import Array

Shape = Callable[[Table], Mapping[str, Array]]
GROUPED: Final = (
    Coefficient(name="launch_s", start=2e-5, low=1e-6, high=1e-3),
    Coefficient(name="efficiency", start=0.5, low=0.005, high=1.0),
    Coefficient(name="memory_efficiency", start=0.6, low=0.01, high=1.0),
    Coefficient(name="pad_rows", start=48.0, low=4.0, high=512.0),
    Coefficient(name="overlap", start=2.0, low=1.0, high=6.0),
    Coefficient(name="start_depth", start=100.0, low=1.0, high=3000.0),
    Coefficient(name="skew", start=0.2, low=0.001, high=1.0),
)
WEIGHT_BYTES: Final = {
    "bfloat16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": NVFP4_BYTES, "int4_wo": 0.53,
    "w4a16_mxfp4": 0.53, "w4a8_mxfp4_mxfp8": 0.53,
}  # fmt: skip
"""Bytes per weight with its scales."""
PLACED: Final = re.compile(r"topk=(\d+);experts=(\d+);tp=(\d+);ep=(\d+);dist=(\w+)")
STEPS: Final = {
    ("Vanilla", 1760): 50, ("Vanilla", 2048): 50, ("Vanilla", 2560): 50, ("LSTM", 512): 25, ("LSTM", 1024): 25,
    ("LSTM", 2048): 25, ("LSTM", 4096): 25, ("LSTM", 1536): 50, ("LSTM", 256): 150, ("GRU", 512): 1,
    ("GRU", 1024): 1500,
}  # fmt: skip
"""Time steps of the benchmark by cell and width; those of the other widths are not unique (DeepBench, problem list)."""
GATES: Final = {"Vanilla": 1.0, "GRU": 3.0, "LSTM": 4.0}


def grouped_device(device: Device, dtype: str) -> dict[str, float]:
    """Datasheet numbers of :func:`grouped_products_s`; 4-bit weights run at the rate of the activations."""
    activations = {"int4_wo": "bf16", "w4a16_mxfp4": "bf16", "fp4": "fp4"}.get(dtype, dtype)
    return attention.device_arguments(device, activations)


def _grouped(
    groups: Array, rows: Array, columns: Array, depth: Array, weights: Array, moved: Array
) -> dict[str, Array]:
    return {
        "groups": groups, "rows": rows, "columns": columns, "depth": depth, "weight_bytes": weights,
        "activation_bytes": moved, "spread": np.ones(len(rows)),
    }  # fmt: skip


def expert_blocks(table: Table) -> dict[str, Array]:
    """Two (gated) products per expert; `m` tokens over all ranks, `n` the width of an expert."""
    found = [PLACED.search(notes) for notes in table.text("notes")]
    numbers = [[float(m[i]) for i in (1, 2, 3, 4)] if m else [np.nan] * 4 for m in found]
    choices, experts, tensor, ranks = np.array(numbers, np.float64).reshape(-1, 4).T
    tokens, hidden, wide = table.dim("m"), table.dim("k"), table.dim("n") / tensor
    touched = np.asarray(experts_touched(experts, tokens, choices))
    groups = np.maximum(touched / ranks, 1.0)
    rows = np.maximum(tokens * choices / np.where(touched > 0, touched, 1.0), 1.0)
    size = np.array([WEIGHT_BYTES.get(dtype, 2.0) for dtype in table.text("dtype")])
    weights = groups * 3 * wide * hidden * size
    moved = 2 * groups * rows * (2 * hidden + 3 * wide)
    skewed = np.array([bool(m) and "power" in m[5] if m else False for m in found], bool)
    out = _grouped(groups, rows, 3 * wide, hidden, weights, moved)
    return out | {"spread": np.where(skewed, ranks, 1.0)}


def latent_products(table: Table) -> dict[str, Array]:
    """Products per head around latent attention: 128 to 512 before, 512 to 128 after."""
    heads, rows = table.dim("h_q"), table.dim("m")
    before = np.array(["mla_gen_pre" in notes for notes in table.text("notes")])
    columns, depth = np.where(before, 512.0, 128.0), np.where(before, 128.0, 512.0)
    size = element_bytes(table)
    return _grouped(heads, rows, columns, depth, heads * 65536 * size, 2 * heads * rows * 640.0)


def grouped_products(table: Table) -> dict[str, Array]:
    """`batch` products of `m` x `k` by `k` x `n`."""
    groups, m, n, k = (table.dim(name) for name in ("batch", "m", "n", "k"))
    return _grouped(groups, m, n, k, 2 * groups * n * k, 2 * groups * m * (n + k))


def served_products(table: Table) -> dict[str, Array]:
    """Projections, experts and the output layer of a served model."""
    rows = table.dim("rows")
    columns, depth = products(table)
    size = element_bytes(table)
    return _grouped(np.ones(len(rows)), rows, columns, depth, columns * depth * size, rows * (columns + depth) * size)


def served_experts(table: Table) -> dict[str, Array]:
    """One expert block of a served model: `experts` of the note are active for one token each."""
    known = [re.search(r"model=([^;]+);tp=(\d+);experts=(\d+)", notes) for notes in table.text("notes")]
    rows = [(MODELS[m[1]].hidden, MODELS[m[1]].feedforward / int(m[2]), float(m[3])) if m else None for m in known]
    hidden, wide, experts = np.array([r or (np.nan,) * 3 for r in rows], np.float64).reshape(-1, 3).T
    ones = np.ones(len(hidden))
    return _grouped(experts, ones, 3 * wide, hidden, 6 * experts * wide * hidden, 2 * experts * hidden)


def recurrent(products_per_step: float) -> Shape:
    """Arguments of :func:`recurrent_s`."""

    def shape(table: Table) -> dict[str, Array]:
        cells = [re.search(r"cell=(\w+);hidden=(\d+)", notes) for notes in table.text("notes")]
        keys = [(m[1], int(m[2])) if m else ("", 0) for m in cells]
        batch = table.dim("b")
        return {
            "batch": batch,
            "hidden": np.array([float(h) for _, h in keys]),
            "gates": np.array([GATES.get(cell, np.nan) for cell, _ in keys]),
            "steps": np.array([float(STEPS.get(key, np.nan)) for key in keys]),
            "element_bytes": element_bytes(table),
            "products": np.full(len(batch), products_per_step),
        }

    return shape


RECURRENT: Final = (
    Coefficient(name="launch_s", start=5e-5, low=1e-6, high=1e-3),
    Coefficient(name="step_s", start=1e-5, low=1e-7, high=1e-3),
    Coefficient(name="efficiency", start=0.5, low=0.02, high=1.0),
    Coefficient(name="batch_half", start=20.0, low=0.1, high=300.0),
    Coefficient(name="weight_reuse", start=1.0, low=0.05, high=50.0),
)

CONFIGURATION: Final = re.compile(r"^mode=[\w-]+;(\w+)=([\d.]+);cfg=(\{.*\});liger=")
WIDTHS: Final = ("V", "vocab_size", "D", "ffn_local", "hidden_size", "H", "N", "intermediate_dim")
EAGER: Final = re.compile(r"/(huggingface|torch|megatron-unfused|deepspeed_tiled)$")
PASSES: Final = {"_bwd": 2.0, "_fwdbwd": 3.0}
"""Traffic of a backward pass, and of both, in units of the forward pass."""


def dimensions(notes: str) -> dict[str, float]:
    """Numbers of the configuration of a Liger benchmark, the swept one included.

    >>> dimensions('mode=forward;N=1024;cfg={"M": 4096, "eps": 1e-06};liger=0.2.1')
    {'M': 4096.0, 'eps': 1e-06, 'N': 1024.0}
    """
    found = CONFIGURATION.search(notes)
    if not found:
        return {}
    try:
        given: dict[str, Any] = json.loads(found[3])
    except ValueError:
        return {}
    numbers = {k: float(v) for k, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return numbers | {found[1]: float(found[2])}


def rows_of(size: Mapping[str, float]) -> float:
    """Tokens or rows of a configuration."""
    if "BT" in size:
        return size["BT"]
    batch = next((size[k] for k in ("B", "bsz", "batch_size") if k in size), 1.0)
    length = next((size[k] for k in ("T", "seq_len", "S", "M", "L") if k in size), 1.0)
    return batch * length


def benchmark(table: Table) -> dict[str, Array]:
    """Rows x width of a configuration; products over the vocabulary or a feed-forward as what they would move."""
    sizes = [dimensions(notes) for notes in table.text("notes")]
    rows = np.array([rows_of(s) if s else np.nan for s in sizes])
    width = np.array([next((s[k] for k in WIDTHS if k in s), 1.0) * _heads(s) for s in sizes])
    passes = np.array([next((v for k, v in PASSES.items() if op.endswith(k)), 1.0) for op in table.text("op")])
    moved = 2 * passes * rows * width * element_bytes(table)
    eager = np.array([bool(EAGER.search(kernel)) for kernel in table.text("kernel")])
    return memory_bound.columns(moved, rows, np.where(eager, moved, 0.0))


def _heads(size: Mapping[str, float]) -> float:
    """Maps over the sequence: keys times heads or channels."""
    return size["L"] * size.get("C_in", 1.0) if "L" in size else 1.0


LIGER: Final = (
    "cross_entropy", "cross_entropy_no-grad-forward", "distill_cosine_loss", "distill_jsd_loss", "dyt", "elementwise",
    "embedding", "fused_linear_cpo_loss", "fused_linear_cross_entropy", "fused_linear_grpo_loss_sequence",
    "fused_linear_grpo_loss_token", "fused_linear_jsd", "fused_linear_orpo_loss", "fused_linear_simpo_loss",
    "fused_moe", "fused_neighborhood_attention", "group_norm", "jsd", "kl_div", "kto_loss", "layernorm", "llama4_rope",
    "megatron_cross_entropy", "megatron_rms_norm", "megatron_swiglu", "mlp_geglu", "mlp_swiglu",
    "multi_token_attention", "poly_norm", "qwen2vl_mrope", "softmax", "sparse_multi_token_attention", "sparsemax",
    "tiled_geglu", "tiled_swiglu", "tvd",
)  # fmt: skip
PAIRS: Final = ("add", "sub", "mul", "div", "eq", "ge", "gt", "le", "lt", "ne", "rsub", "bitwise_and", "bitwise_or")
SINGLES: Final = (
    "abs", "cos", "exp", "gelu", "isinf", "isnan", "neg", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "silu",
    "sin", "tanh", "bitwise_not",
)  # fmt: skip
TENSORS: Final = {**dict.fromkeys(PAIRS, 3.0), **dict.fromkeys(SINGLES, 2.0)}
"""Tensors that an element-wise operator of FlagPerf moves, each of 1024 Mi elements (its case_config.yaml)."""


def flagperf(table: Table) -> dict[str, Array]:
    """Element-wise operators of one large shape."""
    tensors = np.array([TENSORS.get(op.removeprefix("flagperf_"), np.nan) for op in table.text("op")])
    moved = tensors * 2**30 * element_bytes(table)
    return memory_bound.columns(moved, np.ones(len(moved)))


WIDER: Final = {
    "launch_s": Coefficient(name="launch_s", start=1e-5, low=1e-6, high=2e-3),
    "efficiency": Coefficient(name="efficiency", start=0.3, low=2e-4, high=1.0),
    "reread": Coefficient(name="reread", start=1.0, low=0.01, high=300.0),
}
BENCHMARK: Final = tuple(WIDER.get(c.name, c) for c in GENERIC)
"""As the generic ones; products hide in some of them, so that they seem to use little of the bandwidth."""
ONE_SIZE: Final = tuple(
    c if c.name == "efficiency" else Coefficient(name=c.name, start=c.start, low=c.start, high=c.start) for c in GENERIC
)
"""As the generic ones, and only the share of the bandwidth is fitted."""


def _memory(name: str, ops: frozenset[str], shape: Shape, fitted: tuple[Coefficient, ...] = GENERIC) -> KernelFamily:
    return KernelFamily(
        name=name, ops=ops, formula=memory_bound_s, shape=shape,
        device=memory_bound.device_arguments, coefficients=fitted,
    )  # fmt: skip


def _products(name: str, op: str, shape: Shape, source: str = "", notes: str = "", kernel: str = "") -> KernelFamily:
    return KernelFamily(
        name=name, ops=frozenset({op}), formula=grouped_products_s, shape=matching(shape, source, notes, kernel),
        device=grouped_device, coefficients=GROUPED,
    )  # fmt: skip


def matching(shape: Shape, source: str, notes: str, kernel: str) -> Shape:
    """The shape, NaN on rows that do not match the expressions."""
    wanted = {"source": source, "notes": notes, "kernel": kernel}

    def masked(table: Table) -> dict[str, Array]:
        keep = rows_like(table, wanted)
        return {name: np.where(keep, values, np.nan) for name, values in shape(table).items()}

    return masked


MEMORY_FAMILIES: Final = (
    _memory("layer_attention", frozenset({"layer"}), only(of_a_model({"=attn;": 4.0}), SERVED)),
    *(
        _memory(f"liger_{op}{way}", frozenset({op + way}), only(benchmark, "^liger"), BENCHMARK)
        for op in LIGER
        for way in ("", "_bwd", "_fwdbwd")
    ),
    _memory("flagperf", frozenset(f"flagperf_{op}" for op in TENSORS), only(flagperf, "^flagperf"), ONE_SIZE),
)
"""In bytes only: curves of dtype ``any``."""
AIC: Final = "^aiconfigurator"
FAMILIES: Final = (
    *(
        _products(f"moe_{fw}_{name}", "moe", expert_blocks, AIC, f"^fw={fw};", kernel)
        for fw, name, kernel in (
            ("trtllm", "cutlass", "cutlass"), ("trtllm", "nongated", "nongated"), ("trtllm", "flow", "flow$"),
            ("sglang", "flashinfer", "flashinfer"), ("sglang", "triton", "triton(?!llm)|fused_moe_triton"),
            ("sglang", "marlin", "marlin"), ("vllm", "marlin", "marlin"), ("vllm", "flashinfer", "flashinfer"),
            ("vllm", "triton", "_triton_|fused_moe"), ("vllm", "xpu", "xpu"),
        )
    ),
    _products("moe_served", "moe", served_experts, SERVED),
    *(
        _products(f"mla_bmm_{fw}_{way}", "mla_bmm", latent_products, AIC, f"^fw={fw};.*gen_{way}")
        for fw in ("sglang", "trtllm", "vllm") for way in ("pre", "post")
    ),
    _products("grouped_gemm", "grouped_gemm", grouped_products, "", "stage=(fwd|bwd_grad_act)"),
    _products("grouped_gemm_weights", "grouped_gemm", grouped_products, "", "stage=bwd_grad_w"),
    *(
        _products(f"layer_{name}", "layer", served_products, SERVED, f"layer={layer};")
        for name, layer in (("output", "lm_head"), ("projection", r"\w_proj"), ("expert", r"expert\.w\d"),
                            ("gate", "gate"), ("sampler", "sampler"))
    ),
    *(
        KernelFamily(
            name=op, ops=frozenset({op}), formula=recurrent_s, shape=recurrent(count),
            device=attention.device_arguments, coefficients=RECURRENT,
        )
        for op, count in (("rnn_fwd", 1.0), ("rnn_bwd", 2.0), ("rnn_bwd_data", 1.0), ("rnn_bwd_weight", 1.0))
    ),
)  # fmt: skip
