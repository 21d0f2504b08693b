"""Inputs on which users met a wrong answer: each has its right value, or says by how much it misses it."""

from __future__ import annotations

import pytest
import trial_cases


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[pytest.mark.xfail(reason=case.missed, strict=True)] if case.missed else [], id=case.name
        )
        for case in trial_cases.CASES
    ],
)
def test_the_right_value_is_met(case) -> None:
    said = case.said
    assert case.meets(said), f"right {trial_cases.shown(case.right)}, said {trial_cases.shown(said)}"


def test_every_case_has_a_row() -> None:
    named = {case.name.partition(",")[0] for case in trial_cases.CASES}
    assert len(named | set(trial_cases.NOT_HERE)) == 27 and not named & set(trial_cases.NOT_HERE)
