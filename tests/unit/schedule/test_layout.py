"""Layouts of pipelines as text."""

from __future__ import annotations

import pytest

from steptime import UserError
from steptime.simulation.layout import check_layout, layout_text, parse_layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E||t|L", ["E", "", "t", "L"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        (" E t * 2 | ((t|)*2 m)*2 L", ["Ett", "t", "t", "mt", "t", "mL"]),
    ],
)
def test_layouts_are_read_and_written(text: str, stages: list[str]) -> None:
    assert list(parse_layout(text)) == stages
    assert list(parse_layout(layout_text(stages))) == stages


def test_text_is_short() -> None:
    assert layout_text(["Ettt", *["tt"] * 29, "m", "L"]) == "Et*3|(tt|)*29m|L"
    assert layout_text(["Et", *["tttt"] * 2, "ttttL"]) == "Et|(t*4|)*2t*4L"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Etx|L", "'x' is no letter"), ("*3t", r"\*3 repeats nothing"), ("(tt", "bracket is not closed"),
        ("tt)", "none opens"), ("t*0", "no number of repetitions"), ("(t*99999)*99999", "no number of repetitions"),
        ("E|(*2)t", "repeats nothing"),
    ],
)  # fmt: skip
def test_wrong_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et|t|L", "3 stages over 2 ranks"), ("Et|tL", r"2 x t \(decoder layer\); the model has 3"),
        ("t|ttL", "0 x E"), ("Ett|mtL", "out of order"), ("Ett|tL", "0 x m"), ("|EtttmL", "is empty"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_add_up_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_layout(text, parse_layout(text), 2, 3, 1)
    check_layout("Ett|tmL", parse_layout("Ett|tmL"), 2, 3, 1)
