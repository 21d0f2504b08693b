"""Catalogue files that were parsed when the package was built."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from steptime.errors import FieldError, UserError
from steptime.hardware import load, load_cluster, profiles
from steptime.hardware.search_path import CATALOGUE
from steptime.model import known
from steptime.plan import framework_file
from steptime.store import compiled, files

TEXT = 'name = "one"\nnumbers = [1, 2.5, 1e400]\n[below]\nlong = "a text of some length, so that it is looked for"\n'


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file of documents of the test's own."""
    monkeypatch.setattr(compiled, "FILE", tmp_path / "compiled.json")
    yield tmp_path / "compiled.json"
    compiled._index.cache_clear()


def test_a_document_comes_back_and_an_edited_text_is_parsed(kept):
    document = tomllib.loads(TEXT)
    assert compiled.write([((TEXT,), document | {"name": "from the build"})], kept) == 1
    assert files.parse_toml(TEXT, "a.toml") == document | {"name": "from the build"}
    edited = TEXT.replace("2.5", "2.6")
    assert files.parse_toml(edited, "a.toml") == tomllib.loads(edited)
    files.parse_toml(TEXT, "a.toml")["below"]["long"] = "changed"
    assert files.parse_toml(TEXT, "a.toml")["below"] == document["below"]


def test_what_json_does_not_keep_is_left_out(kept):
    text = "day = 2024-02-03\n" + TEXT
    assert compiled.write([((text,), tomllib.loads(text))], kept) == 0
    assert files.parse_toml(text, "a.toml")["day"].month == 2


WITH_PLACE = '{"%s": %s}\nabc'
"""A file of documents whose index has the key of :data:`TEXT` with some place."""


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"x": 3}\n', None, b"[1]\n", b"7\n", b"[" * 100_000]
    + [
        (WITH_PLACE % (compiled.key_of(TEXT), place)).encode() for place in ("null", "3", '["a", "b"]', "[0, 3]", "[1]")
    ],
    ids=lambda content: None if content is None else content[:20].decode(),
)
def test_a_broken_file_of_documents_is_as_none(kept, content):
    compiled.write([((TEXT,), {"name": "from the build"})], kept)
    if content is None:
        kept.unlink()
    else:
        kept.write_bytes(compiled._seal(content) + b"\n" + content)
    compiled._index.cache_clear()
    assert files.parse_toml(TEXT, "a.toml") == tomllib.loads(TEXT)


@pytest.mark.parametrize("damage", ["digit", "cut", "version", "zeros"])
def test_a_damaged_file_or_one_of_another_version_is_not_used(kept, monkeypatch, damage):
    compiled.write([((TEXT,), tomllib.loads(TEXT) | {"numbers": [1, 2.5, 7]})], kept)
    assert files.parse_toml(TEXT, "a.toml")["numbers"][2] == 7
    data = kept.read_bytes()
    if damage == "version":
        monkeypatch.setattr(compiled, "__version__", "9.9.9")
    else:
        kept.write_bytes({"digit": data.replace(b"2.5", b"1.5"), "cut": data[:-1], "zeros": bytes(len(data))}[damage])
    compiled._index.cache_clear()
    assert files.parse_toml(TEXT, "a.toml") == tomllib.loads(TEXT)


def test_every_model_of_the_catalogue_can_be_compiled(kept):
    documents = list(known.catalogue_documents())
    assert len(documents) == len(known.catalogue_names())
    compiled.write(documents, kept)
    for name in known.catalogue_names()[::9]:
        written, table = known._catalogue()[known._key(name)]
        assert compiled.compiled(*known._texts(written, table)) is not None
        assert known.load_catalogue_model(name) == known._checked(written, table)


