"""Models whose layers are of several kinds: parameters of published configurations, and of the modules themselves.

`tests/data/layered_checkpoints.json` has configurations as they are published (of Qwen3.5 the defaults of its
configuration class) without keys that change no cost, and the parameters of the `transformers` module made from each on
the meta device, with the biases that balance experts, which checkpoints keep as buffers. `python
benchmarks/bench_layers.py` counts all again (10 s).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime.formats.huggingface import read_huggingface
from steptime.formats.huggingface.encoders import ENCODERS
from steptime.formats.huggingface.hybrids import HYBRIDS
from steptime.formats.huggingface.linear import LINEAR
from steptime.formats.huggingface.towers import WITH_TOWERS
from steptime.model import parameter_terms

CHECKPOINTS = json.loads((Path(__file__).parents[1] / "data" / "layered_checkpoints.json").read_text(encoding="utf-8"))
PUBLISHED = {
    "codestral-mamba-7b": 7_285_403_648,  # its announcement
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "jamba-v0.1": 51_570_323_328,
    "llava-1.5-7b": 7_063_427_072,
    "paligemma-3b-224": 2_923_466_480,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "smolvlm-256m": 256_484_928,
    "smolvlm-2.2b": 2_246_272_880,
    "t5-small": 60_506_624,
    "t5-large": 737_668_096,
    "t5-11b": 11_307_321_344,
    "flan-t5-xl": 2_849_757_184,
    "bart-large": 406_291_456,
    "mbart-large-50": 610_879_488,
    "whisper-tiny": 37_760_640,
    "whisper-medium": 763_857_920,
    "whisper-large-v3": 1_543_490_560,
    "whisper-large-v3-turbo": 808_878_080,
}
"""Hub, ``safetensors.total``, where no other source is named."""


def read(folder: Path, config: dict[str, Any]) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return int(parameter_terms(read_huggingface(path)[0]).total)


def test_parameters_are_those_of_the_modules(tmp_path: Path) -> None:
    seen = {name: read(tmp_path, row["config"]) for name, row in CHECKPOINTS.items()}
    assert seen == {name: row["parameters"] for name, row in CHECKPOINTS.items()}
    assert {name: seen[name] for name in PUBLISHED} == PUBLISHED
    assert len(seen) >= 30


def test_every_family_has_a_checkpoint() -> None:
    types = {row["config"]["model_type"].removesuffix("_text") for row in CHECKPOINTS.values()}
    assert types >= {*HYBRIDS, *LINEAR, *ENCODERS, *WITH_TOWERS}


@pytest.mark.parametrize("name", ["zamba2-7b", "falcon-h1-0.5b"])
def test_modules_are_counted_again(name: str) -> None:
    pytest.importorskip("transformers")
    from models.layered import counted

    assert counted(CHECKPOINTS[name]["config"]) == CHECKPOINTS[name]["parameters"]
