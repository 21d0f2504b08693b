"""Files of frameworks: those of a user, those of the package, and a fit that is saved into them."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fits import fit_text
from steptime import api
from steptime.api.frameworks import framework_record
from steptime.errors import FieldError, UserError
from steptime.estimate.memory_definitions import memory_constants
from steptime.measure.runs.bands import save_fit
from steptime.plan import framework_file
from steptime.plan.framework import Habits
from steptime.plan.framework_file import (
    FILES,
    KINDS,
    PACKAGED,
    SLOWED,
    framework_called,
    framework_names,
    habits_of,
    load_framework,
    memory_profile_of,
    name_rules,
)
from steptime.plan.switches import switches_of


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("[common]", "[common]\nmatirx = 9.0", "common.matirx: unknown key\n  did you mean matrix?"),
        ("unknown_sources", "unknown_sorces", "band.model.unknown_sorces: unknown key\n  did you mean unknown_sources"),
        ("[doubts]", "[doubt]\nx = 1\n[doubts]", "doubt: unknown key\n  did you mean doubts?"),
        ('[device."a10"]', '[device."a10"]\nsource = 3', "device.a10.source: unknown key\n  did you mean sources?"),
        ('[framework."torchtitan".doubts]', '[framework."torchtitan".doubts]\nmatric = 1.0',
         "framework.torchtitan.doubts.matric: unknown key\n  did you mean matrix?"),
        ('[framework."torchtitan"]', '[framework."torchtitan"]\nrun = 1', "framework.torchtitan.run: unknown key"),
    ],
)  # fmt: skip
def test_keys_of_the_file_that_nothing_reads_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, problem: str
) -> None:
    """They were without effect, and without a word."""
    (tmp_path / "frameworks.toml").write_text(fit_text().replace(before, after, 1))
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    with pytest.raises(FieldError) as caught:
        load_framework("torchtitan", "h100-sxm")
    assert problem in str(caught.value)


def test_a_framework_that_nobody_named_is_as_much_slower_as_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\[generic\]\nslower = [\d.]+\n", "", fit_text())
    plain, slower = tmp_path / "older", tmp_path / "newer"
    for folder, more in ((plain, ""), (slower, "[generic]\nslower = 1.25\n\n")):
        folder.mkdir()
        (folder / "frameworks.toml").write_text(text.replace("[common]", f"{more}[common]", 1))
    found = []
    for folder in (plain, slower):
        monkeypatch.setenv("STEPTIME_PATH", str(folder))
        found.append([load_framework(name, "h100-sxm") for name in ("generic", "torchtitan")])
    (generic, named), (slow, same) = found
    assert [getattr(slow, name) / getattr(generic, name) for name in SLOWED] == pytest.approx([1.25] * len(SLOWED))
    assert slow.data_links == generic.data_links and named == same


JOB: dict[str, Any] = {"gpus": 16, "global_batch": 32, "plan": {"micro_batch": 1}}
OWN = """
base = "megatron-core"
source = "our fork of Megatron-Core"
kind = "measured"

[habits]
kernel = "flash2"
zero = 3

[memory]
workspace_bytes = 5e9

[switches]
graphs = []

[fitted]
runs = 3
matrix = 2.0
doubts = { matrix = 0.05 }
"""


def test_a_file_that_is_put_into_a_folder_is_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name in a folder of STEPTIME_PATH, by its path anywhere: what it does not say is as its base has it."""
    (tmp_path / "frameworks").mkdir()
    file = tmp_path / "frameworks" / "ours.toml"
    file.write_text(OWN)
    base = api.estimate("llama3-8b", "dgx-h100", framework="megatron-core", **JOB)
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    assert "ours" in framework_names()
    for name in ("ours", str(file)):
        found = api.estimate("llama3-8b", "dgx-h100", framework=name, **JOB)
        assert (found.plan["zero"], base.plan["zero"]) == (3, 1)
        assert found.step_time_s > 1.2 * base.step_time_s
        assert found.provenance.framework == name
        habits, memory = habits_of(name), memory_profile_of(name)
        assert habits == replace(habits_of("megatron-core"), kernel="flash2", zero=3)
        assert memory == replace(memory_profile_of("megatron-core"), name=name, workspace_bytes=5e9)
        assert switches_of(name) == replace(switches_of("megatron-core"), graphs=())
        own, other = (load_framework(each, "h100-sxm") for each in (name, "megatron-core"))
        assert own.spread is not None and other.spread is not None
        assert own.matrix == pytest.approx(2.0 * 0.96591) and own.vector == other.vector
        assert own.spread.doubts == {**other.spread.doubts, "matrix": 0.05}
        record = framework_record(name)
        assert record.runs == 3 and record.sources["kernel"] == (
            "our fork of Megatron-Core", "measured",
        )  # fmt: skip
        assert "arXiv 2104.04473" in record.sources["scattered_messages"][0]
        assert memory_constants().spread("device", name) == memory_constants().spread("device", "megatron-core")


