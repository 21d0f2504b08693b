"""The journal survives crashes, refuses mixtures, and never loses a record; files are whole or absent."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from steptime.errors import InputFileError, UserError
from steptime.measure.table import read_table
from steptime.store.files import prepare_folder, refuse_unwritable, write_bytes, write_whole
from steptime.store.journal import Journal, content_key, read_journal
from steptime.store.tables import write_table

HEADER = {"host": "a", "torch": "2"}


def _filled(path: Path, count: int = 3) -> Path:
    with Journal(path, HEADER) as journal:
        for i in range(count):
            journal.append({"key": f"k{i}", "seconds": [0.5 * i]})
    return path


def test_content_key_depends_on_content_alone() -> None:
    assert content_key({"a": [1, 2], "b": "x"}) == content_key({"b": "x", "a": [1, 2]})
    assert content_key({"a": 1}) != content_key({"a": 2})
    with pytest.raises(ValueError):
        content_key({"a": float("nan")})


def test_round_trip_and_resume(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.jsonl")
    with Journal(path, HEADER, resume=True) as journal:
        assert [r["key"] for r in journal.records] == ["k0", "k1", "k2"]
        journal.append({"key": "k3"})
    assert read_journal(path).records[-1] == {"key": "k3"}
    with Journal(path, HEADER):
        pass
    assert read_journal(path).records == ()


@pytest.mark.each("cut", range(1, 33))
def test_every_torn_last_line_is_dropped_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = _filled(tmp_path / "j.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    lost = data[-cut:].count(b"\n") if cut > 1 else 1
    assert len(read_journal(path).records) == 3 - lost
    with Journal(path, HEADER, resume=True) as journal:
        journal.append({"key": "after"})
    assert [r["key"] for r in read_journal(path).records] == [*[f"k{i}" for i in range(3 - lost)], "after"]


def test_a_last_line_of_zeros_is_torn_too(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.jsonl")
    with path.open("ab") as file:
        file.write(b"\0" * 20 + b"\n")
    assert len(read_journal(path).records) == 3


def test_damage_in_the_middle_is_refused_with_its_line(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.jsonl")
    lines = path.read_bytes().split(b"\n")
    lines[2] = b'{"key": 5}'
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(InputFileError, match="line 3 is damaged"):
        read_journal(path)


@pytest.mark.parametrize("content", [b"", b"hello\n", b"[1]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 100000 + b"\n"])
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match="not a journal"):
        read_journal(path)


def test_another_header_is_refused_and_named(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.jsonl")
    with pytest.raises(InputFileError, match='host: "a" there, "b" now') as caught:
        Journal(path, {**HEADER, "host": "b"}, resume=True)
    assert "torch" not in str(caught.value)
    assert len(read_journal(path).records) == 3


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, HEADER) as journal:
        journal.append({"key": "x"})
        with pytest.raises(InputFileError, match="another process"):
            Journal(path, HEADER)
    assert len(read_journal(path).records) == 1


def test_a_disk_that_fills_up_leaves_whole_records_and_is_named(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, limits = _filled(tmp_path / "a.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = path.stat().st_size
    try:
        with (
            pytest.raises(InputFileError, match=rf"{path}: cannot be written: .*\n  it keeps 3 records"),
            Journal(path, HEADER, resume=True) as journal,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 10, limits[1]))
            journal.append({"key": "long", "seconds": [0.1] * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == whole, "nothing of the record that did not fit is left, nor written at the end"
    with Journal(path, HEADER, resume=True) as journal:
        journal.append({"key": "long", "seconds": [0.1] * 100})
    assert [record["key"] for record in read_journal(path).records] == ["k0", "k1", "k2", "long"]


def test_a_record_needs_a_key_and_plain_data(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl", HEADER) as journal:
        with pytest.raises(ValueError):
            journal.append({"seconds": 1.0})
        with pytest.raises(ValueError):
            journal.append({"key": "x", "seconds": float("inf")})
        assert journal.records == ()


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(InputFileError):
            refuse_unwritable(path)
        with pytest.raises(InputFileError):
            write_whole(path, "x")
        with pytest.raises(InputFileError):
            Journal(path, HEADER)
    refuse_unwritable(tmp_path / "fine")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.txt"]


def test_write_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "t", tmp_path / "l"
    write_whole(target, "old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet"])
def test_tables(tmp_path: Path, ending: str) -> None:
    import duckdb

    path = tmp_path / f"it's a table{ending}"
    write_table(path, [{"op": "gemm", "m": 1}, {"op": 'a "b"', "us": 2.5}])
    with duckdb.connect() as connection:
        reader = "read_parquet" if ending == ".parquet" else "read_csv"
        rows = connection.execute(f"select op, m, us from {reader}(?)", [str(path)]).fetchall()
    assert rows == [("gemm", 1.0, None), ('a "b"', None, 2.5)]
    if ending == ".csv.gz":
        assert gzip.decompress(path.read_bytes()).startswith(b"op,m,us")


def test_tables_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends in"):
        write_table(tmp_path / "a.xlsx", [{"a": 1}])
    with pytest.raises(UserError, match="no rows"):
        write_table(tmp_path / "a.csv", [])
    with pytest.raises(InputFileError):
        write_table(tmp_path / "none" / "a.csv", [{"a": 1}])


def test_lines_are_plain_json(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.jsonl")
    first, *rest = path.read_text().splitlines()
    assert json.loads(first) == {"journal": 1, **HEADER}
    assert all("key" in json.loads(line) for line in rest)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder in which no file may grow beyond a kilobyte."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_found_before_the_work_with_what_to_do(full: Path) -> None:
    (full / "a.toml").write_text("old")
    for refuse in (
        lambda: refuse_unwritable(full / "a.toml"),
        lambda: prepare_folder(full / "new"),
        lambda: write_whole(full / "a.toml", "x" * 5000),
        lambda: write_bytes(full / "a.toml", bytes(5000)),
        lambda: write_table(full / "a.csv", [{"text": "x" * 5000}]),
    ):
        with pytest.raises(InputFileError, match=r"cannot be written: .*\n  make room, or write it to another disk"):
            refuse()
    assert (full / "a.toml").read_text() == "old" and sorted(p.name for p in full.iterdir()) == ["a.toml", "new"]


@pytest.mark.parametrize(
    "said",
    [
        'IO Error: Could not write file "/disk/tmp_a.csv": No space left on device',
        'IO Error: Async write failed for range [offset=0, size=3]: {"exception_type":"IO","exception_message":"Could '
        'not write file \\"/disk/tmp_a.csv\\": No space left on device","errno":"28"}',
    ],
)
def test_a_table_on_a_full_disk_says_why_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    import duckdb

    monkeypatch.setattr(duckdb, "connect", lambda: Failing(duckdb.IOException(said)))
    with pytest.raises(InputFileError) as error:
        write_table(tmp_path / "a.parquet", [{"a": 1}])
    assert str(error.value) == f"{tmp_path / 'a.parquet'}: cannot be written: No space left on device"


class Failing:
    """A connection whose queries raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def execute(self, *_: object) -> None:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["RuntimeError: Query interrupted", "InterruptException: INTERRUPT Error: Stop"])
def test_ctrl_c_inside_a_query_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import duckdb

    name, _, text = kind.partition(": ")
    error = getattr(duckdb, name, RuntimeError)(text)
    (tmp_path / "a.parquet").write_text("a\n1\n")
    monkeypatch.setattr(duckdb, "connect", lambda: Failing(error))
    with pytest.raises(KeyboardInterrupt):
        read_table(tmp_path / "a.parquet")
    with pytest.raises(KeyboardInterrupt):
        write_table(tmp_path / "b.parquet", [{"a": 1}])


def test_other_failures_of_a_query_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    monkeypatch.setattr(duckdb, "connect", lambda: Failing(RuntimeError("of ours")))
    with pytest.raises(RuntimeError, match="of ours"):
        write_table(tmp_path / "b.parquet", [{"a": 1}])


def test_a_column_of_infinities_is_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("us,day,on\ninf,2026-01-02,true\n-inf,2026-01-03,false\n")
    table = read_table(tmp_path / "a.csv")
    assert table["us"].tolist() == [float("inf"), float("-inf")]
    assert (table["day"].tolist(), table["on"].tolist()) == (["2026-01-02", "2026-01-03"], [1.0, 0.0])
