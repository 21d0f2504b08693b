"""Which tests see a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import affected
from docs.test_documents import ALONE, TOGETHER

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml": '[project.entry-points."steptime.modes"]\nodd = "steptime_lab.odd:MODE"\n',
    "README.md": "```console\n$ steptime plan a\n```\n",
    "docs/fit.md": "```python\nfrom steptime.fitting import fit\n```\n",
    "docs/other.md": "no command\n",
    "src/steptime/__init__.py": 'PLACES = {"fit": "steptime.fitting:fit", "api": "steptime.api"}\n',
    "src/steptime/api/__init__.py": 'PLACES = {"look": "steptime.fitting:look"}\n',
    "src/steptime/cli/__init__.py": "",
    "src/steptime/cli/main.py": 'TABLE = {"plan": ("steptime.planning", "P"), "fit": ("steptime.fitting", "F")}\n',
    "src/steptime/planning.py": "from steptime.units import (\n    GIB,  # why\n    MIB,\n)\n",
    "src/steptime/fitting.py": "if TYPE_CHECKING:\n    import steptime.planning\ndef f():\n    import steptime.units\n",
    "src/steptime/units.py": '"""\n>>> 1\n1\n"""\n',
    "src/steptime/rooms/__init__.py": "",
    "src/steptime/rooms/catalogue/a.toml": "x = 1\n",
    "src/steptime_lab/__init__.py": "",
    "src/steptime_lab/commands.py": '_LAB = {"odd": (\n    "steptime_lab.odd",\n    "Odd.",\n)}\n',
    "src/steptime_lab/odd.py": "",
    "tests/helper.py": "from steptime.planning import GIB\n",
    "tests/cli/conftest.py": "from steptime.cli.main import main\n",
    "tests/cli/test_commands.py": 'def test(run):\n    run("plan", "a")\n',
    "tests/cli/test_odd.py": 'def test(run):\n    run("lab", "odd")\n',
    "tests/cli/test_all.py": "from steptime.cli.main import COMMANDS\n",
    "tests/docs/test_documents.py": "",
    "tests/docs/test_pages.py": "",
    "tests/unit/test_helped.py": "import helper\n",
    "tests/unit/test_api.py": "from steptime import api\napi.look()\n",
    "tests/unit/test_fit.py": "import steptime\nsteptime.fit()\n",
    "tests/unit/test_mode.py": 'MODE = "odd"\n',
    "tests/unit/test_rooms.py": "import steptime.rooms\n",
    "tests/unit/test_data.py": 'NAME = "machines"\n',
    "tests/unit/test_repository.py": "",
    "tests/data/machines/m.csv": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ("src/steptime/units.py", "units helped api fit commands all README fit,tour"),
        ("src/steptime/planning.py", "helped commands all README"),
        ("src/steptime/fitting.py", "api fit all fit,tour"),
        ("src/steptime_lab/odd.py", "odd mode all"),
        ("tests/helper.py", "helped"),
        ("tests/cli/conftest.py", "commands odd all"),
        ("tests/unit/test_mode.py", "mode"),
        ("tests/data/machines/m.csv", "data"),
        ("src/steptime/rooms/catalogue/a.toml", "rooms"),
        ("docs/other.md", "pages other"),
        ("README.md", "README"),
        ("examples/gpt.py", "README fit,tour other"),
    ],
)
def test_what_sees_a_change(root: Path, changed: str, seen: str) -> None:
    found = affected.affected(root, [changed])
    names = [name.partition("[")[2].rstrip("]") or Path(name).stem.removeprefix("test_") for name in found]
    assert sorted(names) == sorted(["repository", *seen.split()])


@pytest.mark.parametrize("changed", affected.OF_ALL)
def test_what_every_test_may_see(root: Path, changed: str) -> None:
    assert affected.affected(root, [changed]) == sorted(
        [name for name in FILES if Path(name).name.startswith("test_")] + ["src/steptime/units.py"]
    )


def test_files_that_differ_from_a_commit(root: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "mine")
    (root / "new.py").touch()
    (root / "README.md").write_text("changed")
    git("commit", "-am", "second")
    (root / "tests/helper.py").write_text("")
    git("checkout", "main")
    git("commit", "--allow-empty", "-m", "third")
    git("checkout", "mine")
    assert affected.changed_since("main", root) == ["README.md", "new.py", "tests/helper.py"]


def test_rooms_of_this_repository_are_apart() -> None:
    found = affected.affected(ROOT, ["src/steptime/doctor/log.py"])
    folders = {name.rpartition("/")[0] for name in found}
    assert "tests/unit/doctor" in folders and "tests/cli/test_doctor.py" in found
    assert not folders & {"tests/unit/rewrite", "tests/unit/sharding", "tests/unit/cost", "tests/unit/captured"}
    assert len(found) < 80


def test_pages_are_named_as_pytest_names_them() -> None:
    found = affected.affected(ROOT, ["examples/gpt.py"])
    pages = {",".join(path.stem for path in paths) for paths in (TOGETHER, *ALONE)}
    assert {name.partition("[")[2].rstrip("]") for name in found if "[" in name} == pages