#: What neither command needs: gates and parsers of what is not the user's, parts of libraries, rooms of other jobs.
NEVER = {
    "pydantic", "pydantic_core", "scipy", "duckdb", "asyncio", "csv", "numpy.ma", "numpy.random", "numpy.fft",
    "numpy.typing", "argcomplete", "rich.markdown", "rich.progress", "rich.prompt", "rich.traceback", "pygments",
    "steptime.simulation.synthesis", "steptime.formats.huggingface.reader", "steptime.model.kinds",
    "steptime.model.library", "steptime.estimate.learned",
    "steptime.estimate.further_kernels", "steptime.cost.convolution", "steptime.captured", "steptime_lab",
}  # fmt: skip
#: Command -> what it does without, and the most modules of ours that it loads.
LOADED = {
    "plan gpt3_1T --cluster dgx-b200 --gpus 64 --global-batch 512 --top 2": (
        {"tomllib", "steptime.api.calls", "steptime.formats.estimate_file"},
        145,
    ),
    "estimate run.toml": (
        {"statistics", "steptime.api.searches", "steptime.goodput.objective", "steptime.search.planner",
         "steptime.search.exhaustive", "steptime.search.layers", "steptime.search.advice", "steptime.report.plan"},
        128,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A program that runs ``steptime`` with all files compiled, and prints what it loaded as its last error line."""
    folder = tmp_path_factory.mktemp("package")
    script = Path(__file__).parents[3] / "scripts" / "catalogue"
    code = f"""
import pathlib, sys
from steptime.store import compiled
compiled.FILE = pathlib.Path({str(folder / "compiled.json")!r})
if sys.argv.pop(1) == "build":
    import importlib.machinery, importlib.util
    loader = importlib.machinery.SourceFileLoader("catalogue", {str(script)!r})
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("catalogue", loader))
    loader.exec_module(module)
    compiled.write(module.documents(), compiled.FILE)
else:
    sys.argv[0] = "steptime"
    from steptime.cli.main import main
    main()
    import json
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    (folder / "run.toml").write_text(
        'model = "llama3-70b"\ncluster = "dgx-h100"\ngpus = 512\nglobal_batch = 1024\n[plan]\ntp = 8\npp = 4\n'
    )
    subprocess.run([sys.executable, "-c", code, "build"], check=True, capture_output=True)
    return folder, code


def test_the_first_installation_compiles_files_before_anything_is_installed():
    """`make demo` builds the package in an environment without numpy."""
    script = Path(__file__).parents[3] / "scripts" / "catalogue"
    code = f"""
import runpy, sys
sys.path.insert(0, {str(script.parents[1] / "src")!r})
print(sum(1 for _ in runpy.run_path({str(script)!r})["documents"]()))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
    assert "left out: No module named 'numpy'" in done.stderr


@pytest.mark.quick(without=["plan gpt3_1T --cluster dgx-b200 --gpus 64 --global-batch 512 --top 2"])
@pytest.mark.parametrize("command", LOADED)
def test_a_job_of_the_catalogue_loads_no_more_than_it_needs(package, command):
    """What is imported until a plan or an estimate is printed."""
    (folder, code), (without, most) = package, LOADED[command]
    words = [sys.executable, "-c", code, "run", *command.split()]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=folder)
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert not modules & (NEVER | without)
    ours = sorted(name for name in modules if name.partition(".")[0] == "steptime")
    assert len(ours) <= most, f"{len(ours)} modules, {most} were enough: leave one out, or say here why not; {ours}"


def test_fabrics_and_frameworks_of_the_catalogue_are_compiled_as_they_are_read(kept, monkeypatch):
    fabrics, tables = profiles.load_fabric_profiles(), framework_file._checked()
    documents = [*profiles.fabric_documents(), *framework_file.framework_documents()]
    assert compiled.write(documents, kept) == 2
    monkeypatch.setattr(profiles, "parse_toml", lambda *_: pytest.fail("a file was parsed"))
    assert profiles.load_fabric_profiles() == fabrics
    monkeypatch.setattr(framework_file, "parse_toml", lambda *_: pytest.fail("a file was parsed"))
    framework_file._packaged.cache_clear()
    assert framework_file._packaged() == tables
    framework_file._packaged.cache_clear()


def test_a_fabric_of_the_user_is_read_next_to_those_of_the_catalogue(kept, monkeypatch, tmp_path):
    compiled.write(profiles.fabric_documents(), kept)
    source = CATALOGUE / "fabrics" / "h100-sxm-nccl.toml"
    (tmp_path / "fabrics").mkdir()
    (tmp_path / "fabrics" / "ours.toml").write_text(source.read_text().replace("h100-sxm-nccl", "ours"))
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    names = [profile.name for profile in profiles.load_fabric_profiles()]
    assert "ours" in names and "h100-sxm-nccl" in names
    (tmp_path / "fabrics" / "ours.toml").write_text("name = 3")
    with pytest.raises(UserError, match=r"ours\.toml: 11 fields are wrong\n  name: 3 is not a text"):
        profiles.load_fabric_profiles()


@pytest.mark.slow
def test_what_was_checked_when_it_was_built_is_not_checked_again(kept, monkeypatch, tmp_path):
    """An edited file of the catalogue is: the text that it was compiled from is another one."""
    documents = (load.hardware_documents, profiles.profile_documents, profiles.fabric_documents)
    before = load_cluster("dgx-h100"), profiles.load_profile("h100-sxm"), profiles.load_fabric_profiles()
    compiled.write([each for make in (*documents, framework_file.framework_documents) for each in make()], kept)
    framework_file._packaged.cache_clear()
    for module in (load, profiles, framework_file):
        monkeypatch.setattr(module, "checked", lambda *_: pytest.fail("a file was checked"))
    assert (load_cluster("dgx-h100"), profiles.load_profile("h100-sxm"), profiles.load_fabric_profiles()) == before
    assert framework_file.habits_of("torchtitan").zero == 3
    monkeypatch.undo()
    edited = tmp_path / "h100-sxm.toml"
    edited.write_text((CATALOGUE / "devices" / "h100-sxm.toml").read_text().replace('memory = "', 'memory = "-', 1))
    with pytest.raises(FieldError, match=r"h100-sxm\.toml: memory: .*is not between"):
        load.read(edited, "device", trusted=True)
