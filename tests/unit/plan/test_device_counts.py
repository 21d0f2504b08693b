"""Which numbers of devices are named where a plan is missing, or where fewer devices would be faster."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from steptime.api.models import load_model
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.space import Constraint, CorrectedSpace
from steptime.plan.strategies import CORRECTED
from steptime.search import advice


def setting(gpus: int) -> Setting:
    job = Job(model=load_model("llama3-8b"), gpus=gpus, global_batch=64, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100"))


def known(monkeypatch: pytest.MonkeyPatch, times: Mapping[int, float]) -> list[int]:
    """Makes the search find these step times for these counts; the counts that are asked for."""
    asked: list[int] = []

    def best_s(one: Setting, gpus: int, *rest: object) -> float | None:
        asked.append(gpus)
        return times.get(gpus)

    monkeypatch.setattr(advice, "best_step_s", best_s)
    return asked


def nearest(gpus: int) -> tuple[str, ...]:
    return tuple(words for _, words in advice.nearest_counts(setting(gpus), CorrectedSpace(), {}, ()))


def faster(gpus: int, best_s: float) -> tuple[str, ...]:
    return advice.faster_counts(setting(gpus), CorrectedSpace(), {}, (), best_s)


def test_the_fastest_of_the_counts_that_leave_few_idle_and_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, {999: 3.0, 996: 2.0, 984: 2.5, 976: 1.0, 512: 0.5, 1004: 2.2, 1008: 1.0})
    assert nearest(1000) == (
        "996 of the 1000 devices work: best step 2 s, 4 idle (0.4 % of what is paid for)",
        "1008 devices work: best step 1 s, 8 more than there are",
    )


@pytest.mark.parametrize(("gpus", "wanted"), [
    (100, "64 of the 100 devices work: best step 2 s, 36 idle (36.0 % of what is paid for)"),
    (64, "32 of the 64 devices work: best step 1 s, 32 idle (50.0 % of what is paid for)"),
])  # fmt: skip
def test_else_the_nearest_power_of_two_below(monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: str) -> None:
    known(monkeypatch, {97: 9.0, 64: 2.0, 32: 1.0})
    assert nearest(gpus) == (wanted,)


def test_above_whole_domains_and_powers_of_two_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = known(monkeypatch, {4096: 0.7})
    assert nearest(100) == ("4096 devices work: best step 0.7 s, 3996 more than there are",)
    above = [count for count in asked if count > 100]
    assert above == sorted(above) and {104, 112, 128, 256, 4096} <= set(above) and 101 not in above
    assert all(0 < count != 100 for count in asked)


@pytest.mark.parametrize(("gpus", "count"), [(100, 96), (200, None), (7, None)])
def test_whole_domains_that_are_faster_than_all_devices(
    monkeypatch: pytest.MonkeyPatch, gpus: int, count: int | None
) -> None:
    known(monkeypatch, {96: 1.5, 192: 1.0, 200: 1.0, 4: 1.0})
    found = faster(gpus, 2.0)
    said = f"{count} of the {gpus} devices are faster: 1.5 s against 2 s, {gpus - (count or 0)} idle"
    assert found == (() if count is None else (said,))
    assert faster(gpus, 1.5) == (), "as fast is not faster"


def test_the_fastest_of_whole_domains_and_of_four_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, {120: 1.8, 96: 1.6})
    assert faster(125, 2.0) == ("96 of the 125 devices are faster: 1.6 s against 2 s, 29 idle",)
    known(monkeypatch, {120: 1.2, 96: 1.6})
    assert faster(125, 2.0) == ("120 of the 125 devices are faster: 1.2 s against 2 s, 5 idle",)


def test_a_power_of_two_is_named_where_it_is_faster_than_whole_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, {32: 1.2, 40: 1.1})
    assert faster(48, 2.0) == ("32 of the 48 devices are faster: 1.2 s against 2 s, 16 idle",)
    asked = known(monkeypatch, {32: 1.2})
    assert faster(64, 2.0) == () and not asked, "a power of two of devices has none below it that divides more"


def test_degrees_that_do_not_divide_the_devices_are_named() -> None:
    given = (("tp", "=", 3), ("pp", "=", 4), ("dp", "=", 5), ("cp", "<=", 7), ("micro_batch", "=", 5))
    fixed = [Constraint(column=column, relation=relation, value=value) for column, relation, value in given]
    named = advice.why_empty(setting(64).job, fixed)
    assert named == ("tp 3 does not divide 64 devices", "dp 5 does not divide 64 devices")
    nothing = ("no candidate of the space satisfies the constraints",)
    assert advice.why_empty(setting(64).job, fixed[1:2]) == nothing
    one = Constraint(column="tp", relation="=", value=1)
    assert advice.why_empty(setting(63).job, [one]) == nothing
