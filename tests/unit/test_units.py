"""Units at the border."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.errors import UserError
from steptime.units import UNITS, format_bytes, format_seconds, format_si, parse


@pytest.mark.each(
    ("text", "dimension", "value"),
    [
        ("900 GB/s", "Bps", 9e11), ("900GB/s", "Bps", 9e11), ("400 Gb/s", "Bps", 5e10), ("400 Gbps", "Bps", 5e10),
        ("1.5 GiB/s", "Bps", 1.5 * 2**30), ("80 GB", "bytes", 8e10), ("80 GiB", "bytes", 80 * 2**30),
        ("8 Gbit/s", "Bps", 1e9), ("989.4 TFLOP/s", "flops_per_s", 9.894e14), ("1 PFLOPS", "flops_per_s", 1e15),
        ("2.5 us", "s", 2.5e-6), ("2.5 µs", "s", 2.5e-6), ("1.5 h", "s", 5400.0), ("2 days", "s", 172800.0),
        ("  1_000 ms ", "s", 1.0), ("1e3 W", "W", 1000.0), (".5 GHz", "Hz", 5e8), ("-1 s", "s", -1.0),
    ],
)  # fmt: skip
def test_parse(text, dimension, value):
    assert parse(text, dimension) == value


@pytest.mark.each(
    ("text", "dimension", "problem"),
    [
        ("80", "bytes", "no unit"), ("80 GB/s", "bytes", "a unit of Bps, not of bytes"), ("80 Gb/x", "Bps", "unknown"),
        ("GB", "bytes", "not a number"), ("", "bytes", "not a number"), ("1 2 GB", "bytes", "unknown unit"),
        ("1e999 GB", "bytes", "not finite"), ("nan GB", "bytes", "not a number"), ("x" * 1000, "s", "not a number"),
        ("80 gb", "bytes", "unknown unit"), ("5,200 GB/s", "Bps", "a comma in its number\n  write it without"),
        ("900", "flops_per_s", "'900 TFLOP/s'"), ("900e12", "flops_per_s", "'900e12 FLOP/s'"),
        ("3_350_000_000_000", "Bps", "'3_350_000_000_000 B/s'"), ("4.5e-6", "s", "'4.5e-6 s'"), ("0", "s", "'0 us'"),
    ],
)  # fmt: skip
def test_refusals(text, dimension, problem):
    with pytest.raises(UserError, match=problem) as caught:
        parse(text, dimension)
    assert len(str(caught.value)) < 300


def test_every_unit_has_a_positive_factor_and_one_dimension():
    for table in UNITS.values():
        assert all(factor > 0 for factor in table.values())
    names = [unit for table in UNITS.values() for unit in table]
    assert len(names) == len(set(names))


@given(st.floats(1e-3, 1e20), st.sampled_from(["B", "kB", "MB", "GiB", "TB"]))
def test_parse_is_the_number_times_the_factor(value, unit):
    assert parse(f"{value!r} {unit}", "bytes") == pytest.approx(value * UNITS["bytes"][unit], rel=1e-15)


def test_formats():
    assert format_si(989.4e12, "FLOP/s") == "989 TFLOP/s"
    assert format_si(1.5, "B") == "1.5 B"
    assert format_si(float("inf"), "B") == "inf B"
    assert format_bytes(2**40) == "1 TiB" and format_bytes(1000) == "1000 B" and format_bytes(1536) == "1.5 KiB"
    assert [format_seconds(t) for t in (3.2333, 0.012, 90.0, 7200.0, 1e-9, 0.0)] == [
        "3.233 s", "12 ms", "90 s", "2 h", "1 ns", "0 s",
    ]  # fmt: skip
