"""The committed bundle is what its source builds: small, without addresses of others, with the formulas of today."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

from steptime.web.formulas import records
from steptime.web.report_file import bundle

SOURCE = Path(__file__).parents[2] / "web-src"
STATIC = Path(__file__).parents[2] / "src/steptime/web/static"
#: Bytes of script and style together, minified.
MOST = 250_000


def test_the_bundle_was_built_from_these_sources() -> None:
    """As `scripts/web` adds them up; `scripts/web --check` builds them again."""
    tops = [path for path in SOURCE.iterdir() if path.suffix in (".json", ".ts", ".mjs") or path.name == "index.html"]
    names = [path.relative_to(SOURCE).as_posix() for path in (*tops, *(SOURCE / "src").rglob("*")) if path.is_file()]
    lines = [f"{hashlib.sha256((SOURCE / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(names)]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert (STATIC / "built-from.txt").read_text().strip() == expected, "run scripts/web"


def test_formulas_are_those_of_the_docstrings() -> None:
    written = json.loads(bundle()["formulas.json"])
    for record in written.values():
        assert record.pop("mathml").startswith("<math ")
    assert written == records(), "run scripts/web"


def test_formulas_need_no_style_and_run_nothing() -> None:
    text = bundle()["formulas.json"].decode()
    assert not re.search(r"<script|<style| style=| on\w+=|javascript:", text)


def test_the_bundle_is_small_and_asks_nobody() -> None:
    script, style = bundle()["page.js"], bundle()["page.css"]
    assert len(script) + len(style) < MOST
    assert len(gzip.compress(script)) < 40_000
    addresses = set(re.findall(rb"https?://[\w.]+", script + style))
    assert addresses <= {b"http://www.w3.org"}, addresses  # names of SVG and MathML, which are not fetched
    assert b"eval(" not in script
    assert b"new Function" not in script
