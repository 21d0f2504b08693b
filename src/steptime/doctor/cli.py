"""``steptime doctor``: a training log or a profiler trace against the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from steptime.cli import options as o
from steptime.cli.job import over_plan, plan_file, plan_given, written_given
from steptime.cli.parser import flag, number, positional, takes

if TYPE_CHECKING:
    from steptime.doctor import Diagnosis, Log, Stated, StatedJob, Variant
    from steptime.estimate.result import Estimate
    from steptime.formats.run_spec import RunSpec
    from steptime.model.spec import ModelSpec

#: Choices of a plan in which a run may differ from its declaration: plan entry, value, description.
VARIANTS: Final = (
    ("overlap", "none", "no overlap of data-parallel traffic"),
    ("recompute", "full", "full recomputation"),
    ("attention", "unfused", "unfused attention"),
)
#: Choices that change memory.
MEMORY_VARIANTS: Final = (
    ("zero", 0, "nothing shared out over data-parallel ranks"),
    ("zero", 1, "optimiser states shared out over data-parallel ranks (ZeRO-1)"),
    ("gradient_dtype", "fp32", "gradients in fp32"),
    ("recompute", "none", "no recomputation"),
    ("recompute", "full", "full recomputation"),
    ("attention", "unfused", "unfused attention"),
    ("sp", "off", "no sequence parallelism"),
    ("offload", "optimizer", "the optimiser on the host"),
)
#: A measured step this close to the prediction needs no other explanation.
CLOSE: Final = 0.04


@takes(o.JOB)
def command(
    file: Annotated[
        str,
        positional(
            metavar="LOG|TRACE", help="Log of Megatron-LM, NeMo, DeepSpeed, torchtitan, MaxText, a Trainer; or a trace."
        ),
    ],
    model: Annotated[
        str | None,
        flag("--model", metavar="MODEL|RUN.toml", help="Model or run; default: what the log's sizes fit."),
    ] = None,
    steps: Annotated[
        int | None, number("--steps", "N", "Steps in a trace without ProfilerStep annotations; default 1.", 1, 10**6)
    ] = None,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Say where the time of a run goes that should not, and what to try.

    What the log states of its job fills what is not given; contradictions are named. Without a cluster only what was
    measured is shown. --plan also takes the launch file that the run was started from.
    """
    _run({"file": file, "model": model, "steps": steps, "json": json, **job})


def _run(given: Mapping[str, Any]) -> None:
    """Body of :func:`command`, given its parameters by name."""
    settings, reference = o.settings_given(given), _reference(given["plan"])
    if reference is None:
        model, cluster, plan = given["model"], given["cluster"], plan_given(given, written_given(given))
    else:
        plan = over_plan(reference.run.plan, plan_given(given, None))
        settings = {**reference.run.settings, **settings}
        model, cluster = given["model"] or reference.run.model, given["cluster"] or reference.run.cluster
    note = "" if reference is None else reference.note
    diagnosis = diagnose(given["file"], model, cluster, settings, plan, given["steps"], reference=note)
    if given["json"]:
        from steptime.cli.output import document, print_json

        print_json(document(**diagnosis.to_json()))
        return
    from steptime.doctor.report import print_diagnosis

    print_diagnosis(diagnosis)


class _Reference(NamedTuple):
    """The run described by the file of ``--plan``, and a note on its origin."""

    run: RunSpec
    note: str


def _reference(path: str | None) -> _Reference | None:
    """The run of a launch file, or of a plan file with model and cluster; None: the file is neither."""
    if path is None:
        return None
    from steptime.launch.read import read_launch, with_model
    from steptime.launch.table import software_called

    if (run := plan_file(path)) is not None:
        return _Reference(run, f"reference: the plan of {path}")
    found = with_model(read_launch(path), None)
    return _Reference(found.run, f"reference: {path}, a launch file of {software_called(found.software).title}")


