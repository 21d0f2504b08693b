"""``steptime import``: a launch file of a training software as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, positional


def command(
    file: Annotated[str, positional(metavar="FILE|COMMAND", help="Launch file, shell script, or a command line.")],
    software: Annotated[
        str | None, flag("--from", metavar="NAME", help="Its software; default: recognised by its options.")
    ] = None,
    model: Annotated[str | None, flag("--model", metavar="MODEL", help="Model; default: what the file says.")] = None,
    cluster: o.Cluster = None,
    out: Annotated[
        Path | None, flag("-o", "--out", metavar="RUN.toml", help="Write the run there; default: print it.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Read a launch file, a launch script or its arguments into a run that estimate reads.

    Options that a run has no key for are kept and named; options that contradict each other are refused.
    """
    from steptime.errors import FieldError
    from steptime.launch.read import read_launch, with_model

    if out is not None and (not out.name or out.is_dir()):
        raise FieldError("", "-o", f"{str(out)!r} is no file", hint="give the name of one, as -o run.toml")
    own = None if out is None else out.with_suffix(".model.toml")
    found = with_model(
        read_launch(file, software, model=model, cluster=cluster), None if own is None or json else own.name
    )
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(**found.to_json()))
        return
    if out is None:
        print(found.text, end="")
        return
    from steptime.launch.report import print_imported
    from steptime.store.files import write_whole

    if found.model_text and own is not None:
        write_whole(own, found.model_text)
    write_whole(out, found.text)
    print_imported(found, str(out))
