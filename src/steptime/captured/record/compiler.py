"""PyTorch's compiler, which a capture does not run and most captures need not load.

PyTorch asks it before its optimisers, checkpoints and reference kernels run whether it should leave them alone, and
loads it, with what it needs, for the answer. While nobody compiles the answer is known.
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
    """A module that is loaded when it is asked for more than is known without it."""

    def __init__(self, name: str, load: Callable[[], object], **known: Any) -> None:
        super().__init__(name)
        self._load, self._known = load, tuple(known)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name, self.__name__) != ("__path__", DYNAMO):  # with which imports of parts begin
            raise AttributeError(name)
        self._load()
        return getattr(importlib.import_module(self.__name__), name)

    def forget(self) -> None:
        """From now on all is what the module has."""
        for name in self._known:
            vars(self).pop(name, None)


class _RandomValueSource:
    """Where PyTorch says that a tensor holds random numbers: none of a capture does."""


def _nowhere(name: str) -> Any:
    """Where a tensor comes from that no compiled function was given."""
    return Source()


class _Absent:
    """What stands for the compiler: it leaves alone what nobody compiles; asked for anything else it is loaded."""

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
        """A function of PyTorch as it is; for another one, which may be compiled some day, the compiler is loaded."""
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
        """Takes it away; who looks for the compiler from now on finds the real one."""
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
    """What is to be compiled runs as it is written, and the compiler is loaded only where somebody asks for it."""
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
