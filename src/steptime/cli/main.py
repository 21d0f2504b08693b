"""Entry point of ``steptime``: the table of commands, and the handling of errors.

Exit codes: 0 done, 1 a defect of steptime, 2 the input is wrong, 3 ``plan`` found nothing that fits,
130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from steptime import __version__
from steptime.cli.parser import Entry, Group, complete
from steptime.errors import UserError, shorten

EXIT_DEFECT: Final = 1
EXIT_USER: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141

SHELLS: Final = (["bash"], ["zsh"], ["fish"])
#: Error numbers of writes that are no defect: a full disk, a full quota, a broken device, a closed standard output.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

#: Heading of ``steptime --help`` -> command -> its module, which is imported when the command runs, and a summary.
_TABLE: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Plan": {
        "plan": ("steptime.cli.plan", "Rank every parallel plan of a model on a number of devices."),
        "estimate": ("steptime.cli.estimate", "Explain one plan: step time, MFU, memory; or a model's ledger."),
        "guide": ("steptime.study.guide.cli", "The questions by which a plan is chosen by hand, answered."),
        "diff": ("steptime.cli.diff", "Compare two estimates term by term."),
        "shadow": ("steptime.study.cli.shadow", "What one more GB, GB/s, TFLOP/s, device or sequence is worth."),
        "fleet": ("steptime.study.cli.fleet", "Which kind and number of devices to buy for a run."),
        "mixed": ("steptime.jobs.mixed.cli", "A job over two kinds of devices, or two sites."),
        "lengths": ("steptime.jobs.batches.cli", "Sequences of unequal lengths: padded, bucketed or packed."),
        "rl": ("steptime.jobs.phases.cli", "A step of DPO, PPO or GRPO as phases: time, memory, generation."),
    },
    "Your module": {
        "profile": ("steptime.captured.cli.profile", "A real PyTorch or ONNX model: operators' cost, peak memory."),
        "fit": ("steptime.captured.cli.fit", "The cheapest way to make a training step fit on one device."),
        "shard": ("steptime.sharding.cli.shard", "The best shardings of a real module over a mesh, with a bound."),
        "rewrite": ("steptime.rewrite.cli.rewrite", "A cheaper equivalent graph of a real model, checked and written."),
    },
    "Pipelines and links": {
        "simulate": ("steptime.simulation.cli", "Play a step of a pipeline: bubble by cause, memory, trace."),
        "schedules": ("steptime.simulation.cli", "List pipeline schedules, show one, or search for a better one."),
        "collective": ("steptime.simulation.collectives.cli", "Time of one collective: NCCL's choice, rings, trees."),
    },
    "A run that exists": {
        "doctor": ("steptime.doctor.cli", "Read a run's log or trace: where time is lost, what to try."),
        "import": ("steptime.launch.cli.importing", "Read a launch file of a training software into a run."),
        "export": ("steptime.launch.cli.export", "Write a run as the launch file of a training software."),
    },
    "Pictures and the page": {
        "study": ("steptime.study.cli.study", "Run, resume and query many jobs from one file."),
        "plot": ("steptime.cli.plot", "Draw saved results: scaling, breakdowns, rooflines, timelines."),
        "report": ("steptime.web.cli", "Write one HTML file of a plan that opens without a server."),
        "serve": ("steptime.web.cli", "The page: choose, plan, change, explain; on this machine alone."),
    },
    "This machine": {
        "calibrate": ("steptime.measure.cli.calibrate", "Measure this machine, or fit time models to measurements."),
        "score": ("steptime.measure.cli.score", "Predict a table of measurements and report the errors."),
    },
    "Catalogues": {
        "devices": ("steptime.cli.catalogue", "List devices, or show one with the source of every number."),
        "clusters": ("steptime.cli.catalogue", "List clusters, or show one with the source of every number."),
        "models": ("steptime.cli.catalogue", "List models, or show one."),
        "frameworks": ("steptime.cli.catalogue", "List training frameworks, or show one with its fitted values."),
    },
}
COMMANDS: Final = {
    name: Entry(place, summary, heading)
    for heading, commands in _TABLE.items()
    for name, (place, summary) in commands.items()
}
"""Every command of the product."""
LAB: Final = Group(
    "steptime lab",
    "Studies of models below and next to the planner: rules and their proofs, caches, tiles, papers, baselines.",
)
LIST: Final = Group(
    "steptime list",
    "What the catalogues have.",
    {name: COMMANDS[name] for name in (*_TABLE["Catalogues"], "schedules")},
)
ROOT: Final = Group(
    "steptime",
    "What a deep-learning training step will cost before you run it, why, and how to make it cheaper.",
    COMMANDS
    | {
        "list": Entry(LIST, "The same, and schedules: steptime list devices", "Catalogues"),
        "lab": Entry(LAB, "Rules and proofs, baselines of planners, caches, tiles, papers.", "Laboratory"),
    },
)


class _Closed(io.TextIOBase):
    """Stand-in for a closed standard output: a write fails instead of losing a report silently."""

    def write(self, text: str) -> int:
        """Raise OSError."""
        raise OSError(errno.EBADF, "standard output is closed")


class _PipeClosed(Exception):
    """The reader of standard output is gone."""


def main(args: Sequence[str] | None = None) -> int:
    """Run ``steptime`` with arguments, by default the process's; an exception becomes a message and an exit code."""
    given, code = list(sys.argv[1:] if args is None else args), 0
    try:
        if "_ARGCOMPLETE" in os.environ:
            complete(ROOT)
        if given[:1] == ["--version"]:
            print(f"steptime {__version__}")
        elif given[:1] == ["--completion"]:
            from argcomplete.shell_integration import shellcode

            if given[1:] not in SHELLS:
                raise UserError("--completion takes a shell: bash, zsh or fish", hint="as steptime --completion bash")
            print(shellcode(["steptime"], shell=given[1]))
        else:
            try:
                found = ROOT.run("steptime", given)
            except SystemExit as end:  # --help
                found = end.code
            code = found if isinstance(found, int) else 0
        flush()
    except BrokenPipeError:
        code = exit_code(_PipeClosed())
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
    return code


def flush() -> None:
    """Flush standard output, so that a failed write is seen here and not at exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def exit_code(error: BaseException) -> int:
    """Exit code for an exception of a command, after one message about it on standard error."""
    if isinstance(error, UserError):
        return _fail(f"Error: {error}", EXIT_USER)
    if isinstance(error, KeyboardInterrupt):
        return _fail("Interrupted.", EXIT_INTERRUPTED)
    if isinstance(error, _PipeClosed | OSError):
        _discard_output()
    if isinstance(error, _PipeClosed | BrokenPipeError):
        return EXIT_PIPE
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _fail(f"Error: the output cannot be written: {error.strerror}", EXIT_USER)
    return _defect(error)


def _fail(message: str, code: int) -> int:
    from steptime.report.text import printable

    with contextlib.suppress(OSError, ValueError):
        print(printable(message), file=sys.stderr)
    return code


def _defect(error: BaseException) -> int:
    if os.environ.get("STEPTIME_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    what = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
    advice = (
        "this is a defect of steptime, not of your input; report it with the command and what STEPTIME_DEBUG=1 prints"
    )
    return _fail(f"Error: {what} ({advice}; steptime {__version__})", EXIT_DEFECT)


def _discard_output() -> None:
    """Point standard output at nothing, so that the interpreter's own flush at exit stays silent."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def prepare_streams() -> None:
    """Make standard streams accept all text: closed ones get a stand-in, unencodable characters are escaped."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:  # print() and the console would write messages to standard output instead
        sys.stderr = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
