"""The markers ``shared``, ``each`` and ``quick``.

``shared``: tests that carry it see the bulk measurements or are skipped, all other tests do not see them. The bulk
measurements lie outside the repository, and a clone may lack them. A test without the marker runs as in such a clone:
where it needs the measurements, it fails, whether or not they are here.

``each``: written as ``parametrize`` is, but one test goes through all values, and its failure shows every value that
failed. Each value has its own ``monkeypatch``, ``tmp_path`` and ``capsys``; values share the other fixtures.

``quick``: names, by their ids, the values that the default suite takes of a test with ``parametrize`` or ``each``; the
others are slow. Those of ``each`` are then two tests. Instead, ``without`` names the slow ones; ``every=n`` takes one
value of ``n``.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import suites
from steptime.errors import UserError
from steptime_lab.data_root import VARIABLE, data_root

#: Name of the empty folder in which tests without the marker look for measurements; a failure shows it.
HIDDEN: Final = "hidden-from-tests-without-the-marker-shared"
SLOW: Final = "slow"
ABSENT: Final = f"no bulk measurements: {VARIABLE} is not set, and shared/data is not next to the checkout"

#: This file has no doctests, and its module name is also that of tests/cli/conftest.py.
collect_ignore = ["conftest.py"]

suites.register_profiles()

#: Threads of libraries would wait for each other in the processes that run tests. Their number also changes the kernels
#: that a library takes and the order of its sums.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

_KEY: Final = "measurements"
_PARAM: Final = type(pytest.param(None))
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


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Tell pytest that the arguments of the marker ``each`` are no fixtures; values that are not quick are slow."""
    quick = metafunc.definition.get_closest_marker("quick")
    each = list(metafunc.definition.iter_markers("each"))
    for marker in each:
        names = _names(marker)
        tests = [pytest.param(*([None] * len(names)), id=pytest.HIDDEN_PARAM)]
        if quick and marker is each[0]:
            tests.append(pytest.param(*([None] * len(names)), id=SLOW, marks=pytest.mark.slow))
        metafunc.parametrize(names, tests)
    yield
    if quick and not each:
        chosen = _quick(quick, [call.id for call in metafunc._calls])
        for call in metafunc._calls:
            if call.id not in chosen:
                call.marks.append(pytest.mark.slow.mark)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with the marker ``each`` with all its values and fail with all failures; None for other tests."""
    values = [_values(marker) for marker in pyfuncitem.iter_markers("each")]
    if not values:
        return None
    every = [("-".join(name for name, _ in cases), cases) for cases in itertools.product(*values)]
    assert every, "no value to go through"
    if quick := pyfuncitem.get_closest_marker("quick"):
        chosen, slow = _quick(quick, [name for name, _ in every]), SLOW in pyfuncitem.callspec._idlist
        every = [(name, cases) for name, cases in every if (name in chosen) is not slow]
    failures = []
    for n, (name, cases) in enumerate(every, 1):
        given = {argument: value for _, case in cases for argument, value in case.items()}
        try:
            _call(pyfuncitem, given, n)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            failures.append(f"[{name}] {_told(error, pyfuncitem.path)}")
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} of {len(every)} values failed", *failures]), pytrace=False)
    return True


def _quick(marker: pytest.Mark, ids: list[str]) -> set[str]:
    """Which values of a test a marker ``quick`` means: those that it names, all without some, or every nth."""
    names, without = set(marker.args), set(marker.kwargs.get("without", ()))
    if unknown := (names | without) - set(ids):
        raise TypeError(f"the marker quick names {sorted(unknown)}; there are {ids}")
    return (names or set(ids[:: marker.kwargs.get("every", 1)])) - without


def _names(marker: pytest.Mark) -> list[str]:
    names = marker.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(marker: pytest.Mark) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of every value of a marker ``each``, read as ``parametrize`` reads them."""
    names, ids = _names(marker), marker.kwargs.get("ids")
    if unknown := set(marker.kwargs) - {"ids"}:
        raise TypeError(f"the marker each does not know {', '.join(sorted(unknown))}")
    cases = []
    for index, value in enumerate(marker.args[1]):
        found = value if isinstance(value, _PARAM) else pytest.param(*([value] if len(names) == 1 else value))
        if found.marks:
            raise TypeError("the marker each takes no marks of single values")
        given = dict(zip(names, found.values, strict=True))
        if ids is None or callable(ids):
            shown = [_shown((ids and ids(part)) or part, f"{name}{index}") for name, part in given.items()]
        else:
            shown = [str(ids[index])]
        cases.append((str(found.id or "-".join(shown)), given))
    return cases


def _shown(value: object, otherwise: str) -> str:
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        return str(value)
    return str(getattr(value, "__name__", otherwise))


def _call(item: pytest.Function, given: dict[str, Any], index: int) -> None:
    """Call a test with one value; what fixtures of a single test keep is fresh."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames} | given
    with ExitStack() as stack:
        if "monkeypatch" in arguments:
            arguments["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        if "tmp_path" in arguments:
            arguments["tmp_path"] = arguments["tmp_path"] / str(index)
            arguments["tmp_path"].mkdir()
        if "capsys" in arguments:
            arguments["capsys"].readouterr()
        item.obj(**arguments)


def _told(error: BaseException, path: Path) -> str:
    """The error with the last line of the test that it passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return f"{path.name}:{lines[-1] if lines else '?'}: {text}"
