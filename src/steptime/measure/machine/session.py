"""A whole calibration: refuse what cannot work, measure, fit, write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, UserError, counted
from steptime.measure.machine import MAX_PROCESSES, cluster_file, collectives, profile, ranks, runner
from steptime.measure.machine.collectives import Mesh, RankDiedError
from steptime.measure.machine.runner import Bench, Host, Settings, this_host
from steptime.model.spec import ELEMENT_BYTES
from steptime.registry import needed
from steptime.store.files import refuse_unwritable
from steptime.store.journal import Journal, read_journal, refuse_busy

Progress = Callable[[int, int], None]

_FINISHED: Final = "finished"
#: Record of dtypes in the journal -> probes that have to be fast in them.
_DTYPES: Final = {"dtypes": runner.PRODUCT, "dtypes of convolutions": runner.CONVOLUTION}
#: Visits of operators that one visit of a collective takes, about; only for the progress bar.
_WEIGHT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of a calibration."""

    out: Path
    quick: bool = False
    resume: bool = False
    processes: int | None = None
    """None: one for each GPU, or a single one on a CPU."""
    threads: int = 1
    device: str | None = None
    """``cpu`` or ``cuda``; None: CUDA if there is a GPU."""


def calibrate(request: Request, progress: Progress) -> profile.Fitted | None:
    """Measures this machine and writes its cluster file, its curves and the journal of measurements.

    Under ``torchrun`` the ranks of the job are used, and only the first rank returns a result.

    Raises:
        UserError: torch is missing, a path cannot be written, the journal belongs to another measurement, or a rank
            died; in the last case what was measured is fitted and written first.
    """
    if _in_job() and os.environ["RANK"] != "0":
        _follow(request)
        return None
    for path in _paths(request.out):
        refuse_unwritable(path)
    for path in _paths(request.out)[:2]:
        cluster_file.refuse_foreign(path)
    torch = needed("torch", "measuring a machine")
    host = host_of(torch, request)
    mesh = _mesh(request, host)
    with _journal(request, host, mesh) as journal:
        died = _measure(request, torch, host, mesh, journal, progress)
        fitted = fit_records(host, mesh, journal.records)
        cluster_file.write(request.out, fitted)
        if died is not None:
            raise RankDiedError(
                str(died),
                hint=f"{counted(len(journal.records), 'measurement')} kept in {journal.path}; {request.out} holds the "
                "fit of these; --resume measures the rest",
            )
        if _FINISHED not in journal.keys:
            journal.append({"key": _FINISHED})
    return fitted


def fit_records(host: Host, mesh: Mesh | None, records: Any) -> profile.Fitted:
    """Fit the records of a journal."""
    timed = [] if mesh is None else collectives.results(records, mesh)
    return profile.fit(host, runner.results(records), timed, mesh, date.today().isoformat())


def _paths(out: Path) -> tuple[Path, Path, Path]:
    return out, cluster_file.curves_path(out), cluster_file.journal_path(out)


def host_of(torch: Any, request: Request) -> Host:
    """The machine with the device that was asked for.

    Raises:
        UserError: there is no GPU that torch sees.
    """
    if request.device == "cuda" and not torch.cuda.is_available():
        hint = "install the build of torch for CUDA, or measure the CPU: --device cpu"
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU", hint=hint)
    return this_host(torch, request.threads, request.device)


