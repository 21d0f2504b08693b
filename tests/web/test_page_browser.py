"""The page in a real browser: a person's path, a report from disk, accessibility; nothing leaves this machine."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_in_browser import AXE, LOOPBACK, Watched, browser_or_reason, path_of_a_person, seconds, served

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main

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


@pytest.mark.slow
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
    again = CliRunner().invoke(main, ["estimate", str(tmp_path / "RUN.toml"), "--json"])
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


def test_the_back_button_undoes_an_edit(browser: Any, address: str) -> None:
    job = "#model=llama3-8b&cluster=dgx-h100&gpus=16&batch=64"
    with Watched(browser, LIGHT) as seen:
        page = seen.page
        page.goto(f"{address}{job}")
        page.wait_for_selector("table.plans")
        page.get_by_label("Pipeline (pp): more").click()
        page.get_by_label("Pipeline (pp): more").click()  # in a row: one step
        page.wait_for_url(re.compile("plan.pp=4"))
        page.get_by_role("spinbutton", name="Devices").fill("32")
        page.wait_for_url(re.compile("gpus=32"))
        page.go_back()
        assert "gpus=16" in page.url and "plan.pp=4" in page.url
        page.go_back()
        assert page.url.endswith(job)
        page.wait_for_function("() => document.querySelector('#degree-pp').getAttribute('aria-valuetext') === '1'")


def test_an_error_is_said_once(browser: Any, address: str) -> None:
    with Watched(browser, LIGHT) as seen:
        page = seen.page
        page.goto(f"{address}#model=nothing&cluster=dgx-h100&gpus=16&batch=64")
        page.wait_for_selector("[role=alert]")
        page.wait_for_function("() => !document.querySelector('progress')")
        assert page.locator("[role=alert]").count() == 1


@pytest.mark.slow
def test_a_map_of_two_degrees_and_the_whole_run(browser: Any, address: str) -> None:
    with Watched(browser, PHONE) as seen:
        page = seen.page
        page.goto(f"{address}#model=llama3-8b&cluster=dgx-h100&gpus=64&batch=64&tokens=1T&view=mesh")
        page.wait_for_selector("svg[data-name=mesh]")
        assert page.locator("svg[data-name=mesh] rect.domain").count() == 8  # all that the text says
        page.wait_for_selector("[data-testid=training]")
        job = {"gpus": 64, "global_batch": 64}
        run = api.plan("llama3-8b", "dgx-h100", **job, training={"tokens": "1T"}, top=1).plans[0].to_json()["training"]
        said = page.locator("[data-testid=training]").inner_text()
        assert f"{run['training_days']:.2f} days" in said and f"{run['gpu_hours']:,.0f} device hours" in said
        page.goto(f"{address}#model=llama3-8b&cluster=dgx-h100&gpus=2&batch=4&view=map")
        page.wait_for_selector("svg[data-name=map]")
        page.wait_for_function("() => !document.querySelector('#view').innerText.includes('searches')")
        best = api.plan("llama3-8b", "dgx-h100", gpus=2, global_batch=4, fix={"tp": 2, "pp": 1}, top=1).plans
        cell = page.locator("svg[data-name=map] g.cell", has=page.locator("title", has_text="tp 2, pp 1"))
        shown = cell.locator("title").text_content()
        assert seconds(shown.rsplit(": ", 1)[1]) == pytest.approx(best[0].step_time_s, rel=0.005)
        assert page.locator("rect.best").count() == 1
    assert seen.problems == []


@pytest.mark.quick(every=3)
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
        views = ("plans", "time", "memory", "explain", "roofline", "timeline", "mesh", "map", "compare")
        for view in views if name == "light" else ("plans", "explain", "compare"):
            page.locator(f"#tab-{view}").click()
            if view == "explain":
                page.locator(".details summary").first.click()
                page.wait_for_selector("math")
            if view in ("roofline", "map"):
                page.wait_for_selector(f"svg[data-name={view}]")
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


@pytest.mark.slow
def test_a_report_opens_from_disk(browser: Any, tmp_path: Path) -> None:
    written = tmp_path / "report.html"
    options = ["--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64", "--tp", "2", "--pp", "2"]
    assert CliRunner().invoke(main, ["report", "llama3-8b", *options, "-o", str(written)]).exit_code == 0
    moved = Path(shutil.move(written, tmp_path / "moved.html"))
    with Watched(browser, LIGHT, offline=True) as seen:
        page = seen.page
        page.goto(moved.as_uri())
        page.wait_for_selector("[data-testid=step]")
        for view, selector in (
            ("plans", "table.plans"),
            ("memory", "svg[data-name=memory]"),
            ("timeline", "canvas.gantt"),
            ("roofline", "svg[data-name=roofline]"),
        ):
            page.locator(f"#tab-{view}").click()
            page.wait_for_selector(selector)
        page.locator("#tab-plans").click()
        page.locator("button.pick[aria-pressed=false]").first.click()  # of another plan the report has numbers alone
        for view in ("timeline", "roofline"):
            page.locator(f"#tab-{view}").click()
            assert "not in the report" in page.locator("#view").inner_text()
        for _ in range(3):
            page.go_back()
        page.locator("#tab-explain").click()
        page.locator(".details summary").first.click()
        page.wait_for_selector("math")
    assert seen.problems == []
    assert [url for url in seen.urls if not url.startswith(("file:", "data:", "blob:"))] == []
