"""What many candidates share is costed once: equal rows are found, and columns that are left out have no say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime import api
from steptime.api.models import load_model
from steptime.estimate.single import Setting
from steptime.estimate.step_inputs import messages_of
from steptime.estimate.traffic import parameter_traffic
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.records import distinct, leaves
from steptime.search import exhaustive, ranking
from steptime.search.exhaustive import Found, Task, search
from steptime.search.modes import MODES


@pytest.mark.parametrize("kinds", [1, 7, 5000])
def test_every_row_finds_its_own_kind(kinds: int) -> None:
    draw = np.random.default_rng(kinds)
    columns = [draw.integers(0, kinds, 20_000), draw.integers(0, kinds, 20_000) / 3.0, np.full(20_000, 0.5)]
    one, number = distinct(columns)
    assert all((column[one][number] == column).all() for column in columns)
    assert len(one) <= 1.2 * len(np.unique(np.stack(columns), axis=1).T)


def test_rows_that_share_a_slot_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one place: none is equal to what stands there but one kind, and each of the others is its own."""
    monkeypatch.setattr("steptime.records.hashes", lambda columns, count: np.zeros(count, dtype=np.uint64))
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

    def run(self: ranking.Ranking, done: ranking.Done) -> None:
        of = self._of
        position, place = of.candidates(np.arange(len(of.configured.at)))
        found, planned = of.sent(position, place)(slice(None)), of.planned(position, place)
        alone = messages_of(planned, of.setting.machine), parameter_traffic(planned, of.setting.machine)
        for one, other in zip(leaves({"found": found[0], "more": found[1]}),
                              leaves({"found": alone[0], "more": alone[1]}), strict=True):  # fmt: skip
            assert np.array_equal(np.broadcast_to(one, position.shape), np.broadcast_to(other, position.shape))
        checked.append(len(position))
        original(self, done)

    original = ranking.Ranking.run
    monkeypatch.setattr(ranking.Ranking, "run", run)
    api.plan(cluster="dgx-h100", global_batch=48, **job)
    assert max(checked) > 200


def test_tasks_that_differ_in_fast_domains_share_configurations_and_find_what_each_finds_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [_task(domain, gpus) for domain in (4, 8) for gpus in (16, 32)]
    configured, original = [], exhaustive._configured
    monkeypatch.setattr(exhaustive, "_configured", lambda *given: configured.append(given) or original(*given))
    together = search(tasks, 3)
    assert len(configured) == 2
    for found, task in zip(together, tasks, strict=True):
        (alone,) = search([task], 3)
        assert _told(found) == _told(alone)
    assert _told(together[0]) != _told(together[2])


def _task(domain: int, gpus: int) -> Task:
    mode = MODES["published"]
    model = load_model("gpt3-175b")
    job = Job(model=model, gpus=16 * gpus, global_batch=64, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    setting = Setting(method=mode.method, job=job, cluster=load_cluster(f"published-a100-nvs{domain}"))
    return Task(setting=setting, strategy=mode.method.strategies["1d"], space=mode.space)


def _told(found: Found) -> tuple[Any, ...]:
    return found.candidates, found.feasible, found.best_s.tolist(), found.front_s.tolist(), found.reasons
