"""Entry point of ``steptime``: the table of commands, and what every error becomes.

Exit codes: 0 done, 1 a defect of steptime, 2 the input is wrong, 3 ``plan`` found nothing that fits,
130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperGroup

from steptime import __version__
from steptime.cli.values import PlainCommand, plain_params
from steptime.errors import UserError, did_you_mean, shorten

EXIT_DEFECT: Final = 1
EXIT_USER: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141

#: Failures to write that are no defect: a full disk, a full quota, a broken device, a closed standard output.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

#: Command -> its module, which is imported when the command runs, and what it does, in one line.
COMMANDS: Final = {
    "plan": ("steptime.cli.plan", "Rank every parallel plan of a model on a number of devices."),
    "estimate": ("steptime.cli.estimate", "Explain one plan: step time, MFU, memory; or a model's ledger."),
    "fleet": ("steptime.goodput.cli.fleet", "Which kind and number of devices to buy for a run."),
    "mixed": ("steptime.mixed.cli", "Plan a job over two kinds of devices, or two sites with a slow link."),
    "lengths": ("steptime.batches.cli", "Sequences of unequal lengths: padded, bucketed or packed."),
    "rl": ("steptime.phases.cli", "A step of DPO, PPO or GRPO as phases: time, memory, generation."),
    "shadow": ("steptime.goodput.cli.shadow", "What one more GB, GB/s, TFLOP/s, device or sequence is worth."),
    "profile": (
        "steptime.captured.cli.profile",
        "Capture a real PyTorch or ONNX model: cost of each operator, peak memory.",
    ),
    "guide": ("steptime.cli.guide", "The questions by which a plan is chosen by hand, answered."),
    "fit": ("steptime.captured.cli.fit", "The cheapest way to make a training step fit on one device."),
    "rewrite": ("steptime.rewrite.cli.rewrite", "A cheaper equivalent graph of a real model, checked and written."),
    "simulate": (
        "steptime.cli.schedules",
        "Play a step of a pipeline: any schedule, bubble by cause, memory, trace.",
    ),
    "serve": ("steptime.web.cli", "The page: choose, plan, change, explain, compare; on this machine alone."),
    "report": ("steptime.web.cli", "Write one HTML file of a plan that opens without server or network."),
    "plot": ("steptime.plots.cli", "Draw saved results: scaling, breakdowns, rooflines, sweeps, timelines."),
    "diff": ("steptime.cli.diff", "Compare two estimates term by term."),
    "reproduce": ("steptime.lab.cli.reproduce", "Check the published mode; show what each corrected defect changes."),
    "export": ("steptime.launch.cli.export", "Write a run as the launch file of a training software."),
    "import": ("steptime.launch.cli.importing", "Read a launch file or script of a training software into a run."),
    "doctor": ("steptime.doctor.cli", "Read a run's log or trace: where time is lost, and what to try."),
    "collective": ("steptime.cli.collective", "Time and bandwidth of one collective: NCCL's choice, rings, trees."),
    "shard": ("steptime.sharding.cli.shard", "The best shardings of a real module over a mesh, with a bound."),
    "planners": (
        "steptime.sharding.cli.planners",
        "Other searches and recipes next to the planner, over CPU time.",
    ),
    "reshard": (
        "steptime.sharding.cli.reshard",
        "The cheapest collectives from one sharding to another.",
    ),
    "consistency": (
        "steptime.cli.consistency",
        "All-reduce and parameter servers, synchronous to asynchronous: throughput, staleness.",
    ),
    "study": ("steptime.study.cli", "Run, resume and query many jobs from one file: sweeps of plans and machines."),
    "rules": ("steptime.rewrite.rules.cli", "Substitutions of tensor terms with their proofs: list, check, generate."),
    "cache": (
        "steptime.hierarchy.cli.cache",
        "Simulate caches on access patterns: hits, causes of misses, reuse, predicted levels.",
    ),
    "tune": ("steptime.hierarchy.cli.tune", "The fastest tiles of a product here: a cost model, then measurements."),
    "iterate": ("steptime.iterate.cli", "An iteration of Lanczos, CG or a loop of yours, on a matrix."),
    "tile": ("steptime.hierarchy.cli.tile", "The best tiles of a product at every level of a machine; warps."),
    "compress": (
        "steptime.captured.cli.compress",
        "Quantised, sparse and low-rank weights on a device: bytes, time, what pays.",
    ),
    "limits": ("steptime.lab.cli.limits", "How far a training run can scale before data movement stops it."),
    "calibrate": ("steptime.lab.cli.calibrate", "Measure this machine, or fit time models to measurements."),
    "predict": ("steptime.lab.cli.predict", "Learned corrections of times: measure graphs, fit factors, score."),
    "score": ("steptime.lab.cli.score", "Predict a table of measurements and report the errors."),
    "devices": ("steptime.cli.catalogue", "List devices, or show one with the source of every number."),
    "clusters": ("steptime.cli.catalogue", "List clusters, or show one with the source of every number."),
    "models": ("steptime.cli.catalogue", "List models, or show one."),
    "schedules": ("steptime.cli.schedules", "List pipeline schedules, show one, or search for a better one."),
    "frameworks": ("steptime.cli.catalogue", "List training frameworks, or show one with its fitted overheads."),
}


class _Closed(io.TextIOBase):
    """Stands for a standard output that is closed: a report or a document cannot go unwritten without notice."""

    def write(self, text: str) -> int:
        """Raises OSError."""
        raise OSError(errno.EBADF, "standard output is closed")


class _PipeClosed(Exception):
    """The reader of standard output is gone."""


class LazyGroup(TyperGroup):
    """A group of commands; a command's module is imported when it is asked for."""

    #: Command -> its module, and what it does, in one line.
    table: ClassVar[Mapping[str, tuple[str, str]]] = COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None."""
        if cmd_name not in self.table:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(self.table[cmd_name][0], cmd_name)
        return self.commands[cmd_name]

    def get_params(self, ctx: Any) -> list[Any]:
        """Options of the group."""
        return plain_params(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command as the base class does; an error names the nearest command."""
        if self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            ctx.fail(f"there is no command {shorten(args[0])!r}; {did_you_mean(args[0], names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in ``--help``, from the table, so that help imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.table[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: Any) -> Any:
        """Run the command and write out what it printed."""
        try:
            result = super().invoke(ctx)
            flush()
        except BrokenPipeError:
            raise _PipeClosed from None
        return result

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and turn whatever is raised into a message and an exit code."""
        try:
            done = super().main(args, prog_name or "steptime", complete_var, False, windows_expand_args, **extra)
            flush()
            code = _fail("Interrupted.", EXIT_INTERRUPTED) if done == EXIT_INTERRUPTED else done
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error)
        code = code if isinstance(code, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


def group(name: str, commands: Mapping[str, tuple[str, str]], text: str) -> typer.Typer:
    """A command that is a group of commands.

    Args:
        name: of the group.
        commands: as :attr:`LazyGroup.table`.
        text: what the group is for.
    """

    class Commands(LazyGroup):
        table = commands

    def nothing() -> None:
        """A group does nothing itself."""

    return typer.Typer(
        name=name,
        cls=Commands,
        callback=nothing,
        help=text,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )


def _load(path: str, name: str) -> Any:
    """Import a command's module: its group ``GROUP``, its function ``command``, or the one of the command's name."""
    module = importlib.import_module(path)
    group = getattr(module, "GROUP", None)
    if group is not None:
        return typer.main.get_command(group)
    function = getattr(module, "command", None) or getattr(module, name)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=getattr(module, "COMMAND_CLASS", PlainCommand))(function)
    return typer.main.get_command(app)


def flush() -> None:
    """Write out what is buffered, so that a failure to write is seen here and not at exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def exit_code(error: BaseException) -> int:
    """Exit code for what a command raised, after one message about it on standard error."""
    if isinstance(error, UserError):
        return _fail(f"Error: {error}", EXIT_USER)
    if isinstance(error, typer.TyperException):
        _show(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _fail("Interrupted.", EXIT_INTERRUPTED)
    if isinstance(error, _PipeClosed | OSError):
        _discard_output()
    if isinstance(error, _PipeClosed | BrokenPipeError):
        return EXIT_PIPE
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _fail(f"Error: the output cannot be written: {error.strerror}", EXIT_USER)
    return _defect(error)


def _show(error: typer.TyperException) -> None:
    show = getattr(error, "show", None)
    if show is not None:
        show()
    else:
        _fail(f"Error: {error.format_message()}", error.exit_code)


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


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"steptime {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="steptime",
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What a deep-learning training step will cost before you run it, why, and how to make it cheaper."""


def prepare_streams() -> None:
    """Standard streams that take whatever is printed: closed ones have a stand-in, what they cannot show is escaped."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:  # print() and the console would write messages to standard output instead
        sys.stderr = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
