"""Where the bulk measurements are looked for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime_lab import data_root as module


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with nothing beside it, and no variable."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(module, "_CHECKOUT", folder)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    return folder


def test_without_a_folder_there_is_none(checkout):
    assert module.data_root() is None
    with pytest.raises(UserError, match=r"kernels\.parquet") as caught:
        module.require_data("kernels.parquet")
    assert module.VARIABLE in str(caught.value)


def test_the_folder_beside_the_checkout_is_found(checkout):
    folder = checkout.parent / "shared" / "data"
    folder.mkdir(parents=True)
    assert module.data_root() == folder
    (checkout / "pyproject.toml").unlink()
    assert module.data_root() is None


def test_the_variable_wins(checkout, monkeypatch, tmp_path):
    (checkout.parent / "shared" / "data").mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.csv").touch()
    monkeypatch.setenv(module.VARIABLE, str(mine))
    assert module.data_root() == mine
    assert module.require_data("a.csv") == mine / "a.csv"
    with pytest.raises(UserError, match=r"b\.csv(.|\n)*a\.csv"):
        module.require_data("b.csv")


@pytest.mark.parametrize("given", ["nowhere", "pyproject.toml"])
def test_a_variable_that_names_no_folder_is_a_user_error(checkout, monkeypatch, given):
    monkeypatch.setenv(module.VARIABLE, str(checkout / given))
    with pytest.raises(UserError, match=module.VARIABLE):
        module.data_root()


def test_an_empty_variable_counts_as_unset(checkout, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "")
    assert module.data_root() is None


TESTS = """\
import pytest
from steptime_lab.data_root import require_data

@pytest.fixture(scope="module")
def lines():
    return require_data("a.csv").read_text()

@pytest.mark.shared
def test_marked(lines):
    assert lines == "1"

@pytest.mark.shared
def test_marked_too():
    assert require_data("a.csv").read_text() == "1"

def test_unmarked():
    require_data("a.csv")
"""


@pytest.mark.quick("False-0-outcome2")
@pytest.mark.parametrize(
    ("present", "workers", "outcome"),
    [(True, "0", {"passed": 2, "failed": 1}), (True, "2", {"passed": 2, "failed": 1}),
     (False, "0", {"skipped": 2, "failed": 1})],
)  # fmt: skip
def test_only_marked_tests_see_the_measurements(tmp_path, monkeypatch, present, workers, outcome):
    """With them the marked tests pass, without them they are skipped with the reason; the unmarked one always fails."""
    for name in ("conftest.py", "suites.py"):
        shutil.copy(Path(__file__).parents[2] / name, tmp_path)
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "nothing_beside.py").write_text("import steptime_lab.data_root as m\nm._CHECKOUT = m.Path('/none')\n")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_text("1")
    monkeypatch.setenv(module.VARIABLE, str(data) if present else "")
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ["-p", "nothing_beside", "-p", "no:cacheprovider", "-n", workers, "-rs"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "markers=shared", str(tmp_path)], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": places, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
    assert found == outcome, done.stdout + done.stderr
    assert ("no bulk measurements" in done.stdout) is not present
    assert "hidden-from-tests-without-the-marker-shared" in done.stdout
