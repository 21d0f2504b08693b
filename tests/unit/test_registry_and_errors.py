"""Plug-in tables, and errors that say what to do."""

from __future__ import annotations

import pytest

from steptime import errors
from steptime.registry import Registry


def test_a_registry_is_extended_by_name():
    table: Registry[int] = Registry("thing", "steptime.test_things")
    assert table.add("one", 1) == 1
    assert (table["one"], "one" in table, "two" in table, list(table), len(table)) == (1, True, False, ["one"], 1)
    with pytest.raises(errors.InternalError, match="twice"):
        table.add("one", 2)
    with pytest.raises(errors.UnknownNameError, match="did you mean one") as caught:
        table["onne"]
    assert (caught.value.kind, caught.value.given, caught.value.allowed) == ("thing", "onne", ["one"])


def test_an_installed_package_extends_it_but_replaces_nothing(monkeypatch):
    class Entry:
        def __init__(self, name):
            self.name = name

        def load(self):
            return f"theirs {self.name}"

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry("one"), Entry("two")])
    table: Registry[str] = Registry("thing", "steptime.test_things")
    table.add("one", "ours")
    assert (table["two"], table["one"], sorted(table)) == ("theirs two", "ours", ["one", "two"])


def test_the_tree():
    for kind in (errors.UnknownNameError, errors.FieldError, errors.InputFileError, errors.PlanError):
        assert issubclass(kind, errors.UserError)
    assert issubclass(errors.UserError, errors.SteptimeError)
    assert not issubclass(errors.InternalError, errors.UserError)


def test_messages():
    assert str(errors.UserError("no", hint="do this")) == "no\n  do this"
    field = errors.FieldError("a.toml", "memory", "is bad")
    assert (str(field), field.field) == ("a.toml: memory: is bad", "memory")
    assert str(errors.FieldError("", "tp", "is bad")) == "tp: is bad"
    assert str(errors.InputFileError("a.toml", "is empty")) == "a.toml: is empty"
    assert str(errors.UnknownNameError("model", "x" * 500, ["a"], where="f")).startswith("f: there is no model 'xxx")
    assert len(str(errors.UnknownNameError("model", "x" * 5000, ["a"]))) < 200


def test_hints():
    assert errors.nearest("H100", ["h100-sxm", "h200-sxm", "t4"])[0] == "h100-sxm"
    assert errors.did_you_mean("zzz", []) == "there are none"
    assert errors.did_you_mean("zzz", ["a", "b"]) == "valid: a, b"
    keys = [f"key{number}" for number in range(25)]
    assert errors.did_you_mean("zzz", keys) == f"valid: {', '.join(keys)}"
    assert errors.did_you_mean("zzz", [f"a{number}" for number in range(100)]).endswith(" and 60 more")
    assert errors.did_you_mean("b20", ["b200", "b2000"]) == "did you mean b200 or b2000?"
    assert errors.nearest("Dgx_H10", ["a100", "dgx-h100"]) == ["dgx-h100"]
    assert errors.nearest("b", ["b200"]) == [], "one letter begins too many names"


@pytest.mark.parametrize(
    ("given", "other"),
    [("cohere", "starcoder2"), ("minimax_m2", "gemma2"), ("p4de", "p4"), ("nemotron", "megatron-core"), ("phi", "opt")],
)
def test_other_names_are_not_proposed(given, other):
    assert errors.nearest(given, [other]) == []


@pytest.mark.parametrize(
    ("given", "near"), [("mixral", "mixtral"), ("h210", "h200"), ("zreo", "zero"), ("qwen3-moe", "qwen3_moe")]
)
def test_slips_of_the_keyboard_are(given, near):
    assert errors.nearest(given, [near, "falcon"]) == [near]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("device", f"steptime devices lists them; {errors.MEASURED}"),
        ("cluster", f"steptime clusters and steptime devices list what there is; {errors.MEASURED}"),
        ("model", "steptime models lists them"),
        ("framework", "steptime frameworks lists them"),
        ("optimizer", "valid: abc"),
    ],
)
def test_where_nothing_is_near_the_error_says_how_to_list_what_there_is(kind, says):
    assert errors.UnknownNameError(kind, "xyz", ["abc"]).hint == says
    assert errors.UnknownNameError(kind, "xyz", ["abc"], otherwise="look there").hint == "look there"
    assert errors.UnknownNameError(kind, "abd", ["abcd"], otherwise="look there").hint == "did you mean abcd?"
