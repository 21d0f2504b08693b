"""The model of a row: its printed shape, completed from the catalogue or from the defaults of its family."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from steptime.errors import UserError
from steptime.measure.runs.meaning import framework_of
from steptime.measure.runs.read import Flag, Reason, RowProblem, TableRow, table
from steptime.model.known import hub_model, in_catalogue, load_catalogue_model
from steptime.model.spec import Experts, ModelSpec, check_spec

_PREFIX: Final = re.compile(r"^(maxtext|paxml|nemo|megatron|hf|meta)[-_ ]+", re.IGNORECASE)
_FILES: Final = (".json", ".toml")
_FOLDER: Final = re.compile(r"(\.{1,2}|~)?[/\\]")
_ASPECT: Final = 128
"""Hidden width over layers of a model that is guessed from its size; GPT-3 and the SC21 models have 85 to 200."""

ModelFile = Callable[[str], ModelSpec]
"""Reads a model's file, or the folder that has it; raises UserError where it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model, its kind, and flags of what was assumed about it."""

    spec: ModelSpec
    kind: str
    """``dense``, ``moe``, ``encoder`` or ``vision``."""
    flags: frozenset[Flag]
    catalogue: str | None
    """Model of the catalogue that completed it."""


def architecture(row: TableRow, seq_len: int, stages: int = 1, load: ModelFile | None = None) -> Architecture:
    """The model of a row.

    Args:
        row: the record.
        seq_len: tokens per sequence.
        stages: pipeline stages that the layers are cut into; a guessed number of layers is made divisible by it.
        load: reads the model where its cell is the path of a file; without it such a cell is a name like others.

    Raises:
        RowProblem: it is no transformer of equal blocks, there is no shape, or the shape contradicts itself; the
            file of the model cannot be used, or is of another model than the shape.
    """
    name = row.text("model") or "unnamed"
    file = _from_file(row, name, load) if load is not None and is_path(name) else None
    known = None if file else known_model(name)
    family = _family(name, row.flag("gated_mlp"))
    for column in ("layers", "hidden"):
        if row.whole(column) is None and column in row.unread:
            raise RowProblem(Reason.BAD_NUMBER, f"{column}: {row.text(column)!r}")
    flags: set[Flag] = set()
    base = file or _base(row, known)
    if family.get("unsupported") and base is None:
        raise RowProblem(Reason.UNSUPPORTED_ARCHITECTURE, name)
    spec = _from_catalogue(row, base, known or {}) if base else _from_family(row, name, family, seq_len, stages, flags)
    spec = replace(spec, name=name[:120], source="columns of the row", seq_len=seq_len)
    spec = replace(spec, dropout=spec.dropout and (file is not None or not spec.causal or _drops_out(row)))
    if stages > spec.layers:
        flags.add(Flag.STAGES_ABOVE_LAYERS)
    if spec.position == "learned":
        spec = replace(spec, max_positions=max(seq_len, spec.max_positions if base else 0))
    try:
        check_spec(spec, name[:80])
    except UserError as error:
        raise RowProblem(Reason.BAD_ARCHITECTURE, str(error)) from None
    kind = "vision" if spec.vision else "moe" if spec.experts else "dense" if spec.causal else "encoder"
    catalogue = base.name if base and not file else None
    return Architecture(spec=spec, kind=kind, flags=frozenset(flags), catalogue=catalogue)


def _drops_out(row: TableRow) -> bool:
    """True if a decoder with dropout trained with it; the defaults list frameworks and sources that do without."""
    without = table("defaults")["without_dropout"]
    return framework_of(row) not in without["frameworks"] and row.text("source_key") not in without["sources"]


def is_path(name: str) -> bool:
    """True if the model of a row is a file, or a folder written as a path; a bare name is a name.

    >>> [is_path(name) for name in ("mine/config.json", "./mine", "/data/mine", "meta-llama/Llama-2-7b", "GPT-3 175B")]
    [True, True, True, False, False]
    """
    return PurePath(name).suffix.lower() in _FILES or _FOLDER.match(name) is not None


