"""The checker of files: values in SI, every wrong field by its path, whatever the table."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.errors import FieldError, UserError
from steptime.schema import Each, Field, Table, checked, filled, flag, number, positive, text


def _ordered(band: Any) -> None:
    if band[0] > band[1]:
        raise UserError("the smaller comes first")


def _named(table: Any) -> None:
    if "name" not in table:
        raise FieldError("", "name", "is missing")


ROWS = Table(
    rows={
        "memory": Field(dimension="bytes", low=1e6, high=1e15, example="80 GB"),
        "count": Field(low=1, high=64, whole=True, example="8"),
        "kind": text("measured", "assumed"),
        "of": text(*(f"name{i}" for i in range(20))),
        "title": text(empty=False),
        "own": flag,
        "band": Each(row=number, least=2, most=2, called="two numbers", also=_ordered),
        "parts": Each(row=Table(rows={"name": text(), "rate": positive}, also=_named)),
        "factors": Table(named=number, also=filled),
        "device": Table(rows={"base": text()}, short="base"),
        "needs": Table(rows={"a": number, "b": number}, required=("a", "b"), hint="calibrate writes it"),
    }
)


def test_values_are_in_si_and_as_they_are_given() -> None:
    given = {
        "memory": "80 GB", "count": 8, "kind": "measured", "own": True, "band": [0.5, 2], "device": "h100",
        "parts": [{"name": "x", "rate": 3}], "factors": {"any": -1}, "needs": {"a": 1, "b": 2},
    }  # fmt: skip
    found = checked(given, ROWS, "f.toml")
    assert found == {**given, "memory": 80e9} and type(found["count"]) is int
    assert checked({"device": {"base": "h100"}}, ROWS, "f.toml") == {"device": {"base": "h100"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": 80}, 'memory: 80 has no unit\n  write it as text with a unit, for example "80 GB"'),
        ({"memory": "1 kB"}, "memory: '1 kB' is not between 1e+06 B and 1e+15 B"),
        ({"count": 2.0}, "count: 2.0 is not a whole number"),
        ({"count": True}, "count: True is not a whole number"),
        ({"count": 10**5000}, "count: a huge number is not between 1 and 64"),
        ({"kind": "guess"}, "kind: 'guess' is none of measured, assumed"),
        ({"of": "nam3"}, "of: 'nam3' is none of the names that may stand here\n  did you mean name3"),
        ({"title": ""}, "title: '' is not a valid string"),
        ({"title": 3}, "title: 3 is not a valid string"),
        ({"own": 1}, "own: 1 is neither true nor false"),
        ({"band": [1]}, "band: [1] is not two numbers"),
        ({"band": [2, 1]}, "band: the smaller comes first"),
        ({"band": [1, "2"]}, "band[1]: '2' is not a finite number"),
        ({"parts": {}}, "parts: {} is not a list"),
        ({"parts": [{"name": "x"}, {"name": "y", "rate": 0}]}, "parts[1].rate: 0 is not positive"),
        ({"parts": [{"rate": 1}]}, "parts[0].name: is missing"),
        ({"factors": {}}, "factors: is a table without entries"),
        ({"factors": {"any": float("nan")}}, "factors.any: nan is not a finite number"),
        ({"device": 3}, "device: 3 is not a table"),
        ({"needs": {"a": 1}}, "needs.b: is missing\n  calibrate writes it"),
        ({"needs": {"a": 1, "bb": 1}}, "needs.bb: is unknown\n  valid: a, b"),
        ({"memroy": 1}, "memroy: is unknown\n  did you mean memory?"),
        ([], "[] is not a table"),
        (
            {"own": 1, "count": 0},
            "own: 1 is neither true nor false\n  count: 0 is not between 1 and 64 (for example 8)",
        ),
    ],
)
def test_every_wrong_field_is_named(given: Any, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        checked(given, ROWS, "f.toml")
    assert str(caught.value).removeprefix("f.toml: ").removeprefix(": ").startswith(message)


def test_ten_problems_are_named_at_most() -> None:
    with pytest.raises(FieldError) as caught:
        checked({f"key{i}": 1 for i in range(30)}, ROWS, "f.toml")
    assert len(str(caught.value).splitlines()) == 11 and str(caught.value).endswith("... and 20 more")
