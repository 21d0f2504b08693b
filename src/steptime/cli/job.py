"""Conversion of RUN.toml and options into a call of the API; values of ``--fix``, ``--limit``, ``--placement``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steptime.cli.options import given, settings_given
from steptime.errors import FieldError, UnknownNameError, UserError, shorten
from steptime.estimate.result import Estimate
from steptime.formats.run_spec import RunSpec, is_run_document, parse_run, read_description
from steptime.options import AXES, CHANCE, COUNTS, KEYS, LAUNCHED, RATIOS, SEARCHED, SHOWN, digits
from steptime.store.files import is_file, parse_toml

if TYPE_CHECKING:
    from steptime.formats.estimate_file import Written

_NEEDED = {"cluster": "--cluster NAME", "gpus": "--gpus N", "global_batch": "--global-batch SEQUENCES"}


def job_from(
    model_or_run: str,
    cluster: str | None,
    settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    *,
    whole: bool = False,
) -> RunSpec:
    """The job that the command line describes; options win over RUN.toml, and a ``whole`` plan replaces the file's.

    Raises:
        UserError: RUN.toml is wrong, or an option is given that needs a cluster.
    """
    base = _run_file(model_or_run) or plan_file(model_or_run) or RunSpec(model=model_or_run)
    return RunSpec(
        model=base.model,
        cluster=cluster if cluster is not None else base.cluster,
        settings={**base.settings, **settings, **_lora(base.settings, settings)},
        plan={**({} if whole else base.plan), **plan},
    )


def asked_job(model_or_run: str, options: Mapping[str, Any]) -> RunSpec:
    """The job of a command that takes all options of a job and its plan, from its parameters."""
    written = written_given(options)
    plan, whole = plan_given(options, written), written is not None
    return job_from(model_or_run, options["cluster"], settings_given(options), plan, whole=whole)


def _lora(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The table of adapters: the file's, overridden by single options."""
    own = {**base.get("lora", {}), **settings.get("lora", {})}
    return {"lora": own} if own else {}


def _run_file(text: str) -> RunSpec | None:
    if not text.lower().endswith(".toml"):
        return None
    document = parse_toml(read_description(text), text)
    return parse_run(document, text) if is_run_document(document) else None


def plan_file(text: str) -> RunSpec | None:
    """The run of a file written by ``plan --json`` or ``estimate --json``; None: another file."""
    if not text.lower().endswith(".json"):
        return None
    from steptime.formats.plan_document import run_of_plan

    return run_of_plan(text)


def refuse_run(model: str) -> None:
    """Refuse a RUN.toml in place of a model.

    Raises:
        UserError: the file is a run.
    """
    if not model.lower().endswith(".toml") or not is_file(model):
        return
    if is_run_document(parse_toml(read_description(model), model)):
        raise UserError(f"{model}: a run, not a model", hint="steptime estimate and steptime plan take a run")


def estimate_of(job: RunSpec, where: str = "") -> Estimate:
    """Run the estimate.

    Raises:
        UserError: the cluster, the number of devices or the batch is missing, or the API refuses the job.
    """
    from steptime import api

    return api.estimate(job.model, needed(job, "an estimate", where), plan=job.plan, **job.settings)


def needed(job: RunSpec, what: str, where: str = "") -> str:
    """The cluster of a job, checked to have everything that ``what`` needs.

    Raises:
        FieldError: the cluster, the number of devices or the batch is missing.
    """
    given = {"cluster": job.cluster, **job.settings}
    lacking = [name for name in _NEEDED if given.get(name) is None]
    if job.cluster is None or lacking:
        raise _missing(where, lacking, what)
    return job.cluster


def plan_not_kept(where: str, job: RunSpec) -> tuple[str, ...]:
    """Note that a search of plans does not keep the plan of a run.

    >>> plan_not_kept("run.toml", RunSpec(model="toy", plan={"tp": 8, "placement": {"tp": 8}}))
    ('the [plan] of run.toml (tp, placement) is not kept: --fix KEY=VALUE keeps one',)
    """
    names = ", ".join(job.plan)
    return (f"the [plan] of {where} ({names}) is not kept: --fix KEY=VALUE keeps one",) if names else ()


