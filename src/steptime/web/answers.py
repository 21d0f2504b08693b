"""Answers to the questions of the page: each is one call of the API, as plain data.

``GET`` lists catalogues like the commands of the same names; ``POST`` takes a job (:mod:`steptime.web.asked`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from steptime import __version__, api
from steptime.api.models import load_model, read_model
from steptime.cli.output import document
from steptime.errors import FieldError, PlanError, UnknownNameError
from steptime.formats.trace import chrome
from steptime.hardware import cluster_names, device_names, load_cluster, load_device
from steptime.hardware.records import Cluster
from steptime.hardware.search_path import is_path
from steptime.model import active_parameter_terms, catalogue_names, parameter_terms
from steptime.options import COUNTS
from steptime.plan.framework_file import framework_names
from steptime.plan.job import PRECISIONS
from steptime.plan.optimizers import OPTIMIZERS
from steptime.report.plots.results import result
from steptime.report.plots.series import chart
from steptime.schedule import SCHEDULES
from steptime.simulation.trace import trace_of
from steptime.web.asked import WHERE, Asked, Desk, asked_of, on_cluster
from steptime.web.timeline import MAX_ACTIONS, columns_of

Progress = Callable[[int, int], None]
Answer = Callable[[Mapping[str, Any], Desk, Progress], Mapping[str, Any]]
MAX_TOP: Final = 200
"""Largest number of plans in the answer to a search."""


def _estimate(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    asked = on_cluster(asked_of(given, own, {"explain": bool, "training": dict}))
    training = asked.options.get("training")
    found = api.estimate(asked.model, asked.cluster, plan=asked.plan, **asked.settings, training=training)
    return found.to_json(explain=asked.options.get("explain", False))


def _roofline(given: Mapping[str, Any], own: Desk, progress: Progress) -> Mapping[str, Any]:
    asked = on_cluster(asked_of(given, own, {}))
    return roofline_of(
        api.estimate(asked.model, asked.cluster, plan=asked.plan, **asked.settings).to_json(explain=True)
    )


def roofline_of(estimate: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chart of ``steptime plot roofline`` of an explained estimate, as plain data.

    Raises:
        UserError: the estimate does not have the work of its operators.
    """
    return chart("roofline", [result("the estimate", estimate)]).to_json()


