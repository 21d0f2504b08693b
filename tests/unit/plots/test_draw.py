"""Pictures: every kind in every format, the same bytes each time, in grey as in colour."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import UserError
from steptime.report import figure
from steptime.report.figure import COLOURS, LINES, MARKERS, refuse_plot
from steptime.report.plots import draw
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.plots.draw import BOXES, HATCHES, unit_for, write_chart
from unit.plots.test_plot_series import FULL, drawn

pytest.importorskip("matplotlib")


def example(kind: str, data: Any = None) -> Any:
    options = {"x": "gpus", "y": "cluster"} if kind == "heatmap" else {}
    return drawn(kind, FULL[kind] if data is None else data, **options)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("kind", FULL)
def test_a_chart_has_its_texts_and_the_same_bytes_again(kind, tmp_path):
    chart = example(kind)
    for name in ("a.svg", "b.svg"):
        write_chart(chart, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "<dc:date>" not in text
    for panel in chart.panels:
        for series in panel.series if kind != "heatmap" else ():
            assert f">{series.name}<" in text, series.name
        for axis in (panel.x, panel.y):
            assert axis.label in text
            assert not axis.unit or re.search(rf"{axis.label} \(\w+(/\w+)?\)<", text), "axes say their unit"
        assert not panel.value.label or panel.value.label in text


def test_the_number_on_a_bar_is_the_step_without_what_is_overlapped(tmp_path):
    write_chart(example("breakdown"), tmp_path / "a.svg")
    numbers = re.findall(r">(\d[\d.]*)</text>", (tmp_path / "a.svg").read_text())
    assert numbers[-1] == "4", "4.5 s with what is overlapped"


@pytest.mark.quick(without=["pdf"])
@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_pictures_for_papers_are_the_same_bytes_too(suffix, tmp_path):
    for name in ("a", "b"):
        write_chart(example("overview"), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_series_differ_without_colour():
    assert len(set(HATCHES)) == len(set(MARKERS)) == len(set(map(str, LINES))) == len(COLOURS) == 8
    steps = [abs(lightness(a) - lightness(b)) for a, b in itertools.pairwise(BOXES)]
    assert min(steps) > 0.12, "boxes next to each other: passes are too narrow for hatches"


def test_nine_systems_are_nine_lines(tmp_path):
    series = [Series(name=f"s{i}", style="line", x=(1.0, 2.0), y=(1.0 + i, 2.0 + i)) for i in range(9)]
    panel = Panel(x=Axis(label="x"), y=Axis(label="y"), series=tuple(series))
    write_chart(Chart(kind="scaling", title="", panels=(panel,)), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    strokes = re.findall(r"<path d=\"M [\d. L\n]+\" clip-path=\"[^\"]*\" style=\"(fill: none; [^\"]*)\"", text)
    assert len({re.sub("stroke-linecap.*", "", stroke) for stroke in strokes if "#0072b2" in stroke}) >= 1
    assert text.count("stroke-dasharray") >= 8


def test_a_unit_is_one_that_a_person_would_use():
    assert unit_for("s", [3e-6]) == (1e-6, "us") and unit_for("s", [5.0])[1] == "s" and unit_for("s", [])[1] == "ms"
    assert unit_for("B", [80e9])[1] == "GiB" and unit_for("B", [1.0])[1] == "B" and unit_for("", [7.0]) == (1.0, "")
    assert unit_for("FLOP/s", [989e12])[1] == "TFLOP/s"


def test_text_from_outside_stays_text(tmp_path):
    data = json.loads(json.dumps(FULL["breakdown"]))
    data["provenance"]["model"] = "<script>$x^{$\x1b[2J" + "a" * 10
    write_chart(example("breakdown", data), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<script>" not in text and "\x1b" not in text


@pytest.mark.slow
def test_what_a_chart_takes_can_be_drawn(tmp_path):
    rng, made = random.Random(1), 0
    for kind, data in FULL.items():
        for _ in range(6):
            text = re.sub(
                r"(?<=: )\d+\.\d+", lambda m: rng.choice((m[0], m[0], m[0], "0.0", "-1.0", "1e90")), json.dumps(data)
            )
            try:
                chart = example(kind, json.loads(text))
            except UserError:
                continue
            write_chart(chart, tmp_path / "a.svg")
            made += 1
    assert made > 20


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'steptime\[plots\]'"):
        write_chart(example("memory"), tmp_path / "a.svg")
    with pytest.raises(UserError, match="matplotlib"):
        refuse_plot(tmp_path / "a.svg")


def test_a_picture_of_an_unknown_kind_is_refused_early(tmp_path):
    with pytest.raises(UserError, match=r"a\.doc: matplotlib cannot write such a file"):
        refuse_plot(tmp_path / "a.doc")
    with pytest.raises(UserError, match="cannot be written"):
        write_chart(example("memory"), tmp_path / "none" / "a.svg")


def test_charts_are_made_without_matplotlib():
    import subprocess

    code = "import steptime.report.plots.series, steptime.cli.plot, sys; assert 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_of_points_lie_within_their_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []

    @contextmanager
    def kept(path: Path, width: float, height: float) -> Iterator[Any]:
        with figure.drawn(path, width, height) as one:
            figures.append(one)
            yield one

    monkeypatch.setattr(draw, "drawn", kept)
    x = (1e-2, *(10 ** (-1 + 0.12 * i) for i in range(14)), 1e4)
    y = (1e9, *(1e11 * 1.05**i for i in range(14)), 1e15)
    names = ("", *(f"cross_entropy {i} %" for i in range(14)), "")
    series = Series(name="matrix units", style="points", x=x, y=y, size=(0.01,) * 16, labels=names)
    panel = Panel(x=Axis(label="x", log=True), y=Axis(label="rate", unit="FLOP/s", log=True), series=(series,))
    write_chart(Chart(kind="roofline", title="a", panels=(panel,), notes=("b",)), tmp_path / "a.png")
    axes = figures[0].axes[0]
    figures[0].draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert len(boxes) > 2
    for name, box in boxes.items():
        assert axes.bbox.x0 - 2 <= box.x0 and box.x1 <= axes.bbox.x1 + 2, name


def test_a_front_is_a_staircase(tmp_path: Path) -> None:
    """Between two plans there is no plan of a time and a memory between theirs."""
    chart = example("scatter")
    front = next(one for panel in chart.panels for one in panel.series if one.name.startswith("Pareto front"))
    assert front.style == "step" and len(front.x) > 1
    write_chart(chart, tmp_path / "a.svg")
    lines = re.findall(r'<path d="(M [^"]+)"[^>]*style="fill: none; stroke: #', (tmp_path / "a.svg").read_text())
    corners = [[tuple(map(float, xy)) for xy in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line)] for line in lines]
    stairs = [line for line in corners if len(line) == 2 * len(front.x) - 1 and len(line) > 2]
    assert any(all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(line)) for line in stairs)


def test_letters_that_the_font_lacks_warn_nobody(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with figure.drawn(tmp_path / "y.png") as shown:
            shown.suptitle("\u6a21")
            shown.draw_without_rendering()
    assert not seen
