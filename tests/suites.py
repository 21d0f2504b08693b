"""What the default suite leaves to the whole one: slow tests, and most examples of properties.

``scripts/test`` runs the tests without the marker ``slow``, in hypothesis' profile ``quick``; ``scripts/test --all`` runs
all, in the profile ``thorough``. Every family of slow tests has a small case that is not slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

#: Examples of a property that states no count of its own, by profile.
PROFILES: Final = {"quick": 20, "thorough": 100}
LEAST: Final = 10


def register_profiles() -> None:
    """Enter the profiles; the quick one holds until pytest reads ``--hypothesis-profile``.

    A loaded machine draws slowly, so that no time fails a test. A fixture of a test is shared by its examples, which is
    meant where it is used.
    """
    for name, count in PROFILES.items():
        settings.register_profile(
            name, max_examples=count, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )  # fmt: skip
    settings.load_profile("quick")


def examples(thorough: int) -> int:
    """The examples of a property that takes ``thorough`` of them in the profile of that name.

    Another profile takes the share of it that it takes of the default count, and draws at least :data:`LEAST` examples,
    or ``thorough`` where that is less.
    """
    share = settings().max_examples / PROFILES["thorough"]
    return max(min(LEAST, thorough), round(thorough * share))


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of ``parametrize``, of which all but some are slow.

    Args:
        values: names and numbers, or ``pytest.param``, which is known by its ``id``.
        quick: the values that the default suite takes; each of them is one of ``values``.
    """
    params = [value if isinstance(value, type(pytest.param(None))) else pytest.param(value) for value in values]
    known = [param.id or param.values[0] for param in params]
    if unknown := [value for value in quick if value not in known]:
        raise ValueError(f"{unknown} are none of {known}")
    marks = [[] if name in quick else [pytest.mark.slow] for name in known]
    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, *more]) for p, more in zip(params, marks, strict=True)]
