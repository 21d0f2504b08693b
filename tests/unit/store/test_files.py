"""Files of users: long keys, and files that are whole whenever the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest

from steptime.errors import InputFileError
from steptime.store import files

LONG = ".".join(["a"] * 32_000)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG} = 1",
        f"[{LONG}]",
        f"[[{LONG}]]",
        "x = {" + LONG + " = 1}",
        'b = 1\n"a" . ' * 1 + "c . 'd' . " * 20 + "e = 1",
    ],
    ids=["key", "table", "array", "inline", "quoted"],
)
def test_a_key_of_many_parts_is_refused_before_it_takes_memory(text):
    tracemalloc.start()
    with pytest.raises(InputFileError, match="more than 20 parts"):
        files.parse_toml(text, "a.toml")
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        'x = "' + LONG + '"', "x = '" + LONG + "'", f"# {LONG}", f'x = """\n{LONG}\n"""', "x = [1.5, 2.5]",
        "a.b.c.d.e = 2020-01-01T00:00:00.5", f"# it's\nx = 1 # {LONG}",
    ],
)  # fmt: skip
def test_dots_in_texts_numbers_and_comments_are_no_key(text):
    files.parse_toml(text, "a.toml")


def test_the_line_of_the_key_is_named():
    with pytest.raises(InputFileError, match="line 4 has a key"):
        files.parse_toml(f'x = """\n\n"""\n{LONG} = 1', "a.toml")


WRITER = """
import sys
from pathlib import Path
from steptime.store.files import replace_file
data = b"x" * 4_000_000
print("ready", flush=True)
while True:
    replace_file(Path(sys.argv[1]), data)
"""


def test_a_killed_writer_leaves_the_old_file_or_the_new_one_and_nothing_else(tmp_path):
    target = tmp_path / "out.json"
    target.write_bytes(b"old")
    for pause_s in (0.001, 0.004, 0.01, 0.02, 0.03):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(target)],
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        ) as running:
            assert running.stdout is not None
            running.stdout.readline()
            time.sleep(pause_s)
            running.send_signal(signal.SIGKILL)
        assert target.stat().st_size in (3, 4_000_000)
        # A name exists for the moment between two system calls alone; where a kill met it, it is whole.
        assert all(path.stat().st_size == 4_000_000 for path in tmp_path.iterdir() if path != target)


def test_a_replaced_file_keeps_its_mode(tmp_path):
    target = tmp_path / "out.json"
    target.write_bytes(b"old")
    target.chmod(0o640)
    files.replace_file(target, b"new")
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"new", 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    files.replace_file(tmp_path / "out.json", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]
