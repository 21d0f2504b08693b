"""Records whose methods are shared, against those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from abc import ABC, abstractmethod
from dataclasses import InitVar, field
from functools import cached_property
from typing import ClassVar

import pytest

from steptime.dataclass import FIRST, dataclass


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


def test_arguments_are_known_once_some_records_were_made():
    for _ in range(FIRST + 1):
        Point(x=1)
    assert list(inspect.signature(Point).parameters) == ["x", "y", "name"]


class Shape(ABC):
    """A base that is no dataclass."""

    __slots__ = ()

    @property
    @abstractmethod
    def area(self) -> float: ...


def with_bases(decorator):
    """Classes with and without bases, made by one decorator, each with arguments for a record."""

    @decorator(frozen=True, slots=True, kw_only=True)
    class Base:
        x: int
        y: list[int] = field(default_factory=list)
        limit: ClassVar[int] = 3

    @decorator(frozen=True, slots=True, kw_only=True)
    class Derived(Base):
        x: int = 7
        z: float = 1.5

    @decorator(frozen=True, slots=True)
    class Mixed(Base):
        first: int
        last: int = field(default=4, kw_only=True)

    @decorator(frozen=True, slots=True)
    class Square(Shape):
        side: float

        @property
        def area(self) -> float:
            return self.side**2

    @decorator(frozen=True, slots=True)
    class Sized(Shape):
        area: float = 1.0

    return (
        (Base, {"x": 1}), (Base, {"x": 1, "y": [2]}), (Derived, {}), (Derived, {"z": 2.0, "y": [1]}),
        (Mixed, {"x": 1, "first": 2}), (Square, {"side": 2.0}), (Sized, {}),
    )  # fmt: skip


def with_options(decorator):
    """Classes without slots, not frozen, not compared, ordered, or with methods of their own, made by one decorator."""

    @decorator(frozen=True, kw_only=True)
    class Wide:
        x: int
        y: list[int] = field(default_factory=list)
        z: int = field(default=2, repr=False)

        @cached_property
        def twice(self) -> int:
            return 2 * self.x

    @decorator(slots=True)
    class Counter:
        x: int = 0
        y: int = field(default=1, compare=False)

    @decorator(frozen=True, slots=True, eq=False)
    class Node:
        x: int

    @decorator(frozen=True, slots=True, kw_only=True, order=True)
    class Ranked:
        x: int

    @decorator(frozen=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    @decorator
    class Plain:
        x: int = 1

    return (
        (Wide, {"x": 3}), (Counter, {}), (Counter, {"x": 5, "y": 6}), (Node, {"x": 1}), (Ranked, {"x": 1}),
        (Own, {"x": 1}), (Plain, {}),
    )  # fmt: skip


def made_by(decorator):
    """All of them."""
    return (*with_bases(decorator), *with_options(decorator))


def told(kind, given):
    """What can be seen of a class and of its record."""
    record, same, other = kind(**given), kind(**given), copy.copy(kind(**given))
    changes = kind.__dataclass_params__.frozen
    try:
        hashed = hash(record) == hash(same)
    except TypeError:
        hashed = None
    try:
        setattr(record, dataclasses.fields(kind)[0].name, 1)
        written = True
    except (dataclasses.FrozenInstanceError, AttributeError):
        written = False
    names = [(f.name, f.type, f.kw_only, f.repr, f.compare, f.init) for f in dataclasses.fields(kind)]
    return (
        repr(other), record == same, record == 1, hashed, written, changes, kind.__dataclass_params__.eq, names,
        kind.__match_args__, getattr(kind, "__slots__", None), hasattr(record, "__dict__"), dataclasses.asdict(other),
        repr(dataclasses.replace(other)), kind.__name__, kind.__qualname__,
        getattr(kind, "limit", None), getattr(kind, "z", None) if kind.__name__ == "Wide" else None,
        getattr(record, "area", None), getattr(record, "twice", None),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(14))
def test_each_kind_of_class_is_what_the_standard_library_makes(number):
    (ours, given), (theirs, _) = made_by(dataclass)[number], made_by(dataclasses.dataclass)[number]
    assert told(ours, given) == told(theirs, given)


def test_a_class_with_what_is_not_known_here_is_left_to_the_standard_library():
    @dataclass(frozen=True, slots=True)
    class Doubled:
        twice: InitVar[int]
        value: int = field(init=False, default=0)

        def __post_init__(self, twice: int) -> None:
            object.__setattr__(self, "value", 2 * twice)

    assert Doubled(3).value == 6
    with pytest.raises(ValueError, match="mutable default"):

        @dataclass(frozen=True, slots=True)
        class Shared:
            rows: list[int] = []  # noqa: RUF012

    with pytest.raises(TypeError, match="cannot inherit"):

        @dataclass(slots=True)
        class Loose(Pair):
            third: int = 0


def test_arguments_of_a_class_with_bases_keep_their_order():
    kinds = [made_by(decorator)[4][0] for decorator in (dataclass, dataclasses.dataclass)]
    for kind in (kind for kind in kinds for _ in range(FIRST + 1)):
        assert kind(2, x=1).last == 4 and kind(first=2, x=1, last=5, y=[6]).y == [6]
    first, second = (inspect.signature(kind).parameters for kind in kinds)
    assert [(p.name, p.kind) for p in first.values()] == [(p.name, p.kind) for p in second.values()]
    with pytest.raises(TypeError, match=r"Mixed\.__init__"):
        kinds[0](2, 3, x=1)


@pytest.mark.parametrize("wrong", [((1, 2), {"x": 1}), ((1,), {"x": 1, "first": 2}), ((), {"x": 1}), ((1,), {"v": 2})])
def test_the_first_record_of_a_class_refuses_wrong_arguments(wrong):
    args, values = wrong
    kind = made_by(dataclass)[4][0]
    with pytest.raises(TypeError, match=r"Mixed\.__init__"):
        kind(*args, **values)


def test_the_first_records_of_a_class_are_those_after_them():
    for kind, given in made_by(dataclass):
        assert len({repr(kind(**given)) for _ in range(FIRST + 2)}) == 1
        assert kind.__init__.__qualname__ == f"{kind.__qualname__}.__init__"


def further(decorator):
    """Records of a class that sets attributes in its own way, and of one that declares a field of its base again."""

    @decorator
    class Doubled:
        x: int

        def __setattr__(self, name: str, value: int) -> None:
            object.__setattr__(self, name, 2 * value)

    @decorator
    class Base:
        x: int = 1

    @decorator
    class Again(Base):
        x: float

    return [Doubled(x=1).x for _ in range(FIRST + 2)], [Again().x for _ in range(FIRST + 2)]


def test_own_ways_to_set_attributes_and_fields_declared_again_are_those_of_the_standard_library():
    assert further(dataclass) == further(dataclasses.dataclass) == ([2] * (FIRST + 2), [1] * (FIRST + 2))


def test_a_class_below_a_frozen_record_may_have_attributes_of_its_own():
    @dataclass(frozen=True)
    class Record:
        x: int

    class Below(Record):
        pass

    one = Below(x=1)
    one.more = 2
    assert one.more == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Record(x=1).more = 2