def diagnose(
    file: str,
    model: str | None,
    cluster: str | None,
    settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    steps: int | None = None,
    *,
    reference: str = "",
) -> Diagnosis:
    """The diagnosis of a log or trace; ``reference`` is a note on the origin of the plan.

    Raises:
        UserError: the file is neither, or the job cannot be estimated.
    """
    from steptime import doctor
    from steptime.errors import UserError

    if doctor.kind_of(file) == "trace":
        return _trace(file, model, cluster, settings, plan, steps, reference=reference)
    log = doctor.read_log(file)
    try:
        prediction = _predict(model, cluster, settings, plan, log.stated)
    except UserError as error:
        if cluster is None or not (found := _device_contradictions(cluster, log.device, log.capacity_bytes)):
            raise
        raise UserError(found[0], hint=f"give the cluster that it ran on; with this one: {error}") from None
    prediction.refer_to(reference)
    prediction.hold_device(log.device, log.capacity_bytes, log.peak_memory_bytes)
    known = prediction.known
    variants = _variants(prediction, doctor.series_of(log, known).median_s)
    return doctor.diagnose_log(
        log,
        known,
        prediction.estimate,
        model=prediction.model,
        contradictions=prediction.contradictions,
        variants=variants,
        memory_variants=_memory_variants(prediction, log),
        notes=prediction.notes,
    )


def _trace(
    file: str,
    model: str | None,
    cluster: str | None,
    settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    steps: int | None,
    *,
    reference: str,
) -> Diagnosis:
    from steptime import doctor

    recording = doctor.read_trace(file)
    framework = doctor.framework_of(recording)
    stated = doctor.Stated(settings=doctor.stated_by_trace(recording), framework=doctor.fitted_framework(framework, {}))
    prediction = _predict(model, cluster, settings, plan, stated)
    times = doctor.trace_times(recording, file, prediction.degrees, steps)
    prediction.refer_to(reference)
    prediction.hold_device(times.device or "", times.capacity_bytes)
    if times.groups["attention"]:
        prediction.stated["attention"] = "fused"
    return doctor.diagnose_trace(
        times,
        prediction.estimate,
        contradictions=prediction.contradictions,
        variants=_variants(prediction, times.step_s),
        notes=prediction.notes,
        framework=framework,
    )