def _missing(where: str, names: Sequence[str], what: str) -> FieldError:
    """Error for values missing in a file, or in the options if there is no file."""
    options = [_NEEDED[name] for name in names]
    fields = names if where else [option.partition(" ")[0] for option in options]
    needs = f"missing; {what} needs {'it' if len(names) == 1 else 'them'}"
    return FieldError(where, ", ".join(fields), needs, hint=None if where else f"give {' '.join(options)}")


def ledger_of(job: RunSpec) -> Any:
    """The ledger of a model that is given without a cluster.

    Raises:
        UserError: an option that needs a cluster is given.
    """
    from steptime import api

    known = {"seq", "dtype", "optimizer", "global_batch", "dp"}
    extra = [name for name in (*job.settings, *job.plan) if name not in known]
    if extra:
        option = "--" + _option_name(extra[0], job.settings).replace("_", "-")
        raise FieldError("", option, "means nothing without --cluster", hint="give --cluster, or drop the option")
    given = {**job.settings, **job.plan}
    return api.ledger(job.model, **{name: value for name, value in given.items() if name in known})


def _option_name(setting: str, settings: Mapping[str, Any]) -> str:
    """The option of a setting; adapters have one for each key of their table.

    >>> _option_name("lora", {"lora": {"rank": 16}}), _option_name("lora", {"lora": {"qlora": True}})
    ('lora_rank', 'qlora')
    """
    key = next(iter(settings[setting])) if setting == "lora" else setting
    return f"lora_{key}" if key in ("rank", "targets") else key


_FIX: Final = re.compile(r"\s*([^=<>]*?)\s*=\s*([^=<>]*?)\s*")
_LIMIT: Final = re.compile(r"\s*([^=<>]*?)\s*(<=|>=|==|=|<|>)\s*([^=<>]*?)\s*")


def parse_fix(texts: Sequence[str]) -> dict[str, int | float | str]:
    """Values that a search keeps fixed.

    Raises:
        FieldError: a text is not ``key=value``, a value is out of range, or a key has two values.
        UnknownNameError: a key is no degree.

    >>> parse_fix(["tp=8", "micro-batch=1", "mbs=1", "recompute=full"])
    {'tp': 8, 'micro_batch': 1, 'recompute': 'full'}
    """
    out: dict[str, int | float | str] = {}
    for text in texts:
        match = _FIX.fullmatch(text)
        if match is None or not match.group(2):
            raise FieldError(
                "", "--fix", f"{shorten(text)!r} is not of the form key=value", hint="for example --fix tp=8 --fix pp=4"
            )
        key = _key("--fix", match.group(1), KEYS)
        value = _value(key, match.group(2))
        if out.setdefault(key, value) != value:
            raise FieldError("", "--fix", f"{key} is given twice, as {out[key]} and as {value}")
    return out


def parse_limits(texts: Sequence[str]) -> list[str]:
    """Bounds on degrees and on the probability of running out of memory, normalised as ``key<=value``.

    Raises:
        FieldError: a text is no comparison, or a bound is no whole number (for the probability: no share).
        UnknownNameError: a key is no degree.

    >>> parse_limits(["pp <= 16", "micro-batch<4", "P(oom) <= 10 %"])
    ['pp<=16', 'micro_batch<4', 'oom_probability<=0.1']
    """
    out = []
    for text in texts:
        match = _LIMIT.fullmatch(text)
        if match is None or not match.group(3):
            raise FieldError(
                "", "--limit", f"{shorten(text)!r} is not a comparison", hint="for example --limit 'pp<=16' (quoted)"
            )
        key = _key("--limit", match.group(1), (*COUNTS, CHANCE))
        operator = match.group(2).replace("==", "=")
        bound = _share(match.group(3)) if key == CHANCE else _whole("--limit", key, match.group(3))
        out.append(f"{key}{operator}{bound}")
    return out


