"""The page in a real browser: a person's path, a report from disk, accessibility; nothing leaves this machine."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_in_browser import AXE, LOOPBACK, Watched, browser_or_reason, path_of_a_person, served
from typer.testing import CliRunner

from steptime import api
from steptime.cli.main import app

LIGHT = {"viewport": {"width": 1280, "height": 900}}
DARK = {**LIGHT, "color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "reduced_motion": "reduce"}
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_or_reason() as found:
        if isinstance(found, str):
            pytest.skip(found)
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as found:
        yield found


def test_a_person_chooses_plans_changes_explains_compares_and_downloads(
    browser: Any, address: str, tmp_path: Path
) -> None:
    with Watched(browser, LIGHT) as seen:
        found = path_of_a_person(seen.page, address, tmp_path)
    assert seen.problems == []
    assert seen.outside == []
    job = {"gpus": 16, "global_batch": 64}
    best = api.plan("llama3-8b", "dgx-h100", **job).plans[0]
    changed = api.estimate("llama3-8b", "dgx-h100", plan=found["saved"]["plan"], **job)
    assert found["best_s"] == pytest.approx(best.step_time_s, rel=5e-3)  # three digits are shown
    assert found["saved"]["step_time_s"] == pytest.approx(changed.step_time_s, rel=1e-12)
    assert found["saved"]["plan"]["pp"] == 2
    assert found["shown_s"] == pytest.approx(changed.step_time_s, rel=5e-3)
    assert found["formula"] >= 1
    assert found["rows_compared"] > 6
    run = tomllib.loads((tmp_path / "RUN.toml").read_text())
    assert (run["model"], run["gpus"], run["plan"]["pp"]) == ("llama3-8b", 16, 2)
    again = CliRunner().invoke(app, ["estimate", str(tmp_path / "RUN.toml"), "--json"])
    assert json.loads(again.stdout)["step_time_s"] == pytest.approx(changed.step_time_s, rel=1e-12)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for picture in ("chart.png", "page.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG"), picture
    assert found["restored"] == found["left"]  # the address holds all of the state


def test_errors_are_shown_with_what_to_do(browser: Any, address: str) -> None:
    with Watched(browser, LIGHT) as seen:
        page = seen.page
        page.goto(f"{address}#model=llama3-8b&cluster=dgx-h100&gpus=16&batch=64&plan.tp=3")
        assert "16" in page.locator("[role=alert]").first.inner_text()
        page.goto(f"{address}#model=llama3-8b&cluster=dgx-h100&gpus=1&batch=8")
        page.wait_for_selector("text=No plan fits.")
        page.wait_for_selector("text=does not fit: memory")
        pasted = page.locator("summary", has_text="Paste a model")
        pasted.click()
        page.locator("textarea").first.fill('{"model_type": "llama"')
        page.locator("button", has_text="Use it").first.click()
        page.wait_for_selector("text=is not valid JSON")
    assert seen.outside == []


def test_the_keyboard_is_enough(browser: Any, address: str) -> None:
    with Watched(browser, LIGHT) as seen:
        page = seen.page
        page.goto(f"{address}#model=llama3-8b&cluster=dgx-h100&gpus=16&batch=64")
        page.wait_for_selector("[data-testid=step]")
        page.locator("#tab-plans").focus()
        for key, tab in (("ArrowRight", "time"), ("End", "compare"), ("Home", "plans"), ("ArrowLeft", "compare")):
            page.keyboard.press(key)
            assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{tab}"
        before = page.locator("[data-testid=step]").inner_text()
        page.locator("#degree-pp").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "before => document.querySelector('[data-testid=step]').innerText !== before", arg=before
        )
        assert "plan.pp=" in page.url
    assert seen.problems == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: scripts/web installs it")
@pytest.mark.each(("name", "look"), [("light", LIGHT), ("dark", DARK), ("phone", PHONE)])
def test_no_serious_fault_of_accessibility(browser: Any, address: str, name: str, look: dict[str, Any]) -> None:
    job = "#model=llama3-8b&cluster=dgx-h100&gpus=16&batch=64&plan.tp=2&plan.pp=2"
    with Watched(browser, look, bypass_csp=True) as seen:
        page = seen.page
        page.goto(f"{address}{job}")
        page.wait_for_selector("table.plans")
        page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
        faults = []
        views = ("plans", "time", "memory", "explain", "timeline", "mesh", "compare")
        for view in views if name == "light" else ("plans", "explain", "compare"):
            page.locator(f"#tab-{view}").click()
            if view == "explain":
                page.locator(".details summary").first.click()
                page.wait_for_selector("math")
            if view == "timeline":
                page.wait_for_selector("canvas.gantt")
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            faults += [
                (view, one["id"], [node["html"][:120] for node in one["nodes"][:3]])
                for one in found["violations"]
                if one["impact"] in SERIOUS
            ]
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert faults == []
    assert wide <= 0  # nothing has to be scrolled sideways but tables
    assert all(LOOPBACK.match(url) for url in seen.urls)


def test_a_report_opens_from_disk(browser: Any, tmp_path: Path) -> None:
    written = tmp_path / "report.html"
    options = ["--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64", "--tp", "2", "--pp", "2"]
    assert CliRunner().invoke(app, ["report", "llama3-8b", *options, "-o", str(written)]).exit_code == 0
    moved = Path(shutil.move(written, tmp_path / "moved.html"))
    with Watched(browser, LIGHT, offline=True) as seen:
        page = seen.page
        page.goto(moved.as_uri())
        page.wait_for_selector("[data-testid=step]")
        for view, selector in (
            ("plans", "table.plans"),
            ("memory", "svg[data-name=memory]"),
            ("timeline", "canvas.gantt"),
        ):
            page.locator(f"#tab-{view}").click()
            page.wait_for_selector(selector)
        page.locator("#tab-explain").click()
        page.locator(".details summary").first.click()
        page.wait_for_selector("math")
    assert seen.problems == []
    assert [url for url in seen.urls if not url.startswith(("file:", "data:", "blob:"))] == []
