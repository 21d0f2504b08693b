#!/usr/bin/env python3
"""Print the tests that can see what changed since a commit, one a line, for `scripts/test --changed`.

A test sees a module that it imports, through whatever other modules, a command that it names, and a file of data that
it names. A module that is loaded by its name counts where a string has the name, but for the tables of all commands and
the public API: of these, a test sees the entries that it names. All of this is read from the text, so it is a guess;
`scripts/test --all` makes none.

usage: python tests/affected.py [COMMIT]    default: main
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "scripts")
#: Tables of what is loaded by name: importing one of these files does not load what its strings name.
API = ("src/steptime/__init__.py", "src/steptime/api/__init__.py")
COMMANDS = ("src/steptime/cli/main.py", "src/steptime_lab/commands.py")
TABLES = (*API, *COMMANDS)
#: Every test may see these.
OF_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/suites.py")
#: These read the repository as it lies there, and are quick.
ALWAYS = ("tests/unit/test_repository.py",)
DOCUMENTS = "tests/docs/test_documents.py"
BLOCKS = "test_blocks_run_and_print_what_is_shown"
FIRST_PAGES = ("README.md", "CONTRIBUTING.md")
#: Pages that are one test of DOCUMENTS.
TOGETHER = ("fit", "tour")
PLACE = re.compile(r"(?P<module>steptime\w*(?:\.\w+)+)(?::\w+)?")
FUNCTION = re.compile(r"[\w./]+:\w+")
STRING = re.compile(r'"""(.*?)"""|"((?:[^"\\\n]|\\.)*)"', re.S)
COMMAND_LINE = re.compile(r"\bsteptime (?:lab |list )?([a-z]+)")


class Source:
    """Modules, names and strings in the text of a file of Python; trees take ten times as long."""

    def __init__(self, path: Path, root: Path) -> None:
        self.name, self.text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")

    @cached_property
    def strings(self) -> list[str]:
        """Every string in double quotes, docstrings too."""
        return [long or short for long, short in STRING.findall(self.text)]

    @cached_property
    def words(self) -> set[str]:
        """Words of all strings."""
        return {word for text in self.strings for word in re.findall(r"[\w-]+", text)}

    @cached_property
    def public(self) -> set[str]:
        """Names that the code takes from ``steptime`` and ``steptime.api``; "*" where it takes them by variables."""
        if self.name in TABLES:
            return set()
        found = set(re.findall(r"\b(?:api|steptime)\.(\w+)", self.text))
        found |= {name.rpartition(".")[2] for name in self.imported if name.startswith("steptime")}
        return found | ({"*"} if re.search(r"getattr\((?:steptime\.)?api,", self.text) else set())

    @cached_property
    def imported(self) -> set[str]:
        """Modules by their full names, and what may be one: the names imported from a module."""
        text = re.sub(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", "", self.text, flags=re.M)
        found = set(re.findall(r"^ *import ([\w.]+)", text, re.M))
        for module, listed, line in re.findall(r"^ *from ([\w.]+) import (?:\(([^)]*)\)|(.*))", text, re.M):
            parts = re.sub(r"#.*", "", listed or line).split(",")
            found |= {module} | {f"{module}.{part.split()[0]}" for part in parts if part.strip()}
        if self.name not in TABLES:
            found |= {match["module"] for string in self.strings if (match := PLACE.fullmatch(string))}
        return found


def module_names(name: str) -> Iterator[str]:
    """The names under which a file may be imported: tests and benchmarks are looked for in their own folders."""
    parts = Path(name).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    for start in range(1, len(parts)):
        yield ".".join(parts[start:])
        if parts[0] == "src":
            return


class Repository:
    """Which file of Python reaches which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        self.sources = {source.name: source for source in (Source(path, root) for path in paths)}
        self._files = {module: name for name in self.sources for module in module_names(name)}
        self._reached: dict[str, set[str]] = {}

    @cached_property
    def commands(self) -> Mapping[str, set[str]]:
        """Command -> the files of the modules of its name."""
        found: dict[str, set[str]] = {}
        for table in COMMANDS:
            for name, module in re.findall(r'"([a-z]+)": \(\s*"([\w.]+)"', self.sources[table].text):
                found.setdefault(name, set()).add(self._files[module])
        return found

    @cached_property
    def public(self) -> Mapping[str, str]:
        """Name of the public API -> the file that has it."""
        text = "\n".join(self.sources[table].text for table in API)
        pairs = [*re.findall(r'"(\w+)": "([\w.]+)(?::\w+)?"', text), *self._entry_points.get("steptime.api", ())]
        return {name: self._files[module] for name, module in pairs if module in self._files}

    @cached_property
    def plugins(self) -> Mapping[str, str]:
        """Name of a plug-in that is loaded by an entry point -> the file that has it."""
        groups = [group for group in self._entry_points if group not in ("steptime.api", "steptime.commands")]
        return {name: self._files[module] for group in groups for name, module in self._entry_points[group]}

    @cached_property
    def _entry_points(self) -> Mapping[str, list[tuple[str, str]]]:
        text = (self.root / "pyproject.toml").read_text(encoding="utf-8")
        groups = tomllib.loads(text)["project"]["entry-points"]
        return {
            group: [(name, place.partition(":")[0]) for name, place in found.items()] for group, found in groups.items()
        }

    def _files_of(self, modules: Iterable[str]) -> Iterator[str]:
        """The files that importing modules runs: theirs and those of the packages that they are in."""
        for module in modules:
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                if found := self._files.get(".".join(parts[:end])):
                    yield found

    @cached_property
    def _seen_by(self) -> Mapping[str, set[str]]:
        """File -> the files that import it, or use what a table names of it."""
        found: dict[str, set[str]] = {name: set() for name in self.sources}
        for name in self.sources:
            for file in self._next(name):
                found[file].add(name)
        return found

    def _next(self, name: str) -> set[str]:
        """The files that a file imports, and those of the names of the public API that it uses."""
        if name not in self._reached:
            source = self.sources[name]
            found = set(self._files_of(source.imported))
            if Path(name).name.startswith("test_"):  # fixtures of the folders in which it is
                beside = {(up / "conftest.py").as_posix() for up in Path(name).parents}
                found |= beside & set(self.sources) - set(OF_ALL)
            found |= {file for used, file in self.public.items() if {used, "*"} & source.public}
            self._reached[name] = found
        return self._reached[name]

    def seeing(self, changed: Iterable[str]) -> set[str]:
        """The files of Python that import what changed, through whatever others, and what changed itself."""
        found: set[str] = set()
        waiting = [name for name in changed if name in self.sources]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._seen_by[name]
        return found

    def loads(self, name: str) -> set[str]:
        """The files that a test file loads by names in its strings and those of what it imports of the tests."""
        own, waiting = {}, [name]
        while waiting:
            file = waiting.pop()
            if file not in own and not file.startswith("src/"):
                own[file] = self.sources[file]
                waiting += self._next(file)
        strings = [text for source in own.values() for text in source.strings]
        words = set().union(*(source.words for source in own.values()))
        found = {file for name, file in self.plugins.items() if name in words}
        runs = any(COMMANDS[0] in self._next(file) for file in own)
        if runs or any(text == "steptime" or COMMAND_LINE.search(text) for text in strings):
            every = any(re.search(r"\bCOMMANDS\b", source.text) for source in own.values())
            chosen = (files for command, files in self.commands.items() if every or command in words)
            found |= set(COMMANDS).union(*chosen)
        if any(FUNCTION.fullmatch(text) for text in strings):  # a model as module:function, read by an entry point
            found |= set(self._files_of(["steptime.captured.workload"]))
        return found

    def loaded_by_page(self, page: Path) -> set[str]:
        """The files that the commands and the Python of a page load."""
        text = page.read_text(encoding="utf-8")
        named = (self.commands[word] for word in COMMAND_LINE.findall(text) if word in self.commands)
        return {*COMMANDS, *self._files_of(re.findall(r"\bsteptime\w*(?:\.\w+)+", text))}.union(*named)

    def tests(self) -> Iterator[str]:
        """Files that pytest collects: those named so, and modules with doctests."""
        for name, source in self.sources.items():
            if Path(name).name.startswith("test_") or (name.startswith("src/") and ">>> " in source.text):
                yield name

    def stand_for(self, name: str) -> set[str] | None:
        """The files of Python that read a changed file; None where every test may see it."""
        path = Path(name)
        if name in OF_ALL:
            return None
        if name.endswith(".py"):
            return {name}
        if name.startswith("src/"):  # read by the modules of the package in which it lies
            folder = next(up for up in path.parents if (self.root / up / "__init__.py").exists() or up == Path("src"))
            return {file for file in self.sources if Path(file).parent == folder}
        if name.startswith("tests/golden/"):
            return {file for file in self.sources if file.startswith("tests/golden/")}
        if name.startswith("docs/"):
            return {file for file in self.sources if file.startswith("tests/docs/") and file != DOCUMENTS}
        folders = {f'"{folder}' for folder in path.parts[2:-1]} if name.startswith("tests/data/") else set()
        names = {path.name, f'"{path.stem}"', *folders}  # by its name, as a word, or as one of a folder
        return {file for file, source in self.sources.items() if any(one in source.text for one in names)}


