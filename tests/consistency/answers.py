"""What each command answers to a job: its step time in seconds and its peak memory in bytes, as printed by ``--json``.

An answer is a mapping of these numbers; a text says why a command has none. A number of the form ``(value, named)``
differs from the estimate's by what the command itself prints under the name ``named``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.testclient import TestClient

from cli_runner import CliRunner
from consistency.jobs import Job
from steptime import api, study
from steptime.api.models import load_model
from steptime.cli.main import main as steptime
from steptime.study.file import study_of
from steptime.web.server import application

Answer = Mapping[str, Any] | str
TRAINERS_OF_PHASES: Final = ("deepspeed", "trl")
"""Frameworks whose trainers of preferences have another loss than their trainer of one text."""
TIME, MEMORY = "step_time_s", "peak_memory_bytes"
TRAINERS: Final = {
    "megatron-core": "megatron-lm", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "transformers": "hf-trainer",
}  # fmt: skip
"""Framework -> training software whose launch file is written and read again."""


def asked(*words: object) -> dict[str, Any] | str:
    """The JSON of a command; its error message where it refuses."""
    done = CliRunner().invoke(steptime, [*map(str, words), "--json"])
    if done.exit_code not in (0, 3):
        return " ".join(done.output.split()) or repr(done.exception)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def both(found: Mapping[str, Any] | str) -> Answer:
    """The two numbers of an estimate."""
    return found if isinstance(found, str) else {TIME: found[TIME], MEMORY: found[MEMORY]}


def estimate(job: Job, folder: Path) -> Answer:
    """The reference: the command with every degree given."""
    return both(asked("estimate", *job.options))


def function(job: Job, folder: Path) -> Answer:
    """The function of the API, with the plan as a mapping."""
    run = job.run
    found = api.estimate(run.pop("model"), run.pop("cluster"), **run)
    return {TIME: found.step_time_s, MEMORY: found.peak_memory_bytes}


def run_file(job: Job, folder: Path) -> Answer:
    """A RUN.toml."""
    path = folder / "run.toml"
    path.write_text(written(job.run))
    return both(asked("estimate", path))


def plan_file(job: Job, folder: Path) -> Answer:
    """What ``estimate --json`` wrote, given to ``estimate``."""
    path = folder / "plan.json"
    path.write_text(CliRunner().invoke(steptime, ["estimate", *job.options, "--json"]).stdout)
    return both(asked("estimate", path))


def written(run: Mapping[str, Any]) -> str:
    """Tables as TOML."""
    tables = {key: value for key, value in run.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in run.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def plan_fixed(job: Job, folder: Path) -> Answer:
    """A search in which every degree is fixed."""
    run = job.run
    del run["plan"]
    given = api.estimate(job.model, job.cluster, **job.run_settings())
    kept = {key: given.plan[key] for key in FIXED if key in given.plan}
    found = api.plan(run.pop("model"), run.pop("cluster"), **run, fix={**kept, **job.plan}, top=1)
    if not found.plans:
        return "nothing is feasible"
    best = found.plans[0]
    chosen = [key for key, value in best.plan.items() if key in SEARCHED and value != given.plan.get(key)]
    time, memory = best.step_time_s, best.peak_memory_bytes
    named = ", ".join(f"plan.{key}" for key in chosen)
    return {TIME: (time, named), MEMORY: (memory, named)} if chosen else {TIME: time, MEMORY: memory}


def own_plan(job: Job, folder: Path) -> Answer:
    """The estimate of the first plan of a free search, held against that plan's own numbers: a ratio of one."""
    run = job.run
    del run["plan"]
    model, cluster = run.pop("model"), run.pop("cluster")
    plans = api.plan(model, cluster, **run, top=1).plans
    if not plans:
        return "nothing is feasible"
    record = {key: value for key, value in plans[0].plan.items() if key not in DERIVED}
    again = api.estimate(model, cluster, **run, plan=record)
    mine, reference = again, api.estimate(model, cluster, **job.run_settings())
    return {
        TIME: reference.step_time_s * mine.step_time_s / plans[0].step_time_s,
        MEMORY: reference.peak_memory_bytes * mine.peak_memory_bytes / plans[0].peak_memory_bytes,
    }


FIXED: Final = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "recompute", "zero", "shard", "overlap")
"""Degrees and choices that a search is told besides those of the job."""
SEARCHED: Final = ("placement", "graphs", "dispatcher", "overlap", "context")
"""What a search chooses for the degrees that it is given, and prints in the plan."""
DERIVED: Final = frozenset(
    {"micro_batches", "stage_layers", "fullest_stage", "domains", "idle_devices", "fullest_phase", "panels"}
)
"""Entries of a plan's record that follow from the others."""


def study_row(job: Job, folder: Path) -> Answer:
    """A row of a study."""
    run = job.run
    lora = {"lora": run.pop("lora")} if "lora" in run else {}
    plan = run.pop("plan")
    found = study_of({"what": "estimate", "job": {**run, **lora, "plan": plan}})
    study.run(found, folder / "store", workers=1)
    rows = study.results(found, folder / "store").rows("plans")
    if not rows:
        return str(study.results(found, folder / "store").rows("points")[0]["message"])
    return {TIME: rows[0][TIME], MEMORY: rows[0][MEMORY]}


def page(job: Job, folder: Path) -> Answer:
    """The page's answer."""
    with TestClient(application(), base_url="http://127.0.0.1:8733") as client:
        found = client.post("/api/estimate", json=job.run)
    return both(found.json()) if found.status_code == 200 else found.json()["error"]["message"]


