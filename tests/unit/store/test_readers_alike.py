"""Every reader of a user's file says the same of one that is missing or a folder, and names one that is nearly it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from steptime.captured.formats.snapshot_reader import read_snapshot
from steptime.doctor.source import open_bytes
from steptime.errors import InputFileError
from steptime.formats.huggingface.reader import read_huggingface
from steptime.formats.run_spec import read_description
from steptime.hardware.library import load_cluster
from steptime.measure.mesh.read import read_links
from steptime.measure.runs.read import read_rows
from steptime.measure.table import read_table
from steptime.model.known import read_model_toml
from steptime.store.files import read_bytes, refuse_unwritable, write_whole
from steptime.store.journal import Journal, read_journal

READERS: dict[str, tuple[Callable[..., object], str]] = {
    "model": (read_model_toml, "a.toml"), "cluster": (load_cluster, "a.toml"), "run": (read_description, "a.toml"),
    "journal": (read_journal, "a.jsonl"), "snapshot": (read_snapshot, "a.pickle"), "log": (open_bytes, "a.log"),
    "runs": (read_rows, "a.csv"), "table": (read_table, "a.parquet"), "links": (read_links, "a.csv"),
}  # fmt: skip


@pytest.mark.each("reader", READERS)
def test_a_missing_file_is_said_to_be_missing(reader: str, tmp_path: Path) -> None:
    read, name = READERS[reader]
    beside = tmp_path / f"my_{name}"
    beside.write_text("")
    with pytest.raises(InputFileError, match=rf"the file does not exist\n.*did you mean .*{beside.name}") as error:
        read(str(tmp_path / f"mi_{name}"))
    assert str(error.value).startswith(str(tmp_path / f"mi_{name}"))


@pytest.mark.each("reader", READERS)
def test_a_folder_is_said_to_be_one(reader: str, tmp_path: Path) -> None:
    read, name = READERS[reader]
    (tmp_path / name).mkdir()
    with pytest.raises(InputFileError, match="is a folder, not a file"):
        read(str(tmp_path / name))


def test_a_folder_of_a_model_needs_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"config\.json: the file does not exist"):
        read_huggingface(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**21 + 1)
    with pytest.raises(InputFileError, match="is larger than 2 MiB, too large for a hardware file"):
        read_bytes(large, 2**21, "a hardware file")
    assert len(read_bytes(large, 2**22, "a hardware file")) == 2**21 + 1


WRITERS: dict[str, Callable[[Path], object]] = {
    "report": lambda path: write_whole(path, "text"), "early": refuse_unwritable,
    "journal": lambda path: Journal(path, {"what": "test"}),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_say_the_same_of_a_folder_and_of_a_pipe(writer: str, tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="is a folder, not a file"):
        WRITERS[writer](tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputFileError, match="is not a regular file"):
        WRITERS[writer](tmp_path / "pipe")


@pytest.mark.each("reader", READERS)
def test_a_name_that_no_file_can_have_is_said_to_be_unreadable(reader: str, tmp_path: Path) -> None:
    read, name = READERS[reader]
    with pytest.raises(InputFileError, match="cannot be read: File name too long"):
        read(str(tmp_path / ("a" * 300 + name)))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_name_that_no_file_can_have_cannot_be_written(writer: str, tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be written: File name too long"):
        WRITERS[writer](tmp_path / ("a" * 300))
