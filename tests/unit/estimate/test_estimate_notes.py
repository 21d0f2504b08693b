"""An estimate says what was taken for granted: the micro-batch that nobody gave, a batch that is rounded up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.formats.estimate_file import parse_estimate

HOST_BOUND: dict[str, Any] = {"model": "gpt2", "cluster": "h100-sxm", "gpus": 1, "global_batch": 8}
UNEVEN: dict[str, Any] = {"model": "llama3.1-8b", "cluster": "dgx-h100", "gpus": 64, "global_batch": 100}


def test_a_micro_batch_that_nobody_gave_is_named() -> None:
    (note,) = api.estimate(**HOST_BOUND).notes
    assert "1 was taken; a replica has 8 sequences; the host paces the step, so a larger one would help" in note
    larger = api.estimate(**HOST_BOUND, plan={"micro_batch": 8})
    assert larger.notes == () and larger.step_time_s < api.estimate(**HOST_BOUND).step_time_s
    (note,) = api.estimate(**UNEVEN | {"global_batch": 128}, plan={"tp": 2}).notes
    assert "1 was taken" in note and "host" not in note


def test_a_replica_with_one_sequence_leaves_no_choice() -> None:
    assert api.estimate(**HOST_BOUND | {"global_batch": 1}).notes == ()


@pytest.mark.parametrize(("micro_batch", "words"), [(1, "dp 32 x 4 x 1 = 128"), (3, "dp 32 x 2 x 3 = 192")])
def test_a_batch_that_the_replicas_do_not_divide_is_charged_as_a_larger_one(micro_batch: int, words: str) -> None:
    plan = {"tp": 2, "micro_batch": micro_batch}
    uneven = api.estimate(**UNEVEN, plan=plan)
    (note,) = uneven.notes
    assert f"as long as one of {words} sequences; rates and MFU count the 100" in note
    charged = api.estimate(**UNEVEN | {"global_batch": int(words.split()[-1])}, plan=plan)
    if micro_batch == 1:
        assert uneven.step_time_s == pytest.approx(charged.step_time_s, rel=1e-12)
        assert uneven.mfu == pytest.approx(charged.mfu * 100 / 128, rel=1e-12)
    assert parse_estimate(json.dumps(uneven.to_json()), "a.json").notes == uneven.notes


def test_a_reproduced_paper_drops_the_remainder_and_gets_no_such_note() -> None:
    e = api.estimate("gpt3", "published-b200-nvs8", gpus=512, global_batch=1000, mode="published",
                     plan={"tp": 8, "pp": 8, "micro_batch": 1})  # fmt: skip
    assert e.notes == ()


def test_plans_of_a_search_carry_the_note() -> None:
    result = api.plan(**UNEVEN, fix={"tp": 2, "pp": 1}, strategy="1d", top=3)
    assert any("rates and MFU count the 100" in note for e in result.plans for note in e.notes)


@pytest.mark.parametrize(
    ("cluster", "dtype", "words"),
    [
        ("tpu-v5p", "fp8", "dtype fp8: tpu-v5p has no fp8 products; its int8 rate stands in"),
        ("tpu-v5p", "mxfp8", "its int8 rate stands in"),
        ("dgx-h100", "mxfp8", "h100-sxm has no products with a scale per block; its fp8 rate stands in"),
        ("mi300x-8", "mxfp8", "mi300x has no products with a scale per block; its fp8 rate stands in"),
    ],
)
def test_a_rate_that_stands_in_is_named(cluster: str, dtype: str, words: str) -> None:
    (note,) = api.estimate("llama3-8b", cluster, gpus=8, global_batch=8, dtype=dtype, plan={"tp": 8}).notes[1:]
    assert words in note


@pytest.mark.parametrize(("cluster", "dtype"), [("dgx-h100", "fp8"), ("dgx-b200", "mxfp8"), ("dgx-b200", "nvfp4")])
def test_a_rate_of_the_device_needs_no_word(cluster: str, dtype: str) -> None:
    plan = {"micro_batch": 1}
    assert api.estimate("llama3-8b", cluster, gpus=8, global_batch=8, dtype=dtype, plan=plan).notes == ()


def test_summa_in_a_quantised_recipe_is_fp8_alone() -> None:
    job: dict[str, Any] = {"model": "gpt3-175b", "cluster": "dgx-b200", "gpus": 16, "global_batch": 16}
    plan = {"tp": 2, "tp2": 4, "micro_batch": 1}
    plain, recipe = (api.estimate(**job, dtype=dtype, strategy="2d", plan=plan) for dtype in ("fp8", "fp8-te"))
    assert dict(recipe.time) == dict(plain.time) and dict(recipe.memory) == dict(plain.memory)
    assert plain.notes == ()
    (note,) = recipe.notes
    assert note.startswith("dtype fp8-te: strategy 2d has no quantisation")
    tensor = api.estimate(**job, dtype="fp8-te", strategy="1d", plan={"tp": 8, "micro_batch": 1})
    assert not any("quantisation" in each for each in tensor.notes)


def test_levels_between_the_first_and_the_slowest_are_named(tmp_path: Path) -> None:
    """Traffic within a leaf is timed over the spine, so whoever wrote the leaf into a file has to know."""
    level = '[levels.{}]\n{}link = "roce-400"\n'
    text = 'device = "h100-sxm"\n[levels.nvlink]\ndevices = 8\nlink = "nvlink4"\n'
    file = tmp_path / "pods.toml"
    file.write_text(
        text + level.format("leaf", "devices = 32\n") + level.format("spine", "") + "oversubscription = 4\n"
    )
    job: dict[str, Any] = {"model": "llama3-8b", "cluster": str(file), "global_batch": 64}
    (note,) = api.estimate(**job, gpus=64, plan={"micro_batch": 1}).notes
    assert note.startswith("level leaf is not told apart from spine for groups that leave it: their traffic")
    assert note in api.plan(**job, gpus=64, top=1).notes
    assert api.estimate(**job, gpus=32, plan={"micro_batch": 1}).notes == ()
    assert api.estimate(**job, gpus=8, plan={"micro_batch": 1}).notes == ()
    file.write_text(file.read_text().replace("oversubscription = 4", ""))
    assert api.estimate(**job, gpus=64, plan={"micro_batch": 1}).notes == ()


def test_a_batch_that_nobody_gave_is_named() -> None:
    """The commands ask for it; in Python it may be left out."""
    job, plan = {"framework": "ideal", "gpus": 8}, {"pp": 2, "micro_batch": 2}
    taken = api.estimate("gpt2", "dgx-h100", **job, plan=plan)
    assert taken.workload["global_batch"] == 4 * 2 * 2
    said = "global_batch was not given: one micro-batch per stage and replica was taken, 16 sequences"
    assert taken.notes[0] == said
    assert said not in api.estimate("gpt2", "dgx-h100", **job, plan=plan, global_batch=16).notes
