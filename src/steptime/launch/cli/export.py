"""``steptime export``: a run as the launch file of a training software."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, positional, takes


@takes(o.JOB)
def command(
    model: Annotated[
        str, positional(metavar="RUN.toml|PLAN.json|MODEL", help="Run, plan that plan or estimate wrote, or model.")
    ],
    software: Annotated[
        str,
        flag(
            "--for",
            metavar="NAME",
            help="megatron-lm, megatron-bridge, nemo, torchtitan, torchtitan-python, deepspeed, accelerate, fsdp2, "
            "hf-trainer, lightning, maxtext or llm-foundry.",
        ),
    ],
    out: Annotated[
        Path | None, flag("-o", "--out", metavar="FILE|FOLDER", help="Write it there; default: print it.")
    ] = None,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Write what a training software reads to run a plan: degrees, schedule, precision, batch, recomputation, overlap.

    What it has no option for stands in comments; a plan that it cannot run is refused with the rule.
    """
    from steptime.cli.job import asked_job, needed
    from steptime.launch.write import export_run, summary

    asked = asked_job(model, job)
    if asked.cluster is not None:
        needed(asked, "a launch file")
    found = export_run(asked, software)
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(**found.to_json()))
        return
    if out is None:
        print(found.text, end="")
        return
    from steptime.store.files import write_whole

    target = out / found.file if out.is_dir() or not out.suffix else out
    write_whole(target, found.text, make_folder=True)
    print(f"wrote {target}" + (f"; start it with: {found.launcher}" if found.launcher else ""))
    if text := summary(found):
        print(text)
