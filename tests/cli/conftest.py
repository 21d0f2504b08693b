"""Fixtures: the command as a user runs it, above a fake API."""

from __future__ import annotations

import sys

import pytest
from fake_api import FakeApi, Run
from typer.testing import CliRunner

import steptime.api
from steptime.cli.main import app


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "steptime.api.calls", fake)
    monkeypatch.setattr(steptime.api, "api", fake, raising=False)
    return fake


@pytest.fixture
def run() -> Run:
    """Run ``steptime`` with these arguments; stdout and stderr are kept apart."""
    runner = CliRunner(env={"COLUMNS": "80", "STEPTIME_DEBUG": ""})
    return lambda *args: runner.invoke(app, list(args))
