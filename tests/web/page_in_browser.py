"""The page in Chromium: a server of its own, a browser that says what it asked for, and the path of a person."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import uvicorn

from steptime.web.cli import server_settings

CHROMIUM: Final = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
AXE: Final = Path(__file__).parents[2] / "web-src/node_modules/axe-core/axe.min.js"
LOOPBACK: Final = re.compile(r"(http://127\.0\.0\.1[:/]|file:|data:|blob:)")


@contextmanager
def served() -> Iterator[str]:
    """The address of a page that is served."""
    bound = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(server_settings("127.0.0.1"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        running.should_exit = True
        thread.join(10)
        bound.close()


@contextmanager
def browser_or_reason() -> Iterator[Any]:
    """A browser; a text: why there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        yield "playwright is not installed"
        return
    if not CHROMIUM.exists():
        yield f"there is no {CHROMIUM}: install chromium, or set CHROMIUM"
        return
    with sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=options)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of a browser that records every request, and everything that went wrong."""

    def __init__(self, browser: Any, look: Mapping[str, Any], **settings: Any) -> None:
        self._context = browser.new_context(**look, **settings)
        self.page = self._context.new_page()
        self.page.set_default_timeout(15_000)
        self.urls: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._said)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    @property
    def outside(self) -> list[str]:
        """Requests that left this machine."""
        return [url for url in self.urls if not LOOPBACK.match(url)]

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()


def seconds(text: str) -> float:
    """Seconds of a time as the page writes it."""
    value, unit = text.split()
    return float(value) * {"h": 3600, "min": 60, "s": 1, "ms": 1e-3}[unit]


def shown_s(page: Any) -> float:
    """Time of the step that is shown."""
    return seconds(page.locator("[data-testid=step]").inner_text())


def download(page: Any, title: str, where: Path) -> Path:
    """The file behind an entry of the menu of downloads."""
    page.locator(".menu summary").click()
    with page.expect_download() as waiting:
        page.locator(".menu button", has_text=title).click()
    waiting.value.save_as(where)
    return where


def path_of_a_person(page: Any, address: str, folder: Path) -> dict[str, Any]:
    """Choose a model, see plans, change a degree, read a formula, compare, download, come back by the address."""
    page.goto(address)
    page.wait_for_selector("[data-testid=step]")
    page.get_by_role("combobox", name="Model", exact=True).select_option("llama3-8b")
    page.get_by_role("spinbutton", name="Devices").fill("16")
    page.get_by_role("spinbutton", name="Batch").fill("64")
    page.wait_for_function("() => document.title.includes('llama3-8b on 16') && !document.querySelector('progress')")
    page.wait_for_selector("table.plans tr.on")
    found: dict[str, Any] = {"best_s": shown_s(page)}
    page.locator("button", has_text="Keep as A").first.click()
    before = page.locator("[data-testid=step]").inner_text()
    page.get_by_label("Pipeline (pp): more").click()
    page.wait_for_function("before => document.querySelector('[data-testid=step]').innerText !== before", arg=before)
    page.wait_for_selector("#view table tbody tr.head")
    found["rows_compared"] = page.locator("#view table tbody tr").count()
    found["shown_s"] = shown_s(page)
    page.screenshot(path=folder / "page.png", full_page=True)
    page.locator("#tab-time").click()
    page.wait_for_selector("svg[data-name=time]")
    download(page, "Charts of this view", folder / "chart.png")
    found["saved"] = json.loads(download(page, "This plan (JSON)", folder / "plan.json").read_text())
    download(page, "Run file", folder / "RUN.toml")
    download(page, "Trace for Perfetto", folder / "trace.json")
    page.locator("#tab-timeline").click()
    page.wait_for_selector("canvas.gantt")
    page.locator("#tab-mesh").click()
    page.wait_for_selector("svg[data-name=mesh]")
    page.locator("#tab-explain").click()
    page.locator(".details summary").first.click()
    page.wait_for_selector("math")
    found["formula"] = page.locator("math").count()
    found["left"] = page.locator("#view").inner_text()
    page.goto("about:blank")
    page.go_back()
    page.wait_for_selector("math")
    page.wait_for_function("() => !document.querySelector('progress')")
    found["restored"] = page.locator("#view").inner_text()
    return found
