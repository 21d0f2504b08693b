"""Tables that third parties can extend.

A :class:`Registry` maps names to plug-ins. Ours register with the decorator; an installed package
adds its own through the entry-point group that the registry names, without a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from steptime.errors import InternalError, UnknownNameError, UserError

P = TypeVar("P")

EXTRAS: Final[Mapping[str, tuple[str, str]]] = {
    "distributed": ("Dask", "dask"),
    "duckdb": ("DuckDB", "files"),
    "egglog": ("egglog", "rewrite"),
    "highspy": ("HiGHS", "solver"),
    "matplotlib": ("matplotlib", "plots"),
    "mpi4py": ("mpi4py", "mpi"),
    "numba": ("numba", "hierarchy"),
    "onnx": ("the onnx library", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "optuna": ("optuna", "learn"),
    "ray": ("Ray", "ray"),
    "scipy": ("SciPy", "calibrate"),
    "sklearn": ("scikit-learn", "learn"),
    "starlette": ("Starlette", "page"),
    "torch": ("PyTorch", "torch"),
    "uvicorn": ("uvicorn", "page"),
    "yaml": ("PyYAML", "launch"),
    "z3": ("z3", "rewrite"),
}
"""Library -> its name, and the extra of ``pyproject.toml`` that installs it."""


def entry_points(**wanted: str) -> Any:
    """Entry points of the installed packages, by group and name; the laboratory's are those of our own wheel."""
    from importlib import metadata  # 10 ms, which most commands do without

    return metadata.entry_points(**wanted)


def loaded(place: str) -> Any:
    """The object at ``module:attribute``, or a module; it is imported.

    >>> loaded("math:pi")
    3.141592653589793
    """
    module, _, attribute = place.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def public(
    package: str, places: Mapping[str, str], group: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose public names are loaded when they are first used.

    Args:
        package: its name.
        places: public name -> ``module:attribute``.
        group: of the entry points by which installed packages add names; empty: none do.
    """
    added: Mapping[str, Any] = Registry("public name", group) if group else {}

    def attribute(name: str) -> Any:
        if name in places:
            value = loaded(places[name])
        elif not name.startswith("_") and name in added:  # Python asks for many names with an underscore
            value = added[name]
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return attribute, lambda: list(vars(sys.modules[package])["__all__"])


def needed(module: str, what: str, extra: str | None = None) -> Any:
    """A module of a library that only an extra of steptime installs; it is imported.

    Args:
        module: its name.
        what: needs it, for the message.
        extra: which installs it; None: that of :data:`EXTRAS`.

    Raises:
        UserError: the library is not installed; the message says what installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        name, usual = EXTRAS[library]
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise UserError(f"{what} needs {name}, which {why}", hint=f"pip install 'steptime[{extra or usual}]'") from None


def require(module: str, what: str) -> None:
    """Raise the error of :func:`needed` before any work if a library is not installed, without importing it."""
    if find_spec(module) is None:
        needed(module, what)


class Registry(Mapping[str, P]):
    """Named plug-ins of one kind: a mapping that searches installed packages once a name is missing.

    >>> shapes = Registry[object]("shape", "steptime.shapes")
    >>> shapes.later("pi", "math:pi")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes["square"] is Square, shapes["pi"]
    (True, 3.141592653589793)
    >>> shapes["sqare"]
    Traceback (most recent call last):
    steptime.errors.UnknownNameError: there is no shape 'sqare'
      did you mean square?
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group, self._looked = kind, group, False
        self._plugins: dict[str, Callable[[], P]] = {}

    def add(self, name: str, plugin: P) -> P:
        """Enters a plug-in; InternalError where the name is taken."""
        if name in self._plugins:
            raise InternalError(f"{self.kind} {name!r} is registered twice")
        self._plugins[name] = lambda: plugin
        return plugin

    def register(self, name: str) -> Callable[[P], P]:
        """Decorator that enters a plug-in under ``name``."""
        return partial(self.add, name)

    def later(self, name: str, place: str) -> None:
        """Enters a plug-in of ours by its place, ``module:attribute``; its module is imported once it is asked for."""
        self._plugins[name] = partial(loaded, place)

    def _all(self) -> dict[str, Callable[[], P]]:
        if not self._looked:
            self._looked = True
            for entry in entry_points(group=self.group):
                self._plugins.setdefault(entry.name, entry.load)
        return self._plugins

    def __contains__(self, name: object) -> bool:
        return name in self._plugins or name in self._all()

    def __getitem__(self, name: str) -> P:
        """The plug-in of a name; UnknownNameError, with the nearest names, where there is none."""
        if name not in self:
            raise UnknownNameError(self.kind, name, self)
        return self._plugins[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
