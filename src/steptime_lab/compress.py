"""Compressed products on a device: bytes, times, and the schemes that pay.

A scheme is a row of :data:`SCHEMES`: the format of the weight, the units that multiply it, the dtype of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from steptime.captured.cost import Timer, Work
from steptime.captured.ops.work import KernelCall
from steptime.cost.matmul import matmul_flops
from steptime.cost.quantisation import quantised_bytes
from steptime.errors import UserError
from steptime.hardware.records import Device
from steptime_lab.cost import compression as c

LARGEST: Final = 1 << 24
SPARSE_UNITS: Final = frozenset(
    {"ampere", "ampere-rtx", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"}
)
"""Architectures whose matrix units skip 2 of 4 weights at twice the rate.

Source: NVIDIA A100 and later architecture white papers; AMD CDNA3 white paper, 4:2 sparsity.
"""
EIGHT_BITS_ALIKE: Final = frozenset({"hopper", "ada"})
"""Architectures whose int8 rate equals the fp8 rate, by their datasheets."""
GROUP: Final = 128
RANK_SHARE: Final = 0.25
SPARSE_SPEED: Final = 2.0
WORTH: Final = 0.98
"""A scheme pays if it takes less than this share of the time of the dense product."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """The dense product in 16 bits and the device it runs on."""

    tokens: int
    rows: int
    columns: int
    device: Device

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.rows * self.columns

    @property
    def activation_bytes(self) -> float:
        """Input and output in 16 bits."""
        return 2.0 * self.tokens * (self.rows + self.columns)

    @property
    def flops(self) -> float:
        """FLOPs of the dense product."""
        return float(matmul_flops(self.tokens, self.rows, self.columns, 1))

    def rate(self, dtype: str) -> float | None:
        """Sustained rate of the units for products in a dtype; None where the device lacks it or it is unknown."""
        device = self.device
        peak = device.matrix_flops_per_s.get(dtype)
        if peak is None and dtype == "int8" and device.architecture in EIGHT_BITS_ALIKE:
            peak = device.matrix_flops_per_s.get("fp8")
        return None if peak is None else peak * device.matrix_efficiency

    @property
    def wide(self) -> str:
        """The 16-bit dtype of the device's matrix units; fp32 where they have none."""
        return next((name for name in ("bf16", "fp16") if name in self.device.matrix_flops_per_s), "fp32")

    @property
    def wide_rate(self) -> float:
        """Sustained rate of a dense product in 16 bits; the vector units' peak where no matrix rate is known."""
        return self.rate(self.wide) or self.device.peak_vector_flops_per_s

    @cached_property
    def dense_s(self) -> float:
        """Time of the dense product by the fitted curve of the device, else by the roofline."""
        work = {"matrix_flops": self.flops, "vector_flops": 0.0, "moved_bytes": self._dense_bytes}
        call = KernelCall(operator="matmul", shape={"m": self.tokens, "n": self.rows, "k": self.columns})
        dtype = self.wide if self.wide in self.device.matrix_flops_per_s else "fp32"
        return (
            Timer(device=self.device)
            .time("mm", Work(**work, launches=1.0, kernels=(call,), dtype=dtype, family="product"))
            .seconds
        )

    @property
    def _dense_bytes(self) -> float:
        return 2.0 * self.weights + self.activation_bytes

    def time_s(self, flops: float, rate: float, weight_bytes: float, activation_bytes: float, kernels: int) -> float:
        """Time of a product of one or more kernels: its roofline, scaled by time over roofline of the dense product."""
        own_s = self._roofline_s(flops, rate, weight_bytes, activation_bytes, kernels)
        return (
            own_s
            * self.dense_s
            / self._roofline_s(self.flops, self.wide_rate, 2.0 * self.weights, self.activation_bytes, 1)
        )

    def _roofline_s(
        self, flops: float, rate: float, weight_bytes: float, activation_bytes: float, kernels: int
    ) -> float:
        bandwidth = self.device.memory_Bps * self.device.memory_efficiency
        latency_s = kernels * self.device.kernel_latency_s
        return float(c.compressed_product_s(flops, rate, weight_bytes, activation_bytes, bandwidth, latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """One scheme on one product."""

    scheme: str
    weight_bytes: float
    ratio: float
    """Bytes of the dense weight in 16 bits over `weight_bytes`."""
    time_s: float | None
    """None where the device lacks the units."""
    speedup: float | None
    pays: bool
    why: str


Timed: TypeAlias = tuple[float, float | None, str]
"""Bytes of the weight, seconds (None without the units), and a remark on the limit."""


def _dense(p: Product) -> Timed:
    return 2.0 * p.weights, p.dense_s, ""


def _stored(p: Product, bits: float, scales: float, scale_bytes: float = 2.0) -> Timed:
    """Narrow weights that are expanded before 16-bit units multiply them."""
    weight = float(quantised_bytes(p.weights, bits, scales, scale_bytes))
    rate = p.wide_rate
    limit = c.memory_bound_tokens(weight / p.weights, rate, p.device.memory_Bps * p.device.memory_efficiency)
    return (
        weight,
        p.time_s(p.flops, rate, weight, p.activation_bytes, 1),
        (f"products stay in 16 bits: helps below {limit:,.0f} tokens"),
    )


def _both(p: Product, dtype: str, scales: float, scale_passes: int) -> Timed:
    """Weights and activations in 8 bits on 8-bit units."""
    return _eight_bits(p, dtype, float(quantised_bytes(p.weights, 8, scales, 2.0)), scale_passes, 1.0)


def _eight_bits(p: Product, dtype: str, weight: float, scale_passes: int, speed: float) -> Timed:
    """A product of 8 bits at a multiple of the dense rate; activations are quantised in a kernel of their own."""
    rate = p.rate(dtype)
    if rate is None:
        return weight, None, f"no rate of {dtype} units is known"
    entered = p.tokens * p.columns
    moved = float(c.quantise_pass_bytes(entered, 2, 1, scale_passes))
    pass_s = moved / (p.device.memory_Bps * p.device.memory_efficiency) + p.device.kernel_latency_s
    product_s = p.time_s(p.flops, speed * rate, weight, entered + 2.0 * p.tokens * p.rows, 1)
    return weight, product_s + pass_s, f"quantising activations is {100 * pass_s / (product_s + pass_s):.0f} % of it"


def _structured(p: Product) -> Timed:
    weight = float(c.structured_sparse_bytes(p.weights, 2))
    rate = p.rate(p.wide)
    if p.device.architecture not in SPARSE_UNITS or rate is None:
        return weight, None, "no units that skip 2 of 4"
    return (
        weight,
        p.time_s(p.flops, SPARSE_SPEED * rate, weight, p.activation_bytes, 1),
        "needs 2 zeros in every 4 weights",
    )


def _structured_int8(p: Product) -> Timed:
    weight = float(c.structured_sparse_bytes(p.weights, 1)) + 2.0 * p.rows
    if p.device.architecture not in SPARSE_UNITS:
        return weight, None, "no int8 units that skip 2 of 4"
    return _eight_bits(p, "int8", weight, 0, SPARSE_SPEED)


def _unstructured(p: Product, density: float) -> Timed:
    """A bitmap and the kept weights: expanded for the matrix units, or multiplied on the vector units, if faster."""
    weight = float(c.bitmap_sparse_bytes(p.weights, density, 2))
    rate = p.wide_rate
    expanded_s = p.time_s(p.flops, rate, weight, p.activation_bytes, 1)
    vector = p.device.peak_vector_flops_per_s * p.device.vector_efficiency
    skipped_s = p.time_s(p.flops * density, vector, weight, p.activation_bytes, 1)
    if skipped_s < expanded_s:
        return weight, skipped_s, "zeros are skipped on the vector units"
    return weight, expanded_s, "matrix units multiply the zeros: only bytes are saved"


def _low_rank(p: Product) -> Timed:
    most = float(c.low_rank_break_even(p.rows, p.columns))
    rank = max(1, round(2 * RANK_SHARE * most))
    weight = 2.0 * float(c.low_rank_elements(p.rows, p.columns, rank))
    rate = p.wide_rate
    flops = float(c.low_rank_flops(p.tokens, p.rows, p.columns, rank))
    moved = p.activation_bytes + 4.0 * p.tokens * rank  # the intermediate result is written and read
    return weight, p.time_s(flops, rate, weight, moved, 2), f"rank {rank:,}; any below {most:,.0f} has fewer weights"


SCHEMES: Final[Mapping[str, Callable[[Product], Timed]]] = {
    "dense, 16 bits": _dense,
    "int8 weights, per tensor": lambda p: _stored(p, 8, 1),
    "int8 weights, per channel": lambda p: _stored(p, 8, p.rows),
    "int8 weights, groups of 128": lambda p: _stored(p, 8, float(c.scales_of(p.rows, p.columns, GROUP))),
    "4-bit weights, groups of 128": lambda p: _stored(p, 4, float(c.scales_of(p.rows, p.columns, GROUP))),
    "NF4, two levels of scales": lambda p: _stored(p, float(c.scale_levels_bits(4, (64, 256), (8, 32))), 0),
    "int8 both, scale per tensor": lambda p: _both(p, "int8", 1, 1),
    "int8 both, per channel and token": lambda p: _both(p, "int8", p.rows, 0),
    "fp8 both, groups of 128": lambda p: _both(p, "fp8", float(c.scales_of(p.rows, p.columns, GROUP)), 0),
    "2:4 sparse, 16 bits": _structured,
    "2:4 sparse, int8 both": _structured_int8,
    "unstructured, half kept": lambda p: _unstructured(p, 0.5),
    "unstructured, a tenth kept": lambda p: _unstructured(p, 0.1),
    "unstructured, a hundredth kept": lambda p: _unstructured(p, 0.01),
    "low rank, half the weights": _low_rank,
}


def compressed(tokens: int, rows: int, columns: int, device: Device) -> tuple[Compressed, ...]:
    """Every scheme on one product, the dense one first.

    Raises:
        UserError: a size that is not possible.

    >>> from steptime.hardware import load_device
    >>> rows = compressed(1, 4096, 4096, load_device("h100-sxm"))
    >>> [row.scheme for row in rows if row.ratio > 3.5 and row.pays][:2]
    ['4-bit weights, groups of 128', 'NF4, two levels of scales']
    """
    for name, size in (("tokens", tokens), ("rows", rows), ("columns", columns)):
        if not 1 <= size <= LARGEST:
            raise UserError(f"{name}: {size} is not a size from 1 to {LARGEST:,}")
    product = Product(tokens=tokens, rows=rows, columns=columns, device=device)
    dense_bytes, dense_s, _ = _dense(product)
    out = []
    for scheme, price in SCHEMES.items():
        weight_bytes, time_s, why = price(product)
        out.append(
            Compressed(
                scheme=scheme,
                weight_bytes=weight_bytes,
                ratio=dense_bytes / weight_bytes,
                time_s=time_s,
                speedup=None if time_s is None else (dense_s or 0.0) / time_s,
                pays=time_s is not None and time_s < WORTH * (dense_s or 0.0),
                why=why,
            )
        )
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Times of a training step of one product with narrow formats."""

    aware_s: float
    """Time that quantisation-aware training adds: rounding of weights and activations, masks of clipped elements."""
    step_s: float
    """Time of the dense products of forward and backward."""
    gradient_wide_s: float
    """Time of the all-reduce of the weight's gradient in 16 bits."""
    gradient_narrow_s: float
    """Time of the all-reduce in 8 bits with a scale per group, with the passes that quantise and expand."""
    break_even_Bps: float
    """Bandwidth of links below which 8 bits pay."""


def training(tokens: int, rows: int, columns: int, device: Device, *, ranks: int, link_Bps: float) -> Training:
    """Quantisation-aware training of one product, and its gradient exchanged in 8 bits.

    >>> from steptime.hardware import load_device
    >>> found = training(8192, 4096, 4096, load_device("h100-sxm"), ranks=8, link_Bps=25e9)
    >>> found.gradient_narrow_s < found.gradient_wide_s
    True
    """
    product = Product(tokens=tokens, rows=rows, columns=columns, device=device)
    bandwidth = device.memory_Bps * device.memory_efficiency
    added = float(c.fake_quantised_bytes(product.weights, tokens * columns, 2))
    passes = 2 * float(c.quantise_pass_bytes(1, 2, 1, 0))  # quantised before, expanded after
    narrow_bytes = float(quantised_bytes(GROUP, 8, 1, 2.0)) / GROUP
    exchange = (product.weights, ranks, link_Bps)
    return Training(
        aware_s=added / bandwidth + 4 * device.kernel_latency_s,
        step_s=3 * (_dense(product)[1] or 0.0),
        gradient_wide_s=float(c.exchanged_gradient_s(exchange[0], 2, *exchange[1:], 0.0, bandwidth)),
        gradient_narrow_s=float(
            c.exchanged_gradient_s(exchange[0], narrow_bytes, *exchange[1:], passes * product.weights, bandwidth)
        ),
        break_even_Bps=float(c.gradient_break_even_Bps(2 - narrow_bytes, ranks, passes, bandwidth)),
    )
