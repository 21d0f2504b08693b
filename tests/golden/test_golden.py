"""Nothing that steptime says moves unseen: a change that moves it runs scripts/golden and commits the difference."""

from __future__ import annotations

import math

import golden_commands
import golden_compare as compare
import golden_replay
import pytest
from golden_families import COMMANDS, FAMILIES, Family, needs

NAMES = tuple(FAMILIES)


@pytest.mark.quick(without=["reports", "scores"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_moved(name: str) -> None:
    family = FAMILIES[name]
    found, _ = golden_replay.moved(family)
    assert not found, f"scripts/golden {name} accepts it\n" + "\n".join(compare.lines_of(found))
    skipped = family.skipped()
    if skipped:
        reasons = "; ".join(sorted(set(skipped.values())))
        pytest.skip(f"{len(skipped)} of {len(family.stored())} cases not replayed: {reasons}")


@pytest.mark.each("name", NAMES)
def test_files_have_every_case_and_are_written_as_they_are_read(name: str) -> None:
    family = FAMILIES[name]
    stored, text = family.stored(), family.file.read_text(encoding="utf-8")
    assert not family.commands or tuple(stored) == family.commands
    family_text = compare.as_text(stored) if family.text else compare.as_json(compare.packed(stored), family.width)
    assert family_text == text
    assert len(text) < 800_000


def test_terms_add_up() -> None:
    """Whatever the mode, the framework and the dtype."""
    for name, record in FAMILIES["estimates"].stored().items():
        terms = sum(value for term, value in record.items() if term.startswith("time/"))
        assert terms == pytest.approx(record["step_time_s"], rel=1e-9), name


def test_the_estimates_are_broad() -> None:
    stored = FAMILIES["estimates"].stored()
    assert len(stored) > 500
    feasible = sum(not record["reasons"] for record in stored.values())
    assert 100 < feasible < len(stored) - 50
    terms = {name for record in stored.values() for name in record if name.startswith("time/")}
    axes = {f"time/{axis}_comm" for axis in ("tp", "tp2", "cp", "dp", "pp", "ep", "etp")}
    others = {"compute", "memory_bound", "bubble", "optimizer", "host", "scaling", "overhead"}
    assert terms == axes | {f"time/{name}" for name in others}
    assert any("band_low_s" in record for record in stored.values())


def test_the_other_families_are_broad() -> None:
    plans = [answer["json"] for answer in FAMILIES["plans"].stored().values()]
    assert sum(len(found["plans"]) == 10 for found in plans) >= 4
    assert [found["nearest"]["reasons"] for found in plans if not found["feasible"]] == [["memory"]]
    scores = FAMILIES["scores"].stored()
    assert sum(len(answer["rows"]) for answer in scores.values()) > 500
    assert all(answer["json"]["scored"] for answer in scores.values())
    assert all("stderr" not in answer for name in NAMES[1:-1] for answer in FAMILIES[name].stored().values())
    shown = {command.split()[0] for command in FAMILIES["reports"].commands}
    assert set(COMMANDS) < shown
    pages = (golden_commands.printed(page)["stdout"] for page in ("--help", "lab --help"))
    offered = [line for page in pages for line in page.splitlines() if line.startswith("  ")]
    assert {line.split()[0] for line in offered} - {"list", "lab"} == set(COMMANDS)


def test_no_path_of_a_checkout_is_kept() -> None:
    here = str(golden_commands.TESTS.parent)
    for family in FAMILIES.values():
        text = family.file.read_text(encoding="utf-8")
        assert here not in text and "/tmp" not in text and "Traceback" not in text, family.name


def test_a_move_is_shown_with_its_size() -> None:
    before = {"a": {"time": {"x": 2.0, "y": 1.0}, "why": "", "list": [1, True]}, "b": {"x": 1.0}}
    now = {"a": {"time": {"x": 2.1, "y": 1.0 + 1e-12}, "why": "memory", "list": [1, False]}, "c": {"x": 1.0}}
    assert compare.lines_of(compare.moves("plans", before, now)) == [
        "plans: a\n    time > x: 2 -> 2.1 (+5 %)",
        "plans: a\n    why:  -> memory",
        "plans: a\n    list > 1: True -> False",
        "plans: b\n    the case: stored -> absent",
        "plans: c\n    the case: absent -> new",
        "plans: 5 values of 3 cases moved",
    ]
    assert compare.moves("plans", before, before) == []


def test_the_ten_largest_moves_are_shown() -> None:
    before = {"a": {str(n): 1.0 for n in range(30)}}
    now = {"a": {str(n): 1.0 + n / 100 for n in range(30)}}
    lines = compare.lines_of(compare.moves("plans", before, now))
    assert lines[0] == "plans: a\n    29: 1 -> 1.29 (+29 %)" and lines[9].endswith("1 -> 1.2 (+20 %)")
    assert lines[10:] == ["plans: 29 values of 1 cases moved"]


def test_numbers_out_of_nothing_and_of_other_kinds_are_moves() -> None:
    def change(one: object, other: object) -> list[float]:
        return [move.change for move in compare.moves("plans", {"a": {"x": one}}, {"a": {"x": other}})]

    assert change(0.0, 1e-30) == [1.0] and change(1.0, -1.0) == [-2.0]
    assert change(1, 1.0) == [] and change(1.0, 1.0 + 2e-10) == [pytest.approx(2e-10)]
    for one, other in ((1, True), (1.0, None), (1.0, "1.0"), ([], {}), ({}, [1])):
        assert change(one, other) and all(map(math.isinf, change(one, other)))


def test_a_report_is_compared_line_by_line() -> None:
    before, now = {"plan x": "a\nb\nc"}, {"plan x": "a\nB\nc\nd"}
    assert [str(move).split("\n")[1].strip() for move in compare.moves("reports", before, now)] == [
        "line 2: 'b' -> 'B'", "line 4: absent -> 'd'",
    ]  # fmt: skip
    assert compare.from_text(compare.as_text(now)) == now


def test_rows_are_kept_by_columns() -> None:
    cases = {"score": {"json": {"rows": 2}, "rows": {"2": {"a": 1.0}, "3": {"a": 2.0, "skipped": "why"}}}}
    assert compare.packed(cases)["score"]["rows"] == {"2": [1.0, None], "3": [2.0, "why"]}
    assert compare.unpacked(compare.packed(cases)) == cases


def test_durations_are_masked() -> None:
    text = "1,000 candidates, 3 feasible; exhausted in 1,097.98 ms CPU"
    assert golden_commands.MASKED_TEXT.sub("#", text) == "1,000 candidates, 3 feasible; exhausted in #"


def test_what_a_case_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs("profile models:gpt --device l4") == needs("fit inputs/net.py:net --device l4") == ("torch",)
    assert needs("profile absent.onnx --device l4") == ("onnx",) and needs("profile mlp.onnx") == ("onnx", "torch")
    assert needs("plan gpt2 --limit a:b") == needs("fit gpt2 --device l4") == needs("--help") == ()
    monkeypatch.setattr(golden_commands, "find_spec", lambda name: None if name == "torch" else name)
    family = Family(name="fits", commands=("fit gpt2 --device l4", "fit a:b --device l4"))
    assert family.skipped() == {"fit a:b --device l4": "torch not installed"}


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What moved is shown and makes --check fail; a family that is not there is named."""
    family = Family(name="explained", commands=("limits",))
    monkeypatch.setattr(golden_replay, "FAMILIES", {"explained": family})
    assert golden_replay.main(["--check"]) == 1
    assert "explained: limits\n    the case: absent -> new" in capsys.readouterr().out
    assert golden_replay.main(["plots"]) == 2 and "no family 'plots'" in capsys.readouterr().err
