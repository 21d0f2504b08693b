"""From RUN.toml and options to one call of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime.errors import FieldError, UserError
from steptime.estimate.result import Estimate
from steptime.formats.run_toml import RunSpec, is_run_document, parse_run, read_description
from steptime.store.files import is_file, parse_toml

_NEEDED = {"cluster": "--cluster NAME", "gpus": "--gpus N", "global_batch": "--global-batch SEQUENCES"}


def job_from(model_or_run: str, cluster: str | None, settings: Mapping[str, Any], plan: Mapping[str, Any]) -> RunSpec:
    """The job that the command line describes; options win over what RUN.toml says.

    Raises:
        UserError: RUN.toml is wrong, or an option is given that means nothing without a cluster.
    """
    base = _run_file(model_or_run) or RunSpec(model=model_or_run)
    return RunSpec(
        model=base.model,
        cluster=cluster if cluster is not None else base.cluster,
        settings={**base.settings, **settings, **_lora(base.settings, settings)},
        plan={**base.plan, **plan},
    )


def _lora(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options win one by one over the table of the file."""
    own = {**base.get("lora", {}), **settings.get("lora", {})}
    return {"lora": own} if own else {}


def _run_file(text: str) -> RunSpec | None:
    if not text.lower().endswith(".toml"):
        return None
    document = parse_toml(read_description(text), text)
    return parse_run(document, text) if is_run_document(document) else None


def refuse_run(model: str) -> None:
    """Refuse a RUN.toml where a model is wanted.

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
    """The cluster of a job that has all that ``what`` needs.

    Raises:
        FieldError: the cluster, the number of devices or the batch is missing.
    """
    given = {"cluster": job.cluster, **job.settings}
    lacking = [name for name in _NEEDED if given.get(name) is None]
    if job.cluster is None or lacking:
        raise _missing(where, lacking, what)
    return job.cluster


def plan_not_kept(where: str, job: RunSpec) -> tuple[str, ...]:
    """What to know of the plan of a run whose plans are searched.

    >>> plan_not_kept("run.toml", RunSpec(model="toy", plan={"tp": 8, "placement": {"tp": 8}}))
    ('the [plan] of run.toml (tp, placement) is not kept: --fix KEY=VALUE keeps one',)
    """
    names = ", ".join(job.plan)
    return (f"the [plan] of {where} ({names}) is not kept: --fix KEY=VALUE keeps one",) if names else ()


def _missing(where: str, names: Sequence[str], what: str) -> FieldError:
    """The error for what a file (without one: the options) does not say."""
    options = [_NEEDED[name] for name in names]
    fields = names if where else [option.partition(" ")[0] for option in options]
    needs = f"missing; {what} needs {'it' if len(names) == 1 else 'them'}"
    return FieldError(where, ", ".join(fields), needs, hint=None if where else f"give {' '.join(options)}")


def ledger_of(job: RunSpec) -> Any:
    """The ledger of a model that is given without a cluster.

    Raises:
        UserError: an option that says something about a cluster is given.
    """
    from steptime import api

    known = {"seq", "dtype"}
    extra = [name for name in (*job.settings, *job.plan) if name not in known]
    if extra:
        option = "--" + _option_name(extra[0], job.settings).replace("_", "-")
        raise FieldError("", option, "means nothing without --cluster", hint="give --cluster, or drop the option")
    return api.ledger(job.model, **{name: value for name, value in job.settings.items() if name in known})


def _option_name(setting: str, settings: Mapping[str, Any]) -> str:
    """The option that sets something; adapters have one for each key of their table.

    >>> _option_name("lora", {"lora": {"rank": 16}}), _option_name("lora", {"lora": {"qlora": True}})
    ('lora_rank', 'qlora')
    """
    key = next(iter(settings[setting])) if setting == "lora" else setting
    return f"lora_{key}" if key in ("rank", "targets") else key


def estimate_or_file(path: str) -> Estimate:
    """The estimate in a JSON file, or of the run in a RUN.toml.

    Raises:
        UserError: the file is neither.
    """
    text = read_description(path)
    if text.lstrip()[:1] in ("{", "[") and not path.lower().endswith(".toml"):
        from steptime.formats.run_toml import parse_estimate

        return parse_estimate(text, path)
    document = parse_toml(text, path)
    if not is_run_document(document):
        raise UserError(f"{path}: neither a RUN.toml nor an estimate in JSON", hint="a RUN.toml has a key `model`")
    return estimate_of(parse_run(document, path), path)
