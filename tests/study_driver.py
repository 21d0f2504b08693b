"""Runs a study in child processes that are killed: at random moments, or at one step of a commit.

usage: study_driver.py STUDY STORE random SEED KILLS LONGEST_S    kill KILLS runs after random times, then finish
       study_driver.py STUDY STORE steps                          one run a step in STORE-0, ...; each dies at its step
       study_driver.py STUDY STORE run                            one run
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steptime.study import read_study, run
from steptime.study.file import Study
from steptime.study.store import FILE, Store


def killed_at_random(seed: int, kills: int, longest_s: float, compute: Callable[[], object], count: Any) -> None:
    """Kills runs; prints how many points the store has after each."""
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
        print(count(), end=" ", flush=True)


STEPS = ("before the transaction", "before its end", "within the journal", "within the file")
AT = 3
"""The commit in which a run dies."""


def dies_at(name: str, at: int) -> None:
    """Makes this process end without a word at a step of the AT-th commit."""
    commits, commit, transaction = [0], Store.commit, Store._transaction

    @contextmanager
    def unfinished(self: Store, *arguments: str) -> Iterator[Any]:
        with transaction(self, *arguments) as database:
            yield database
            os._exit(9)

    def dying(self: Store, rows: Any) -> None:
        commits[0] += 1
        if commits[0] == at:
            if name == "before the transaction":
                os._exit(9)
            elif name == "before its end":
                Store._transaction = unfinished  # type: ignore[assignment, method-assign]
            elif name == "within the journal":
                _dies_at_byte(600)
            else:  # the journal is shorter than the file
                _dies_at_byte(self.file.stat().st_size + 600)
        commit(self, rows)

    Store.commit = dying  # type: ignore[method-assign]


def _dies_at_byte(place: int) -> None:
    """Lets the system kill this process once it writes beyond a place of any file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (place, resource.RLIM_INFINITY))


def _points(found: Study, store: str) -> int:
    return sum(1 for _ in Store(store).read({point.key for point in found.points}))


def main(arguments: list[str]) -> None:
    file, store, how, *rest = arguments
    found = read_study(file)
    found.points[0].key  # noqa: B018 - what children share is computed here

    def compute() -> int:
        return run(found, store, workers=2 if how == "random" else 1).computed

    if how == "random":
        killed_at_random(int(rest[0]), int(rest[1]), float(rest[2]), compute, lambda: _points(found, store))
    if how != "steps":
        print(compute())
        return
    for number, name in enumerate(STEPS):
        child = os.fork()
        if not child:
            dies_at(name, AT)
            run(found, f"{store}-{number}", workers=1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGXFSZ if "within" in name else 9), name
        torn = Path(f"{store}-{number}", f"{FILE}-journal")
        assert torn.exists() == (name != STEPS[0]), "what SQLite undoes is there"


if __name__ == "__main__":
    main(sys.argv[1:])
