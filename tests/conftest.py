"""The marker ``shared``: tests that carry it see the bulk measurements or are skipped, all other tests do not see them.

The bulk measurements lie outside the repository, and a clone may lack them. A test without the marker runs as in such a
clone: where it needs the measurements, it fails, whether or not they are here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from steptime.errors import UserError
from steptime.lab.data_root import VARIABLE, data_root

#: Name of the empty folder in which tests without the marker look for measurements; a failure shows it.
HIDDEN: Final = "hidden-from-tests-without-the-marker-shared"
ABSENT: Final = f"no bulk measurements: {VARIABLE} is not set, and shared/data is not next to the checkout"

#: This file has no doctests, and its module name is also that of tests/cli/conftest.py.
collect_ignore = ["conftest.py"]

_KEY: Final = "measurements"
_measurements = pytest.StashKey[Path | str | None]()
_hidden = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Hide the measurements from everything, imports and fixtures of tests too."""
    try:
        config.stash[_measurements] = data_root() if not hasattr(config, "workerinput") else config.workerinput[_KEY]
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[_hidden] = Path(folder.name, HIDDEN)
    config.stash[_hidden].mkdir()
    os.environ[VARIABLE] = str(config.stash[_hidden])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist, from which they are hidden already, where they are."""
    found = node.config.stash[_measurements]
    node.workerinput[_KEY] = None if found is None else str(found)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the environment as it was found."""
    found = config.stash[_measurements]
    os.environ.pop(VARIABLE, None) if found is None else os.environ.update({VARIABLE: str(found)})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the measurements where they are absent."""
    if config.stash[_measurements] is None:
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason=ABSENT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Show the measurements to a test with the marker, from the setup of its fixtures on."""
    found = item.config.stash[_measurements] if item.get_closest_marker("shared") else None
    os.environ[VARIABLE] = str(found or item.config.stash[_hidden])
    try:
        return (yield)
    finally:
        os.environ[VARIABLE] = str(item.config.stash[_hidden])
