"""Concepts of a launch: common names for the keys of a run and the options of launch files.

A concept is a key of a run (``tp``, ``dtype``), a part of one (``overlap.tp``, ``model.layers``), or a quantity that
software has in place of a key (``nodes``, ``replicate``). Tables relate the latter to keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from steptime.api.jobs import OF_FRAMEWORK
from steptime.errors import PlanError
from steptime.options import KEYS, OPTIONS, choices_of
from steptime.plan.recompute import recompute_code, recompute_text

Values = dict[str, Any]

OVERLAPS: Final = choices_of("overlap")
OFFLOADS: Final = choices_of("offload")
OWN: Final = (*OF_FRAMEWORK, "dp", "tp2", "sp", "micro_batch", "panels", "zero", "offload", "dispatcher", "expert_load")
"""Keys of a plan with a framework's default, keys that every run has, and keys that no launch file has."""
USUAL: Final = tuple(name for name in KEYS if name not in OWN)
"""Keys that a written run leaves out at their default value."""
#: Concept -> default value, which a written run leaves out.
NEUTRAL: Final[Mapping[str, Any]] = {
    "dtype": "bf16",
    "optimizer": "adam",
    **{name: OPTIONS[name].usual for name in USUAL},
    "sp": "on",
    **{f"offload.{name}": False for name in OFFLOADS},
    "lora.rank": None,
    "lora.targets": "linear",
    "lora.qlora": False,
}
#: Concept -> degree or condition without which it does not apply.
NEEDS: Final[Mapping[str, str]] = {
    "sp": "tp",
    "vpp": "pp",
    "schedule": "pp",
    "virtual_layers": "pp",
    "context": "cp",
    "dispatcher": "ep",
    "overlap.tp": "tp",
    "overlap.pp": "pp",
    "overlap.ep": "experts",
    "overlap.dp": "shared",
    "zero": "shared",
    "shard": "sharing",
    "ep": "experts",
    "etp": "experts",
    "expert_capacity": "experts",
    "expert_imbalance": "experts",
    "lora.targets": "lora",
    "lora.qlora": "lora",
    "recompute_every": "recomputed",
}


def _experts(values: Values) -> bool:
    return bool(values.get("model.experts.experts"))


_GROUPS: Final[Mapping[str, Callable[[Values], bool]]] = {
    # weights of experts have replicas on the tensor ranks that do not cut them
    "shared": lambda v: v.get("dp") is None or v["dp"] * v.get("cp", 1) * (v.get("tp", 1) if _experts(v) else 1) > 1,
    "sharing": lambda v: v.get("dp") is None or v["dp"] > 1,
    "experts": _experts,
    "lora": lambda v: v.get("lora.rank") is not None,
    "recomputed": lambda v: v.get("recompute") == "full",
}


def matters(concept: str, values: Values) -> bool:
    """True if a concept applies to a job with these values.

    An unknown number of data ranks may be above 1; other unknown degrees are 1.

    >>> matters("sp", {"tp": 1}), matters("sp", {"tp": 2}), matters("zero", {"dp": 1, "cp": 2}), matters("zero", {})
    (False, True, True, True)
    """
    need = NEEDS.get(concept)
    if need is None:
        return not concept.startswith("model.experts.") or _GROUPS["experts"](values)
    return _GROUPS[need](values) if need in _GROUPS else (values.get(need) or 1) > 1


#: Concept of software -> keys of a run that it stands for.
STANDS_FOR: Final[Mapping[str, tuple[str, ...]]] = {
    "mesh_tp": ("tp",),
    "mesh_cp": ("cp",),
    "model_tp": ("tp",),
    "mesh_shape": ("tp", "shard"),
    "fsdp_mesh": ("shard",),
    "fsdp_shard": ("shard",),
    "shard_ranks": ("shard",),
    "fsdp_axis": ("shard",),
    "instances": ("shard",),
    "expert_axis": ("ep",),
    "virtual_layers": ("vpp",),
    "recompute.how": ("recompute", "recompute_every"),
    "recompute.layers": ("recompute", "recompute_every"),
    "capacity": ("expert_capacity",),
}


