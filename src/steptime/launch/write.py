"""A run written as the launch file of a training software."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.errors import PlanError, first_few
from steptime.formats.run_spec import RunSpec
from steptime.launch.job import Launch, launch_of
from steptime.launch.read import launch_read
from steptime.launch.rules import check_degrees, check_rules
from steptime.launch.syntax import WRITERS, Page
from steptime.launch.table import READ_ONLY, SOFTWARE, Options, Software, software_called
from steptime.launch.values import NEUTRAL, matters, with_parts
from steptime.version import __version__

#: Concepts of a launch file that describe its origin, not the run.
ORIGIN: Final = ("for", "model", "cluster", "framework", "node_devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A launch file."""

    software: str
    file: str
    """Usual name of the file."""
    text: str
    options: Mapping[str, Any]
    """Options of the software that the plan fixes."""
    launcher: str
    """Command that starts the run."""
    lost: tuple[str, ...]
    """Concepts of the plan that the software has no option for."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in ("software", "file", "text", "launcher")} | {
            "options": dict(self.options),
            "lost": list(self.lost),
        }


def export_run(run: RunSpec, software: str) -> Exported:
    """The launch file of a run for a software.

    Raises:
        UserError: the run is wrong, or the software cannot run its plan; the message has the rule.
    """
    found = software_called(software)
    if found.name in READ_ONLY:
        raise PlanError(f"steptime reads files of {found.title} and writes none yet", hint=", ".join(SOFTWARE))
    return export_launch(launch_of(run), found)


def export_launch(launch: Launch, software: Software) -> Exported:
    """The launch file of a complete launch.

    Raises:
        PlanError: the software cannot run the plan.
    """
    values = with_parts({**launch.values, "node_devices": launch.node_devices})
    check_rules(software, values)
    check_degrees(software, software.without_option(values), values)
    options = software.options_with({**values, "model": launch.model})
    launcher = software.launcher.format_map(values)
    extra = _unsaid(launch, software, options, launcher)
    lost = [name for name in extra if name not in ORIGIN and matters(name, values)]
    page = Page(
        options=options,
        head=_head(software, extra, lost),
        extra=extra,
        launcher=launcher,
        python=software.python,
    )
    return Exported(
        software=software.name,
        file=software.file,
        text=WRITERS[software.syntax](page),
        options=options,
        launcher=launcher,
        lost=tuple(lost),
    )


def _unsaid(launch: Launch, software: Software, options: Options, launcher: str) -> dict[str, Any]:
    """Concepts that cannot be read back from the options alone, with the origin of the run."""
    origin = {"for": software.name, "model": launch.model, "cluster": launch.cluster}
    read = launch_read(software, options, launcher, origin)
    out: dict[str, Any] = {name: value for name, value in origin.items() if value is not None}
    if launch.framework != read.framework:
        out["framework"] = launch.framework
    wrong = {
        name: value
        for name, value in launch.values.items()
        if read.values.get(name, NEUTRAL.get(name)) != value and not name.startswith("model.")
    }
    if read.node_devices != launch.node_devices:
        out["node_devices"] = launch.node_devices
    return out | wrong | {f"placement.{axis}": n for axis, n in launch.placement.items()}


def _head(software: Software, extra: Mapping[str, Any], lost: list[str]) -> tuple[str, ...]:
    """Lines of the first comment: the version of steptime, and concepts without an option."""
    lines = [f"Written by steptime {__version__} for {software.title}, options of {software.version}."]
    if lost:
        said = ", ".join(f"{name} {extra[name]}" for name in lost)
        lines.append(f"{software.title} has no option for: {said}.")
    return (*lines, "The lines below are for steptime import and steptime doctor; the software skips them.")


def summary(exported: Exported) -> str:
    """One line on concepts that are not expressed; empty: there are none."""
    if not exported.lost:
        return ""
    return f"no option for: {first_few(exported.lost, 8)} (in a comment that steptime import reads)"
