"""Model files with layers of several kinds, and the catalogue's models that have them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from steptime.errors import FieldError
from steptime.formats.huggingface import read_huggingface
from steptime.model import load_catalogue_model, parameter_terms
from steptime.model.kinds import MIXERS
from steptime.model.known import catalogue_names, read_model_toml
from steptime.model.spec import ModelSpec

CHECKPOINTS = json.loads((Path(__file__).parents[2] / "data" / "layered_checkpoints.json").read_text(encoding="utf-8"))
KINDS = [name for name in catalogue_names() if load_catalogue_model(name).kinds]
SMALL = """
layers = 4
hidden = 32
heads = 4
vocab = 100
norm = "rmsnorm"
"""
HYBRID = f"""{SMALL}
pattern = ["states*3", "attention"]

[[kinds]]
name = "states"
mixers = [{{ form = "mamba2", heads = 4, head_dim = 16, state = 8 }}]

[[kinds]]
name = "attention"
"""


def read(folder: Path, text: str) -> ModelSpec:
    path = folder / "model.toml"
    path.write_text(text, encoding="utf-8")
    return read_model_toml(path)


def test_a_hybrid_by_dimensions(tmp_path: Path) -> None:
    spec = read(tmp_path, HYBRID)
    assert spec.pattern == ("states",) * 3 + ("attention",)
    assert [(kind.name, kind.layers, kind.attention, kind.mlp) for kind in spec.kinds] == [
        ("states", 3, False, False), ("attention", 1, True, True),
    ]  # fmt: skip
    # Products 32 x (2 x 64 + 2 x 8 + 4) and 64 x 32, convolution 80 x 5, 3 numbers a head, norms of 64 and 32.
    states = 32 * 148 + 64 * 32 + 80 * 5 + 12 + 64 + 32
    attention = 4 * 32 * 32 + 2 * 32 * 128 + 2 * 32
    assert parameter_terms(spec).total == 3 * states + attention + 2 * 100 * 32 + 32


def test_a_pattern_repeats_and_kinds_differ_in_any_key(tmp_path: Path) -> None:
    text = f"""{SMALL}
