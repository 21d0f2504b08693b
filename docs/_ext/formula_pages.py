"""One page per module of formulas, of the product and the laboratory, made from its docstrings at every build."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import steptime.cost
import steptime_lab.cost

_SECTION = re.compile(r"(Args|Raises|Returns):\n((?:[ ]{4}.*(?:\n|$)|\n)+)")
_ENTRY = re.compile(r"^[ ]{4}(\w+): (.*(?:\n[ ]{8}.*)*)", re.M)


def write_pages(folder: Path) -> None:
    """Write the pages; those of modules that are gone go too."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = [importlib.import_module(name) for name in _modules()]
    pages = {f"{module.__name__.rsplit('.', 1)[1]}.md": _page(module) for module in modules}
    for stale in set(folder.glob("*.md")) - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _modules() -> Iterator[str]:
    for package in (steptime.cost, steptime_lab.cost):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not found.name.rpartition(".")[2].startswith("_"):
                yield found.name


def _page(module: ModuleType) -> str:
    parts = [f"# `{module.__name__}`", _markdown(inspect.getdoc(module) or "")]
    for function in _functions(module):
        parameters = ", ".join(inspect.signature(function).parameters)
        parts += [f"## `{function.__name__}`", f"`{function.__name__}({parameters})`"]
        parts.append(_markdown(inspect.getdoc(function) or ""))
    return "\n\n".join(parts) + "\n"


def _functions(module: ModuleType) -> list[FunctionType]:
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


def _markdown(doc: str) -> str:
    """A docstring as Markdown: sections become lists, doctests become code."""
    doc = _SECTION.sub(_list, doc + "\n")
    doc = re.sub(r"^Source: ", "**Source:** ", doc, flags=re.M)
    doc = re.sub(r"``([^`\n]+)``", r"`\1`", doc)
    return "\n\n".join(_fenced(paragraph) for paragraph in re.split(r"\n{2,}", doc.strip()))


def _list(section: re.Match[str]) -> str:
    entries = [f"- `{name}`: {' '.join(text.split())}" for name, text in _ENTRY.findall(section.group(2))]
    title = {"Args": "Arguments"}.get(section.group(1), section.group(1))
    return f"**{title}**\n\n" + "\n".join(entries) + "\n\n"


def _fenced(paragraph: str) -> str:
    return f"```pycon\n{paragraph}\n```" if paragraph.startswith(">>> ") else paragraph
