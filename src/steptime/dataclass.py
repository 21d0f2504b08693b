"""Frozen dataclasses whose methods are shared, or made when they are first needed.

The standard decorator compiles six functions for every class; of the classes of an estimate that takes longer than the
estimate. Here one function serves all classes, but for ``__init__``, which is compiled when the first record is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass

_HOUSE: Final = ({"frozen": True, "slots": True, "kw_only": True}, {"frozen": True, "slots": True})


def _values(self: Any, of: str) -> tuple[Any, ...]:
    """Values of the fields that take part in something (``repr``, ``compare``)."""
    return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if getattr(f, of))


def _repr(self: Any) -> str:
    names = [f.name for f in dataclasses.fields(self) if f.repr]
    shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, _values(self, "repr"), strict=True))
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: object) -> Any:
    return _values(self, "compare") == _values(other, "compare") if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self, "compare"))


def _setattr(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


_SHARED: Final[dict[str, Callable[..., Any]]] = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
}


def _init_of(cls: Any) -> Callable[..., None]:
    """``__init__`` of a class, compiled: each field a keyword argument, with its default."""
    scope: dict[str, Any] = {"_set": object.__setattr__, "_NONE": object()}
    takes, sets = [], []
    for f in dataclasses.fields(cls):
        name, default = f.name, f"_default_{f.name}"
        scope[default] = f.default if f.default_factory is dataclasses.MISSING else f.default_factory
        made = f.default_factory is not dataclasses.MISSING
        optional = made or f.default is not dataclasses.MISSING
        takes.append(f"{name}={'_NONE' if made else default}" if optional else name)
        sets.append(f"_set(self, {name!r}, " + (f"{default}() if {name} is _NONE else {name})" if made else f"{name})"))
    sets += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    keywords = ["*"] if takes and dataclasses.fields(cls)[0].kw_only else []
    arguments = ", ".join(["self", *keywords, *takes])
    exec(f"def __init__({arguments}):\n " + "\n ".join(sets or ["pass"]), scope)
    made_init: Callable[..., None] = scope["__init__"]
    made_init.__qualname__ = f"{cls.__qualname__}.__init__"
    return made_init


def _made(cls: type, *, kw_only: bool) -> Any:
    own = set(vars(cls))
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    made.__dataclass_params__.frozen = made.__dataclass_params__.eq = True
    for name, method in _SHARED.items():
        if name not in own or (name == "__hash__" and vars(cls)[name] is None):
            setattr(made, name, method)

    def __init__(self: Any, *args: Any, **values: Any) -> None:
        made.__init__ = _init_of(made)
        made.__init__(self, *args, **values)

    if "__init__" not in own:
        made.__init__ = __init__
    return made


if not TYPE_CHECKING:

    def dataclass(cls=None, /, **options):
        """``dataclasses.dataclass``; what is frozen, has slots and keyword arguments alone, and no base is made late.

        >>> @dataclass(frozen=True, slots=True, kw_only=True)
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(x=1), Point(x=1) == Point(x=1, y=0), dataclasses.replace(Point(x=1), y=2)
        (Point(x=1, y=0), True, Point(x=1, y=2))
        """
        if cls is not None or options not in _HOUSE:
            return dataclasses.dataclass(cls, **options)

        def decorated(given):
            if given.__mro__[1:] != (object,):
                return dataclasses.dataclass(**options)(given)
            return _made(given, kw_only=options.get("kw_only", False))

        return decorated