pattern = ["dense", "routed"]
[[kinds]]
name = "dense"
window = 16
[[kinds]]
name = "routed"
experts = {{ experts = 8, experts_per_token = 2, expert_ffn_hidden = 16 }}
"""
    spec = read(tmp_path, text)
    assert spec.pattern == ("dense", "routed") * 2
    dense, routed = spec.kinds
    assert (dense.block.window, dense.block.windowed_layers, routed.block.window) == (16, 2, None)
    assert spec.experts == routed.block.experts
    assert spec.experts is not None
    assert spec.experts.moe_layers == 2


def test_an_opaque_layer_has_the_parameters_of_its_file(tmp_path: Path) -> None:
    mixer = 'mixers = [{ form = "opaque", parameters = 1000, flops_per_token = 2e6, bytes_per_token = 1e3 }]'
    spec = read(tmp_path, f'{SMALL}[[kinds]]\nname = "black_box"\n{mixer}\n')
    assert parameter_terms(spec).total == 4 * 1000 + 2 * 100 * 32 + 32


def test_what_runs_once_per_sample(tmp_path: Path) -> None:
    stem = '[[stem]]\nname = "patches"\nform = "whole"\nwidth = 32\ndepth = 12\ntokens = 9\nbias = true\n'
    with_stem = read(tmp_path, HYBRID + stem)
    assert parameter_terms(with_stem).total == parameter_terms(read(tmp_path, HYBRID)).total + 32 * 13


@pytest.mark.each(
    ("old", "new", "says"),
    [
        ('form = "mamba2"', 'form = "rwkv9"', "'rwkv9' is an unknown kind of layer"),
        ('form = "mamba2"', 'form = "rwkv9"', "known: mamba, mamba2, delta_net"),
        ('form = "mamba2"', 'form = "rwkv9"', 'form = "opaque" takes the FLOPs and bytes'),
        ('form = "mamba2"', "form = 3", "mixers[0].form"),
        ("heads = 4, head_dim", "head_dim", "mixers[0].heads: is missing"),
        ("state = 8", "state = 0", "mixers[0].state: 0 is not a whole number from 1 to"),
        ("state = 8", "state = true", "mixers[0].state: True is not"),
        ("state = 8", "state = 2.5", "mixers[0].state: 2.5 is not"),
        ("state = 8", "states = 8", "mixers[0].states: unknown key"),
        ("states*3", "states*2", "names 3 layers, of 4"),
        ("states*3", "state*3", "has 'state*3'"),
        ("states*3", "states*x", "has 'states*x'"),
        ('name = "attention"', 'name = "states"', "has 'attention'"),
        ('name = "attention"', "name = 7", "kinds[1].name: 7 is not a name"),
        ('name = "attention"', 'name = "attention"\nmlp = 3', "kinds[1].mlp: 3 is neither true nor false"),
        ('name = "attention"', 'name = "attention"\ntokens = -1', "kinds[1].tokens: -1 is not"),
        ('name = "attention"', 'name = "attention"\nheads = 0', "heads"),
        ('name = "attention"', 'name = "attention"\nvocab = 9', "kinds[1].vocab: is of the whole model"),
        ("mixers = [{", "mixers = 3 #[{", "mixers: 3 is not a list"),
        ('name = "attention"', 'name = "attention"\n[[stem]]\nname = "a"\nform = "ssd"', "stem[0].form"),
        ('name = "attention"', 'name = "attention"\n[[stem]]\nname = "a"\nform = "pass"', "stem[0].width: is missing"),
    ],
)
def test_bad_files_are_refused_by_name(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert old in HYBRID
    with pytest.raises(FieldError) as refused:
        read(tmp_path, HYBRID.replace(old, new, 1))
    assert says in str(refused.value)


@pytest.mark.each("key", ["pattern = ['a']", "[[stem]]\nname = 'a'\nform = 'table'"])
def test_kinds_are_needed(key: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="is given without kinds"):
        read(tmp_path, SMALL + key)


def test_every_mixer_has_a_description_of_each_field() -> None:
    for form, mixer in MIXERS.items():
        assert mixer.__doc__, form
        assert {str(each.type) for each in fields(mixer)} <= {"int", "bool", "float"}


def test_the_catalogue_has_what_the_configurations_have(tmp_path: Path) -> None:
    """Each model of the catalogue whose published configuration is at hand is the same model, kind by kind."""
    compared = [name for name in KINDS if name in CHECKPOINTS]
    assert len(compared) >= 15
    path = tmp_path / "config.json"
    for name in compared:
        spec = load_catalogue_model(name)
        path.write_text(json.dumps(CHECKPOINTS[name]["config"]), encoding="utf-8")
        read_one, _ = read_huggingface(path)
        assert parameter_terms(spec).total == CHECKPOINTS[name]["parameters"], name
        assert spec.pattern == read_one.pattern, name
        for kind, other in zip(spec.kinds, read_one.kinds, strict=True):
            assert kind.operators == other.operators, (name, kind.name)
            same = replace(kind.block, **{key: getattr(other.block, key) for key in _ELSEWHERE})
            assert same == other.block, (name, kind.name)


_ELSEWHERE = ("name", "family", "source", "tied_embeddings", "window", "windowed_layers", "ffn_hidden", "seq_len",
              "attention_gate")  # fmt: skip
"""Fields of a kind that cost nothing where the kind is compared: what is not there, or said of the whole model."""


def test_published_totals() -> None:
    """DiT: parameters of the models released with the paper; T5 v1.1 XXL: Hub, ``safetensors.total``."""
    published = {"dit-xl-2": 675_129_632, "flan-t5-xxl": 11_135_332_352}
    assert {name: parameter_terms(load_catalogue_model(name)).total for name in published} == published
