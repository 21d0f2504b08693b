"""Requests of clients: names of catalogues and pasted text, never a path, a module or a file.

A body is a RUN.toml as JSON (:mod:`steptime.formats.estimate_file`) whose model and cluster are names, or pasted as
``{"text": "..."}``. A pasted text is written to a temporary folder under a fixed name, and deleted with the folder.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from steptime.errors import FieldError, UnknownNameError, UserError, shown
from steptime.formats.run_spec import parse_run
from steptime.hardware import cluster_names, device_names, load_cluster
from steptime.hardware.search_path import is_path
from steptime.model.known import catalogue_names, hub_model, in_catalogue
from steptime.plan.framework_file import framework_names
from steptime.schedule import SCHEDULES
from steptime.store.files import parse_toml

WHERE: Final = "the request"
MAX_BODY_BYTES: Final = 2**20
"""Largest body; a larger one is refused unread."""
MAX_TEXT: Final = 200_000
"""Largest number of characters of a pasted model or cluster; a real one has some thousands."""
MAX_NAME: Final = 200
REFERENCES: Final = frozenset({"base", "device", "link", "cluster", "curves", "include", "includes"})
"""Keys of a hardware file whose value may name another file."""
FILE_ENDINGS: Final = (".csv", ".json", ".toml")
TEXT_HINT: Final = "the page takes names of the catalogue and pasted text; files are for the command line"


def document_of(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        UserError: it is too large, not UTF-8, not JSON, nested too deeply, or no object.

    >>> document_of(b'{"gpus": 8}')
    {'gpus': 8}
    """
    if len(body) > MAX_BODY_BYTES:
        raise UserError(f"{WHERE} is larger than {MAX_BODY_BYTES} bytes", hint="paste a smaller text")
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise UserError(f"{WHERE} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{WHERE} is not valid JSON: {error}", hint="send a JSON object") from None
    if not isinstance(found, dict):
        raise UserError(f"{WHERE} is no JSON object", hint='for example {"model": "llama3-8b", "cluster": "dgx-h100"}')
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job and its plan, as arguments of the API."""

    model: str
    cluster: str
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    options: Mapping[str, Any]
    """Further keys of the question: ``explain``, ``top``, ``fix``, ``limit``."""


class Desk:
    """Folder for the pasted texts of one question, with names for its files in answers and messages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def written(self, text: str, name: str) -> str:
        """Path of a new file with the text.

        Raises:
            UserError: the text cannot be written as UTF-8.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name} has letters that are no text", hint="paste UTF-8 text") from None
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        (place / name).write_bytes(data)
        return str(place / name)

    def without_paths(self, text: str) -> str:
        """The text with bare names for files of the folder."""
        for number in range(1, self._count + 1):
            text = text.replace(f"{self._folder / str(number)}/", "")
        return text


@contextmanager
def desk() -> Iterator[Desk]:
    """Context of a desk, cleared at the end; messages of user errors contain no path of its folder."""
    with tempfile.TemporaryDirectory(prefix="steptime-page-") as folder:
        own = Desk(Path(folder))
        try:
            yield own
        except UserError as error:
            hint = None if error.hint is None else own.without_paths(error.hint)
            raise UserError(own.without_paths(message_of(error)), hint=hint) from None


def message_of(error: UserError) -> str:
    """The message of an error without its hint.

    >>> message_of(UserError("tp 3 does not divide 8", hint="give tp 4"))
    'tp 3 does not divide 8'
    """
    return str(error) if error.hint is None else str(error).removesuffix(f"\n  {error.hint}")


def asked_of(document: Mapping[str, Any], own: Desk, options: Mapping[str, type]) -> Asked:
    """The job that a document describes, and the options of the question.

    Args:
        document: document of the body.
        own: desk for pasted texts.
        options: keys of the question in addition to those of a RUN.toml, each with the type of its value.
    Raises:
        UserError: something in the document is wrong; the message says what to change.
    """
    extra = {key: _typed(key, document[key], kind) for key, kind in options.items() if document.get(key) is not None}
    rest = {key: value for key, value in document.items() if key not in options}
    rest["model"] = model_of(rest.get("model"), own)
    if rest.get("cluster") is not None:
        rest["cluster"] = cluster_of(rest["cluster"], own)
    run = parse_run(rest, WHERE)
    framework = run.settings.get("framework")
    if framework is not None and is_path(framework):
        raise UnknownNameError("framework", framework, framework_names())
    schedule = run.plan.get("schedule")
    if schedule is not None and schedule not in SCHEDULES:
        raise UnknownNameError("schedule", schedule, SCHEDULES)
    _refuse_files(run.plan, "plan")
    return Asked(model=run.model, cluster=run.cluster or "", settings=run.settings, plan=run.plan, options=extra)


def _refuse_files(value: Any, key: str) -> None:
    """Refuse values of a plan that could name a file, under any key (such as a load of experts).

    Raises:
        FieldError: names the key.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_files(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_files(item, key)
    elif isinstance(value, str) and (is_path(value) or value.endswith(FILE_ENDINGS)):
        raise FieldError(WHERE, key, f"{shown(value)} is a file", hint=TEXT_HINT)


def on_cluster(asked: Asked) -> Asked:
    """The job, checked to have a cluster, devices and a batch.

    Raises:
        FieldError: one is missing.
    """
    given = {"cluster": asked.cluster or None, **asked.settings}
    missing = [name for name in ("cluster", "gpus", "global_batch") if given.get(name) is None]
    if missing:
        raise FieldError(WHERE, ", ".join(missing), "missing", hint="give a cluster, gpus and global_batch")
    return asked


def _typed(key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FieldError(WHERE, key, f"{shown(value)} is no {kind.__name__}")
    return value


def model_of(given: Any, own: Desk) -> str:
    """A name of the catalogue, or the file of a pasted ``config.json`` or TOML.

    Raises:
        UserError: it is neither.
    """
    if isinstance(given, Mapping):
        text = _pasted("model", given)
        return own.written(text, "pasted.json" if text.lstrip().startswith("{") else "pasted.toml")
    name = _name("model", given)
    if in_catalogue(name):
        return name
    known = hub_model(name)
    if known is None:
        raise UnknownNameError("model", name, catalogue_names(), otherwise=TEXT_HINT)
    return known


def cluster_of(given: Any, own: Desk) -> str:
    """A name of the catalogue, or the file of a pasted TOML that names no other file.

    Raises:
        UserError: it is neither.
    """
    if isinstance(given, Mapping):
        text = _pasted("cluster", given)
        _refuse_references(parse_toml(text, "pasted.toml"))
        return own.written(text, "pasted.toml")
    name = _name("cluster", given)
    if is_path(name):
        raise UnknownNameError("cluster", name, [*cluster_names(), *device_names()], otherwise=TEXT_HINT)
    load_cluster(name)
    return name


def _name(field: str, given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= MAX_NAME:
        raise FieldError(WHERE, field, f"{shown(given)} is no name", hint=TEXT_HINT)
    return given


def _pasted(field: str, given: Mapping[str, Any]) -> str:
    text = given.get("text")
    if set(given) != {"text"} or not isinstance(text, str) or not text.strip():
        raise FieldError(WHERE, field, "a pasted one is a table with the key text", hint='{"text": "..."}')
    if len(text) > MAX_TEXT:
        raise FieldError(WHERE, field, f"{len(text):,} letters; at most {MAX_TEXT:,}", hint="paste the file alone")
    return text


def _refuse_references(value: Any, key: str = "") -> None:
    """Refuse references of a hardware file to other files.

    Raises:
        FieldError: names the key.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_references(item, name)
    elif isinstance(value, list):
        for item in value:
            _refuse_references(item, key)
    elif isinstance(value, str) and key in REFERENCES and (key == "curves" or is_path(value)):
        raise FieldError("pasted.toml", key, f"{shown(value)} is a file", hint=TEXT_HINT)