def _plan(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    asked = on_cluster(asked_of(given, own, {"top": int, "fix": dict, "limit": list}))
    if asked.plan:
        raise FieldError(WHERE, "plan", "a search has no plan", hint="keep degrees with fix")
    options = dict(asked.options)
    if not 1 <= options.setdefault("top", 10) <= MAX_TOP:
        raise FieldError(WHERE, "top", f"{options['top']} must be a whole number from 1 to {MAX_TOP}")
    _check_limits(options.get("limit", []))
    found = api.plan(asked.model, asked.cluster, **asked.settings, **options, progress=progress)
    return found.to_json()


def _check_limits(limits: list[Any]) -> None:
    for limit in limits:
        if not isinstance(limit, str) or len(limit) > 100:
            raise FieldError(WHERE, "limit", "a bound is a text", hint='for example ["pp<=16"]')


def _diff(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    unknown = sorted(set(given) - {"a", "b"})
    if unknown:
        raise UnknownNameError("key", unknown[0], ("a", "b"), where=WHERE)
    pair = []
    for name in ("a", "b"):
        one = given.get(name)
        if not isinstance(one, Mapping):
            raise FieldError(WHERE, name, "missing", hint="a and b are two jobs with their plans")
        asked = on_cluster(asked_of(one, own, {}))
        pair.append(api.estimate(asked.model, asked.cluster, plan=asked.plan, **asked.settings))
    return api.diff(*pair).to_json()


def simulated(asked: Asked) -> Any:
    """The simulated step of a plan.

    Raises:
        PlanError: it has more passes than a timeline shows.
    """
    plan = api.estimate(asked.model, asked.cluster, plan=asked.plan, **asked.settings).plan
    name = str(asked.plan.get("schedule", plan["schedule"]))
    chunks = int(asked.plan.get("vpp", plan["vpp"]))
    passes = 2 * int(plan["pp"]) * chunks * int(plan["micro_batches"])
    if passes > MAX_ACTIONS:
        raise PlanError(
            f"{passes:,} passes are more than the {MAX_ACTIONS:,} of a timeline",
            hint="steptime simulate --trace FILE writes them; or give a smaller batch",
        )
    if name == "1f1b" and chunks > 1:
        name = "interleaved"
    return api.simulate(asked.model, asked.cluster, plan=asked.plan, **asked.settings, schedule=name)


def _simulate(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    found = simulated(on_cluster(asked_of(given, own, {})))
    return {**found.to_json(), "timeline": columns_of(found)}


def _trace(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    found = simulated(on_cluster(asked_of(given, own, {})))
    return {"chrome": chrome(trace_of(found.simulation, found.memory, found.message_bytes)).decode()}


def _ledger(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    asked = asked_of(given, own, {})
    known = {name: value for name, value in asked.settings.items() if name in ("seq", "dtype")}
    return api.ledger(asked.model, **known).to_json()


def _guide(given: Mapping[str, Any], own: Desk, progress: Progress) -> dict[str, Any]:
    asked = on_cluster(asked_of(given, own, {}))
    settings = {name: value for name, value in asked.settings.items() if name not in ("mode", "strategy", "lora")}
    return api.guide(asked.model, asked.cluster, **settings, progress=progress).to_json()


ANSWERS: Final[Mapping[str, Answer]] = {
    "estimate": _estimate,
    "plan": _plan,
    "diff": _diff,
    "simulate": _simulate,
    "roofline": _roofline,
    "trace": _trace,
    "ledger": _ledger,
    "guide": _guide,
}
"""Question -> function that answers it; the API's function has the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Functions for a list of names, and for one entry of it."""

    every: Callable[[], Mapping[str, Any]]
    one: Callable[[str], Mapping[str, Any]]


def _models() -> Mapping[str, Any]:
    listed = [(load_model(name), parameter_terms(load_model(name)).total) for name in catalogue_names()]
    return document(
        models=[
            {
                "name": spec.name,
                "family": spec.family,
                "seq_len": spec.seq_len,
                "layers": spec.layers,
                "hidden": spec.hidden,
                "heads": spec.heads,
                "experts": spec.experts is not None,
                "parameters": total,
            }
            for spec, total in listed
        ]
    )


def _model(name: str) -> Mapping[str, Any]:
    if name not in catalogue_names():
        raise UnknownNameError("model", name, catalogue_names())
    spec, report = read_model(name)
    terms, active = parameter_terms(spec), active_parameter_terms(spec).total
    return document(model={"spec": spec, "parameters": terms, "active_parameters": active, "assumed": report.assumed})


def _of_cluster(record: Cluster) -> dict[str, Any]:
    device = record.device
    levels = [
        {
            "name": level.name,
            "devices": level.devices,
            "link_Bps": level.link_Bps,
            "links_per_device": level.links_per_device,
        }
        for level in record.levels
    ]
    return {
        "name": record.name,
        "title": record.title,
        "device": device.name,
        "device_title": device.title,
        "memory_bytes": device.memory_bytes,
        "memory_Bps": device.memory_Bps,
        "matrix_flops_per_s": device.matrix_flops_per_s,
        "levels": levels,
    }


def _clusters() -> Mapping[str, Any]:
    return document(clusters=[_of_cluster(load_cluster(name)) for name in cluster_names()])


def _cluster(name: str) -> Mapping[str, Any]:
    _refuse_path("cluster", name, cluster_names())
    return document(cluster=load_cluster(name))


def _devices() -> Mapping[str, Any]:
    return document(
        devices=[
            {
                "name": one.name,
                "title": one.title,
                "memory_bytes": one.memory_bytes,
                "memory_Bps": one.memory_Bps,
                "matrix_flops_per_s": one.matrix_flops_per_s,
            }
            for one in map(load_device, device_names())
        ]
    )


def _device(name: str) -> Mapping[str, Any]:
    _refuse_path("device", name, device_names())
    return document(device=load_device(name))


def _refuse_path(kind: str, name: str, known: list[str]) -> None:
    if is_path(name):
        raise UnknownNameError(kind, name, known)


def _frameworks() -> Mapping[str, Any]:
    return document(frameworks=list(framework_names()))


def _framework(name: str) -> Mapping[str, Any]:
    from steptime.api.frameworks import framework_record

    if name not in framework_names():
        raise UnknownNameError("framework", name, framework_names())
    return document(framework=framework_record(name).to_json())


def _schedules() -> Mapping[str, Any]:
    return document(schedules=[{"name": name, "chunks": row.usual_chunks} for name, row in SCHEDULES.items()])


def _schedule(name: str) -> Mapping[str, Any]:
    from steptime.simulation.summary import summary

    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    return document(schedule=next(row for row in summary(8, 32) if row.name == name))


CATALOGUES: Final[Mapping[str, Catalogue]] = {
    "models": Catalogue(every=_models, one=_model),
    "clusters": Catalogue(every=_clusters, one=_cluster),
    "devices": Catalogue(every=_devices, one=_device),
    "frameworks": Catalogue(every=_frameworks, one=_framework),
    "schedules": Catalogue(every=_schedules, one=_schedule),
}


@lru_cache(maxsize=1)
def choices() -> Mapping[str, Any]:
    """All lists of the page in one answer."""
    return document(
        version=__version__,
        models=_models()["models"],
        clusters=_clusters()["clusters"],
        frameworks=_frameworks()["frameworks"],
        schedules=[name for name, row in SCHEDULES.items() if not row.follows],
        dtypes=list(PRECISIONS),
        optimizers=list(OPTIMIZERS),
        counts={name: list(bounds) for name, bounds in COUNTS.items()},
    )