def parse_placement(text: str) -> dict[str, Any]:
    """Entries of a plan: ``placement`` (devices of each axis inside the fast domain), or ``order`` of the axes.

    Raises:
        FieldError: it is no list of ``axis=devices``.
        UnknownNameError: an axis does not exist.

    >>> parse_placement("tp=4,dp=2"), parse_placement("tp-pp-dp")
    ({'placement': {'tp': 4, 'dp': 2}}, {'order': 'tp-pp-dp'})
    """
    if "=" not in text and ("-" in text or text in (LAUNCHED, SEARCHED)):
        return {"order": text}
    out: dict[str, int] = {}
    for part in text.split(","):
        match = _FIX.fullmatch(part)
        if match is None or not match.group(2):
            problem = f"{shorten(part)!r} is not of the form axis=devices"
            hint = "for example --placement tp=4,dp=2, or an order of the axes: tp-cp-dp-pp"
            raise FieldError("", "--placement", problem, hint=hint)
        axis = _key("--placement", match.group(1), AXES)
        if axis in out:
            raise FieldError("", "--placement", f"{axis} is given twice")
        out[axis] = _whole("--placement", axis, match.group(2))
    return {"placement": out}


def _key(option: str, given: str, allowed: Collection[str]) -> str:
    spelt = given.replace("-", "_").lower()
    name = SHOWN.get(spelt, spelt)
    if name not in allowed:
        raise UnknownNameError("axis" if option == "--placement" else "degree", given, allowed, where=option)
    return name


def _value(key: str, text: str) -> int | float | str:
    if key in RATIOS:
        try:
            return float(text)
        except ValueError:
            raise FieldError("", "--fix", f"{key} is {shorten(text)!r}; it must be a number") from None
    return _whole("--fix", key, text) if key in COUNTS else text


def _share(text: str) -> float | str:
    """A number, with percent as a share; other text is returned unchanged, and refused by the request."""
    number, percent, _ = text.partition("%")
    try:
        return float(f"{float(number) / 100:.15g}") if percent else float(number)
    except ValueError:
        return text


def parse_share(option: str, text: str) -> float:
    """A share above 0 and at most 1, in percent or as a number.

    Raises:
        FieldError: not a share above 0 and at most 1.

    >>> parse_share("--oom-limit", "5 %"), parse_share("--oom-limit", "0.1")
    (0.05, 0.1)
    """
    value = _share(text)
    if isinstance(value, str) or not 0 < value <= 1:
        raise FieldError("", option, f"{shorten(text)!r} is no share above 0 and at most 1", hint="for example 5%")
    return value


def _whole(option: str, key: str, text: str) -> int:
    low, high = COUNTS[key]
    value = digits(text)
    if not low <= value <= high:
        raise FieldError("", option, f"{key} is {shorten(text)!r}; it must be a whole number from {low} to {high}")
    return value


def written_given(given: Mapping[str, Any]) -> Written | None:
    """The plan of the file that the user gave, if any."""
    if given["plan"] is None:
        return None
    from steptime.formats.estimate_file import read_plan

    return read_plan(given["plan"])


def plan_given(options: Mapping[str, Any], written: Written | None) -> dict[str, Any]:
    """The plan of a file, if any, with the user's options on top."""
    plan = given(**{name: options[name] for name in KEYS})
    if options["placement"] is not None:
        plan |= parse_placement(options["placement"])
    return plan if written is None else over_plan(written.plan, plan)


def over_plan(written: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A written plan with the user's changes; if the mesh changes, placement and replicas are dropped.

    >>> over_plan({"tp": 8, "dp": 4, "placement": {"tp": 8}}, {"tp": 4})
    {'tp': 4}
    """
    stale = {"dp", "placement", "order"} if {"tp", "tp2", "cp", "pp"} & set(given) else set()
    stale |= {"schedule"} if "vpp" in given else set()
    return {**{name: value for name, value in written.items() if name not in stale}, **given}