def affected(root: Path, changed: Iterable[str]) -> list[str]:
    """What pytest is to run: files, and of the test of the documents the pages."""
    repository = Repository(root)
    tests = sorted(repository.tests())
    seen: set[str] = set()
    for name in changed:
        stand = repository.stand_for(name)
        if stand is None:
            return tests
        seen |= stand
    seeing = repository.seeing(seen)
    pages = [*(root / name for name in FIRST_PAGES if (root / name).exists()), *sorted((root / "docs").glob("*.md"))]
    changed_pages = {name for name in changed if name.endswith(".md")}
    chosen = [
        name for name in tests
        if name in ALWAYS or (name != DOCUMENTS and (name in seeing or seeing & repository.loads(name)))
    ]  # fmt: skip
    whole = DOCUMENTS in seen or any(name.startswith(("examples/", "studies/")) for name in changed)
    see = {
        page.stem for page in pages
        if whole or page.relative_to(root).as_posix() in changed_pages or seeing & repository.loaded_by_page(page)
    }  # fmt: skip
    together = [",".join(TOGETHER)] if see & set(TOGETHER) else []
    chosen += [f"{DOCUMENTS}::{BLOCKS}[{page}]" for page in together + sorted(see - set(TOGETHER))]
    return chosen


def changed_since(commit: str, root: Path) -> list[str]:
    """Files that differ from where a commit and this one part, and files that are new here."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    base = git("merge-base", commit, "HEAD")[0]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


if __name__ == "__main__":
    print("\n".join(affected(ROOT, changed_since(sys.argv[1] if len(sys.argv) > 1 else "main", ROOT))))
