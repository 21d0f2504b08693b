"""``steptime cache``, ``tile`` and ``compress``: reports, JSON, refusals."""

from __future__ import annotations

import json

import pytest
from fake_api import Run

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.hardware import load_device
from steptime_lab.compress import compressed
from steptime_lab.hierarchy.answers import cache_report, reuse_report, tile_answer
from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.hierarchy.traces import Shape

SMALL = ("cache", "simulate", "matmul", "--n", "24", "--tile", "8", "--cache", "1KiB:2,4KiB:4")
REPORTS = (
    SMALL,
    ("cache", "reuse", "transpose", "--n", "24"),
    ("cache", "levels", "chase", "--cache", "1KiB:2,4KiB:4"),
    ("cache", "list"),
    ("tile", "matmul", "--m", "300"),
    ("tile", "matmul", "--device", "a100-sxm-80gb", "--dtype", "bf16"),
    ("tile", "warp", "--stride", "8"),
    ("compress", "--tokens", "8"),
)


@pytest.mark.quick("60")
@pytest.mark.each("columns", [60, 80, 200])
def test_reports_fit_every_width(columns: int) -> None:
    for arguments in REPORTS:
        done = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, list(arguments))
        assert done.exit_code == 0, done.output
        assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= columns, arguments


def printed(run: Run, *arguments: str) -> dict:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.mark.slow
def test_json_is_what_python_returns(run: Run) -> None:
    found = printed(run, *SMALL)
    caches = hierarchy("1KiB:2,4KiB:4")
    ours = cache_report("matmul", Shape(n=24, tile=8), caches, "1KiB:2,4KiB:4").to_json()
    assert found == json.loads(json.dumps(ours))
    assert sum(found["causes"].values()) == found["levels"][0]["misses"]
    again = json.loads(json.dumps(reuse_report("chase", Shape(n=64, table=32), 64)))
    assert printed(run, "cache", "reuse", "chase", "--n", "64", "--table", "32") == again
    plan = printed(run, "tile", "matmul", "--m", "64", "--n", "64", "--k", "64")
    assert [row["rows"] for row in plan["levels"]] == [
        tile.rows for tile in tile_answer((64, 64, 64), "fp32", device=None, name=None, cache=None).levels
    ]
    schemes = printed(run, "compress", "--tokens", "8")["schemes"]
    assert [row["weight_bytes"] for row in schemes] == [
        row.weight_bytes for row in compressed(8, 16384, 4096, load_device("h100-sxm"))
    ]
    levels = printed(run, "cache", "levels", "chase", "--cache", "1KiB:2,4KiB:4")["patterns"][0]
    assert 0 <= levels["scores"][0]["accuracy"] <= 1 and levels["served"].keys() == {"L2", "memory"}
    assert len(printed(run, "cache", "list")["processors"]) >= 4
    assert printed(run, "tile", "warp", "--stride", "128")["memory_factor"] == 8


@pytest.mark.each(
    "arguments, words",
    [
        (("cache", "simulate", "matmul", "--cache", "1000:3"), "is not SIZE:WAYS"),
        (("cache", "simulate", "matmul", "--cache", "1000B:3"), "nearest possible size"),
        (("cache", "simulate", "matmul", "--cache", "1KiB:1", "--line", "48"), "power of two"),
        (("cache", "simulate", "matmal"), "did you mean matmul"),
        (("cache", "simulate", "matmul", "--n", "2"), "3 to 32,768"),
        (("cache", "simulate", "matmul", "--leading", "3"), "fewer than"),
        (("cache", "simulate", "matmul", "--cache", "1KiB:1", "--processor", "zen4"), "give one of them"),
        (("cache", "simulate", "matmul", "--processor", "zen"), "zen3"),
        (("cache", "reuse", "stream", "--line", "3"), "power of two"),
        (("cache", "levels", "nope"), "access pattern"),
        (("tile", "matmul", "--device", "tpu-v4"), "not known"),
        (("tile", "matmul", "--device", "h100-sxm", "--cache", "1KiB:1"), "more than one machine"),
        (("tile", "matmul", "--dtype", "fp31"), "no dtype"),
        (("tile", "matmul", "--dtype", "fp31", "--device", "h100-sxm"), "no dtype"),
        (("tile", "matmul", "--m", "0"), "whole number"),
        (("tile", "warp", "--access", "3"), "1, 2, 4, 8 or 16"),
        (("tile", "warp", "--stride", "3"), "multiples of 4"),
        (("compress", "--device", "h10"), "h100"),
        (("compress", "--link", "fast"), "fast"),
    ],
)
def test_what_cannot_be_is_named(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output
    assert "defect" not in done.output
