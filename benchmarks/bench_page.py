"""Seconds until the page shows a first result and follows a changed degree, in Chromium; size of its bundle.

python benchmarks/bench_page.py            prints the table; exit code 1 where the first result takes 2 s or more
python benchmarks/bench_page.py --write    also writes it to benchmarks/page.md
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/web"))
from page_in_browser import browser_or_reason

from steptime.web.server import bundle

RUNS = 5
FIRST_S = 2.0
"""Seconds in which a first result has to be shown."""
SHOWN = "[data-testid=step]"
CHANGED = "before => document.querySelector('[data-testid=step]').innerText !== before"
SERVE = (sys.executable, "-c", "from steptime.__main__ import run; run()", "serve", "--port", "0")


def started() -> tuple[subprocess.Popen[str], str, float]:
    """A server, its address, and the wall seconds until it said so."""
    begun = time.perf_counter()
    process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[2]
    return process, address, time.perf_counter() - begun


def cpu_s(process: subprocess.Popen[str]) -> float:
    """User and system seconds that a process has had."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_bytes(process: subprocess.Popen[str]) -> float:
    """Memory that a process holds."""
    return int(Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()[1]) * 4096


def visit(browser: Any, address: str) -> tuple[float, float]:
    """Seconds from opening the page to its first result, and from a key to the changed result."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(SHOWN)
    first_s = time.perf_counter() - begun
    page.wait_for_selector("table.plans")
    page.wait_for_function("() => !document.querySelector('progress')")
    before = page.locator(SHOWN).inner_text()
    page.locator("#degree-pp").focus()
    begun = time.perf_counter()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(CHANGED, arg=before)
    changed_s = time.perf_counter() - begun
    context.close()
    return first_s, changed_s


def row(name: str, seconds: list[float]) -> str:
    """A row of the table."""
    return f"| {name} | {median(seconds):.2f} s | {min(seconds):.2f} to {max(seconds):.2f} s |"


def main() -> None:
    with browser_or_reason() as browser:
        if isinstance(browser, str):
            sys.exit(browser)
        starts, colds, firsts, changes, cpus, memory = [], [], [], [], [], 0.0
        for _ in range(RUNS):
            process, address, start_s = started()
            try:
                starts.append(start_s)
                cold_s, _ = visit(browser, address)
                first_s, changed_s = visit(browser, address)
                colds.append(cold_s)
                firsts.append(first_s)
                changes.append(changed_s)
                cpus.append(cpu_s(process))
                memory = max(memory, resident_bytes(process))
            finally:
                process.terminate()
                process.wait()
    files = {name: bundle()[name] for name in ("page.js", "page.css", "formulas.json")}
    lines = [
        "| what | median | range |",
        "|---|---:|---:|",
        row("`steptime serve`: process to address", starts),
        row("first result, first visit of a new server", colds),
        row("first result, further visits", firsts),
        row("a changed degree, key to number", changes),
        row("CPU of the server for all of it", cpus),
        "",
        "| file | kB | gzip, kB |",
        "|---|---:|---:|",
        *(
            f"| `{name}` | {len(data) / 1e3:.0f} | {len(gzip.compress(data)) / 1e3:.0f} |"
            for name, data in files.items()
        ),
    ]
    notes = (
        f"Wall time in a headless Chromium on the same machine, {RUNS} servers. A first result is the best of 30,162\n"
        "candidates for llama3-70b on 64 devices, searched when the page opens: it has to be there within "
        f"{FIRST_S:g} s.\nLoad average of the machine meanwhile: {os.getloadavg()[0]:.1f}. The server holds at most {memory / 2**20:.0f} MiB. `formulas.json` is fetched when a formula "
        "is opened.\n"
    )
    report("page", "The page", "\n".join(lines), notes)
    if median(colds) >= FIRST_S:
        sys.exit(f"the first result took {median(colds):.2f} s, not under {FIRST_S:g} s")


if __name__ == "__main__":
    main()
