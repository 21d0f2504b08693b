"""What the default suite leaves to the whole one: slow tests, and most examples of properties.

``scripts/test`` takes the tests without the marker ``slow``, and the profile ``quick`` of hypothesis; ``scripts/test
--all`` takes all tests, and the profile ``thorough``. Every family of slow tests has a small case that is not slow:
another test, or the values that the marker ``quick`` names.
"""

from __future__ import annotations

from typing import Final

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
