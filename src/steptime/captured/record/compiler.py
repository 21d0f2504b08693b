"""A stand-in for PyTorch's compiler, which a capture never runs and rarely has to load.

Before its optimisers, checkpoints and reference kernels run, PyTorch loads the compiler with all its imports, only to
ask if they are excluded from compilation. While nothing is compiled, the answer is known without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from steptime.captured.torch_parts import DYNAMO, LEFT_ALONE, Source

_ATTRIBUTE = DYNAMO.rpartition(".")[2]


class _Module(ModuleType):
    """A module that is loaded at the first access to an attribute other than the known ones."""

    def __init__(self, name: str, load: Callable[[], object], **known: Any) -> None:
        super().__init__(name)
        self._load, self._known = load, tuple(known)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name, self.__name__) != ("__path__", DYNAMO):  # imports of submodules read it
            raise AttributeError(name)
        self._load()
        return getattr(importlib.import_module(self.__name__), name)

    def forget(self) -> None:
        """Drop the known attributes, so that all are those of the real module."""
        for name in self._known:
            vars(self).pop(name, None)


class _RandomValueSource:
    """Stand-in for the class with which PyTorch marks tensors of random numbers; no tensor of a capture is one."""


def _nowhere(name: str) -> Any:
    """Source of a tensor that is no argument of a compiled function."""
    return Source()


class _Absent:
    """Stand-in for the compiler that excludes functions of PyTorch from compilation; other uses load the compiler."""

    def __init__(self, loaded: Callable[[ModuleType], None]) -> None:
        self._loaded = loaded
        self._marked: list[Any] = []
        sources = _Module(f"{DYNAMO}.source", self._load, ConstantSource=_nowhere, RandomValueSource=_RandomValueSource)
        compiler = _Module(
            DYNAMO, self._load, disable=self._disable, graph_break=lambda msg="": None, source=sources, config=None
        )
        self._modules = {DYNAMO: compiler, sources.__name__: sources}
        sys.modules.update(self._modules)
        setattr(torch, _ATTRIBUTE, compiler)
        compiler.__path__ = [f"{place}/{_ATTRIBUTE}" for place in torch.__path__]
        vars(compiler)["config"] = importlib.import_module(f"{DYNAMO}.config")
        del compiler.__path__

    def _disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """A function of PyTorch unchanged; for other functions, which may be compiled later, the compiler is loaded."""
        if not getattr(fn, "__module__", "").startswith("torch."):
            self._load()
            return sys.modules[DYNAMO].disable(fn, *args, **options)
        if not options.get("wrapping", True):
            self._marked.append(fn)
        return fn

    def _load(self) -> None:
        if self._modules:
            self.removed()
            self._loaded(importlib.import_module(DYNAMO))

    def removed(self) -> None:
        """Remove the stand-in, so that later imports find the real compiler."""
        for fn in self._marked:
            vars(fn).pop(LEFT_ALONE, None)
        if vars(torch).get(_ATTRIBUTE) is self._modules.get(DYNAMO, self):
            delattr(torch, _ATTRIBUTE)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            module.forget()
        self._modules = {}
        self._marked.clear()


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Run compiled functions eagerly, and load the compiler only where code uses it."""
    with ExitStack() as stack:

        def loaded(compiler: ModuleType) -> None:
            stack.enter_context(compiler.set_stance("force_eager"))

        if DYNAMO in sys.modules:
            if not isinstance(sys.modules[DYNAMO], _Module):
                loaded(sys.modules[DYNAMO])
        else:
            absent = _Absent(loaded)
            stack.callback(absent.removed)
        yield
