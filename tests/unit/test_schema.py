"""The checker of files: values in SI, every wrong field by its path, whatever the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from steptime import schema
from steptime.errors import FieldError, UserError
from steptime.schema import (
    Each,
    Field,
    Null,
    Table,
    above,
    as_given,
    checked,
    filled,
    flag,
    letters,
    needed_by,
    number,
    rows_of,
    text,
)


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
        "title": letters(64),
        "own": flag,
        "band": Each(row=number, least=2, most=2, called="two numbers", also=_ordered),
        "parts": Each(row=Table(rows={"name": text(), "rate": above(0)}, also=_named)),
        "factors": Table(named=number, also=filled),
        "device": Table(rows={"base": text()}, short="base"),
        "code": text(pattern="[a-z]+", called="small letters"),
        "ratio": as_given(Field(low=1, meaning="rows per token")),
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
        ({"count": 10**5000}, "count: a huge number is not a whole number from 1 to 64"),
        ({"kind": "guess"}, "kind: 'guess' is none of measured, assumed"),
        ({"of": "nam3"}, "of: 'nam3' is none of the names that may stand here\n  did you mean name3"),
        ({"title": ""}, "title: '' is not a text of 1 to 64 letters"),
        ({"title": 3}, "title: 3 is not a text of 1 to 64 letters"),
        ({"code": "A1"}, "code: 'A1' is not small letters"),
        ({"ratio": 0.5}, "ratio: 0.5 is not a number of 1 or more (rows per token)"),
        ({"ratio": float("inf")}, "ratio: inf is not a number of 1 or more"),
        ({"needs": {"a": "x"}}, "2 fields are wrong\n  needs.a: 'x' is not a finite number\n  needs.b: is missing"),
        ({7: 1}, "7: unknown key"),
        ({"own": 1}, "own: 1 is neither true nor false"),
        ({"band": [1]}, "band: [1] is not two numbers"),
        ({"band": [2, 1]}, "band: the smaller comes first"),
        ({"band": [1, "2"]}, "band[1]: '2' is not a finite number"),
        ({"parts": {}}, "parts: {} is not a list"),
        ({"parts": [{"name": "x"}, {"name": "y", "rate": 0}]}, "parts[1].rate: 0 is not above 0"),
        ({"parts": [{"rate": 1}]}, "parts[0].name: is missing"),
        ({"factors": {}}, "factors: is a table without entries"),
        ({"factors": {"any": float("nan")}}, "factors.any: nan is not a finite number"),
        ({"device": 3}, "device: 3 is not a table"),
        ({"needs": {"a": 1}}, "needs.b: is missing\n  calibrate writes it"),
        ({"needs": {"a": 1, "bb": 1}}, "needs.bb: unknown key\n  valid: a, b"),
        ({"memroy": 1}, "memroy: unknown key\n  did you mean memory?"),
        ([], "the file: [] is not a table"),
        (
            {"own": 1, "count": 0},
            "2 fields are wrong\n  own: 1 is neither true nor false\n"
            "  count: 0 is not a whole number from 1 to 64 (for example 8)",
        ),
    ],
)
def test_every_wrong_field_is_named(given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(given, ROWS, "f.toml")
    assert str(caught.value).removeprefix("f.toml: ").startswith(message)
    assert isinstance(caught.value, FieldError) == ("fields are wrong" not in message)


def test_ten_problems_are_named_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(schema, "did_you_mean", lambda given, allowed: asked.append(given) or "")
    with pytest.raises(UserError) as caught:
        checked({f"key{i}": 1 for i in range(3000)}, ROWS, "f.toml")
    assert len(str(caught.value).splitlines()) == 12 and str(caught.value).endswith("and 2990 more")
    assert len(asked) == 10, "the nearest of a file's many keys would take minutes"


def test_null_is_no_key_but_where_it_means_something() -> None:
    row = Table(rows={"a": number, "b": number, "c": Null(row=number, means="none")}, required=("b",))
    assert checked({"a": None, "b": 1, "c": None}, row, "f.json") == {"b": 1, "c": "none"}
    assert checked([None, 2], Each(row=Null(row=number)), "f.json") == [None, 2]
    for given, problem in (
        ({"b": None}, "b: is missing"),
        ({"b": 1, "d": None}, "d: unknown key"),
        ({"b": 1, "c": "x"}, "c: 'x' is not"),
    ):
        with pytest.raises(FieldError, match=problem):
            checked(given, row, "f.json")
    with pytest.raises(FieldError, match=r"band\[1\]: None is not a finite number"):
        checked({"band": [1, None]}, ROWS, "f.json")


@dataclass
class Link:
    name: str
    rate: float | None = None
    ends: tuple[str, ...] = field(default_factory=tuple)


def test_rows_of_a_record_are_its_fields() -> None:
    rows = rows_of(Link, {"str": text(), "float": number}, {"ends": Each(row=text())})
    assert list(rows) == ["name", "rate", "ends"] and needed_by(Link) == ["name"]
    found = checked({"name": "a", "rate": 2, "ends": ["b"]}, Table(rows=rows, required=needed_by(Link)), "f.toml")
    assert found == {"name": "a", "rate": 2.0, "ends": ["b"]}
    assert type(checked({"ratio": 2}, ROWS, "f.toml")["ratio"]) is int, "as it is given"
