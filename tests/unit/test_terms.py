"""Named terms that add up."""

from __future__ import annotations

import pytest

from steptime.terms import Terms

T = Terms({"compute/fc1/a_s": 2.0, "compute/fc2/a_s": 1.0, "computed/x_s": 8.0, "bubble": 4.0})


def test_it_is_an_ordered_mapping():
    assert list(T) == ["compute/fc1/a_s", "compute/fc2/a_s", "computed/x_s", "bubble"]
    assert (len(T), T["bubble"], T.total, Terms().total) == (4, 4.0, 15.0, 0.0)
    assert Terms(dict(T)) == T and repr(Terms({"a": 1.0})) == "Terms({'a': 1.0})"
    with pytest.raises(KeyError):
        T["compute"]


def test_it_keeps_its_own_copy():
    values = {"a": 1.0}
    terms = Terms(values)
    values["a"] = 2.0
    assert terms["a"] == 1.0
    with pytest.raises(TypeError):
        terms["a"] = 3.0  # type: ignore[index]


def test_a_group_is_a_path_and_what_is_below_it():
    assert (T.group("compute"), T.group("computed"), T.group("bubble"), T.group("comp")) == (3.0, 8.0, 4.0, 0.0)
    assert T.rollup(1) == {"compute": 3.0, "computed": 8.0, "bubble": 4.0}
    assert T.rollup(2)["compute/fc1"] == 2.0
    assert sum(T.rollup(1).values()) == T.total


def test_arithmetic():
    both = T + {"bubble": 1.0, "new": 2.0}
    assert (both["bubble"], both["new"], both.total) == (5.0, 2.0, 18.0)
    assert T["bubble"] == 4.0
    assert T.scaled(2).total == 30.0
    assert dict(Terms({"a": 0.0, "b": -1.0}).without_zeros()) == {"b": -1.0}
    assert T.top(2) == [("computed/x_s", 8.0), ("bubble", 4.0)]
