"""Rules about the repository's own files."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Written in two pieces so that this file does not match itself.
FORBIDDEN = re.compile("/wo" + "rk/|" + r"\.\./" + "shared")
ALLOWED = {"src/steptime_lab/data_root.py"}
SKIPPED = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".import_linter_cache", ".hypothesis", "__pycache__"}
BUILT = {"docs/_build", "docs/generated", "build", "dist"}


def repository_files() -> list[Path]:
    out = []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        folders[:] = [f for f in folders if f not in SKIPPED and str(here / f) not in BUILT]
        out += [Path(folder, name) for name in files if name not in SKIPPED]  # .git of a worktree is a file
    return out


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(f"{name}_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in repository_files():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8", errors="ignore")
        if name not in ALLOWED and (match := FORBIDDEN.search(text)):
            found.append(f"{name}:{text[: match.start()].count(chr(10)) + 1}: {match.group()}")
    assert found == []


def test_the_search_for_paths_sees_them():
    assert FORBIDDEN.search("see /wo" + "rk/main")
    assert FORBIDDEN.search("open('.." + "/shared/data')")
    assert not FORBIDDEN.search("the framework/network folder")
    names = {path.relative_to(ROOT).as_posix() for path in repository_files()}
    assert {"pyproject.toml", ".ci/run", "src/steptime/errors.py"} <= names


def test_the_constraints_pin_every_declared_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(item for name in ("test", "lint", "docs") for item in extras[name])]
    wanted = {_normal(re.match(r"[\w.-]+", item)[0]) for item in declared} | {"hatchling"}  # type: ignore[index]
    wanted -= {_normal(project["name"])}  # an extra that contains another one
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_normal(line.split("==")[0]) for line in lines if "==" in line}
    assert wanted <= pinned
    assert all(line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in lines)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_size_check_holds_files_the_total_and_knows_every_room(tmp_path, monkeypatch, capsys):
    size = script("size")
    monkeypatch.chdir(tmp_path)
    files = {"steptime/small/a.py": 3, "steptime/unknown/a.py": 1, "steptime/b.py": 2, "steptime_lab/far/a.py": 1001}
    for name, lines in files.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text("x = 1\n" * lines)
    assert size.room_lines(size.files_here()) == {"small": 3, "unknown": 1, "steptime": 2, "lab/far": 1001}
    (tmp_path / "docs").mkdir()
    house = "at most **{}** lines of Python\n| `small` | x |\n| `lab/far` | x |\n"
    (tmp_path / "docs/house.md").write_text(house.format("1,006"))
    assert size.main() == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "src/steptime_lab/far/a.py: 1001 lines; at most 1000",
        "unknown: a room that docs/house.md does not have",
        "src: 1,007 lines; at most 1,006 (docs/house.md)",
    ]
    (tmp_path / "docs/house.md").write_text(house.format("1,007") + "| `unknown` | x |\n")
    (tmp_path / "src/steptime_lab/far/a.py").write_text("x = 1\n" * 1000)
    assert size.main() == 0


def test_size_check_reads_the_lines_of_a_commit(monkeypatch):
    size = script("size")
    monkeypatch.chdir(ROOT)
    assert size.room_lines(size.files_of("no-such-commit")) == {}
    if (ROOT / ".git").exists():
        assert size.room_lines(size.files_of("HEAD"))["cost"] > 1000


def test_word_check_reads_text_and_leaves_code_alone(tmp_path, monkeypatch):
    words = script("words")
    (tmp_path / "room").mkdir()
    (tmp_path / "page.md").write_text("a row beside\n`beside`\n```\nbeside\n```\n")
    (tmp_path / "room" / "a.py").write_text(
        '"""A row beside another.\n\n``beside`` is code.\n\n>>> beside = 1\n"""\nbeside = {"beside": 1}  # Beside\n'
    )
    monkeypatch.setattr(words, "PACKAGES", (tmp_path,))
    monkeypatch.setattr(words, "PAGES", tmp_path)
    found = words.occurrences(["beside"])
    assert [line.split(":")[1] for line in found["room"]] == ["1", "7"]
    assert [line.split(":")[1] for line in found[f"{tmp_path}/page.md"]] == ["1"]


def test_word_check_reads_the_table_of_the_vocabulary():
    words = script("words")
    listed = words.words_to_avoid((ROOT / "docs/vocabulary.md").read_text())
    assert {"likewise", "beside", "besides", "so many"} <= set(listed)
    assert "not" not in listed and "---" not in listed


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "lint", "docs", "bench"])
def test_make_has_the_targets_that_documents_name(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_scripts_are_executable_and_fit_on_a_screen():
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]:
        if path.is_file():
            assert os.access(path, os.X_OK), path
            assert path.read_text().count("\n") <= 80, path


def test_every_path_that_the_pages_of_contributors_name_exists():
    """Paths below the package in docs/house.md, and links to files in all pages."""
    packages = (ROOT / "src/steptime", ROOT / "src", ROOT)
    named = re.findall(r"`([a-z_/]+\.(?:py|toml))`", (ROOT / "docs/house.md").read_text())
    assert len(named) > 30
    lost = [name for name in named if not any((folder / name).exists() for folder in packages)]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#\s:]+\.(?:py|toml|md))[)#]", text)
        lost += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
        paths = re.findall(r"`(src/steptime/[\w/]+\.(?:py|toml))`", text)
        lost += [f"{page.name}: {name}" for name in paths if not (ROOT / name).exists()]
    assert not lost