def _from_file(row: TableRow, name: str, load: ModelFile) -> ModelSpec:
    """The model of a file; a shape in the row has to be that of the file, or of fewer of its layers."""
    try:
        spec = load(name)
    except UserError as error:
        raise RowProblem(Reason.MODEL_FILE, "; ".join(str(error).split("\n  "))) from None
    if not _fits(row, spec):
        stated = ", ".join(f"{column} {row.text(column)}" for column in ("layers", "hidden", "heads", "moe_experts"))
        raise RowProblem(Reason.BAD_ARCHITECTURE, f"{name} is of another model than {stated}")
    return spec


def known_model(name: str) -> Mapping[str, Any] | None:
    """The entry of the table of models for a name.

    >>> known_model("MaxText Llama3-70B (proxy)")["catalogue"], known_model("GPT 52B")
    ('llama3.1-70b', None)
    """
    if (hub := hub_model(name)) is not None:
        return {"catalogue": hub}
    plain = re.sub(r"\([^()]*\)", " ", name.lower()[:200]).strip()
    while _PREFIX.match(plain):
        plain = _PREFIX.sub("", plain)
    for entry in table("models")["model"]:
        if re.search(entry["match"], plain):
            found: Mapping[str, Any] = entry
            return found
    key = plain.replace(" ", "-")
    return {"catalogue": key} if in_catalogue(key) else None


def _family(name: str, gated: bool | None) -> Mapping[str, Any]:
    for entry in table("families")["family"]:
        if re.search(entry["match"], name.lower()[:200]) and not (entry.get("needs_gated") and not gated):
            found: Mapping[str, Any] = entry
            return found
    raise AssertionError("the last family takes everything")


def _is_cut(row: TableRow) -> bool:
    """True if the row says that its model has fewer layers than its name means."""
    return bool(re.search(r"proxy|layer[- ]reduced", row.text("notes") + row.text("model"), re.IGNORECASE))


def _base(row: TableRow, known: Mapping[str, Any] | None) -> ModelSpec | None:
    """The catalogue's model if the printed shape of the row is that model's or has fewer layers, else None."""
    cut = _is_cut(row)
    if known is None or (cut and row.whole("layers") is None):
        return None
    spec = load_catalogue_model(known["catalogue"])
    return spec if _fits(row, spec) else None


def _fits(row: TableRow, spec: ModelSpec) -> bool:
    """True if the printed shape of the row is that of a model, or of fewer of its layers."""
    hidden, heads, layers = (row.whole(name) for name in ("hidden", "heads", "layers"))
    experts = row.whole("moe_experts")
    fits = hidden in (None, spec.hidden) and heads in (None, spec.heads) and (layers or 1) <= spec.layers
    return fits and (experts is None or spec.experts is not None)


def _from_catalogue(row: TableRow, base: ModelSpec, known: Mapping[str, Any]) -> ModelSpec:
    layers = row.whole("layers") or base.layers
    tied = row.flag("tied_embeddings")
    changes: dict[str, Any] = {
        "layers": layers,
        "vocab": row.whole("vocab") or base.vocab,
        "tied_embeddings": base.tied_embeddings if tied is None else tied,
        "windowed_layers": round(base.windowed_layers * layers / base.layers),
    }
    if base.latent is None:
        changes["kv_heads"] = row.whole("kv_heads") or base.kv_heads
        changes["head_dim"] = row.whole("head_dim") or base.head_dim
    if base.experts is None:
        changes["ffn_hidden"] = row.whole("ffn_hidden") or base.ffn_hidden
    else:
        changes["experts"] = _catalogue_experts(row, base, base.experts, known, layers)
        changes["ffn_hidden"] = known.get("ffn_hidden", base.ffn_hidden)
    return replace(base, **changes)


def _catalogue_experts(
    row: TableRow, base: ModelSpec, experts: Experts, known: Mapping[str, Any], layers: int
) -> Experts:
    dense = base.layers - experts.moe_layers
    stated = re.search(r"(?<!\d)(\d{1,4}) dense (?:l\b|layer)", row.text("notes"))
    if stated:
        dense = int(stated.group(1))
    moe_layers = layers // known["moe_every"] if "moe_every" in known else max(1, layers - dense)
    return replace(
        experts,
        experts=row.whole("moe_experts") or experts.experts,
        experts_per_token=row.whole("moe_topk") or experts.experts_per_token,
        moe_layers=moe_layers,
    )


