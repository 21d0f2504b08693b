"""Runs a study in child processes that are killed: at random moments, or at one step of a commit.

usage: study_driver.py STUDY STORE random SEED KILLS LONGEST_S    kill KILLS runs after random times, then finish
       study_driver.py STUDY STORE steps                          one run a step in STORE-0, ...; each dies at its step
       study_driver.py STUDY STORE run                            one run
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steptime.store import files
from steptime.store.journal import Journal
from steptime.study import read_study, run
from steptime.study import store as study_store


def killed_at_random(seed: int, kills: int, longest_s: float, compute: Callable[[], object], store: Path) -> None:
    """Kills runs; prints how many blocks the store has after each."""
    chosen = random.Random(seed)
    for _ in range(kills):
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            compute()
            os._exit(0)
        time.sleep(chosen.uniform(0, longest_s))
        os.kill(child, signal.SIGKILL)  # the parent of the workers, not they
        os.waitpid(child, 0)
        print(len(list(store.glob("blocks/*.parquet"))), end=" ", flush=True)


STEPS = ("before the file", "before the rename", "before the journal", "within the line")
AT = 3
"""The block in whose commit a run dies."""


def dies_at(name: str, at: int) -> None:
    """Makes this process end without a word at a step of the commit of the AT-th block."""
    seen = {"blocks": 0}

    def count(original: Callable[..., Any], when: str) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            seen["blocks"] += 1
            if seen["blocks"] == at and when == "before":
                os._exit(9)
            out = original(*arguments)
            if seen["blocks"] == at and when == "after":
                os._exit(9)
            return out

        return counted

    if name == "before the file":
        study_store.replace_file = count(study_store.replace_file, "before")
    elif name == "before the rename":
        replace = count(Path.replace, "before")
        Path.replace = lambda self, target: replace(self, target)  # type: ignore[method-assign]
    elif name == "before the journal":
        study_store.replace_file = count(study_store.replace_file, "after")
    elif name == "within the line":
        lines = [0]

        def write(self: Journal, record: Any) -> None:
            lines[0] += 1
            if lines[0] == at + 1:  # the header is a line too
                self._file.write(b'{"key":"torn')
                os._exit(9)
            original(self, record)

        original, Journal._write = Journal._write, write  # type: ignore[method-assign]
    else:
        raise ValueError(name)
    assert files.replace_file


def main(arguments: list[str]) -> None:
    file, store, how, *rest = arguments
    found = read_study(file)
    found.points[0].key  # noqa: B018 - what children share is computed here

    def compute() -> None:
        run(found, store, workers=2 if how == "random" else 1)

    if how == "random":
        killed_at_random(int(rest[0]), int(rest[1]), float(rest[2]), compute, Path(store))
    if how != "steps":
        compute()
        return
    for number, name in enumerate(STEPS):
        child = os.fork()
        if not child:
            dies_at(name, AT)
            run(found, f"{store}-{number}", workers=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, name


if __name__ == "__main__":
    main(sys.argv[1:])
