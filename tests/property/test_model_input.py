"""Whatever stands in a model file, the answer is a model or a UserError."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.api.models import load_model
from steptime.errors import UserError
from steptime.formats.huggingface import read_huggingface
from steptime.model import parameter_terms, read_model_toml
from suites import examples

FILES = sorted((Path(__file__).parents[1] / "data" / "huggingface").glob("*.json"))
LAYERED = json.loads((FILES[0].parents[1] / "layered_checkpoints.json").read_text(encoding="utf-8"))
CONFIGS = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]
CONFIGS += [row["config"] for row in LAYERED.values()]
QUICK = settings(max_examples=examples(150))

TOML_KEYS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len", "norm", "window",
    "windowed_layers", "position", "max_positions", "vision.image_size", "vision.patch_size", "name",
    "experts.experts", "experts.experts_per_token", "experts.expert_ffn_hidden", "latent.kv_lora_rank",
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 5) | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["sliding_attention", "silu", "linear_attention", 10**30, 2**31, -0.0])
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=6), v, max_size=4))


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of a real model with a few keys changed or taken away."""
    config = dict(draw(st.sampled_from(CONFIGS)))
    target = config
    if "text_config" in config and draw(st.booleans()):
        target = config["text_config"] = dict(config["text_config"])
    for _ in range(draw(st.integers(1, 4))):
        key = draw(
            st.sampled_from(sorted(target))
            | st.sampled_from(["head_dim", "layer_types", "architectures", "layers_block_type"])
        )
        if draw(st.booleans()):
            target[key] = draw(VALUES)
        else:
            target.pop(key, None)
        if not target:
            break
    return config


@QUICK
@given(config=mutated())
def test_changed_configurations(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with contextlib.suppress(UserError):
        spec, _ = read_huggingface(path)
        assert parameter_terms(spec).total > 0


@QUICK
@given(text=st.text(max_size=200) | VALUES.map(lambda value: json.dumps(value)))
def test_any_text_as_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(UserError):
        read_huggingface(path)


@QUICK
@given(
    changes=st.dictionaries(
        st.sampled_from(TOML_KEYS),
        st.integers(-2, 9)
        | st.integers(-(2**70), 2**70)
        | st.booleans()
        | st.sampled_from(["nan", "'rope'", "[]", "1.5"]),
        max_size=5,
    )
)
def test_changed_toml(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = {"layers": 2, "hidden": 64, "heads": 4} | changes
    path = tmp_path / "model.toml"
    path.write_text("\n".join(f"{key} = {str(value).lower()}" for key, value in values.items()), encoding="utf-8")
    with contextlib.suppress(UserError):
        assert parameter_terms(read_model_toml(path)).total > 0


@QUICK
@given(text=st.text(max_size=200))
def test_any_text_as_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(UserError):
        read_model_toml(path)


@QUICK
@given(name=st.text(max_size=60))
def test_any_text_as_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(UserError):
        load_model(name)
