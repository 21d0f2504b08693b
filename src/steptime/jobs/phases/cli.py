"""``steptime rl``: a step of preference or reinforcement learning as phases."""

from __future__ import annotations

from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, takes


@takes(o.JOB)
def command(
    recipe: Annotated[str, positional(metavar="RECIPE", help="dpo, orpo, simpo, kto, ppo or grpo.")],
    model: o.ModelOrRun,
    prompts: Annotated[int, number("--prompts", "N", "Prompts of a step (pairs of dpo).", 1, 10**7)] = 64,
    samples: Annotated[int | None, number("--samples", "N", "Responses of a prompt.", 1, 10**6)] = None,
    prompt_len: Annotated[int, number("--prompt-len", "TOKENS", "Tokens of a prompt.", 1, 10**7)] = 512,
    response_len: Annotated[int, number("--response-len", "TOKENS", "Tokens of a response.", 1, 10**7)] = 512,
    reference: Annotated[str | None, flag("--reference", metavar="MODEL|same|none")] = None,
    reward: Annotated[str | None, flag("--reward", metavar="MODEL|same|rule")] = None,
    critic: Annotated[str | None, flag("--critic", metavar="MODEL|same")] = None,
    epochs: Annotated[int, number("--rl-epochs", "N", "Passes over the sequences of a step.", 1, 1000)] = 1,
    updates: Annotated[int, number("--updates", "N", "Optimiser steps of an epoch.", 1, 10**6)] = 1,
    offload_frozen: Annotated[
        bool, flag("--offload-frozen", help="Frozen models are on the host when they do not run.")
    ] = False,
    fused_loss: Annotated[
        bool, flag("--fused-loss", help="Log-probabilities are made in pieces with the head (Liger).")
    ] = False,
    generation_s: Annotated[
        float | None, flag("--generation-s", metavar="S", help="Time of generation, if you know it.")
    ] = None,
    generation_tp: Annotated[
        int | None, number("--generation-tp", "N", "Devices that generate the same sequences.", 1, 10**4)
    ] = None,
    at_once: Annotated[
        int | None, number("--at-once", "N", "Sequences at once of these devices; default: what fits.", 1, 10**6)
    ] = None,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Split a step of preference or reinforcement learning into phases: time, memory, what generation takes.

    A training phase is an estimate, a forward pass its forward part, generation a roofline or the time that you state.
    """
    from steptime.cli.job import asked_job
    from steptime.errors import FieldError
    from steptime.jobs.phases.run import Options, rl_step

    asked = asked_job(model, job)
    settings = dict(asked.settings)
    for name in ("global_batch", "seq"):
        if settings.pop(name, None) is not None:
            hint = "--prompts and --samples" if name == "global_batch" else "--prompt-len and --response-len"
            raise FieldError("", name, "follows from the sequences", hint=f"give {hint}")
    if asked.cluster is None or settings.get("gpus") is None:
        raise FieldError("", "--cluster, --gpus", "missing", hint="give --cluster NAME --gpus N")
    given = {"reference": reference, "reward": reward, "critic": critic}
    options = Options(
        prompts=prompts,
        samples=samples,
        prompt_len=prompt_len,
        response_len=response_len,
        models={role: name for role, name in given.items() if name is not None},
        epochs=epochs,
        updates=updates,
        offload_frozen=offload_frozen,
        fused_loss=fused_loss,
        generation_s=generation_s,
        generation_tp=generation_tp,
        at_once=at_once,
    )
    found = rl_step(recipe, asked.model, asked.cluster, options=options, plan=asked.plan, **settings)
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.jobs.phases.report import print_rl

    print_rl(found)
