"""Import of a module from user code, ``pkg.module:factory`` or ``file.py:factory``; the import runs the code."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from steptime.captured.record import require_torch
from steptime.captured.record.inputs import InputSpec
from steptime.errors import InputFileError, UserError, did_you_mean, nearest, shorten
from steptime.model.captured import TARGET
from steptime.store.files import unreadable

#: Element types in which a module can be built.
WEIGHT_DTYPES = ("fp32", "bf16", "fp16", "fp64")

#: Size -> parameter names of a factory that receive it.
SIZES: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch", "batch_size", "micro_batch", "micro_batch_size"),
    "seq": ("seq", "seq_len", "sequence_length", "tokens", "block_size"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Result of a factory: a module, inputs of its forward, a loss."""

    module: Any
    inputs: Any
    loss: Any = None
    name: str = ""


def load_target(
    text: str, *, sizes: Mapping[str, int], dtype: str | None, inputs: tuple[InputSpec, ...], with_memory: bool = False
) -> Target:
    """Import a factory, call it without memory for weights (``with_memory``: with memory), and make the inputs.

    The factory may take `batch` and `seq` (by any of their usual names) and returns a module, or a module with its
    inputs (a tensor, a tuple, a dict of them), or these two and a loss function. It may also be a module, or a class of
    modules.

    Raises:
        UserError: PyTorch is missing, the import or the call fails, the result is no module, or inputs are unknown.
    """
    require_torch()
    match = TARGET.fullmatch(text)
    if match is None:
        raise UserError(f"{shorten(text)!r} is no factory", hint="write pkg.module:factory or file.py:factory")
    factory = found_factory(match["module"], match["name"])
    with _errors_of_user(text), contextlib.redirect_stdout(sys.stderr):
        given = _called(factory, sizes, dtype, with_memory=with_memory)
    return _target(given, text, inputs, dtype)


def found_factory(module: str, name: str) -> Any:
    """Object of a dotted name in a module or a file, which is imported.

    Raises:
        UserError: the import fails, or the name is unknown; the message has the error of the user's code.
    """
    with _errors_of_user(f"importing {module}"), contextlib.redirect_stdout(sys.stderr):
        found: Any = _from_file(Path(module)) if module.endswith(".py") else _from_path(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module} has no {shorten(name)!r}", hint=_instead(part, found))
        found = getattr(found, part)
    return found


def _instead(part: str, found: Any) -> str:
    """Suggestion for an unknown name: the nearest callable; else callables that the module itself defines."""
    members = {name: getattr(found, name, None) for name in dir(found) if not name.startswith("_")}
    usable = [name for name, value in members.items() if callable(value)]
    own = [name for name in usable if inspect.ismodule(found) and _is_of(members[name], found.__name__)]
    return did_you_mean(part, usable if nearest(part, usable) else own or usable)


def _is_of(value: Any, module: str) -> bool:
    """True if a Python module or a submodule defines a function or class, or holds an instance."""
    where = getattr(value, "__module__", None) or ""
    return where == module or where.startswith(f"{module}.") or not hasattr(value, "__qualname__")


def _from_path(module: str) -> Any:
    """Import a module with the working directory on the path."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise UserError(
                f"there is no Python module {shorten(module)!r}", hint="run from its folder, or set PYTHONPATH"
            ) from None
        raise


def _from_file(path: Path) -> Any:
    try:
        path, state = path.absolute(), path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    if path.is_dir():
        raise unreadable(path, IsADirectoryError())
    module = _executed(path, (state.st_mtime_ns, state.st_size))
    sys.modules[module.__name__] = module
    return module


@lru_cache(maxsize=16)
def _executed(path: Path, version: tuple[int, int]) -> ModuleType:
    """Module of one version of a file; its code runs once per version."""
    spec = importlib.util.spec_from_file_location(f"_steptime_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputFileError(str(path), "is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _called(factory: Any, sizes: Mapping[str, int], dtype: str | None, *, with_memory: bool = False) -> Any:
    import torch

    from steptime.captured.record.fake import build

    if isinstance(factory, torch.nn.Module):
        if sizes:
            raise UserError(f"a module takes no {' or '.join(sizes)}", hint="give --input, or a function that makes it")
        return factory
    if not callable(factory):
        raise UserError(f"{factory!r} is neither a module nor a function that makes one")
    wanted = _accepted(factory, sizes)
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(_torch_dtype(dtype))
        return factory(**wanted) if with_memory else build(lambda: factory(**wanted))
    finally:
        torch.set_default_dtype(before)


def _torch_dtype(name: str) -> Any:
    from steptime.captured.record.values import TORCH_DTYPES

    if name not in WEIGHT_DTYPES:
        raise UserError(f"weights of type {name!r} cannot be captured", hint=f"one of {', '.join(WEIGHT_DTYPES)}")
    return TORCH_DTYPES[name]


def _accepted(factory: Callable[..., Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes by parameter names of the factory.

    Raises:
        UserError: the factory has no parameter for a size.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    out = {}
    for size, value in sizes.items():
        words = SIZES.get(size, (size,))
        name = next((word for word in words if word in parameters), None)
        if name is None:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes nothing"
            hint = f"give the factory a parameter {' or '.join(words[:2])}; {takes}"
            raise UserError(f"the factory takes no {size}", hint=hint)
        out[name] = value
    return out


def _target(given: Any, text: str, specs: tuple[InputSpec, ...], dtype: str | None) -> Target:
    import torch

    from steptime.captured.record.inputs import made
    from steptime.captured.record.step import as_module

    module, inputs, loss = as_module(given), None, None
    if isinstance(given, (tuple, list)) and len(given) > 3:
        raise UserError(
            f"{text} returned {len(given)} things", hint="return (module, inputs) or (module, inputs, loss)"
        )
    if isinstance(given, (tuple, list)) and given:
        first, inputs, loss = (*given, None, None)[:3]
        module = as_module(first)
    elif isinstance(given, torch.export.ExportedProgram) and given.example_inputs is not None:
        inputs = given.example_inputs[0]
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            f"{text} returned {type(given).__name__}, no torch.nn.Module",
            hint="return a module, or (module, inputs), or (module, inputs, loss)",
        )
    if specs:
        inputs = made(specs, dtype)
    if inputs is None:
        raise UserError(
            f"{text}: the inputs of {type(module).__name__}.forward are not known",
            hint="let the factory return (module, inputs), or give --input 8x1024:int64 for each",
        )
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    return Target(module, inputs, loss, type(module).__name__)


@contextlib.contextmanager
def _errors_of_user(what: str) -> Iterator[None]:
    """Report errors of a factory in one message; a missing file is data that it should not need."""
    from steptime.captured.record.problems import explaining

    with explaining(what):
        try:
            yield
        except FileNotFoundError as error:
            raise UserError(
                f"{what}: it needs a file that is not there: {error.filename}",
                hint="let the factory build the module without data",
            ) from None
