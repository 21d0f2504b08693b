"""From the spellings of a table to names of steptime: accelerator, dtype, recomputation, sharding, and the rest.

Every reader takes any text and never raises: an unknown spelling comes back as unknown, for the caller to count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from steptime.errors import UserError
from steptime.hardware.library import device_named, load_device
from steptime.hardware.records import Device
from steptime.hardware.search_path import is_path
from steptime.plan.recompute import MODULES

_VENDORS: Final = re.compile(r"\b(nvidia|amd|intel|google|habana|instinct|tesla|geforce|accelerators?|gpus?|cloud)\b")
_PARENTHESES: Final = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")
_UNSURE: Final = re.compile(r"not stated|unknown|variant|\bor\b|[a-z]\d+\s*/\s*[a-z]\d+|\?")
_EITHER: Final = re.compile(r"([a-z]+\d+\w*)\s*/\s*([a-z]+\d+\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """Device that the name of an accelerator means."""

    name: str | None
    """Device of the catalogue; None: none, or more than one."""
    assumed: bool = False
    """The text leaves the variant open, or only a part of it is known."""
    ambiguous: bool = False
    """The text names several accelerators."""


@cache
def catalogue_device(name: str) -> Device:
    """The device of the catalogue, read once."""
    return load_device(name)


@cache
def device_name(text: str) -> DeviceName:
    """The accelerator of a spelling.

    Words in parentheses and vendors are dropped, then parts from the end, until the catalogue knows the rest.

    >>> device_name("NVIDIA H100-SXM-80GB (700W)").name, device_name("A100 (variant not stated)").assumed
    ('h100-sxm', True)
    >>> device_name("A800/H800 80GB").ambiguous, device_name("abacus").name
    (True, None)
    >>> device_name("NVIDIA A100 80GB PCIe").name  # as its driver says
    'a100-pcie-80gb'
    """
    plain = " ".join(text.lower()[:200].split())
    unsure = bool(_UNSURE.search(plain))
    bare = _VENDORS.sub(" ", _PARENTHESES.sub(" ", plain)).strip(" ,;:-")
    either = _EITHER.search(bare)
    if either is not None:
        names = {device_name(part).name for part in either.groups()} - {None}
        if len(names) > 1:
            return DeviceName(name=None, ambiguous=True)
        bare = either.group(1)
    called = device_named(bare)
    if called is not None:
        return DeviceName(name=called.name, assumed=unsure)
    parts = [part for part in re.split(r"[\s_-]+", re.sub(r"(\d)\s+gb\b", r"\1gb", bare)) if part]
    for kept in range(len(parts), 0, -1):
        found = _known("-".join(parts[:kept]))
        if found is not None:
            return DeviceName(name=found, assumed=unsure or kept < len(parts))
    return DeviceName(name=None)


def _known(spelling: str) -> str | None:
    if is_path(spelling) or len(spelling) < 2:
        return None
    try:
        return load_device(spelling).name
    except UserError:
        return None


#: Words next to FP8 -> recipe. A scale per row takes as many bytes to quantise as one per tensor that is found
#: beforehand.
_RECIPES: Final = (
    (r"tensor-?wise|row-?wise|current|(?<![a-z])cs(?![a-z])", "fp8-tensorwise"),
    (r"block-?wise|block[- ]?scal|sub-?channel|(?<![a-z])sc(?![a-z])", "fp8-blockwise"),
    (r"delayed|(?<![a-z])ds(?![a-z])|(?<=fp8[-_])te(?![a-z])", "fp8-te"),
)


def _next_to_fp8(words: str) -> tuple[str, str]:
    """Patterns of FP8 with one of ``words`` soon after it, or right before it (``current scaling FP8``)."""
    return rf"(?:fp8|float8)[^/]{{0,20}}?(?:{words})", rf"(?:{words})(?:[-_ ]?scaling)?[-_ ](?:fp8|float8)"


#: Pattern -> precision; where matches overlap, the first of this table counts.
_DTYPES: Final = (
    (r"nvfp4|nv[-_ ]?fp4", "nvfp4"),
    (r"mxfp8|mx[-_ ]?fp8|fp8[-_ ]?mx|fp8[^/]*\bmx\b", "mxfp8"),
    *((pattern, name) for words, name in _RECIPES for pattern in _next_to_fp8(words)),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"mxfp4|fp4", "nvfp4"),
    (r"int8|w8a8", "fp8"),
    (r"tf32|tensorfloat", "tf32"),
    (r"bf16|bfloat16|bfloat", "bf16"),
    (r"fp16|float16|\bhalf\b|amp_fp16|\bo[12]\b", "fp16"),
    (r"fp32|float32|\bsingle\b|\bfp ?32", "fp32"),
)
_QUANTISED_BASE: Final = re.compile(r"nf4|int4|4[- ]?bit|qlora")
_BASE_NOTE: Final = re.compile(r"\([^()]*(base|grad|accum|reduce|master|param|weight)[^()]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeName:
    """Precisions that a text may mean."""

    precisions: tuple[str, ...]
    """Several where the text is ambiguous; empty where nothing in it is known."""
    quantised_base: bool = False
    """Frozen weights are kept in four bits."""


def dtype_name(text: str) -> DtypeName:
    """Precisions of a spelling.

    >>> [dtype_name(t).precisions for t in ("FP8 (TE hybrid)", "FP8-MX", "FP8 or NVFP4", "BF16/FP16", "FP8-CS", "x")]
    [('fp8',), ('mxfp8',), ('nvfp4', 'fp8'), ('bf16', 'fp16'), ('fp8-tensorwise',), ()]
    """
    left = _BASE_NOTE.sub(" ", text.lower()[:200])
    base = bool(_QUANTISED_BASE.search(left))
    left = _QUANTISED_BASE.sub(" ", left)
    either = bool(re.search(r"\bor\b|/|ambiguous", left))
    found: list[str] = []
    for pattern, name in _DTYPES:
        if re.search(pattern, left):
            left = re.sub(pattern, " ", left)
            if name not in found:
                found.append(name)
    return DtypeName(precisions=tuple(found if either else found[:1]), quantised_base=base)


#: Recomputation of a measured run -> names of the plan's bits.
RECOMPUTE: Final = {
    "none": (),
    "attention": ("attention",),
    "full": ("full",),
    "ops": ("norm", "activation", "outputs"),
    "norms": ("norm", "up_projection"),
    "modules": ("norm", "up_projection", "activation"),
    "beside_attention": ("norm", "attention_out", "mlp", "experts"),
    "beside_products": ("norm", "attention", "activation"),
    "beside_projections": ("norm", "attention", "mlp", "experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Recomputation in the backward pass."""

    kind: str
    """``none``, ``attention`` (selective: scores and softmax), ``full`` (a layer from its input), ``ops`` (everything
    but the outputs of products and attention), ``norms`` (norms and cheap projections), ``beside_products`` (all but
    the products), ``beside_projections`` (all but queries, keys, values and the stream after attention),
    ``beside_attention`` (all but queries, keys, values and the result of attention); or parts of a layer in the
    words of a plan, joined by ``+``."""
    share: float = 1.0
    """Share of the layers that are recomputed."""


