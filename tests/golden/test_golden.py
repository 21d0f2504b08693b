"""No prediction moves unseen: a change that moves them runs scripts/golden and commits the difference."""

from __future__ import annotations

import golden_replay as golden
import pytest


@pytest.fixture(scope="module")
def now():
    return golden.evaluated()


def test_no_estimate_moved(now):
    lines = golden.moved(golden.stored(), now)
    shown = "\n".join(lines[:40])
    assert not lines, f"{len(lines)} of {len(now)} estimates moved; scripts/golden accepts it\n{shown}"


def test_terms_add_up(now):
    """Whatever the mode, the framework and the dtype."""
    for name, record in now.items():
        terms = sum(value for term, value in record.items() if term.startswith("time/"))
        assert terms == pytest.approx(record["step_time_s"], rel=1e-9), name


def test_the_set_is_broad(now):
    stored = golden.stored()
    assert len(stored) > 500
    assert golden.FILE.stat().st_size < 1_000_000
    feasible = sum(not record["reasons"] for record in stored.values())
    assert 100 < feasible < len(stored) - 50
    terms = {name for record in stored.values() for name in record if name.startswith("time/")}
    axes = {f"time/{axis}_comm" for axis in ("tp", "tp2", "cp", "dp", "pp", "ep", "etp")}
    others = {"compute", "memory_bound", "bubble", "optimizer", "host", "scaling", "overhead"}
    assert terms == axes | {f"time/{name}" for name in others}
    assert any("band_low_s" in record for record in stored.values())


def test_a_move_is_shown_with_its_size():
    before = {"a": {"step_time_s": 2.0, "mfu": 0.5, "reasons": ""}, "b": {"step_time_s": 1.0}}
    now = {"a": {"step_time_s": 2.1, "mfu": 0.5, "reasons": "memory"}, "c": {"step_time_s": 1.0}}
    assert golden.moved(before, now) == [
        "gone: b", "new: c", "a\n    step_time_s: 2 -> 2.1 (+5 %)\n    reasons: none -> memory",
    ]  # fmt: skip
    assert golden.moved(before, before) == []
