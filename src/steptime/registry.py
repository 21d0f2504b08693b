"""Tables that third parties can extend.

A :class:`Registry` maps names to plug-ins. Ours register with the decorator; an installed package
adds its own through the entry-point group that the registry names, without a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

from steptime.errors import InternalError, UnknownNameError, UserError

P = TypeVar("P")


def loaded(place: str) -> Any:
    """What stands at ``module:attribute``; the module is imported.

    The core reaches the annexes this way alone: it names them, and works without them until they are asked for.

    >>> loaded("math:pi")
    3.141592653589793
    """
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def needed(module: str, extra: str, what: str) -> Any:
    """A module of a package that not every installation has; imported.

    Args:
        module: its name.
        extra: of steptime, which installs the package.
        what: needs it, for the message.

    Raises:
        UserError: it is not installed; the message says what installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        problem = f"{what} needs {package}, which is not installed"
        raise UserError(problem, hint=f"pip install 'steptime[{extra}]'") from None


class Registry(Mapping[str, P]):
    """Named plug-ins of one kind: a mapping that looks for installed extensions once a name is missing.

    >>> shapes = Registry[type]("shape", "steptime.shapes")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes["square"] is Square
    True
    >>> shapes["sqare"]
    Traceback (most recent call last):
    steptime.errors.UnknownNameError: there is no shape 'sqare'
      did you mean square?
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._plugins: dict[str, P] = {}
        self._later: dict[str, str] = {}
        self._loaded = False

    def add(self, name: str, plugin: P) -> P:
        """Enters a plug-in.

        Raises:
            InternalError: the name is taken.
        """
        return self.register(name)(plugin)

    def register(self, name: str) -> Callable[[P], P]:
        """Decorator that enters a plug-in under ``name``."""

        def enter(plugin: P) -> P:
            if name in self._plugins:
                raise InternalError(f"{self.kind} {name!r} is registered twice")
            self._plugins[name] = plugin
            return plugin

        return enter

    def later(self, name: str, place: str) -> None:
        """Enters a plug-in of ours by its place, ``module:attribute``; its module is imported once it is asked for.

        >>> shapes = Registry[object]("shape", "steptime.shapes")
        >>> shapes.later("pi", "math:pi")
        >>> "pi" in shapes, shapes["pi"]
        (True, 3.141592653589793)
        """
        self._later[name] = place

    def _load_entry_points(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        from importlib import metadata

        for entry in metadata.entry_points(group=self.group):
            self._plugins.setdefault(entry.name, entry.load())

    def __contains__(self, name: object) -> bool:
        if name not in self._plugins and name not in self._later:
            self._load_entry_points()
        return name in self._plugins or name in self._later

    def __getitem__(self, name: str) -> P:
        """The plug-in of a name.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        if name not in self:
            raise UnknownNameError(self.kind, name, self)
        if name not in self._plugins:
            self._plugins[name] = loaded(self._later[name])
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter({**self._plugins, **self._later})

    def __len__(self) -> int:
        self._load_entry_points()
        return len({**self._plugins, **self._later})
