"""Named terms that add up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from steptime.terms import Terms, at, call, part, taped, term

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


def area_m2(width_m: float, height_m: float) -> float:
    return width_m * height_m


def test_a_tape_keeps_calls_by_path_and_terms_say_what_shows() -> None:
    with taped() as tape:
        call(area_m2, width_m=9.0, height_m=9.0)  # at no path: in no term
        with at("hall", times=2.0):
            with at("cellar"):
                call(area_m2, "survey", width_m=1.0, height_m=1.0)
            found = call(area_m2, width_m=2.0, height_m=3.0)
        assert term("hall", 10.0, 12.0, share=0.5) == 10.0
        term("nowhere", 1.0)
        part("hall", share=0.5)
    assert found == 6.0 and [one.value for one in tape.calls["hall"]] == [6.0]
    assert [one.basis for one in tape.calls["cellar"]] == ["survey"]
    exposed, whole = tape.terms
    assert (exposed.path, exposed.exposed_s, exposed.hidden_s, exposed.part_s) == ("hall/area_m2", 10.0, 2.0, 0.0)
    assert whole.part_s == 6.0 * 2.0 * 0.5 and not whole.exposed_s


def test_each_thread_has_its_own_tape_and_without_one_nothing_is_kept() -> None:
    with taped() as tape, at("hall"), ThreadPoolExecutor(1) as other:
        assert other.submit(call, area_m2, width_m=1.0, height_m=2.0).result() == 2.0
    assert tape.calls["hall"] == []
    with at("hall") as calls:
        call(area_m2, width_m=1.0, height_m=2.0)
    assert calls == [] and term("hall", 1.0) == 1.0
