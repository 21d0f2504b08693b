"""What a report says of a plan that is not feasible."""

from __future__ import annotations

from typing import Any

import pytest

from steptime import api
from steptime.surface.report.risk import failings
from steptime.surface.report.text import memory

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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_to_be_tried_makes_it_fit(case: tuple[str, str, int, dict[str, Any]]) -> None:
    found = estimated(case)
    (line,) = failings(found)
    lacking = memory(found.peak_memory_bytes - found.memory_capacity_bytes)
    assert line.startswith(f"not feasible: it needs {lacking} more than a device has; try --")
    assert {estimated(case, **options).feasible for options in tried(line)} == {True}


def test_where_no_option_is_enough_more_ranks_are() -> None:
    (line,) = failings(estimated(("gpt3_1T", "dgx-h100", 8, {"tp": 8})))
    assert line.endswith("try more ranks of tp or pp and --offload optimizer")


def test_a_broken_rule_is_told_with_its_meaning() -> None:
    assert failings(estimated(("llama3-8b", "dgx-h100", 24, {"tp": 3}))) == [
        "not feasible: heads: tp (with Ulysses tp x cp) does not divide the attention heads",
        "not feasible: kv_heads: tp and the key-value heads do not divide each other",
    ]
    assert failings(estimated(("llama3-8b", "dgx-h100", 8, {"tp": 8}))) == []