def relevant(values: Values) -> Values:
    """The values without concepts that do not apply to the job."""
    return {concept: value for concept, value in values.items() if matters(concept, values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A concept that is the product of others; any one of them follows from the rest."""

    whole: str
    parts: tuple[str, ...]
    needed: bool = True
    """True: parts that do not divide the whole are refused; False: they leave the rest unknown."""

    def completed(self, values: Values) -> Values:
        """The one concept that follows, if all others are known.

        Raises:
            PlanError: the parts do not multiply to the whole; the message shows the arithmetic.
        """
        missing = [name for name in (self.whole, *self.parts) if values.get(name) is None]
        known = prod(values[name] for name in self.parts if values.get(name) is not None)
        if missing == [self.whole]:
            return {self.whole: known}
        if len(missing) > 1 or (not missing and values[self.whole] == known):
            return {}
        if missing and known and not values[self.whole] % known:
            return {missing[0]: values[self.whole] // known}
        if not self.needed:
            return {}
        factors = " x ".join(f"{_said(name)} {values[name]}" for name in self.parts if name not in missing)
        relation = "is not divisible by" if missing else "is not"
        raise PlanError(
            f"{_said(self.whole)} {values[self.whole]} {relation} {factors} = {known}",
            hint=f"{_said(self.whole)} = {' x '.join(map(_said, self.parts))}",
        )


_CALLED: Final = {
    "gpus": "world size",
    "global_batch": "global batch",
    "micro_batch": "micro-batch",
    "micro_batches": "micro-batches per step",
    "node_devices": "devices per node",
    "shard_ranks": "shards",
    "replicate": "replicas of the shards",
}


def _said(concept: str) -> str:
    return _CALLED.get(concept, concept.replace("_", " "))


PRODUCTS: Final = (
    Product(whole="gpus", parts=("nodes", "node_devices")),
    Product(whole="gpus", parts=("tp", "cp", "pp", "dp")),
    Product(whole="dp", parts=("replicate", "shard_ranks")),
    Product(whole="global_batch", parts=("micro_batch", "micro_batches", "dp")),
    Product(whole="replica_batch", parts=("micro_batch", "micro_batches")),
    Product(whole="data_ranks", parts=("dp", "cp")),
    Product(whole="data_ranks", parts=("instances", "shard_ranks"), needed=False),
    Product(whole="model.layers", parts=("pp", "vpp", "virtual_layers"), needed=False),
    Product(whole="virtual_layers", parts=("recompute_layers", "recompute_every"), needed=False),
    Product(whole="replicate", parts=("replicate_outside", "ep"), needed=False),
    Product(whole="shard_ranks", parts=("shard_outside", "ep"), needed=False),
    Product(whole="sequence_tokens", parts=("seq", "micro_batch"), needed=False),
)


def multiplied(values: Values) -> Values:
    """The values with all concepts that follow from products.

    Raises:
        PlanError: numbers that do not multiply.

    >>> multiplied({"gpus": 64, "tp": 8, "cp": 1, "pp": 2})["dp"]
    4
    """
    out = dict(values)
    while True:
        found: Values = {}
        for product in PRODUCTS:
            found |= product.completed(out | found)
        if not found:
            return out
        out |= found


def above_one(name: str, values: Values) -> bool:
    """True if a degree is above 1; ``sharded``: gradients are sharded, ``hybrid``: the shards have replicas.

    >>> above_one("tp", {"tp": 2}), above_one("sharded", {"zero": 1}), above_one("hybrid", {"replicate": 4})
    (True, False, True)
    """
    if name == "sharded":
        return (values.get("zero") or 0) > 1
    degree = values.get("replicate" if name == "hybrid" else name) or 1
    return degree > 1 or degree == -1


#: Name of a device mesh axis in scripts -> concept.
MESH_NAMES: Final = {
    **dict.fromkeys(("replicate", "dp_replicate", "ddp", "inter_node"), "replicate"),
    **dict.fromkeys(("shard", "dp_shard", "fsdp", "dp", "data", "intra_node"), "shard_ranks"),
    **dict.fromkeys(("tp", "model", "tensor"), "tp"),
    **dict.fromkeys(("cp", "context"), "cp"),
}


def with_parts(values: Values) -> Values:
    """The values of a run with the concepts that software has in place of its keys.

    Raises:
        PlanError: numbers that do not multiply, as a global batch that is no multiple of the replicas.
    """
    out: Values = {**NEUTRAL, "zero": 0, **values}
    every, text = out["recompute_every"], out["recompute"]
    out["recompute.how"] = "some" if every > 1 else {"none": "none", "full": "all"}.get(text, "parts")
    out["recompute.layers"] = f"every {every}" if every > 1 else text
    out["recompute.parts"] = tuple(sorted(text.split("+"))) if out["recompute.how"] == "parts" else None
    out["shard_ranks"] = (out["shard"] or out["dp"]) if out["zero"] else 1
    out = multiplied(out)
    if every == 1:
        out.pop("recompute_layers", None)
    piped, zero = out["pp"] > 1, out["zero"]
    out |= {
        "local_batch": out["replica_batch"] if piped else out["micro_batch"],
        "piped_micro_batch": out["micro_batch"] if piped else None,
        "piped_micro_batches": out["micro_batches"] if piped else None,
        "accumulated": 1 if piped else out["micro_batches"],
        "capacity": out.get("expert_capacity"),
    }
    out["device_batch"] = out["global_batch"] / out["gpus"] / out["accumulated"]
    out["expert_axis"] = out["ep"]
    out["data_axis"] = out["replicate"] if zero == 3 else out.get("replicate_outside")
    if zero == 1:
        out["data_axis"] = out.get("shard_outside")
    out["fsdp_axis"] = out.get("shard_outside") if zero == 3 else 1
    meshed = zero > 1 or out["tp"] * out["cp"] > 1
    out["fsdp_replicate"], out["fsdp_shard"] = (out["replicate"], out["shard_ranks"]) if meshed else (None, None)
    out["mesh_tp"], out["mesh_cp"] = (out["tp"], out["cp"]) if meshed else (None, None)
    out["mesh_shape"], out["mesh_names"] = _mesh(out)
    out["deepspeed_steps"] = out["micro_batches"] if zero == 1 else None
    out["fsdp_mesh"] = (out["replicate"], out["shard_ranks"]) if zero > 1 and out["replicate"] > 1 else None
    out["model_tp"], out["model_dp"] = (out["tp"], out["dp"]) if out["tp"] > 1 else (None, None)
    return out | _of_model(out)


def _of_model(values: Values) -> Values:
    """Concepts that software has in place of a model's dimensions."""
    if not values.get("model.hidden"):
        return {}
    layers, moe = values["model.layers"], values.get("model.experts.moe_layers")
    return {
        "positions": values.get("seq"),
        "dropout.hidden": None if values.get("model.dropout") else 0,
        "dropout.attention": None if values.get("model.dropout") else 0,
        "model.expansion": values["model.ffn_hidden"] / values["model.hidden"],
        "model.grouped": (grouped := values["model.kv_heads"] != values["model.heads"]),
        "model.grouped_kv": values["model.kv_heads"] if grouped else None,
        "model.block": _block(values),
        "model.is_latent": values.get("model.latent.kv_lora_rank") is not None,
        "model.experts.pattern": f"([0]*{layers - moe}+[1]*{moe})" if moe and moe < layers else None,
    }


def _block(values: Values) -> str:
    """Kind of decoder, for software with one class per kind."""
    if values.get("model.latent.kv_lora_rank"):
        return "latent"
    if values.get("model.experts.experts"):
        return "experts"
    return "plain" if values.get("model.norm") == "layernorm" else "gated"


def _mesh(values: Values) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and axis names of a device mesh, outermost axis first; ranks are numbered along the innermost."""
    axes = [("replicate", values["replicate"]), ("shard", values["shard_ranks"])]
    axes += [(name, values[name]) for name in ("cp", "tp") if values[name] > 1]
    return tuple(n for _, n in axes), tuple(name for name, _ in axes)


def unfolded(values: Values) -> Values:
    """Keys of a run from the concepts in their place: the inverse of :func:`with_parts`, before choices that depend on
    degrees."""
    out = dict(values)
    if (shape := out.pop("mesh_shape", None)) is not None:
        names = out.pop("mesh_names", None) or ("replicate", "shard")[-len(shape) :]
        out |= {MESH_NAMES[str(name)]: n for name, n in zip(names, shape, strict=False) if str(name) in MESH_NAMES}
    if (pair := out.pop("fsdp_mesh", None)) is not None:
        out["replicate"], out["shard_ranks"] = pair[0], pair[-1]
    for concept, own in (
        ("fsdp_replicate", "replicate"),
        ("fsdp_shard", "shard_ranks"),
        ("mesh_tp", "tp"),
        ("mesh_cp", "cp"),
        ("model_tp", "tp"),
        ("model_dp", "dp"),
        ("deepspeed_steps", "micro_batches"),
        ("capacity", "expert_capacity"),
        ("expert_axis", "ep"),
    ):
        if (value := out.pop(concept, None)) is not None and value != -1.0:
            out[own] = value
    return _batches(out)


def _batches(out: Values) -> Values:
    out.pop("positions", None)
    if (grouped := out.pop("model.grouped_kv", None)) is not None:
        out["model.kv_heads"] = grouped
    piped = (out.get("pp") or 1) > 1
    if (local := out.pop("local_batch", None)) is not None and not piped:
        out["micro_batch"] = local
    micro = out.pop("piped_micro_batch", None)
    if piped and local is not None:
        out["micro_batch"] = micro or 1
    if (ratio := out.pop("model.expansion", None)) is not None and out.get("model.hidden"):
        out["model.ffn_hidden"] = round(ratio * out["model.hidden"])
    return out


def expert_layers(pattern: Any, layers: int | None) -> int | None:
    """Layers with experts of a pattern: a list of 0 and 1, its text, or n for every n-th layer; None: no pattern.

    >>> expert_layers("([0]*1+[1]*27)", 28), expert_layers([0, 1], 2), expert_layers("2", 5), expert_layers("x", 5)
    (27, 1, 3, None)
    """
    if str(pattern).isdigit():
        every = int(str(pattern)[:9])
        return -(-layers // every) if layers and every else None
    text = re.sub(r"\s", "", str(list(pattern) if isinstance(pattern, tuple) else pattern))
    if not re.fullmatch(r"\(*(\(*\[[01](,[01])*\](\*\d{1,4})?\)*(\*\d{1,4})?\+?)+\)*", text) or len(text) > 5000:
        return None
    ones = zeros = 0
    for listed, times in re.findall(r"\[([01,]+)\](?:\*(\d+))?", text):
        ones += listed.count("1") * int(times or 1)
        zeros += listed.count("0") * int(times or 1)
    if re.search(r"\)\*\d", text) or (layers is not None and ones + zeros != layers):
        return None
    return ones


def meshed(values: Values) -> Values:
    """Data ranks and batches of software whose axes of data, shards and experts multiply (MaxText)."""
    out = dict(values)
    ep = out.get("ep") or 1
    whole = next((name for name in ("fsdp_axis", "data_axis") if out.get(name) == -1), None)
    if whole is not None:  # all devices that no other axis takes
        names = ("data_axis", "fsdp_axis", "dcn_data", "dcn_fsdp", "dcn_pp", "tp", "cp", "pp")
        others = prod(max(out.get(name) or 1, 1) for name in names) * ep
        rest, left = divmod(out.get("gpus") or 0, others)
        if left:
            raise PlanError(f"world size {out['gpus']} is not divisible by {others}, the ranks of the other axes")
        out[whole] = rest or -1
    if (fsdp := out.get("fsdp_axis")) is not None and -1 not in (fsdp, out.get("data_axis")):
        data = (out.pop("data_axis", None) or 1) * (out.pop("dcn_data", None) or 1)
        fsdp *= out.pop("dcn_fsdp", None) or 1
        out["pp"] = (out.get("pp") or 1) * (out.pop("dcn_pp", None) or 1)
        out["dp"] = data * fsdp * ep
        if fsdp > 1:
            out |= {"replicate": data, "shard_ranks": fsdp * ep}
    if (batch := out.pop("device_batch", None)) is not None and out.get("dp"):
        ranks = out["dp"] * (out.get("tp") or 1) * (out.get("cp") or 1) * (out.get("pp") or 1)
        steps, piped = out.pop("accumulated", None) or 1, out.pop("piped_micro_batches", None)
        out["global_batch"] = round(batch * ranks * steps)
        out["micro_batches"] = (piped or out["pp"]) if (out.get("pp") or 1) > 1 else steps
    return out


def without_parts(values: Values) -> Values:
    """The values with recomputation and shards as keys of a run.

    Raises:
        PlanError: numbers that do not multiply.
    """
    out = dict(values)
    how, parts = out.pop("recompute.how", None), out.pop("recompute.parts", None)
    layers = out.pop("recompute.layers", None)
    if how is not None:
        words = {"none": "none", "all": "full", "some": "full"}
        out["recompute"] = words.get(how) or recompute_text(recompute_code("+".join(parts or ("attention",))))
        if how != "some":
            out["recompute_every"] = 1
            out.pop("recompute_layers", None)
    elif layers is not None:
        every = str(layers).removeprefix("every ")
        out["recompute"], out["recompute_every"] = ("full", int(every)) if every != layers else (layers, 1)
    if out.get("dp") is not None and "shard" not in out:
        ranks = out.get("shard_ranks")
        out["shard"] = 0 if ranks in (None, out["dp"]) or not out.get("zero") else ranks
    elif (ranks := out.get("shard_ranks") or 1) > 1 and out.get("zero"):
        out.setdefault("shard", ranks)
    return multiplied(out)
