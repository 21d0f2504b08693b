"""Runs out of the documents that ``steptime plan --json`` and ``steptime estimate --json`` write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError
from steptime.formats.estimate_file import read_plan
from steptime.formats.run_spec import RunSpec, read_description
from steptime.plan.framework_file import GENERIC

#: Field of a written estimate's job -> setting of a run.
_SETTINGS: Final = {
    "gpus": "gpus",
    "global_batch": "global_batch",
    "seq_len": "seq",
    "dtype": "dtype",
    "optimizer": "optimizer",
    "framework": "framework",
    "lora": "lora",
}


def run_of_plan(path: str) -> RunSpec | None:
    """The run of a written plan, for a search of its first plan; None: the name is not that of such a document.

    Raises:
        InputFileError: the document has no plan, or does not name its model and cluster.
    """
    found = _load(path)
    if not isinstance(found, dict) or "schema_version" not in found or not {"plan", "plans"} & set(found):
        return None  # a configuration of another software
    written = read_plan(path)
    source = (found["plans"][0] if found.get("plans") else found).get("provenance", {})
    source = source if isinstance(source, dict) else {}
    model, cluster = source.get("model"), source.get("cluster")
    if not isinstance(model, str) or not isinstance(cluster, str):
        raise InputFileError(path, "does not say for which model and cluster it was made")
    kind, _, place = str(source.get("model_source", "")).partition(" ")
    if kind == "PyTorch":
        hint = "give FILE.py:NAME and the plan with --plan"
        raise InputFileError(path, f"was made for a module, {model}, and does not hold it", hint=hint)
    if kind in ("file", "config"):
        sibling = Path(path).parent / place
        model = os.fspath(sibling) if not Path(place).exists() and sibling.exists() else place
    settings = {
        own: written.workload[name] for name, own in _SETTINGS.items() if written.workload.get(name) is not None
    }
    if source.get("mode") == "published":
        settings["mode"] = "published"
    if settings.get("framework") == GENERIC or "mode" in settings:  # none was named
        settings.pop("framework", None)
    if not isinstance(settings.get("lora", {}), dict):
        raise InputFileError(path, "workload.lora is no table")
    plan = {name: value for name, value in written.plan.items() if value is not None}
    return RunSpec(model=model, cluster=cluster, settings=settings, plan=plan)


def _load(path: str) -> Any:
    try:
        return json.loads(read_description(path))
    except (ValueError, RecursionError):
        return None