def _from_family(
    row: TableRow, name: str, family: Mapping[str, Any], seq_len: int, stages: int, flags: set[Flag]
) -> ModelSpec:
    gated, tied = (
        bool(family[name]) if (said := row.flag(column)) is None else said
        for name, column in (("gated", "gated_mlp"), ("tied", "tied_embeddings"))
    )
    if (vocab := row.whole("vocab")) is None:
        vocab = int(table("defaults")["vocab_of_source"].get(row.text("source_key"), family["vocab"]))
        flags.add(Flag.VOCAB_ASSUMED)
    hidden, layers = _shape(row, vocab, tied, stages, flags)
    heads = _heads(row, family, hidden, flags)
    if (ffn := row.whole("ffn_hidden")) is None:
        ffn = -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden
        flags.add(Flag.FFN_ASSUMED)
    bias = bool(family.get("bias", False))
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    biases["norm_bias"] = bool(family.get("norm_bias", bias))
    options: dict[str, Any] = {n: bool(family.get(n, False)) for n in ("parallel_block", "embedding_norm", "dropout")}
    return ModelSpec(
        name=name,
        family=str(family["name"]),
        source="",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=row.whole("kv_heads") or heads,
        head_dim=row.whole("head_dim") or max(1, hidden // heads),
        ffn_hidden=ffn,
        gated_mlp=gated,
        activation=str(family["activation"]),
        norm=family["norm"],
        causal=bool(family.get("causal", True)),
        seq_len=seq_len,
        vocab=vocab,
        tied_embeddings=tied,
        position=family["position"],
        max_positions=seq_len if family["position"] == "learned" else 0,
        **biases,
        **options,
        experts=_family_experts(row, layers, ffn),
    )


def _heads(row: TableRow, family: Mapping[str, Any], hidden: int, flags: set[Flag]) -> int:
    """Number of heads; where it is not printed, from their width, or that of models of the family."""
    heads, head_dim = row.whole("heads"), row.whole("head_dim")
    if heads is not None:
        return heads
    flags.add(Flag.HEADS_ASSUMED)
    if head_dim and hidden % head_dim == 0:
        return hidden // head_dim
    return int(family.get("heads", {}).get(str(hidden)) or likely_heads(hidden))


def _family_experts(row: TableRow, layers: int, ffn: int) -> Experts | None:
    count = row.whole("moe_experts")
    if count is None or count == 1:
        return None
    return Experts(
        experts=count,
        experts_per_token=row.whole("moe_topk") or min(2, count),
        expert_ffn_hidden=ffn,
        moe_layers=layers,
    )


def _shape(row: TableRow, vocab: int, tied: bool, stages: int, flags: set[Flag]) -> tuple[int, int]:
    """Hidden width and layers; from the number of parameters where they are not printed."""
    hidden, layers, count = row.whole("hidden"), row.whole("layers"), row.number("n_params")
    if hidden is not None and layers is not None:
        return hidden, layers
    cut = _is_cut(row)
    if count is None or cut or row.whole("moe_experts") is not None or not 1e6 <= count <= 1e14:
        raise RowProblem(Reason.NO_ARCHITECTURE, row.text("model"))
    flags.add(Flag.ARCHITECTURE_GUESSED if hidden is None else Flag.LAYERS_DERIVED)
    if hidden is None:
        layers = layers or max(1, round(likely_hidden(count) / _ASPECT / stages)) * stages
        hidden = likely_hidden(count, layers)
    if layers is None:
        body = max(0.5 * count, count - vocab * hidden * (1 if tied else 2))
        layers = max(1, round(body / (12 * hidden**2) / stages)) * stages
    return hidden, layers


def likely_hidden(parameters: float, layers: int | None = None) -> int:
    r"""Likely hidden width with :math:`N` parameters: :math:`N = 12 L h^2` with :math:`L` given or :math:`h / 128`.

    >>> likely_hidden(52e9), likely_hidden(175e9)
    (8192, 12288)
    """
    exact = math.sqrt(parameters / (12 * layers)) if layers else (parameters * _ASPECT / 12) ** (1 / 3)
    grain = 1024 if exact > 4000 else 128
    return max(grain, round(exact / grain) * grain)


def likely_heads(hidden: int) -> int:
    """Number of heads that makes them nearest to 128 wide.

    >>> likely_heads(14336), likely_heads(14400)
    (112, 120)
    """
    widths = [d for d in range(32, 513) if hidden % d == 0] or [min(hidden, 128)]
    return max(1, hidden // min(widths, key=lambda d: abs(d - 128)))