_EVERY: Final = re.compile(r"every[- ]?(other|\d+)|select\w*\W{1,3}(?:1/)?(\d{1,4})\b")
_BY_OPERATOR: Final = re.compile(r"\bops?\b|op[-_]level|op sac|by operator|toml default")


def recomputation(text: str, selective: str = "attention") -> Recomputation | None:
    """Recomputation that a text describes; None if it names none that is known.

    Args:
        text: what the row says.
        selective: kind that its framework calls selective without further words.

    >>> [r and (r.kind, r.share) for r in map(recomputation, ("full (remat)", "selective (every-other-layer)", ""))]
    [('full', 1.0), ('full', 0.5), None]
    >>> [recomputation(text).kind for text in ("core_attn", "mla_up_proj + moe_act", "mla_up_proj, mlp")]
    ['attention', 'up_projection+activation', 'up_projection+mlp']
    >>> [recomputation(text, "ops").kind for text in ("selective", "selective activation checkpointing", "selective 2")]
    ['ops', 'ops', 'full']
    """
    low = text.lower()[:300]
    if low.strip() in RECOMPUTE:
        return Recomputation(kind=low.strip())
    words = re.split(r"[\s+,/]+", low.strip())
    if all(word in MODULES for word in words):
        return Recomputation(kind="+".join(dict.fromkeys(MODULES[word] for word in words)))
    every = _EVERY.search(low)
    number = {"other": 2}.get(every.group(1) or "", 0) or int(every.group(1) or every.group(2)) if every else 1
    share = 1 / max(1, number)
    if re.search(r"\boff\b|disabled|\bno\b|without", low) or low.strip() in ("none", "false", "no", "0"):
        return Recomputation(kind="none")
    if _BY_OPERATOR.search(low):
        return Recomputation(kind="ops")
    if re.search(r"rmsnorm|layernorm|norms?\b|up-proj", low):
        return Recomputation(kind="norms")
    if every is not None or re.search(r"\bfull\b|\bremat\b|\blayer|\bblock|\btrue\b|uniform", low):
        return Recomputation(kind="full", share=share)
    if re.search(r"attention|core|sdpa|mlp", low):
        return Recomputation(kind="attention")
    if "select" in low:
        return Recomputation(kind=selective)
    return Recomputation(kind="full") if re.search(r"\bac\b|checkpoint", low) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of states over data-parallel ranks."""

    stages: tuple[int, ...]
    """ZeRO stages that the text may mean: 1 optimiser states, 2 gradients too, 3 weights too."""
    ranks: int | None = None
    """Ranks of one sharding group; None: the text has none, usually all data-parallel ranks."""
    replicas: int | None = None
    """Copies of the sharded model (hybrid sharding); None: the text has none."""
    within_node: bool = False
    """States are sharded over the ranks of a node, and every node holds a copy."""


#: Pattern -> stages, the first that is found.
_SHARDING: Final = (
    (r"^0/1\b|zero[-_ ]?0/1", (0, 1)),
    (r"zero[-_ ]?(stage[-_ ]?)?3", (3,)), (r"zero[-_ ]?(stage[-_ ]?)?2", (2,)),
    (r"zero[-_ ]?(stage[-_ ]?)?1|distributed[-_ ]optimi[sz]er", (1,)),
    (r"zero[-_ ]?(stage[-_ ]?)?0", (0,)),
    (r"^3\b", (3,)), (r"^2\b", (2,)), (r"^1\b", (1,)), (r"^0\b|^none$|^no\b|replicated|^ddp\b|no_shard", (0,)),
    (r"shard_grad_op|no reshard|reshard[_ a-z]*=? ?(false|never)|zero2", (2,)),
    (r"fsdp|hsdp|full_shard|hybrid_shard|fully sharded|\bsharded\b", (3,)),
)  # fmt: skip


_WITHIN_NODE: Final = re.compile(r"hsdp|hybrid[-_ ]?shard|(?:with)?in (?:a|each|one|the) node|intra-?node|per node")


def sharding(text: str) -> Sharding | None:
    """Sharding that a text describes; None if it names none that is known.

    >>> sharding("FSDP=128, DP=4")
    Sharding(stages=(3,), ranks=128, replicas=4, within_node=False)
    >>> sharding("FSDP SHARD_GRAD_OP").stages, sharding("FSDP2 (dp_shard 8)").ranks, sharding("")
    ((2,), 8, None)
    >>> sharding("HSDP").within_node, sharding("FSDP full shard").within_node, sharding("HSDP shard 16").within_node
    (True, False, False)
    """
    low = text.lower().strip()[:300]
    stages = next((found for pattern, found in _SHARDING if re.search(pattern, low)), None)
    if stages is None:
        return None
    if stages not in ((2,), (3,)):
        return Sharding(stages=stages)
    size = re.search(r"(?:fsdp2?|hsdp|dp_shard|shard)(?: size)?\s*(?:[=(:]\s*|\s+)(\d+)|(\d+)-way fully sharded", low)
    copies = re.search(r"(?:\bdp|dp_replicate|replicas?)\s*[=:]\s*(\d+)|(\d+)-way pod", low)
    ranks, replicas = (
        int(found.group(1) or found.group(2)) if found and len(found.group()) < 40 else None for found in (size, copies)
    )
    within = bool(_WITHIN_NODE.search(low)) and not ranks and not replicas
    return Sharding(stages=stages, ranks=ranks or None, replicas=replicas or None, within_node=within)


def fused_kernel(text: str) -> str | None:
    """Fused attention kernel that a text names; None if it names none that is known.

    >>> [fused_kernel(t) for t in ("flash (TE/cuDNN)", "flash (SDPA)", "xformers memory-efficient", "flash")]
    ['newest', 'sdpa', 'flash1', None]
    >>> [fused_kernel(t) for t in ("flash_attentionv1.0.8", "flash_attention2 + RMS kernel")]
    ['flash1', 'flash2']
    """
    named = (
        (r"fa[- ]?4|flash[- ]?attention[- ]?4", "flash4"),
        (r"cudnn|\bte\b|fa[- ]?3|flash[- ]?attention[- ]?3|ck|aiter", "newest"),
        (r"sdpa", "sdpa"),
        (r"fa[- ]?2|flash[-_ ]?attention[-_ ]?v?2", "flash2"),
        (r"triton|xformers|fa[- ]?1\b|flash[-_ ]?attention[-_ ]?v?1\b", "flash1"),
    )
    return next((kernel for pattern, kernel in named if re.search(pattern, text.lower())), None)


def attention_kernel(text: str) -> str | None:
    """``fused``, ``unfused``, or None where the text says neither.

    >>> [attention_kernel(t) for t in ("flash (TE)", "no flash (21.11)", "Megatron fused softmax (no flash)", "")]
    ['fused', 'unfused', 'unfused', None]
    """
    low = text.lower()
    if re.search(r"no[- ]flash|without flash|unfused|eager|naive|fused softmax|\bmath\b", low):
        return "unfused"
    if re.search(r"flash|cudnn|sdpa|flex|splash|xformers|memory[- ]efficient|fused|\bfa ?[234]\b|\bte\b|pallas", low):
        return "fused"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleName:
    """Pipeline schedule and gradient accumulation that a text states."""

    name: str | None
    """``1f1b``, ``interleaved``, ``zb-1p``, ``zb-2p``, ``zb-v``, ``dualpipe``, ``gpipe``, or None."""
    accumulation: int | None = None
    """Micro-batches per step and replica."""


def schedule_name(text: str) -> ScheduleName:
    """Schedule of a text.

    >>> schedule_name("FSDP grad-accum 4").accumulation, schedule_name("1F1B-I").name, schedule_name("ZB-2p").name
    (4, 'interleaved', 'zb-2p')
    """
    low = text.lower()[:200]
    rules = (
        (r"dual ?pipe", "dualpipe"),
        (r"zb[-_ ]?v", "zb-v"),
        (r"zb[-_ ]?2p|zb[-_ ]?h2", "zb-2p"),
        (r"zb[-_ ]?1p|zb[-_ ]?h1|zero[- ]bubble", "zb-1p"),
        (r"interleav|1f1b-i\b|virtual", "interleaved"),
        (r"1f1b|pipedream", "1f1b"),
        (r"gpipe|afab", "gpipe"),
    )
    name = next((found for pattern, found in rules if re.search(pattern, low)), None)
    count = re.search(r"accum\w*\s*[=:]?\s*(\d{1,9})", low)
    return ScheduleName(name=name, accumulation=int(count.group(1)) or None if count else None)


def offloaded(text: str, section: str = "") -> frozenset[str]:
    """Tensors kept in host memory: some of ``optimizer``, ``weights``, ``activations``.

    Args:
        text: what the row says.
        section: title of its table, which counts where the row refers to it (``see section``).

    >>> sorted(offloaded("optimizer+param")), sorted(offloaded("none"))
    (['optimizer', 'weights'], [])
    >>> sorted(offloaded("see section", "ZeRO-3 + Full Offload"))
    ['optimizer', 'weights']
    """
    low = (section if "see section" in text.lower() else text).lower()
    if "full offload" in low:
        return frozenset({"optimizer", "weights"})
    names = {"optimizer": r"optim|adam", "weights": r"param|weight", "activations": r"activ"}
    return frozenset(name for name, pattern in names.items() if re.search(pattern, low))


_RATE: Final = re.compile(r"(?<!\d)(\d{2,4})\s*G(?:b/s|bps|b/[Ss]ec|bit|bE)")
_TWO_NETWORKS: Final = re.compile(r"\d\s*GbE\s+InfiniBand", re.IGNORECASE)
"""One rate for two kinds of network: it can hold for one of them at most."""
_OTHER_TRAFFIC: Final = re.compile(r"management|storage:|nvlink|pcie|north", re.IGNORECASE)


def network_Bps(text: str, per_node: int) -> float | None:
    """Datasheet bandwidth between nodes per device and direction (bytes/s); None where the text states none.

    The fastest of the networks that a text lists, without those for storage and management.

    >>> network_Bps("4x Omni-Path 100 Gb/s per node", 4), network_Bps("400 Gb/s RDMA per GPU", 8)
    (12500000000.0, 50000000000.0)
    >>> network_Bps("100GbE InfiniBand", 8) is None
    True
    >>> network_Bps("Storage: 2x NDR 400Gb/s, Compute: 8x NDR 400Gb/s", 8), network_Bps("InfiniBand", 8)
    (50000000000.0, None)
    """
    best = 0.0
    for part in re.split(r"[,;+]|\band\b", text[:400]):
        found = _RATE.search(part)
        if found is None or _OTHER_TRAFFIC.search(part[: found.end()]) or _TWO_NETWORKS.search(part):
            continue
        cards = re.search(r"(?<!\d)(\d{1,2})\s*x", part[: found.start()])
        total = int(cards.group(1) if cards else 1) * int(found.group(1)) * 1e9 / 8
        each = re.search(r"per (gpu|accelerator|device|chip)|/gpu", part, re.IGNORECASE)
        best = max(best, total if each else total / max(1, per_node))
    return best or None
