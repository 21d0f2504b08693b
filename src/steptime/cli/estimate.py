"""``steptime estimate``: explain one plan, or print a model's ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, takes
from steptime.errors import FieldError, UserError, did_you_mean, shorten
from steptime.estimate.result import Estimate

_EXPLAIN: Final = "--explain"

#: Field of a written estimate's job -> its option.
_JOB_OPTIONS: Final = {
    "gpus": "--gpus",
    "global_batch": "--global-batch",
    "seq_len": "--seq",
    "dtype": "--dtype",
    "optimizer": "--optimizer",
    "framework": "--framework",
    "lora": "--lora-rank",
}


@takes({**o.JOB, **o.TRAINING})
def command(
    model: o.ModelOrRun = "",
    explain: Annotated[
        str | None,
        flag(
            _EXPLAIN,
            metavar="TERM",
            optional=True,
            help="Show formula, numbers and source of these terms: a path, row or function.",
        ),
    ] = None,
    failures: o.Failures = None,
    prices: o.Prices = None,
    predictor: o.Predictor = None,
    plot: o.Plot = None,
    show_all: o.All = False,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Explain one plan: step time, MFU, memory, and the terms of each.

    Without a cluster: parameters, FLOPs, bytes of the model. Options win over RUN.toml.
    """
    from steptime import api
    from steptime.cli.job import job_from, ledger_of, needed, plan_given, written_given
    from steptime.cli.output import print_json
    from steptime.report.plots.asked import drawing

    if not model:  # the only word after --explain is the model
        model, explain = explain or "", explain and ""
    if not model:
        raise FieldError("", "MODEL|RUN.toml", "missing", hint="as steptime estimate llama3-8b")
    length = {**o.training_given(job), **o.given(failures=failures, prices=prices)}
    settings, written = o.settings_given(job), written_given(job)
    asked = job_from(model, job["cluster"], settings, plan_given(job, written), whole=written is not None)
    if asked.cluster is None:
        of_a_step = {
            "--predictor corrects times, and there is no step": predictor,
            "the length of a training means nothing without a step": length or None,
            f"{_EXPLAIN}: a ledger has no terms to explain": explain,
            "--plot: a ledger has no step to draw": plot,
        }
        for problem, given in of_a_step.items():
            if given is not None:
                raise UserError(problem, hint="give --cluster")
        if json:
            print_json(ledger_of(asked).to_json())
            return
        from steptime.report.estimate import print_ledger

        print_ledger(ledger_of(asked))
        return
    draw = drawing("overview", plot)
    estimate = api.estimate(
        asked.model,
        needed(asked, "an estimate"),
        plan=asked.plan,
        **o.given(predictor=predictor),
        **asked.settings,
        **length,
    )
    if written is not None and (note := not_taken(job["plan"], written.workload, estimate.workload, settings)):
        estimate = dataclasses.replace(estimate, notes=(note, *estimate.notes))
    if explain is not None:
        estimate = dataclasses.replace(estimate, details=details_below(estimate, explain))
    if draw is not None:
        draw(estimate.to_json())
    if json:
        print_json(estimate.to_json(explain=explain is not None))
        return
    from steptime.report.estimate import print_estimate

    print_estimate(estimate, show_all=show_all, explain=explain is not None)


def not_taken(path: str, written: Mapping[str, Any], taken: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Note on choices of a written plan's job that differ in this job without the user's request; "" for none.

    >>> not_taken("a.json", {"dtype": "fp8", "seq_len": 512}, {"dtype": "bf16", "seq_len": 1024}, {"seq": 1024})
    'a.json was written for --dtype fp8, which a plan does not hold: this estimate has bf16'
    """
    of, here = (
        {**w, "lora": w["lora"].get("rank") if isinstance(w.get("lora"), dict) else None} for w in (written, taken)
    )
    differ = [name for name in _JOB_OPTIONS if of.get(name) not in (None, here.get(name))]
    differ = [name for name in differ if {"seq_len": "seq"}.get(name, name) not in settings]
    if not differ:
        return ""
    options = ", ".join(f"{_JOB_OPTIONS[name]} {shorten(str(of[name]), 40)}" for name in differ)
    instead = ", ".join("none" if here[name] is None else str(here[name]) for name in differ)
    return f"{path} was written for {options}, which a plan does not hold: this estimate has {instead}"


def details_below(estimate: Estimate, term: str) -> tuple[Any, ...]:
    """Records of the terms matched by ``term``: the start of a path, of any part of it (a row), or of a function.

    Raises:
        UserError: it matches none; the message has the nearest name.
    """
    found = tuple(d for d in estimate.details if f"/{term}" in f"/{d.path}" or f".{term}" in f".{d.function}")
    if term and not found:
        parts = {part for d in estimate.details for part in d.path.split("/")}
        hint = did_you_mean(term, sorted(parts), "terms are the lines below time and memory; --all shows them")
        raise UserError(f"{_EXPLAIN}: there is no term {shorten(term)!r}", hint=hint)
    return found
