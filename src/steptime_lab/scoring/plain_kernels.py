"""Times the kernels of a table that name no implementation as an estimate times the same operator.

Each becomes the node that a capture of the operator in PyTorch records, so that a table and ``steptime profile`` have
the same prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from steptime.captured.cost import Timer
from steptime.captured.cost.timing import OperatorCost
from steptime.captured.graph import Attribute, Node, Nodes, TensorType
from steptime.errors import UserError
from steptime.hardware.records import Device
from steptime.measure.runs.read import table

Sizes = Mapping[str, int]
Tensor = tuple[tuple[int, ...], str]
Made = tuple[str, Mapping[str, Tensor], Mapping[str, Attribute], tuple[tuple[int, ...], ...]]
"""Operator, shapes and element types of its inputs, attributes, shapes of its outputs."""
ROWS: Final = ("rows", "cols")
HEADS: Final = ("b", "h_q", "h_kv", "s_q", "s_kv", "d_qk", "d_v")
DTYPES: Final = ("bf16", "fp16", "fp32")
"""Element types that name a kernel of PyTorch by themselves; all others depend on a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """An operator that a row may name: the columns that it needs, and its node."""

    columns: tuple[str, ...]
    """Columns of its shape; a column with ``=`` has that value where the cell is empty."""
    node: Callable[[Sizes, str], Made]
    product: bool = False
    """True if every implementation is that of the vendor's library."""

    def sizes(self, cells: Mapping[str, float]) -> dict[str, int] | None:
        """Whole positive sizes of a row; None if one is missing or is not such a number."""
        out = {}
        for column in self.columns:
            name, _, usual = column.partition("=")
            value = cells.get(name, float("nan"))
            value = float(usual) if usual and value != value else value
            if not (0 < value < 2**53 and value == int(value)) and not (value == 0 and name == "conv_pad"):
                return None
            out[name] = int(value)
        return out


def _rows(op: str, inputs: str, **attributes: Attribute) -> Callable[[Sizes, str], Made]:
    """An operator on rows x cols with a result of the same shape; one input per name."""

    def made(s: Sizes, dtype: str) -> Made:
        shape = (s["rows"], s["cols"])
        return op, dict.fromkeys(inputs.split(), (shape, dtype)), dict(attributes), (shape,)

    return made


def _norm(op: str, inputs: str, weights: str, *, backward: bool = False) -> Callable[[Sizes, str], Made]:
    def made(s: Sizes, dtype: str) -> Made:
        shape, width = (s["rows"], s["cols"]), (s["cols"],)
        given: dict[str, Tensor] = {
            **dict.fromkeys(inputs.split(), (shape, dtype)),
            **dict.fromkeys(weights.split(), (width, dtype)),
        }
        out = (shape, *(width for _ in weights.split())) if backward else (shape, (s["rows"], 1))
        return op, given, {"normalized_shape": width}, out

    return made


def _product(s: Sizes, dtype: str) -> Made:
    m, n, k = s["m"], s["n"], s["k"]
    if s["batch"] == 1:
        return "mm", {"self": ((m, k), dtype), "mat2": ((k, n), dtype)}, {}, ((m, n),)
    groups = s["batch"]
    return "bmm", {"self": ((groups, m, k), dtype), "mat2": ((groups, k, n), dtype)}, {}, ((groups, m, n),)


def _attention(backward: bool) -> Callable[[Sizes, str], Made]:
    """Causal attention, as in training of language models; rows of other masks name their implementation."""

    def made(s: Sizes, dtype: str) -> Made:
        q, k, v = (
            (s["b"], s[h], s[n], s[d])
            for h, n, d in (("h_q", "s_q", "d_qk"), ("h_kv", "s_kv", "d_qk"), ("h_kv", "s_kv", "d_v"))
        )
        given: dict[str, Tensor] = {"query": (q, dtype), "key": (k, dtype), "value": (v, dtype)}
        if not backward:
            return "_scaled_dot_product_flash_attention", given, {"is_causal": True}, ((*q[:3], s["d_v"]),)
        gradient: dict[str, Tensor] = {"grad_out": ((*q[:3], s["d_v"]), dtype)}
        return "_scaled_dot_product_flash_attention_backward", gradient | given, {"is_causal": True}, (q, k, v)

    return made


