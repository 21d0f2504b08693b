"""Report file: the page with its answers inside, in one file that opens from disk without a server or network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlencode

from steptime import api
from steptime.cli.job import asked_job, needed
from steptime.cli.output import plain
from steptime.errors import InputFileError, UserError
from steptime.estimate.result import Estimate
from steptime.formats.estimate_file import parse_estimate
from steptime.formats.run_spec import RunSpec, read_description
from steptime.web.answers import choices, roofline_of, simulated
from steptime.web.asked import Asked
from steptime.web.timeline import columns_of

STATIC: Final = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "formulas.json": "application/json",
}
"""File of the bundle -> media type; no other file is served."""


@lru_cache(maxsize=1)
def bundle() -> Mapping[str, bytes]:
    """Built files of the page."""
    folder = files("steptime.web").joinpath("static")
    return {name: folder.joinpath(name).read_bytes() for name in STATIC}


SCRIPT: Final = '<script type="module" crossorigin src="./page.js"></script>'
STYLE: Final = '<link rel="stylesheet" crossorigin href="./page.css">'
POLICY: Final = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def page_of(given: str, options: Mapping[str, Any], length: Mapping[str, Any], *, top: int) -> str:
    """The text of a report.

    Args:
        given: a model, a RUN.toml, or a JSON file that ``estimate`` or ``plan`` wrote.
        options: options of the command, by parameter.
        length: length of the whole run, the argument ``training`` of an API call; or empty.
        top: ranked plans next to the one shown; 0: none.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    answers = _written(given) if _is_answer(given) else _asked(given, options, length, top)
    estimate = answers["estimate"]
    answers["formulas.json"] = _formulas(estimate)
    with suppress(UserError):  # an estimate may lack the work of its operators
        answers["roofline"] = roofline_of(estimate)
    cluster = [one for one in choices()["clusters"] if one["name"] == estimate["provenance"]["cluster"]]
    answers["api/choices"] = {**choices(), "models": [], "clusters": cluster}
    return filled(bundle(), {"fragment": _fragment(estimate), "answers": answers})


def _is_answer(given: str) -> bool:
    """True if a file was written by ``--json``; a model's ``config.json`` was not."""
    if not given.lower().endswith(".json"):
        return False
    try:
        found = json.loads(read_description(given))
    except (ValueError, RecursionError) as error:
        hint = "write it again with --json, or give the whole config.json"
        raise InputFileError(given, f"not JSON: {str(error)[:80]}", hint=hint) from None
    return isinstance(found, dict) and "schema_version" in found


def _written(path: str) -> dict[str, Any]:
    """Answers from a file: an estimate, or a ranking and its first plan."""
    text = read_description(path)
    first = parse_estimate(text, path)
    answers: dict[str, Any] = {"estimate": first.to_json(explain=True)}
    document = json.loads(text)
    if isinstance(document.get("plans"), list):
        for row in document["plans"]:
            parse_estimate(json.dumps(row), path)
        missing = {"candidates", "feasible", "reasons", "stop", "pareto", "advice", "notes"} - set(document)
        if missing:
            raise InputFileError(path, f"lacks {', '.join(sorted(missing))}", hint="steptime plan --json writes it")
        answers["plan"] = document
    return answers


def _asked(given: str, options: Mapping[str, Any], length: Mapping[str, Any], top: int) -> dict[str, Any]:
    """Computed answers: the estimate of the plan or of the best one, the ranking, the timeline."""
    job = asked_job(given, options)
    cluster = needed(job, "a report")
    answers: dict[str, Any] = {}
    plan = dict(job.plan)
    if top or not plan:
        ranking = api.plan(job.model, cluster, **job.settings, **length, top=max(top, 1))
        if top:
            answers["plan"] = ranking.to_json()
        nearest = ranking.plans[0] if ranking.plans else ranking.nearest
        if not plan and nearest is None:
            hint = " ".join(ranking.advice) or "ask for other devices"
            raise UserError("there is no plan to report", hint=hint)
        plan = plan or dict(nearest.plan if nearest is not None else {})
    found = api.estimate(job.model, cluster, plan=plan, **job.settings, **length)
    answers["estimate"] = found.to_json(explain=True)
    played = _timeline(job, cluster, plan, found)
    return answers if played is None else {**answers, "simulate": played}


def _timeline(job: RunSpec, cluster: str, plan: Mapping[str, Any], found: Estimate) -> dict[str, Any] | None:
    """The simulated step; None: it cannot be simulated, or has more passes than can be drawn."""
    if found.plan["pp"] < 2:
        return None
    try:
        played = simulated(Asked(model=job.model, cluster=cluster, settings=job.settings, plan=plan, options={}))
    except UserError:
        return None
    return {**played.to_json(), "timeline": columns_of(played)}


def _formulas(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """Formulas of the terms of an estimate."""
    every = json.loads(bundle()["formulas.json"])
    calls = [call for detail in estimate.get("details", ()) for call in (detail, *detail["further"])]
    return {name: every[name] for name in sorted({call["function"] for call in calls}) if name in every}


def _fragment(estimate: Mapping[str, Any]) -> str:
    """The job as a fragment of the page's address."""
    names = {"gpus": "gpus", "global_batch": "batch", "seq_len": "seq", "dtype": "dtype", "optimizer": "optimizer"}
    of = {ours: estimate["workload"].get(theirs, "") for theirs, ours in names.items()}
    provenance = estimate["provenance"]
    return urlencode({"model": provenance["model"], "cluster": provenance["cluster"], **of, "view": "time"})


def filled(files: Mapping[str, bytes], data: Mapping[str, Any]) -> str:
    """The page with script, style and data inside; its policy allows only this script and style."""
    script, style = files["page.js"].decode(), files["page.css"].decode()
    policy = POLICY.format(script=digest(script), style=digest(style))
    content = json.dumps(plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{style}</style>'
    inside = f'<script type="application/json" id="steptime-data">{content}</script>'
    page = files["index.html"].decode()
    page = page.replace(STYLE, "").replace(SCRIPT, head)
    return page.replace("</body>", f'{inside}\n<script type="module">{script}</script>\n</body>')


def digest(text: str) -> str:
    """Hash by which a policy names an inline script or style.

    >>> digest("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
