"""Files of measured links: every spelling that is read, one clear error for the others; the command."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from steptime.cli.main import main
from steptime.errors import InputFileError, UserError
from steptime.hardware.records import Mesh
from steptime.measure.mesh import Links, discover, read_links, synthetic

SIZES = (8, 2**16, 2**24)
FABRICS = {
    "fat tree": synthetic.fat_tree(4, 5, 3),
    "rails": synthetic.rails(5, 6),
    "3D torus": synthetic.torus((3, 4, 5)),
}


def links_of(fabric: synthetic.Fabric, seed: int = 0, **how: object) -> Links:
    return synthetic.measured(fabric, seed, **how)[0]  # type: ignore[arg-type]


def write(folder: Path, text: str, name: str = "links.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


PAIRS = "source,target,bytes,seconds\n"


def test_a_file_of_pairs_comes_back(tmp_path: Path) -> None:
    links = links_of(synthetic.nvlink_islands(2, 4), 0, sizes_bytes=(8, 2**20))
    path = tmp_path / "links.csv"
    synthetic.write_pairs(links, path)
    read = read_links(path)
    assert [quantity.size_bytes for quantity in read.quantities] == [8, 2**20]
    order = [read.names.index(name) for name in links.names]
    for ours, theirs in zip(links.quantities, read.quantities, strict=True):
        np.testing.assert_allclose(theirs.values[np.ix_(order, order)], ours.values, rtol=1e-5)
    with gzip.open(tmp_path / "links.csv.gz", "wt") as file:
        file.write(path.read_text())
    assert read_links(tmp_path / "links.csv.gz").names == read.names


@pytest.mark.parametrize(
    "text",
    [
        "src,dst,latency_us,bandwidth_GB/s\na,b,3,40\nb,a,3,40\n",
        "src;dst;latency (us);bandwidth (GB/s)\na;b;3;40\nb;a;3;40\n",
        "src\tdst\tlatency\tbandwidth\na\tb\t3 us\t40 GB/s\nb\ta\t3000 ns\t320 Gb/s\n",
        "\ufeff# Monday\r\nTarget,Source,Latency_s,Bandwidth_GBps,remark\r\n\r\na,b,3e-6,40,x\r\nb,a,3e-6,40,\r\n",
        "# by hand; on Monday; again\nsrc,dst,latency_us,bandwidth_GB/s\na,b,3,40\nb,a,3,40\n",
        "# Monday\n\nsrc;dst;latency_us;bandwidth_GB/s\na;b;3;40\nb;a;3;40\n",
    ],
)
def test_latency_and_bandwidth_in_any_unit(tmp_path: Path, text: str) -> None:
    latency, bandwidth = read_links(write(tmp_path, text)).quantities
    assert (latency.kind, bandwidth.kind) == ("latency", "bandwidth")
    assert latency.values[[0, 1], [1, 0]] == pytest.approx(3e-6)
    assert bandwidth.values[[0, 1], [1, 0]] == pytest.approx(40e9)


def test_bytes_and_bandwidth_give_times(tmp_path: Path) -> None:
    (quantity,) = read_links(write(tmp_path, "src,dst,size_MiB,bw_GB/s\na,b,1,2\nb,a,1,2\n")).quantities
    assert quantity.kind == "seconds"
    assert quantity.values[0, 1] == pytest.approx(2**20 / 2e9)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("us,a,b,c\na,0,1,2\nb,1,0,2\nc,2,2,0\n", None),
        ("0,1,2\n1,0,2\n2,2,0\n", "us"),
        (",0,1,2\n0,-,1,2\n1,1,,2\n2,2,2,nan\n", "us"),
        ("a,b,c\n0,1,2\n1,0,2\n2,2,0\n", "us"),
        ("a,0,1,2\nb,1,0,2\nc,2,2,0\n", "us"),
    ],
)
def test_square_matrices(tmp_path: Path, text: str, unit: str | None) -> None:
    links = read_links(write(tmp_path, text), unit)
    assert links.names in (("a", "b", "c"), ("0", "1", "2"))
    values = links.quantities[0].values
    assert values[[0, 0, 1], [1, 2, 2]] == pytest.approx([1e-6, 2e-6, 2e-6])


@pytest.mark.parametrize(("corner", "unit"), [("us", None), ("", "us")])
def test_devices_of_a_matrix_may_be_called_as_columns_are(tmp_path: Path, corner: str, unit: str | None) -> None:
    path = write(tmp_path, f"{corner},bw_1,bw_2\nbw_1,0,2\nbw_2,2,0\n")
    assert read_links(path, unit).names == ("bw_1", "bw_2")


def test_an_empty_cell_of_a_matrix_was_not_measured(tmp_path: Path) -> None:
    links = read_links(write(tmp_path, "GB/s,a,b,c\na,0,,40\nb,-,0,40\nc,40,40,0\n"))
    assert np.isnan(links.quantities[0].values[0, 1])
    assert discover(links).missing_pairs == 1


BAD = {
    "negative": (PAIRS + "a,b,8,1e-6\na,c,8,-1e-6\n", "line 3, column 'seconds': -1e-6 is not positive"),
    "zero": (PAIRS + "a,b,8,0\n", "line 2, column 'seconds': 0 is not positive"),
    "nan": (PAIRS + "a,b,8,nan\n", "line 2, column 'seconds': 'nan' is not a finite"),
    "infinite": (PAIRS + "a,b,8,inf\n", "line 2, column 'seconds': 'inf' is not a finite"),
    "text": (PAIRS + "a,b,8,fast\n", "line 2, column 'seconds': 'fast' is not a number"),
    "one device": (PAIRS + "a,a,8,1e-6\n", "no measured link between two devices"),
    "header only": (PAIRS, "no measured link between two devices"),
    "twice": (PAIRS + "a,b,8,1e-6\na,b,16,1e-6\na,b,8,2e-6\n", "line 4: 'a' to 'b' stands in line 2 already"),
    "microseconds": (PAIRS + "a,b,8,5.2\n", "line 2, column 'seconds': 8 bytes in 5.2 s is no link"),
    "too long": (PAIRS + "a,b,8,5200\n", "line 2, column 'seconds': 5200 is 5200 s, which no link has"),
    "too fast": (PAIRS + "a,b,1e12,1e-6\n", "line 2, column 'seconds': 1e\\+12 bytes in 1e-06 s is no link"),
    "bandwidth of bits": ("src,dst,bandwidth_GB/s\na,b,4e10\n", "line 2, column 'bandwidth_GB/s': 4e10 is"),
    "part of a byte": (PAIRS + "a,b,8.5,1e-6\n", "line 2, column 'bytes': 8.5 is not a whole"),
    "short row": (PAIRS + "a,b,8\n", "line 2: has 3 columns"),
    "thousands": (PAIRS + "a,b,65536,1e-5\na,b,1,048,576,1e-4\n", "line 3 has 6 cells, the header 4\n.*in quotes"),
    "thousands, semicolons": (PAIRS.replace(",", ";") + "a;b;1;048;1e-4\n", "5 cells, the header 4\n.*a ';' stands"),
    "no name": (PAIRS + ",b,8,1e-6\n", "line 2, column 'source': '' is no name"),
    "open quote": (PAIRS + '"a,b,8,1e-6\n', "line 2: unexpected end"),
    "no unit": ("src,dst,latency\na,b,2\n", "line 2, column 'latency': '2' has no unit"),
    "strange unit": ("src,dst,latency_parsec\na,b,2\n", "line 1, column 'latency_parsec': 'parsec' is no unit"),
    "no bytes": ("source,target,seconds\na,b,1\n", "line 1, column 'seconds': needs a column 'bytes'"),
    "no target": ("source,bytes,seconds\na,8,1\n", "line 1: the header lacks a column 'target'"),
    "titles of another tool": (
        "rank_a,rank_b,msg_size,time(us),algbw(GB/s)\n0,1,8,2,1\n",
        "line 1: the header lacks a column 'source' and 'target'; 'rank_a', 'rank_b', 'msg_size', "
        "'algbw\\(GB/s\\)' are unknown",
    ),
    "the titles there are": ("src,peer,bytes,seconds\n0,1,8,2\n", "target or dst or dest or destination or to"),
    "one title is unknown": ("src,peer,bytes,seconds\n0,1,8,2\n", "lacks a column 'target'; 'peer' is unknown"),
    "no title is known": ("a,b,c,d\n0,1,8,2\n", "a file of pairs has a header with source and target"),
    "unknown measure": ("source,target,algbw_GB/s\na,b,8\n", "bandwidth; 'algbw_GB/s' is unknown"),
    "no measure": ("source,target,bytes\na,b,8\n", "line 1: the header has no column with a time"),
    "column twice": ("source,src,target,bytes,seconds\na,a,b,8,1\n", "column 'src': is a second column for source"),
    "empty": ("", "is empty"),
    "one line": ("hello\n", "line 1: one row is no matrix"),
    "not square": ("us,a,b,c\na,0,1,2\nb,1,0,2\n", "2 rows and 3 columns"),
    "row too many": ("us,a,b\na,0,1\nb,1,0\nc,1,1\n", "line 4: is one row too many"),
    "ragged": ("us,a,b,c\na,0,1,2\nb,1,0\nc,1,1,0\n", "line 3: has 2 numbers; the matrix has 3"),
    "matrix, negative": ("us,a,b\na,0,-1\nb,1,0\n", "line 2, column 'b': -1 is not positive"),
    "matrix, nan": ("us,a,b\na,0,nan\nb,1,0\n", "line 2, column 'b': 'nan' is not a finite"),
    "matrix, text": ("us,a,b\na,0,x\nb,1,0\n", "line 2, column 'b': 'x' is not a number"),
    "matrix, no unit": ("0,1\n1,0\n", "line 1, column '1': the matrix has no unit"),
    "matrix, unit": ("s,a,b\na,0,900\nb,1,0\n", "line 2, column 'b': 900 is 900 s, which no link has"),
    "names differ": ("us,a,b\na,0,1\nc,1,0\n", "row 2 is called 'c', column 2 'b'"),
    "name twice": ("us,a,a\na,0,1\na,1,0\n", "names the device 'a' twice"),
    "long line": ("x" * 200_000, "line 1: field larger"),
}


@pytest.mark.each("name", BAD)
def test_bad_files_end_in_one_error_that_names_the_place(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = write(tmp_path, text)
    with pytest.raises(InputFileError, match=message) as caught:
        read_links(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_the_file_is_named_when_devices_are_apart(tmp_path: Path) -> None:
    path = write(tmp_path, PAIRS + "a,b,8,1e-6\nc,d,8,1e-6\n")
    with pytest.raises(UserError, match=r"links\.csv: no measured link joins 'c'"):
        discover(read_links(path))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"source,target\n\xff\xfe\n")
    (tmp_path / "zero.csv").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    for name, message in {
        "bytes.csv": "UTF-8", "zero.csv": "zero byte", "broken.csv.gz": "cannot be read", "none.csv":
        "the file does not exist", ".": "is a folder",
    }.items():  # fmt: skip
        with pytest.raises(InputFileError, match=message):
            read_links(tmp_path / name)


def test_damaged_archives_are_no_defect(tmp_path: Path) -> None:
    """Whatever is broken: the frame, the code or its sum."""
    whole = gzip.compress((PAIRS + "".join(f"a,{i},8,1e-{i % 5 + 4}\n" for i in range(99))).encode())
    for place in range(0, len(whole), 7):
        (tmp_path / "links.csv.gz").write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with contextlib.suppress(InputFileError):
            read_links(tmp_path / "links.csv.gz")


def test_empty_cells_beyond_the_header_say_nothing(tmp_path: Path) -> None:
    assert read_links(write(tmp_path, PAIRS + "a,b,8,1e-6,\nb,a,8,1e-6, ,\n")).names == ("a", "b")


def test_large_files_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime.measure.mesh.read.MAX_BYTES", 10)
    with pytest.raises(InputFileError, match="larger than"):
        read_links(write(tmp_path, PAIRS + "a,b,8,1e-6\n"))


def test_too_many_devices_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime.measure.mesh.read.MAX_DEVICES", 3)
    with pytest.raises(InputFileError, match="line 3, column 'target': there are more than 3 devices"):
        read_links(write(tmp_path, PAIRS + "a,b,8,1e-6\nc,d,8,1e-6\n"))


def test_a_unit_option_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--unit: 'foo' is no unit"):
        read_links(write(tmp_path, "0,1\n1,0\n"), "foo")


# Command


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["calibrate", "mesh", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.quick("rails")
@pytest.mark.parametrize("name", ["rails", "3D torus", "fat tree"])
def test_the_command_prints_what_the_function_returns(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "links.csv"
    synthetic.write_pairs(links_of(FABRICS[name], 0, sizes_bytes=SIZES, broken=[(0, 9, 30.0)]), path)
    code, text, _ = run(str(path), capsys=capsys)
    shape = " x ".join(str(n) for n in FABRICS[name].shape)
    assert code == 0
    assert text.startswith(f"{FABRICS[name].devices} devices: {shape} ")
    assert "broken link: " in text
    code, text, _ = run(str(path), "--json", capsys=capsys)
    document = json.loads(text)
    mesh: Mesh = discover(read_links(path))
    assert code == 0
    assert document["schema_version"] == 1
    assert document["shape"] == list(mesh.shape)
    assert document["mesh"]["confidence"] == mesh.confidence
    assert document["mesh"]["axes"][0]["Bps"] == mesh.axes[0].Bps
    assert len(document["mesh"]["coordinates"]) == len(document["mesh"]["devices"]) == FABRICS[name].devices


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(str(write(tmp_path, PAIRS + "a,b,8,-1\n")), capsys=capsys)
    assert (code, out) == (2, "")
    assert "line 2, column 'seconds'" in error
