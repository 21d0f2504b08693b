"""What a report says of a plan that is not feasible."""

from __future__ import annotations

from typing import Any

import pytest

from steptime import api
from steptime.report.estimate import failings, warning
from steptime.report.text import memory

CASES = [
    ("llama3-70b", "dgx-h100", 16, {"tp": 8}),
    ("llama3-70b", "dgx-h100", 16, {"tp": 8, "pp": 2}),
    ("llama3-70b", "dgx-h100", 16, {"zero": 3}),
    ("llama3-70b", "dgx-h100", 64, {"tp": 8, "micro_batch": 4}),
    ("llama3-70b", "dgx-h100", 8, {"tp": 8, "offload": "activations"}),
    ("llama3-8b", "dgx-h100", 8, {"zero": 0, "micro_batch": 2}),
    ("llama3-8b", "dgx-h100", 64, {"zero": 1, "micro_batch": 4, "shard": 8}),
    ("gpt3-175b", "dgx-b200", 32, {"tp": 2, "zero": 0, "micro_batch": 2}),
    ("gemma2-27b", "dgx-b200", 4, {"zero": 2, "recompute": "norm+activation"}),
    ("gemma2-27b", "dgx-h100", 8, {"tp": 2, "pp": 2, "micro_batch": 4, "offload": "optimizer"}),
]


def estimated(case: tuple[str, str, int, dict[str, Any]], **more: Any) -> Any:
    model, cluster, gpus, plan = case
    return api.estimate(model, cluster, gpus=gpus, global_batch=8 * gpus, plan={**plan, **more})


def tried(line: str) -> list[dict[str, Any]]:
    """The alternatives that a line names, as keys of a plan."""
    alternatives = [one.split(" and ") for one in line.partition("; try ")[2].split(" or ")]
    pairs = [[option.removeprefix("--").split(" ") for option in options] for options in alternatives]
    return [{key.replace("-", "_"): int(v) if v.isdigit() else v for key, v in one} for one in pairs]


@pytest.mark.each("case", CASES, ids=str)
def test_what_is_to_be_tried_makes_it_fit(case: tuple[str, str, int, dict[str, Any]]) -> None:
    found = estimated(case)
    (line,) = failings(found)
    lacking = memory(found.peak_memory_bytes - found.memory_capacity_bytes)
    assert line.startswith(f"not feasible: it needs {lacking} more than a device has; try --")
    assert {estimated(case, **options).feasible for options in tried(line)} == {True}


def test_where_no_option_is_enough_more_ranks_are() -> None:
    (line,) = failings(estimated(("gpt3_1T", "dgx-h100", 8, {"tp": 8})))
    assert line.endswith("try more ranks of tp or pp and --offload optimizer")


def test_one_device_is_never_told_to_cut_the_model_over_more_ranks() -> None:
    (line,) = failings(estimated(("llama3-70b", "dgx-h100", 1, {"recompute": "full"})))
    assert "more devices (--gpus 2 or more)" in line
    assert "ranks of" not in line


def test_a_broken_rule_is_told_with_its_meaning() -> None:
    assert failings(estimated(("llama3-8b", "dgx-h100", 24, {"tp": 3}))) == [
        "not feasible: heads: tp (with Ulysses tp x cp) does not divide the attention heads",
        "not feasible: kv_heads: tp and the key-value heads do not divide each other",
    ]
    assert failings(estimated(("llama3-8b", "dgx-h100", 8, {"tp": 8}))) == []


@pytest.mark.parametrize(
    ("framework", "gpus", "tried"),
    [
        ("fms-fsdp", 64, "--shard 0"),
        ("fms-fsdp", 8, "a framework that has tp or pp and --offload optimizer"),
        ("fms-fsdp", 16, "--shard 0 and --offload optimizer"),
        ("ddp", 64, "a framework that has tp or pp and --offload optimizer"),
        ("llm.c", 64, "a framework that has tp or pp"),
    ],
)
def test_what_is_to_be_tried_is_what_the_framework_has(framework: str, gpus: int, tried: str) -> None:
    found = api.estimate("llama3-70b", "dgx-h100", gpus=gpus, global_batch=gpus, framework=framework,
                         plan={"recompute": "full"})  # fmt: skip
    (line,) = failings(found)
    assert line.endswith(f"more than a device has; try {tried}")


def test_shards_over_all_ranks_are_what_copies_of_them_lack() -> None:
    """FSDP within nodes of 8 by default: over all 64 devices the same plan fits."""
    plan = {"recompute": "full"}
    run = {"gpus": 64, "global_batch": 64, "framework": "fms-fsdp"}
    within, over = (api.estimate("llama3-70b", "dgx-h100", plan=plan | more, **run) for more in ({}, {"shard": 0}))
    assert (within.plan["shard"], within.feasible, over.feasible) == (8, False, True)


def test_a_plan_that_may_not_fit_names_what_its_framework_has() -> None:
    found = api.estimate("llama3-70b", "dgx-h100", gpus=8, global_batch=8, framework="torchtune",
                         plan={"recompute": "full", "cp": 4})  # fmt: skip
    assert str(warning(found)).endswith("try more ranks of tp")
    assert str(warning(found, searched=True)).endswith("try more devices")