def report_file(job: Job, folder: Path) -> Answer:
    """The report as one file: the estimate that its page shows."""
    path = folder / "report.html"
    done = CliRunner().invoke(steptime, ["report", *job.options, "-o", str(path), "--top", "0"])
    if done.exit_code:
        return " ".join(done.output.split())
    shown = {name: re.search(rf'"{name}":\s*([0-9.eE+-]+)', path.read_text()) for name in (TIME, MEMORY)}
    return {name: float(found[1]) for name, found in shown.items() if found is not None}


def compared(job: Job, folder: Path) -> Answer:
    """``diff`` of a run with itself."""
    path = folder / "run.toml"
    path.write_text(written(job.run))
    found = asked("diff", path, path)
    return found if isinstance(found, str) else {name: found["headline"][name][1] for name in (TIME, MEMORY)}


def simulated(job: Job, folder: Path) -> Answer:
    """The step as played: what differs from the closed form is printed with it."""
    found = asked("simulate", *job.options)
    if isinstance(found, str):
        return found
    # What the order of passes makes of the step is printed next to what the closed form of the estimate says.
    memory = max(found[MEMORY])
    return {TIME: found["closed_form_s"], MEMORY: memory}


def lengths(job: Job, folder: Path) -> Answer:
    """Sequences that are all as long as the job's."""
    seq = job.job.get("seq") or load_model(job.model).seq_len
    found = asked("lengths", *job.options, "--lengths", seq)
    if isinstance(found, str):
        return found
    one = next(way for way in found["ways"] if way[TIME] is not None)
    return {TIME: one[TIME], MEMORY: one[MEMORY]}


def shadow(job: Job, folder: Path) -> Answer:
    """The step of which shadow prices are taken."""
    found = asked("shadow", *job.options, "--tokens", "1T")
    return found if isinstance(found, str) else {TIME: found["step_s"]}


def preference(job: Job, folder: Path) -> Answer:
    """The update of a preference step without a reference, of sequences as long as the job's."""
    seq = job.job.get("seq") or load_model(job.model).seq_len
    left = iter(job.options)
    words = [word for word in left if word not in ("--global-batch", "--seq") or not next(left)]
    given = ["--prompts", job.global_batch // 2, "--prompt-len", seq // 2, "--response-len", seq - seq // 2]
    found = asked("rl", "orpo", *words, *given)
    if isinstance(found, str):
        return found
    update = next(phase for phase in found["phases"] if phase["kind"] == "train")
    if job.job.get("framework") in TRAINERS_OF_PHASES:
        return {TIME: (update["time_s"], "loss of the trainer")}
    return {TIME: update["time_s"]}


def launch(job: Job, folder: Path) -> Answer:
    """A launch file of the framework's software, written and read again."""
    software = TRAINERS.get(job.job.get("framework", ""))
    if software is None:
        return "no training software is named"
    run, target, back = folder / "job.toml", folder / "launch", folder / "back.toml"
    run.write_text(written(job.run))
    done = CliRunner().invoke(steptime, ["export", str(run), "--for", software, "-o", str(target)])
    if done.exit_code:
        return " ".join(done.output.split())
    main = target if target.is_file() else min(target.iterdir(), key=lambda path: (path.suffix == ".json", path.name))
    words = ["import", str(main), "--from", software, "--cluster", job.cluster, "-o", str(back)]
    done = CliRunner().invoke(steptime, words)
    return both(asked("estimate", back)) if done.exit_code == 0 else " ".join(done.output.split())


def scored(job: Job, folder: Path) -> Answer:
    """The prediction of a table of measured runs that has the job as its one row."""
    row = measured_row(job)
    if isinstance(row, str):
        return row
    table, residuals = folder / "runs.csv", folder / "residuals.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    found = asked("score", table, "--out", residuals)
    if isinstance(found, str):
        return found
    with residuals.open(newline="") as file:
        one = next(csv.DictReader(file))
    return {TIME: float(one["predicted_s"])} if one["predicted_s"] else f"skipped: {one['skipped']} {one['detail']}"


def measured_row(job: Job) -> dict[str, Any] | str:
    """The job in the columns of measured runs."""
    if job.cluster.startswith("published"):
        return "no such machine was ever measured"
    if job.lora:
        return "the columns do not say which layers have adapters"
    reference = api.estimate(job.run.pop("model"), job.run.pop("cluster"), **job.run_settings())
    plan = reference.plan
    return {
        "row_id": 1, "source_key": "own", "model": job.model, "gpu": job.cluster, "n_gpus": job.gpus,
        "seq_len": job.job.get("seq") or load_model(job.model).seq_len, "dtype": job.job.get("dtype", "bf16"),
        "global_batch_sequences": job.global_batch, "framework": job.job.get("framework", "generic"),
        **{key: plan[key] for key in ("micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp", "recompute", "schedule")},
        "zero_stage_or_fsdp": plan["zero"], "metric_step_time_s": reference.step_time_s, "workload": "pretrain",
        "sequence_parallel": bool(plan["sp"]) and plan["tp"] > 1, "source": "made for this test",
    }  # fmt: skip


ANSWERS: Final[Mapping[str, Callable[[Job, Path], Answer]]] = {
    "api.estimate": function, "RUN.toml": run_file,
    "PLAN.json": plan_file, "plan --fix": plan_fixed, "plan, then estimate": own_plan,
    "study": study_row, "page": page, "report": report_file, "diff": compared, "simulate": simulated,
    "lengths": lengths, "shadow": shadow, "rl orpo": preference, "export, import": launch, "score": scored,
}  # fmt: skip
