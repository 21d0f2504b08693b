"""Dataclasses whose methods are shared, or made when they are first needed.

The standard decorator compiles up to six functions for every class and searches every annotation with a regular
expression; for the classes of an estimate that takes longer than the estimate. Here one function serves all classes,
but for ``__init__``, which is compiled after :data:`FIRST` records. Records are dataclasses to everything in
:mod:`dataclasses`: their fields and parameters are those of the standard library.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass

#: Options that this module knows; a class with another one is made by the standard library.
_KNOWN: Final = {"frozen", "slots", "kw_only", "eq"}


#: Records of a class that are filled field by field, before ``__init__`` is compiled: half of the classes have no more.
FIRST: Final = 4


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Example:
    """A dataclass of the standard library: what marks a field, and what parameters are."""

    field: int


_PARAMETERS: Final[Any] = vars(_Example)["__dataclass_params__"]
_KIND: Final[Any] = vars(_Example)["__dataclass_fields__"]["field"]._field_type


@cache
def _getter(cls: type) -> Callable[[Any], Any]:
    names = [f.name for f in dataclasses.fields(cls) if f.compare]
    return attrgetter(*names) if len(names) > 1 else lambda record: tuple(getattr(record, name) for name in names)


def _compared(record: Any) -> Any:
    """The values by which records of a class are compared."""
    cls: Any = type(record)
    return _getter(cls)(record)


def _repr(self: Any) -> str:
    names = [f.name for f in dataclasses.fields(self) if f.repr]
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _setattr(self: Any, name: str, value: object) -> None:
    if "__dataclass_fields__" not in vars(type(self)) and name not in self.__dataclass_fields__:
        return object.__setattr__(self, name, value)  # of a class below that is no dataclass
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


#: Methods of every record; of frozen ones; of frozen ones with slots.
_METHODS: Final[dict[str, Callable[..., Any]]] = {
    "__repr__": _repr,
    "__eq__": _eq,
    **{name: method for name, method in vars(_Example).items() if name == "__replace__"},
}
_FROZEN: Final[Mapping[str, Callable[..., Any]]] = {"__hash__": _hash, "__setattr__": _setattr, "__delattr__": _delattr}
_SLOTTED: Final[Mapping[str, Callable[..., Any]]] = {"__getstate__": _getstate, "__setstate__": _setstate}


def _init_of(cls: Any) -> Callable[..., None]:
    """``__init__`` of a class, compiled: each field an argument, with its default."""
    frozen = cls.__dataclass_params__.frozen
    scope: dict[str, Any] = {"_set": object.__setattr__, "_NONE": object()}
    takes: dict[bool, list[str]] = {False: [], True: []}
    sets = []
    for f in dataclasses.fields(cls):
        name, default = f.name, f"_default_{f.name}"
        scope[default] = f.default if f.default_factory is dataclasses.MISSING else f.default_factory
        made = f.default_factory is not dataclasses.MISSING
        optional = made or f.default is not dataclasses.MISSING
        takes[bool(f.kw_only)].append(f"{name}={'_NONE' if made else default}" if optional else name)
        value = f"{default}() if {name} is _NONE else {name}" if made else name
        sets.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    sets += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    arguments = ", ".join(["self", *takes[False], *(["*"] if takes[True] else []), *takes[True]])
    exec(f"def __init__({arguments}):\n " + "\n ".join(sets or ["pass"]), scope)
    made_init: Callable[..., None] = scope["__init__"]
    made_init.__qualname__ = f"{cls.__qualname__}.__init__"
    return made_init


def _filled(record: Any, fields: Mapping[str, Any], args: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
    """Sets the fields of a new record; False where the arguments are not right, which ``__init__`` says in words."""
    names = [name for name, each in fields.items() if not each.kw_only] if args else []
    given = {**dict(zip(names, args, strict=False)), **values}
    if len(given) != len(args) + len(values) or not given.keys() <= fields.keys():
        return False
    for name, each in fields.items():
        if name in given:
            value = given[name]
        elif each.default is not dataclasses.MISSING:
            value = each.default
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
        else:
            return False
        object.__setattr__(record, name, value)
    if hasattr(record, "__post_init__"):
        record.__post_init__()
    return True


def _fields_of(cls: type, *, kw_only: bool) -> dict[str, Any] | None:
    """Name -> field, those of bases first; None where a field needs what only the standard library does."""
    fields: dict[str, Any] = {}
    for base in cls.__mro__[-1:0:-1]:
        fields |= vars(base).get("__dataclass_fields__", {})
    for name, kind in cls.__annotations__.items():
        if not isinstance(kind, str) or "InitVar" in kind or "KW_ONLY" in kind:
            return None
        if kind.startswith(("ClassVar", "typing.ClassVar")):
            continue
        default = vars(cls).get(name, dataclasses.MISSING)
        if default is dataclasses.MISSING and name in fields:  # declared again: the default may be that of the base
            return None
        made: Any = default if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
        if type(made.default).__hash__ is None:
            return None
        made.name, made.type, made._field_type = name, kind, _KIND
        if made.kw_only is dataclasses.MISSING:
            made.kw_only = kw_only
        fields[name] = made
    return fields if all(each.init and each._field_type is _KIND for each in fields.values()) else None


def _with_slots(cls: type, fields: Mapping[str, Any]) -> type:
    """The class again, with a slot for each field that no base has one for."""
    theirs: set[str] = set()
    for base in cls.__mro__[1:-1]:
        slots = vars(base).get("__slots__", ())
        theirs |= {slots} if isinstance(slots, str) else set(slots)
    space = {name: value for name, value in vars(cls).items() if name not in fields}
    space["__slots__"] = tuple(name for name in fields if name not in theirs)
    for name in ("__dict__", "__weakref__"):
        space.pop(name, None)
    made = type(cls)(cls.__name__, cls.__bases__, space)
    made.__qualname__ = cls.__qualname__
    return made


def _set_defaults(cls: Any, fields: Mapping[str, Any]) -> None:
    """Defaults as attributes of a class without slots, where its own are ``field(...)``."""
    for name, each in fields.items():
        if isinstance(vars(cls).get(name), dataclasses.Field):
            if each.default is dataclasses.MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, each.default)


def _made(cls: type, fields: dict[str, Any], *, frozen: bool, slots: bool, eq: bool) -> Any:
    made: Any = _with_slots(cls, fields) if slots else cls
    if not slots:
        _set_defaults(cls, fields)
    own = vars(cls)
    parameters = copy.copy(_PARAMETERS)
    parameters.init = parameters.repr = True
    parameters.eq, parameters.frozen = eq, frozen
    made.__dataclass_fields__, made.__dataclass_params__ = fields, parameters

    left = FIRST

    def __init__(self: Any, *args: Any, **values: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0 or not _filled(self, fields, args, values):
            made.__init__ = _init_of(made)
            made.__init__(self, *args, **values)

    shared: dict[str, Any] = {**_METHODS, **(_FROZEN if frozen else {}), **(_SLOTTED if frozen and slots else {})}
    shared["__init__"] = __init__
    shared["__match_args__"] = tuple(name for name, each in fields.items() if not each.kw_only)
    for name, value in shared.items():
        if name not in own and (eq or name not in ("__eq__", "__hash__")):
            setattr(made, name, value)
    if eq and own.get("__hash__") is None:
        made.__hash__ = _hash if frozen else None
    return abc.update_abstractmethods(made)


def _comparable(cls: type, *, frozen: bool, eq: bool) -> bool:
    """Whether the dataclasses among the bases are frozen as the class is, and compare so; none sets its own way."""
    theirs = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
    return all(each.frozen is frozen and each.eq is eq for each in theirs) and not any(
        vars(base).get("__setattr__", _setattr) is not _setattr for base in cls.__mro__[:-1]
    )


if not TYPE_CHECKING:

    def dataclass(cls=None, /, **options):
        """``dataclasses.dataclass``, made late; what has options that are not known here is made by the standard one.

        >>> @dataclass(frozen=True, slots=True, kw_only=True)
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(x=1), Point(x=1) == Point(x=1, y=0), dataclasses.replace(Point(x=1), y=2)
        (Point(x=1, y=0), True, Point(x=1, y=2))
        """
        frozen, eq = options.get("frozen", False), options.get("eq", True)

        def decorated(given):
            known = set(options) <= _KNOWN and _comparable(given, frozen=frozen, eq=eq)
            fields = _fields_of(given, kw_only=options.get("kw_only", False)) if known else None
            if fields is None:
                return dataclasses.dataclass(**options)(given)
            return _made(given, fields, frozen=frozen, slots=options.get("slots", False), eq=eq)

        return decorated if cls is None else decorated(cls)
