"""Models by name, from TOML, and what the dispatcher does with anything else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from steptime.api.models import load_model
from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError
from steptime.model import ModelSpec, catalogue_names, library, load_catalogue_model, read_model_toml
from steptime.model.spec import Experts, LatentAttention, Vision

SMALL = "layers = 2\nhidden = 64\nheads = 4\n"


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_only_three_fields_are_needed(tmp_path: Path) -> None:
    spec = read_model_toml(write(tmp_path, SMALL))
    assert (spec.name, spec.kv_heads, spec.head_dim, spec.ffn_hidden) == ("mine", 4, 16, 256)
    assert (spec.vocab, spec.seq_len, spec.causal, spec.activation) == (0, 2048, True, "gelu")


def test_the_file_has_the_fields_of_the_specification() -> None:
    rows = library._MODEL.rows
    tables = {
        ModelSpec: rows,
        LatentAttention: rows["latent"].rows,
        Experts: rows["experts"].rows,
        Vision: rows["vision"].rows,
    }  # type: ignore[union-attr]
    for record, table in tables.items():
        assert set(table) == {entry.name for entry in fields(record)}


def test_nested_tables_and_their_defaults(tmp_path: Path) -> None:
    text = SMALL + "gated_mlp = true\nwindow = 16\n"
    text += "[experts]\nexperts = 4\nexperts_per_token = 2\nexpert_ffn_hidden = 32\n"
    spec = read_model_toml(write(tmp_path, text))
    assert spec.experts is not None
    assert (spec.experts.moe_layers, spec.windowed_layers, spec.activation) == (2, 2, "silu")
    text = SMALL + 'position = "learned"\n[vision]\nimage_size = 32\npatch_size = 8\n'
    image = read_model_toml(write(tmp_path, text))
    assert (image.seq_len, image.max_positions, image.causal) == (17, 17, False)


@pytest.mark.each(
    ("text", "says"),
    [
        ("layers = 2\nhidden = 64\n", "heads: is missing"),
        (SMALL + "layer = 3\n", "did you mean layers"),
        (SMALL + "[experts]\nexpert = 3\n", "experts.expert"),
        (SMALL.replace("64", "0"), "hidden"),
        (SMALL.replace("64", "-64"), "hidden"),
        (SMALL.replace("64", "64.0"), "hidden"),
        (SMALL.replace("64", "nan"), "hidden"),
        (SMALL.replace("64", "'64'"), "hidden"),
        (SMALL.replace("64", "true"), "hidden"),
        (SMALL.replace("64", "99999999999999"), "hidden: 99999999999999 is not a whole number from 1 to 16777216"),
        (SMALL.replace("64", "65"), "heads: 4 does not divide hidden 65"),
        (SMALL + "kv_heads = 3\n", "nearest that does: 2"),
        (SMALL + "norm = 'batchnorm'\n", "norm"),
        (SMALL + "windowed_layers = 3\nwindow = 4\n", "at most 2"),
        (SMALL + "windowed_layers = 1\n", "window: is missing"),
        (SMALL + "position = 'learned'\nvocab = 5\nmax_positions = 0\n", "max_positions: is 0"),
        (SMALL + "vocab = 5\n[vision]\nimage_size = 32\npatch_size = 8\n", "vocab: is 5"),
        (SMALL + "[vision]\nimage_size = 8\npatch_size = 32\n", "vision.patch_size"),
        (SMALL + "weight_bytes = inf\n", "weight_bytes"),
        (SMALL + "[experts]\nexperts = 1\nexperts_per_token = 2\nexpert_ffn_hidden = 4\n", "at most 1"),
        ("layers = ", "is not valid TOML"),
        ("a = " + "[" * 50_000, "nested too deeply"),
    ],
)
def test_bad_files_name_file_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_published_models_are_as_in_their_source() -> None:
    shapes = {"gpt3_1T": (2048, 25600, 160, 128), "vit_era5": (64800, 12288, 64, 48), "gpt3": (2048, 12288, 96, 96)}
    for name, shape in shapes.items():
        spec = load_catalogue_model(name)
        assert (spec.seq_len, spec.hidden, spec.heads, spec.layers) == shape
        assert (spec.ffn_hidden, spec.vocab, spec.position) == (4 * spec.hidden, 0, "none")
        assert (spec.causal, spec.dropout, spec.qkv_bias) == (name != "vit_era5", True, False)
        assert (spec.out_bias, spec.mlp_bias, spec.norm_bias, spec.gated_mlp) == (True, True, True, False)


@pytest.mark.each("name", catalogue_names())
def test_every_entry_of_the_catalogue_loads(name: str) -> None:
    spec = load_model(name.upper())
    assert spec.name == name
    assert spec.source != "catalogue"


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="did you mean llama2-7b"):
        load_model("llama2-7")
    with pytest.raises(UserError, match="nothing is downloaded"):
        load_model("somebody/Nothing-7B")
    with pytest.raises(UserError, match="a torch module has no specification"):
        load_model("my.package:make_model")
    for odd in ("", "  ", "\0", "a" * 5000, "\ud800", "/no/such/thing"):
        with pytest.raises(UserError):
            load_model(odd)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="neither"):
        load_model(write(tmp_path, SMALL, "model.yaml"))
    with pytest.raises(InputFileError, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(InputFileError, match="the file does not exist"):
        load_model(tmp_path / "absent.toml")


def test_field_errors_carry_their_field(tmp_path: Path) -> None:
    with pytest.raises(FieldError) as caught:
        read_model_toml(write(tmp_path, SMALL + "kv_heads = 3\n"))
    assert caught.value.field == "kv_heads"


def test_a_misspelt_field_is_named_before_the_one_that_is_then_missing(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"layer: unknown key\n  did you mean layers"):
        read_model_toml(write(tmp_path, SMALL.replace("layers", "layer")))