def _in_job() -> bool:
    """True if a launcher such as torchrun started this process as one of several."""
    return "MASTER_ADDR" in os.environ and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _mesh(request: Request, host: Host) -> Mesh | None:
    """Ranks to measure collectives over; None: there is only one.

    Raises:
        UserError: more processes than GPUs, or too many.
    """
    if _in_job():
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return Mesh(nodes=world // local, local=local)
    wanted = request.processes or max(1, host.gpus)
    most = host.gpus if host.device == "cuda" else MAX_PROCESSES
    if wanted > most:
        device = host.device == "cuda"
        room = f"there {'is' if most == 1 else 'are'} {counted(most, 'GPU')}, one for each process"
        raise UserError(f"--processes {wanted}: {room if device else f'at most {most} processes'}")
    return Mesh(nodes=1, local=wanted) if wanted > 1 else None


def _journal(request: Request, host: Host, mesh: Mesh | None) -> Journal:
    """The journal of this calibration.

    Raises:
        InputFileError: another process writes it, it belongs to another measurement, or an unfinished one would be
            overwritten.
    """
    path = cluster_file.journal_path(request.out)
    header = {
        "what": "machine",
        "quick": request.quick,
        **host.header(),
        "mesh": [1, 1] if mesh is None else [mesh.nodes, mesh.local],
    }
    if not request.resume and path.exists() and path.stat().st_size:
        refuse_busy(path)
        stored = read_journal(path)
        if stored.records and not any(record["key"] == _FINISHED for record in stored.records):
            raise InputFileError(
                str(path),
                f"holds {counted(len(stored.records), 'measurement')} of a calibration that was not finished",
                hint="go on with --resume, or delete the file",
            )
    return Journal(path, header, resume=request.resume)


def _measure(
    request: Request, torch: Any, host: Host, mesh: Mesh | None, journal: Journal, progress: Progress
) -> RankDiedError | None:
    """Operators and collectives; the ranks of a running job come first, because the others wait for this one."""
    settings = Settings.of(request.quick)
    bench = Bench.open(torch, host)
    dtypes, convolved = (_dtypes(bench, journal, name) for name in _DTYPES)
    todo = runner.plan(bench, dtypes, convolved, settings)
    sizes = collectives.sizes_bytes(host.device, request.quick)
    visits = [] if mesh is None else collectives.visits(mesh, sizes, settings.rounds)
    first = len(todo) * settings.rounds
    total = first + len(visits) * _WEIGHT
    limit_s = settings.limit_s * 0.6
    if mesh is not None and _in_job():
        died = _lead(torch, host, journal, visits, settings.visit_s, lambda n, _: progress(n * _WEIGHT, total))
        runner.measure(bench, journal, todo, settings, lambda n, _: progress(total - first + n, total))
        return died
    runner.measure(bench, journal, todo, settings, lambda n, _: progress(n, total))
    if mesh is None:
        return None
    try:
        collectives.measure(
            host, journal, mesh, visits, settings.visit_s, lambda n, _: progress(first + n * _WEIGHT, total), limit_s
        )
    except RankDiedError as error:
        return error
    return None


def _dtypes(bench: Bench, journal: Journal, name: str) -> tuple[str, ...]:
    """Dtypes to measure, kept in the journal: a resumed run measures what the first one would have."""
    for record in journal.records:
        known = record.get("dtypes")
        if record["key"] == name and isinstance(known, list) and set(map(str, known)) <= set(ELEMENT_BYTES):
            return tuple(known)
    found = bench.dtypes(_DTYPES[name])
    journal.append({"key": name, "dtypes": list(found)})
    return found


def _lead(
    torch: Any, host: Host, journal: Journal, visits: list[dict[str, Any]], visit_s: float, progress: Progress
) -> RankDiedError | None:
    """Runs the first rank of a job: it sends the missing visits to the others and writes the records."""
    done = runner.done_keys(journal.records)
    missing = [visit for visit in visits if visit["key"] not in done]
    finished = len(visits) - len(missing)

    def emit(record: Mapping[str, Any]) -> None:
        nonlocal finished
        journal.append(record)
        finished += 1
        progress(finished, len(visits))

    try:
        rank = ranks.join(torch, host.device, host.threads, None)
        rank.dist.broadcast_object_list([missing, visit_s], 0)
        ranks.visit_all(rank, missing, visit_s, emit)
        rank.dist.destroy_process_group()
    except RuntimeError as error:
        return RankDiedError(f"another rank is gone: {str(error).splitlines()[0][:200]}")
    return None


def _follow(request: Request) -> None:
    """Runs any other rank of a job.

    Raises:
        RankDiedError: the first rank is gone.
    """
    torch = needed("torch", "measuring a machine")
    host = host_of(torch, request)
    try:
        rank = ranks.join(torch, host.device, host.threads, None)
        work: list[Any] = [None, None]
        rank.dist.broadcast_object_list(work, 0)
        ranks.visit_all(rank, work[0], work[1], lambda record: None)
        rank.dist.destroy_process_group()
    except RuntimeError as error:
        raise RankDiedError(f"another rank is gone: {str(error).splitlines()[0][:200]}") from None
