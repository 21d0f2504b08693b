"""Fixtures: the command as a user runs it, above a fake API."""

from __future__ import annotations

import pytest
from fake_api import FakeApi, Run

import steptime
from cli_runner import CliRunner
from steptime.cli.main import main


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setattr(steptime, "api", fake, raising=False)
    return fake


@pytest.fixture
def run() -> Run:
    """Run ``steptime`` with these arguments; stdout and stderr are kept apart."""
    runner = CliRunner(env={"COLUMNS": "80", "STEPTIME_DEBUG": ""})
    return lambda *args: runner.invoke(main, list(args))