class _Prediction:
    """The estimate of the job, if enough is known for one, and notes on its inputs."""

    def __init__(
        self, job: RunSpec | None, merged: StatedJob, estimate: Estimate | None, model: ModelSpec | None = None
    ) -> None:
        self.job = job
        self.merged = merged
        self.estimate = estimate
        self.model = model
        self.stated: dict[str, Any] = {}
        """Choices of the plan that the run declares; they rule out others as explanations."""
        self.contradictions = merged.contradictions
        self.notes: tuple[str, ...] = ()

    def hold_device(self, name: str, capacity_bytes: float | None, peak_bytes: float | None = None) -> None:
        """Add contradictions between the run's device and the device of the prediction."""
        if self.job is not None and self.job.cluster is not None:
            found = _device_contradictions(self.job.cluster, name, capacity_bytes, peak_bytes)
            self.contradictions = (*found, *self.contradictions)
        elif name:
            self.notes += (f"the run names its device: {name}",)

    def refer_to(self, reference: str) -> None:
        """Add a note on the origin of the plan, if there is one."""
        self.notes = (*((reference,) if reference else ()), *self.notes)

    @property
    def known(self) -> dict[str, Any]:
        """Batch, sequence and devices of the job."""
        if self.estimate is None:
            return {**self.merged.settings}
        work = self.estimate.workload
        said = {"global_batch": work.get("global_batch"), "seq": work.get("seq_len"), "gpus": work.get("gpus")}
        return {**self.merged.settings, **{name: value for name, value in said.items() if value is not None}}

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks of each axis, as far as known."""
        plan = self.merged.plan if self.estimate is None else self.estimate.plan
        return {axis: plan[axis] for axis in ("tp", "cp", "ep", "dp", "pp") if isinstance(plan.get(axis), int)}


def _device_contradictions(
    cluster: str, name: str, capacity_bytes: float | None, peak_bytes: float | None = None
) -> tuple[str, ...]:
    from steptime.doctor import device_contradictions
    from steptime.hardware import load_cluster

    return device_contradictions(load_cluster(cluster).device, cluster, name, capacity_bytes, peak_bytes)


def _predict(
    model: str | None, cluster: str | None, settings: Mapping[str, Any], plan: Mapping[str, Any], stated: Stated
) -> _Prediction:
    from steptime import doctor
    from steptime.api.models import load_model
    from steptime.cli.job import estimate_of, job_from

    notes: list[str] = []
    if model is None and (model := doctor.catalogue_model(stated.model, stated.model_name)):
        notes.append(f"model {model}: {_why(stated)}")
    elif model is None and (stated.model_name or stated.model):
        notes.append(f"no model of the catalogue has {_sought(stated)}: give --model")
    base = None if model is None else job_from(model, cluster, settings, plan)
    spec = None if base is None or base.cluster is None else load_model(base.model)
    stated, against = (stated, ()) if spec is None else doctor.held_against(spec, stated)
    stated = doctor.with_batch(spec, settings if base is None else base.settings, stated)
    merged = doctor.merged(
        settings if base is None else base.settings,
        plan if base is None else base.plan,
        stated,
        experts=spec is not None and spec.experts is not None,
    )
    if merged.filled:
        notes.append("from the run itself: " + ", ".join(merged.filled))
    if base is None or base.cluster is None or spec is None:
        given = {"--model": model, "--cluster": base.cluster if base else cluster}
        missing = " and ".join(name for name, value in given.items() if value is None)
        notes.append(f"without {missing} there is no prediction to compare with")
        out = _Prediction(None, merged, None)
    else:
        notes += _assumed(merged, stated)
        job = job_from(base.model, base.cluster, merged.settings, merged.plan)
        out = _Prediction(job, merged, estimate_of(job), spec)
        out.contradictions += against
    out.notes = tuple(notes)
    out.stated = dict(stated.plan)
    return out


def _assumed(merged: StatedJob, stated: Stated) -> list[str]:
    """Notes on assumptions of the prediction that neither the user nor the run gives."""
    notes = []
    if merged.framework:
        notes.append(f"framework {merged.framework}: that of the run; --framework names another")
    if merged.settings.get("dtype") == "fp8" != stated.settings.get("dtype", "fp8"):
        more = f"the run's own, {stated.settings['dtype']}, also casts, copies and gathers in 8 bits"
        notes.append(f"dtype fp8 is the rate of products alone; {more}")
    if merged.habitual:
        notes.append(f"as {merged.framework} does unless told otherwise: " + ", ".join(merged.habitual))
    if "recompute" not in merged.plan:
        notes.append("what is recomputed is neither given nor stated: predicted as nothing")
    return notes


def _sought(stated: Stated) -> str:
    """Description of the criteria by which a model was searched."""
    if stated.model_name:
        return f"name and sizes of the log's {stated.model_name}"
    return "the sizes of the log's (" + ", ".join(f"{name} {value}" for name, value in stated.model.items()) + ")"


def _why(stated: Stated) -> str:
    """Reason for the choice of the model."""
    sizes = "the log's sizes fit it" if stated.model else ""
    called = f"the log calls it {stated.model_name}" if stated.model_name else ""
    return ", and ".join(reason for reason in (called, sizes) if reason)


def _variants(prediction: _Prediction, step_s: float) -> tuple[Variant, ...]:
    """Predictions of the job with one choice changed, if the measured step is slower than predicted."""
    estimate = prediction.estimate
    if estimate is None or step_s <= (1 + CLOSE) * estimate.step_time_s:
        return ()
    return _changed(prediction, VARIANTS)


def _memory_variants(prediction: _Prediction, log: Log) -> tuple[Variant, ...]:
    """Predictions of the job with one choice changed, if the measured memory is far from the prediction."""
    from steptime.doctor import memory_is_off

    e, measured = prediction.estimate, log.peak_memory_bytes
    if e is None or measured is None:
        return ()
    off = memory_is_off(measured / e.memory_by_definition.get(log.memory_kind, e.peak_memory_bytes))
    return _changed(prediction, MEMORY_VARIANTS) if off else ()


def _changed(prediction: _Prediction, choices: Sequence[tuple[str, Any, str]]) -> tuple[Variant, ...]:
    """Predictions with each choice that differs from the plan, does not contradict the run, and is legal."""
    from dataclasses import replace

    from steptime.cli.job import estimate_of
    from steptime.doctor import Variant
    from steptime.errors import UserError

    job, estimate = prediction.job, prediction.estimate
    if job is None or estimate is None:
        return ()
    out = []
    for name, value, change in choices:
        if value in (job.plan.get(name), estimate.plan.get(name)) or prediction.stated.get(name, value) != value:
            continue
        try:
            changed = estimate_of(replace(job, plan={**job.plan, name: value}))
        except UserError:
            continue
        out.append(Variant(change=change, step_time_s=changed.step_time_s, memory=changed.memory_by_definition))
    return tuple(out)
