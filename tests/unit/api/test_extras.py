"""The core needs few libraries; whatever else is asked for says in one line what installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.registry import EXTRAS, needed, require

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED_BY = {"distributed": "distributed", "sklearn": "scikit-learn", "yaml": "pyyaml", "z3": "z3-solver"}
"""Library -> its package, where that has another name."""
CORE = {"argcomplete", "numpy", "rich"}
RUN = 'model = "gpt2"\ncluster = "{cluster}"\ngpus = 8\nglobal_batch = 64\n[plan]\npp = 2\nmicro_batch = 4\n'
STUDY = '[job]\nmodel = "gpt2"\ncluster = "dgx-h100"\ngpus = [2, 4]\nglobal_batch = 12\n'


def packages(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", one)[0].lower() for one in requirements}


def test_the_core_needs_few_packages() -> None:
    assert packages(PROJECT["dependencies"]) <= CORE


def test_every_extra_has_its_libraries_and_all_has_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    for library, (_, extra) in EXTRAS.items():
        assert INSTALLED_BY.get(library, library) in packages(extras[extra]), library
    (everything,) = extras["all"]
    assert {extra for _, extra in EXTRAS.values()} <= set(everything[len("steptime[") : -1].split(","))
    assert "steptime[all]" in extras["test"]


@pytest.mark.parametrize("library", EXTRAS)
def test_what_is_missing_is_said_with_what_installs_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    name, extra = EXTRAS[library]
    for ask in (needed, require):
        with pytest.raises(UserError) as caught:
            ask(f"{library}.part" if ask is needed else library, "this")
        assert str(caught.value) == (f"this needs {name}, which is not installed\n  pip install 'steptime[{extra}]'")


def test_a_library_that_is_broken_is_not_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "egglog").mkdir()
    (tmp_path / "egglog" / "__init__.py").write_text("raise ImportError('libegglog.so: wrong ELF class')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "egglog"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"cannot be imported \(libegglog.so: wrong ELF class\)"):
        needed("egglog", "a proof")


WITHOUT = f"""
import sys
for library in {[*EXTRAS, "pydantic"]}:
    sys.modules[library] = None
from steptime.__main__ import run
sys.argv = ["steptime", *sys.argv[1:]]
run()
"""


def core(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command where none of the extras is installed."""
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_commands_of_the_core_work_without_extras(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "dgx-h100"\n[levels.nvlink]\ndevices = 4\n')
    (tmp_path / "run.toml").write_text(RUN.format(cluster=tmp_path / "mine.toml"))
    (tmp_path / "study.toml").write_text(STUDY)
    run, store = tmp_path / "run.toml", tmp_path / "store"
    for words in (
        ("--help",),
        ("plan", "gpt2", "--cluster", "dgx-h100", "--gpus", 8, "--global-batch", 64),
        ("estimate", run, "--explain"),
        ("diff", run, run),
        ("simulate", run),
        ("guide", run),
        ("export", run, "--for", "megatron-lm"),
        ("report", "gpt2", "--cluster", "dgx-h100", "--gpus", 8, "--global-batch", 64, "--out", tmp_path / "r.html"),
        ("study", "run", tmp_path / "study.toml", "--store", store, "--workers", 1),
        ("study", "show", tmp_path / "study.toml", "--store", store),
        ("study", "export", tmp_path / "study.toml", "--store", store, "--out", tmp_path / "plans.csv.gz"),
    ):
        done = core(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    (tmp_path / "run.json").write_text(core("estimate", run, "--json").stdout)
    for words, extra in (
        (("serve",), "page"),
        (("shard", "gpt2.py:made", "--cluster", "dgx-h100", "--gpus", 8), "solver"),
        (("profile", "gpt2.py:made", "--device", "h100-sxm"), "torch"),
        (("calibrate", "fit", "--kernels", tmp_path / "k.csv"), "calibrate"),
        (("study", "query", tmp_path / "study.toml", "select 1", "--store", store), "files"),
        (("study", "export", tmp_path / "study.toml", "--store", store, "--out", tmp_path / "plans.parquet"), "files"),
        (("plot", "memory", tmp_path / "run.json", "--out", tmp_path / "a.svg"), "plots"),
    ):
        done = core(*words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert done.stderr.splitlines()[1:] == [f"  pip install 'steptime[{extra}]'"], words
