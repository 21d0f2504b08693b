"""Records whose methods are shared, against those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field

import pytest

from steptime.dataclass import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    y: list[int] = field(default_factory=list)
    name: str = field(default="p", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("below zero")


@dataclass(frozen=True, slots=True)
class Pair:
    first: int
    second: int = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standard(Pair):
    third: int


def test_a_record_is_what_the_standard_library_makes():
    point = Point(x=1)
    assert (point.x, point.y, point.name) == (1, [], "p") and point.y is not Point(x=1).y
    assert repr(point) == "Point(x=1, y=[])"
    assert point == Point(x=1, name="other") and point != Point(x=2) and point != 1
    assert hash(Pair(1)) == hash(Pair(1, 2)) and Pair(1) != Pair(1, 3) and len({Pair(1), Pair(1)}) == 1
    assert dataclasses.replace(point, x=3) == Point(x=3) and dataclasses.asdict(Pair(4)) == {"first": 4, "second": 2}
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == copy.copy(point) == point
    assert not hasattr(point, "__dict__") and Standard(1, third=3).third == 3


@pytest.mark.parametrize("change", [lambda p: setattr(p, "x", 2), lambda p: delattr(p, "x")])
def test_a_record_does_not_change(change):
    with pytest.raises(dataclasses.FrozenInstanceError):
        change(Point(x=1))


@pytest.mark.parametrize("given", [{}, {"x": 1, "z": 2}])
def test_wrong_arguments_are_refused(given):
    with pytest.raises(TypeError, match=r"Point\.__init__"):
        Point(**given)
    with pytest.raises(TypeError):
        Point(1)
    with pytest.raises(ValueError, match="below zero"):
        Point(x=-1)


def test_arguments_are_known_once_a_record_was_made():
    Point(x=1)
    assert list(inspect.signature(Point).parameters) == ["x", "y", "name"]
