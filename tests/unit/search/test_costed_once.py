"""What many candidates share is costed once: equal rows are found, and columns that are left out have no say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from steptime import api
from steptime.api.models import load_model
from steptime.estimate.single import Setting
from steptime.estimate.step_inputs import messages_of
from steptime.estimate.traffic import parameter_traffic
from steptime.hardware import load_cluster
from steptime.num import distinct
from steptime.plan.framework_file import load_framework
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.space import Constraint
from steptime.records import leaves
from steptime.search import exhaustive, ranking
from steptime.search.exhaustive import Found, Task, search
from steptime.search.modes import MODES
from steptime.search.objective import Mix, Objective


@pytest.mark.parametrize("kinds", [1, 7, 5000])
def test_every_row_finds_its_own_kind(kinds: int) -> None:
    draw = np.random.default_rng(kinds)
    columns = [draw.integers(0, kinds, 20_000), draw.integers(0, kinds, 20_000) / 3.0, np.full(20_000, 0.5)]
    one, number = distinct(columns)
    assert all((column[one][number] == column).all() for column in columns)
    assert len(one) <= 1.2 * len(np.unique(np.stack(columns), axis=1).T)


def test_rows_that_share_a_slot_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one place: none is equal to what stands there but one kind, and each of the others is its own."""
    monkeypatch.setattr("steptime.num.hashes", lambda columns, count: np.zeros(count, dtype=np.uint64))
    column = np.array([3, 4, 3, 5, 4])
    one, number = distinct([column])
    assert (column[one][number] == column).all()
    assert len(one) == 4  # both fours stand at the last row, which is one


@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama3.1-8b", "gpus": 24},
        {"model": "mixtral-8x7b", "gpus": 16},
        {"model": "deepseek-v2-lite", "gpus": 16, "framework": "torchtitan"},
        {"model": "llama3.1-8b", "gpus": 16, "optimizer": "muon", "fix": {"schedule": "dualpipe"}},
        {"model": "jamba-v0.1", "gpus": 16},
        {"model": "llama3.1-8b", "gpus": 32, "dtype": "fp8", "framework": "megatron-core"},
    ],
    ids=str,
)
def test_what_is_sent_is_what_each_candidate_sends(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns by which candidates are not told apart have no say in their messages and traffic."""
    checked = []

    def run(self: ranking.Ranking) -> Iterator[int]:
        of = self.of
        position, place = of.candidates(np.arange(len(of.configured.at)))
        found, planned = of.sent(position, place)(slice(None)), of.planned(position, place)
        alone = messages_of(planned, of.setting.machine), parameter_traffic(planned, of.setting.machine)
        for one, other in zip(leaves({"found": found[0], "more": found[1]}),
                              leaves({"found": alone[0], "more": alone[1]}), strict=True):  # fmt: skip
            assert np.array_equal(np.broadcast_to(one, position.shape), np.broadcast_to(other, position.shape))
        checked.append(len(position))
        yield from original(self)

    original = ranking.Ranking.run
    monkeypatch.setattr(ranking.Ranking, "run", run)
    api.plan(cluster="dgx-h100", global_batch=48, **job)
    assert max(checked) > 200


def test_tasks_that_differ_in_fast_domains_share_layers_and_find_what_each_finds_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [_task(domain, gpus) for domain in (4, 8) for gpus in (16, 32)]
    costed, original = [], exhaustive.layer_table
    monkeypatch.setattr(exhaustive, "layer_table", lambda *given: costed.append(given) or original(*given))
    together = search(tasks, 3)
    assert len(costed) == 1
    for found, task in zip(together, tasks, strict=True):
        (alone,) = search([task], 3)
        assert _told(found) == _told(alone)
    assert _told(together[0]) != _told(together[2])


@pytest.mark.parametrize("changed", ["devices", "batch", "limit", "placement", "objective"])
def test_searches_of_whole_steps_together_find_what_each_finds_alone(changed: str) -> None:
    """Jobs on few devices, where many candidates are too large, and on many, whose step grows with their number."""
    others: dict[str, list[dict[str, Any]]] = {
        "devices": [{"gpus": 8}, {"gpus": 48}, {"gpus": 512}, {"gpus": 1}],
        "batch": [{"batch": 96}, {"batch": 192}, {"batch": 96, "gpus": 8}],
        "limit": [{"first_limit": 0.1}, {"oom_limit": 0.2}, {"gpus": 16, "oom_limit": 0.2}],
        "placement": [{"constraints": ()}, {"constraints": (Constraint(column="in_tp", relation="<=", value=2),)}],
        "objective": [{}, {"objective": ENERGY}, {"objective": ENERGY, "gpus": 16}],
    }
    tasks = [_whole(**given) for given in others[changed]]
    for found, task in zip(search(tasks, 4), tasks, strict=True):
        (alone,) = search([task], 4)
        assert _all(found) == _all(alone)


def _task(domain: int, gpus: int) -> Task:
    mode = MODES["published"]
    model = load_model("gpt3-175b")
    job = Job(model=model, gpus=16 * gpus, global_batch=64, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    setting = Setting(method=mode.method, job=job, cluster=load_cluster(f"published-a100-nvs{domain}"))
    return Task(setting=setting, strategy=mode.method.strategies["1d"], space=mode.space)


ENERGY = Objective(
    name="energy", mix=Mix(per_J=1.0), idle_W=100.0, peak_W=700.0, host_W=200.0, pue=1.2,
    bounds={"slow": (Mix(per_s=1.0), 60.0)},
)  # fmt: skip
GROWING = replace(load_framework("generic", "h100-sxm"), growth=0.02)


def _whole(
    gpus: int = 24, batch: int = 96, constraints: tuple[Constraint, ...] = (), objective: Objective | None = None,
    **limits: float,
) -> Task:  # fmt: skip
    mode, model = MODES["corrected"], load_model("llama3.1-8b")
    job = Job(model=model, gpus=gpus, global_batch=batch, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], framework=GROWING)  # fmt: skip
    setting = Setting(method=mode.method, job=job, cluster=load_cluster("dgx-h100"), **limits)
    return Task(setting=setting, strategy=mode.method.strategies["1d"], space=mode.space, constraints=constraints,
                objective=objective)  # fmt: skip


def _all(found: Found) -> dict[str, Any]:
    """All that was found, but how many layers were costed and which candidates were."""
    left = ("task", "distinct_layers", "costed")
    return {
        f"{f.name}/{n}": leaf.tolist() if isinstance(leaf, np.ndarray) else leaf
        for f in fields(found) if f.name not in left for n, leaf in enumerate(leaves(getattr(found, f.name)))
    }  # fmt: skip


def _told(found: Found) -> tuple[Any, ...]:
    return found.candidates, found.feasible, found.best_s.tolist(), found.front_s.tolist(), found.reasons