def test_a_framework_of_the_users_without_a_fit_is_as_one_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frameworks").mkdir()
    (tmp_path / "frameworks" / "new.toml").write_text(
        '[habits]\nzero = 3\n[names]\nnearest = [{ names = ["brandnew"] }]\n'
    )
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    own, generic = (load_framework(name, "h100-sxm") for name in ("new", "generic"))
    assert own == replace(generic, name="new") and habits_of("new") == Habits(zero=3)
    assert framework_called("Brand-New") == "new"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[habits]\nkernal = 'flash2'", "habits.kernal: unknown key\n  did you mean kernel"),
        ("[habits]\nkernel = 'flash9'", "habits.kernel: 'flash9' is none of newest, flash4"),
        ("[habits]\nzero_stages = [4]", "habits.zero_stages[0]: 4 is not a whole number from 0 to 3"),
        ("[habits]\nroot_unit = 1", "habits.root_unit: 1 is neither true nor false"),
        ("[memory]\nlogit_kept_bytes = -1", "memory.logit_kept_bytes: -1 is not a number from 0"),
        ("[fitted]\nmatrix = 0", "fitted.matrix: 0 is not a number from"),
        ("[fitted]\ndata_exposed = 1.0", "fitted.data_exposed: 1.0 is not a number from"),
        ("[names]\npatterns = [{ columns = ['framework'], match = '(' }]", "names.patterns[0].match: is no regular"),
        ('base = "own.toml"', "leads back to this file"),
        ('base = "megatron-cor"', "base: there is no framework 'megatron-cor'\n  did you mean megatron-core"),
        ("[habits]\nzero = 9\n[memory]\npure = 2",
         "2 fields are wrong\n  habits.zero: 9 is not a whole number from 0 to 3 (for example 3)\n  memory.pure: 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_framework_of_the_users_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        api.estimate("llama3-8b", "dgx-h100", framework=str(file), **JOB)
    assert str(file) in str(caught.value) and problem in str(caught.value)


def test_frameworks_of_published_runs_alone_are_no_choice() -> None:
    assert framework_called("ms-swift") == "hf-trainer" and memory_profile_of("hf-trainer").pure
    assert "hf-trainer" not in framework_names()


def test_every_value_of_a_framework_of_the_package_has_a_source() -> None:
    for name in framework_names()[2:]:
        for value, (source, kind) in framework_record(name).sources.items():
            assert source and kind in KINDS, (name, value)


def test_a_fit_is_saved_into_the_file_of_each_framework(tmp_path: Path) -> None:
    """What people wrote stays; a framework without runs loses its values, a new one gets a file."""
    folder, shared = tmp_path / "frameworks", tmp_path / "frameworks.toml"
    shutil.copytree(FILES, folder)
    shared.write_text(PACKAGED.read_text())
    save_fit(fit_text(), shared, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        path.name: path.read_text() for path in FILES.iterdir()
    }
    assert shared.read_text() == PACKAGED.read_text()
    text = re.sub(r'\[framework\."ddp"\]\n(.*\n)+?(?=\[framework\."deepspeed"\])', "", fit_text())
    text = text.replace('[framework."automodel"', '[framework."new \\"one\\""').replace(
        "[common]\nmatrix = 1", "[common]\nmatrix = 3"
    )
    save_fit(text, shared, folder)
    tables = {path.stem: tomllib.loads(path.read_text()) for path in folder.iterdir()}
    before = {path.stem: tomllib.loads(path.read_text()) for path in FILES.iterdir()}
    assert tables['new "one"'] == {"fitted": before["automodel"]["fitted"]}
    for name in ("ddp", "automodel"):
        assert tables[name] == {key: value for key, value in before[name].items() if key != "fitted"}
    assert tables["torchtitan"] == before["torchtitan"]
    assert tomllib.loads(shared.read_text())["common"]["matrix"] > 3 and "[[open]]" in shared.read_text()


def test_a_file_that_is_put_into_the_package_is_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any fit has its runs, timed as `generic`; with bases over bases, and names of its own."""
    folder = tmp_path / "frameworks"
    shutil.copytree(FILES, folder)
    (folder / "added.toml").write_text('base = "trl"\n[habits]\nzero = 2\n[names]\nsource_keys = ["added-runs"]\n')
    (folder / "over.toml").write_text('base = "added"\n[memory]\npure = true\n')
    (folder / "told.toml").write_text(
        'published = true\n[[names.patterns]]\ncolumns = ["framework"]\nmatch = "told.*"\n'
    )
    monkeypatch.setattr(framework_file, "FILES", folder)
    kept = framework_file._packaged, framework_file._packaged_rules
    for each in kept:
        each.cache_clear()
    try:
        assert {"added", "over"} <= set(framework_names()) and "told" not in framework_names()
        assert habits_of("over") == replace(habits_of("trl"), zero=2)
        assert memory_profile_of("over") == replace(memory_profile_of("trl"), name="over", pure=True)
        added, generic = (load_framework(name, "h100-sxm") for name in ("added", "generic"))
        assert added.attention > generic.attention and added.matrix == generic.matrix
        assert framework_called("Told 2") == "told" and name_rules()["source_key"]["added-runs"] == "added"
    finally:
        for each in kept:
            each.cache_clear()
