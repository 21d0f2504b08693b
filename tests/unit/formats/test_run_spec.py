"""RUN.toml: what is taken, and the words for what is not."""

from __future__ import annotations

import random

import pytest

from steptime.errors import UserError
from steptime.formats.run_spec import parse_run
from steptime.options import KEYS, OPTIONS, SETTINGS, Count

VALUES = (
    0, 1, 8, -3, 10**7, 10**7 + 1, 10**12, 1.0, 2.5, 0.0, -1.0, float("nan"), float("inf"), True, "", "x", "1d",
    "corrected", "full", "y" * 65, "m" * 4097, [], ["dp"], [1], {}, {"tp": 8}, {"tp": 0}, {"no": 1}, {"dp": 2, "tp": 4},
)  # fmt: skip


def test_any_value_is_taken_or_refused_by_the_name_of_its_key():
    draw, taken, refused = random.Random(3), 0, 0
    for _ in range(4000):
        job = {name: draw.choice(VALUES) for name in draw.sample((*SETTINGS, "modell"), draw.randint(0, 3))}
        plan = {name: draw.choice(VALUES) for name in draw.sample((*KEYS, "placement", "no"), draw.randint(0, 3))}
        document = {"model": "m", **job, "plan": plan}
        try:
            run = parse_run(document, "run.toml")
        except UserError as error:
            refused += 1
            assert any(f"{name}" in str(error) for name in (*job, *plan)), (document, error)
            continue
        taken += 1
        assert set(run.settings) == set(job) - {"cluster"} and set(run.plan) <= set(plan)
        for name, value in (run.settings | run.plan).items():
            if name in OPTIONS and isinstance(takes := OPTIONS[name].takes, Count):
                assert type(value) is int and takes.low <= value <= takes.high
    assert taken > 200 and refused > 200


def test_keys_stand_in_the_order_of_the_table_and_lists_become_words():
    given = {"model": "m", "seq": 8, "gpus": 2, "plan": {"overlap": ["dp", "pp"], "offload": [], "tp": 2}}
    run = parse_run(given, "run.toml")
    assert list(run.settings) == ["gpus", "seq"]
    assert list(run.plan.items()) == [("tp", 2), ("overlap", "dp,pp"), ("offload", "none")]


def test_all_problems_of_a_file_are_named_at_once():
    with pytest.raises(UserError) as caught:
        parse_run({"model": 3, "gpu": 8, "seq": 0, "plan": {"tp": True, "placement": {"dp": 0}}}, "run.toml")
    text = str(caught.value)
    assert "run.toml: 5 fields are wrong" in text and "did you mean gpus" in text
    assert all(f"\n  {field}: " in text for field in ("model", "gpu", "seq", "plan.tp", "plan.placement.dp"))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"model": "m", "gpus": True}, "gpus"),
        ({"model": "m", "plan": {"tp": 0}}, "plan.tp"),
        ({"model": "m", "plan": 3}, "plan"),
        ({"gpus": 8}, "model"),
        ({"model": "m", "gpu": 8}, "unknown key"),
    ],
)
def test_what_is_not_plain_is_refused_in_the_words_of_the_gate(document, words):
    with pytest.raises(UserError, match=words):
        parse_run(document, "run.toml")
