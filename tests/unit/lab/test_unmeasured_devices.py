"""Doubt of devices that no run of a fit was on."""

from __future__ import annotations

import pytest

from steptime.api.jobs import framework_of
from steptime.hardware import load_device
from steptime.measure.runs.fitting import DEVICE_SPREAD, UNMEASURED_SPREAD, device_spread
from steptime.plan.framework_file import framework_table
from steptime.plan.job import PRECISIONS
from steptime.search.modes import MODES


@pytest.mark.parametrize(("device", "doubt"), [("gaudi3", UNMEASURED_SPREAD), ("t4", DEVICE_SPREAD)])
def test_of_a_device_without_curves_less_is_known(device: str, doubt: float) -> None:
    assert device not in framework_table()["device"]
    spread = framework_of(None, MODES["corrected"], load_device(device), PRECISIONS["fp16"]).spread
    assert spread is not None and spread.device_doubt == doubt == device_spread(device)
