"""Tables that third parties can extend.

A :class:`Registry` maps names to plug-ins. Ours register with the decorator; an installed package
adds its own through the entry-point group that the registry names, without a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Generic, TypeVar

from steptime.errors import InternalError, UnknownNameError

P = TypeVar("P")


class Registry(Generic[P]):
    """Named plug-ins of one kind.

    >>> shapes = Registry[type]("shape", "steptime.shapes")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.get("square") is Square
    True
    >>> shapes.get("sqare")
    Traceback (most recent call last):
    steptime.errors.UnknownNameError: there is no shape 'sqare'
      did you mean square?
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._plugins: dict[str, P] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[P], P]:
        """Decorator that enters a plug-in under ``name``."""

        def enter(plugin: P) -> P:
            if name in self._plugins:
                raise InternalError(f"{self.kind} {name!r} is registered twice")
            self._plugins[name] = plugin
            return plugin

        return enter

    def _load_entry_points(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for entry in metadata.entry_points(group=self.group):
            self._plugins.setdefault(entry.name, entry.load())

    def get(self, name: str) -> P:
        """The plug-in of that name.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        if name not in self._plugins:
            self._load_entry_points()
        if name not in self._plugins:
            raise UnknownNameError(self.kind, name, self._plugins)
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(sorted(self._plugins))