def _embedding(s: Sizes, dtype: str) -> Made:
    shape = (s["rows"], s["cols"])
    return "embedding", {"weight": (shape, dtype), "indices": ((s["rows"],), "int64")}, {}, (shape,)


def _dropout(s: Sizes, dtype: str) -> Made:
    shape = (s["rows"], s["cols"])
    return "native_dropout", {"input": (shape, dtype)}, {"p": 0.1, "train": True}, (shape,)


def _convolution(s: Sizes, dtype: str) -> Made:
    stride, pad = s["conv_stride"], s["conv_pad"]
    high, wide = ((s[f"conv_{a}"] + 2 * pad - s[f"conv_k{a}"]) // stride + 1 for a in "hw")
    x = (s["batch"], s["conv_cin"], s["conv_h"], s["conv_w"])
    w = (s["conv_cout"], s["conv_cin"], s["conv_kh"], s["conv_kw"])
    attributes: dict[str, Attribute] = {
        "stride": (stride, stride),
        "padding": (pad, pad),
        "dilation": (1, 1),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": 1,
    }
    out = (s["batch"], s["conv_cout"], max(high, 1), max(wide, 1))
    return "convolution", {"input": (x, dtype), "weight": (w, dtype)}, attributes, (out,)


_DTYPES: Final = {
    **{name: name for name in ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64", "int8", "int32")},
    **dict.fromkeys(("bfloat16", "brain"), "bf16"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("float32", "float", "single", "f32"), "fp32"),
    **dict.fromkeys(("float64", "double"), "fp64"),
    **dict.fromkeys(("float8", "fp8_e4m3", "e4m3", "float8_e4m3fn", "fp8_e4m3fn"), "fp8"),
}
"""Spellings of element types by their names in the catalogue."""

OTHER_NAMES: Final[Mapping[str, Sequence[str]]] = table("columns")["operators"]
"""Other spellings of operators, apart from case and any of ``_``, ``-`` and space between words."""
PLAIN: Final[Mapping[str, Plain]] = {
    "gemm": Plain(columns=("m", "n", "k", "batch=1"), node=_product, product=True),
    "bmm": Plain(columns=("m", "n", "k", "batch"), node=_product, product=True),
    "attention_fwd": Plain(columns=HEADS, node=_attention(backward=False)),
    "attention_bwd": Plain(columns=HEADS, node=_attention(backward=True)),
    "layernorm": Plain(columns=ROWS, node=_norm("native_layer_norm", "input", "weight bias")),
    "layernorm_bwd": Plain(
        columns=ROWS, node=_norm("native_layer_norm_backward", "grad_out input", "weight bias", backward=True)
    ),
    "rmsnorm": Plain(columns=ROWS, node=_norm("_fused_rms_norm", "input", "weight")),
    "rmsnorm_bwd": Plain(
        columns=ROWS, node=_norm("_fused_rms_norm_backward", "grad_out input", "weight", backward=True)
    ),
    "softmax": Plain(columns=ROWS, node=_rows("_softmax", "self", dim=-1)),
    "softmax_bwd": Plain(columns=ROWS, node=_rows("_softmax_backward_data", "grad_output output", dim=-1)),
    "dropout": Plain(columns=ROWS, node=_dropout),
    "dropout_bwd": Plain(columns=ROWS, node=_rows("native_dropout_backward", "grad_output", scale=1.1)),
    "embedding": Plain(columns=ROWS, node=_embedding),
    "elementwise": Plain(columns=ROWS, node=_rows("relu", "self")),
    "add": Plain(columns=ROWS, node=_rows("add", "self other")),
    "gelu": Plain(columns=ROWS, node=_rows("gelu", "self")),
    "gelu_bwd": Plain(columns=ROWS, node=_rows("gelu_backward", "grad_output self")),
    "silu": Plain(columns=ROWS, node=_rows("silu", "self")),
    "conv_fwd": Plain(
        columns=(
            "batch",
            "conv_cin",
            "conv_cout",
            "conv_kh",
            "conv_kw",
            "conv_h",
            "conv_w",
            "conv_stride=1",
            "conv_pad=0",
        ),
        node=_convolution,
        product=True,
    ),
}
"""Operators that a row may name without saying whose kernel it is."""


def name_key(name: str) -> str:
    """A name without case and separators; ``backward`` and ``grad`` become ``bwd``.

    >>> name_key("Scaled Dot-Product_Attention backward"), name_key("RMSNorm")
    ('scaleddotproductattentionbwd', 'rmsnorm')
    """
    bare = re.sub(r"[\s_\-.:]+", "", name.lower())
    return re.sub(r"(backward|grad|bwd)$", "bwd", re.sub(r"(forward|fwd)$", "fwd", bare))


@cache
def _spellings() -> Mapping[str, str]:
    """Key of a spelling -> operator; a forward pass may have ``fwd`` in its name."""
    own = {name_key(name): op for op in PLAIN for name in (op, f"{op}_fwd")}
    others = {name_key(name): op for op, names in OTHER_NAMES.items() for name in names}
    return {**others, **own}


def operator_named(name: str) -> str:
    """The operator that a spelling means; the spelling itself where it means none.

    >>> [operator_named(name) for name in ("matmul", "RMS-Norm", "sdpa", "layer_norm_backward", "sort")]
    ['gemm', 'rmsnorm', 'attention_fwd', 'layernorm_bwd', 'sort']
    """
    return _spellings().get(name_key(name), name)


def dtype_named(name: str) -> str:
    """The element type that a spelling means; the spelling itself where it means none.

    >>> [dtype_named(name) for name in ("torch.float16", "BF16", "float8_e4m3fn", "float7")]
    ['fp16', 'bf16', 'fp8', 'float7']
    """
    return _DTYPES.get(re.sub(r"^(torch|jnp|np)\.", "", name.strip().lower()), name)


@dataclass(frozen=True, slots=True)
class PlainTimer:
    """Times rows as nodes; rows of equal shape are timed once."""

    timers: dict[str, Timer]
    nodes: Nodes

    @classmethod
    def fresh(cls) -> PlainTimer:
        """A timer that has seen no device yet."""
        return cls({}, Nodes())

    def cost(self, device: Device, op: str, dtype: str, cells: Mapping[str, float]) -> OperatorCost | None:
        """Cost of the operator of a row; None if it is not plain, a size is missing, or nothing can time it.

        Args:
            device: where it ran.
            op: name of the operator in :data:`PLAIN`.
            dtype: element type in the words of the catalogue.
            cells: sizes by column; NaN for an empty cell.
        """
        plain = PLAIN.get(op)
        sizes = plain.sizes(cells) if plain is not None and dtype in DTYPES else None
        if plain is None or sizes is None:
            return None
        timer = self.timers.setdefault(device.name, Timer(device=device))
        try:
            return timer.cost(self._node(plain.node(sizes, dtype), dtype))
        except (UserError, ArithmeticError):
            return None

    def _node(self, made: Made, dtype: str) -> Node:
        op, inputs, attributes, outputs = made
        values = {
            name: self.nodes.source("input", f"{name} {shape} {kind}", TensorType(shape, kind))
            for name, (shape, kind) in inputs.items()
        }
        return self.nodes.apply(op, values, attributes, outputs=[TensorType(shape, dtype) for shape in outputs])
