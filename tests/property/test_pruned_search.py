"""Searches that leave out what a lower bound rules out against searches that cost every candidate."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime.api import plan
from steptime.errors import UserError
from steptime.search import bounds, ranking

CLUSTERS = ("dgx-h100", "dgx-a100-80gb", "dgx-b200", "tpu-v5p-pod")
MODELS = ("llama3.1-8b", "llama2-13b", "gpt3-175b", "mixtral-8x7b", "llama3.1-70b", "deepseek-v3")
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "dualpipe", "dualpipev", "zb-v", "looped-bfs")
OVERLAPS = ("", "dp", "tp", "pp", "dp,tp,pp", "ep")
FRAMEWORKS = ("generic", "ideal", "megatron-lm", "torchtitan", "deepspeed")


def _jobs() -> st.SearchStrategy[dict[str, object]]:
    fixed = {
        "schedule": st.sampled_from(SCHEDULES),
        "overlap": st.sampled_from(OVERLAPS),
        "offload": st.sampled_from(("activations", "optimizer")),
        "attention": st.just("unfused"),
    }
    return st.fixed_dictionaries(
        {
            "model": st.sampled_from(MODELS),
            "cluster": st.sampled_from(CLUSTERS),
            "gpus": st.sampled_from((8, 16, 24, 64, 128)),
            "global_batch": st.sampled_from((16, 48, 96, 256)),
            "framework": st.sampled_from(FRAMEWORKS),
            "fix": st.fixed_dictionaries({}, optional=fixed),
            "limit": st.sampled_from(((), ("oom_probability<=0.1",), ("pp<=4",))),
            "oom_limit": st.sampled_from((None, 1e-4, 0.3, 1.0)),
            "top": st.sampled_from((1, 3, 10)),
        }
    )


def _found(job):
    try:
        result = plan(**job).to_json()
    except UserError as error:
        return str(error)
    del result["stop"]
    return result


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_jobs())
def test_what_is_pruned_changes_nothing(job):
    pruned = _found(job)
    with mock.patch.object(ranking, "least_step_s", lambda planned, machine, table, shape: np.zeros(shape.shape)):
        assert _found(job) == pruned


def test_a_bound_is_near_and_prunes_most():
    result = plan("llama3.1-70b", "dgx-h100", gpus=512, global_batch=1024)
    assert result.stop.reason == "pruned"
    costed = int(result.stop.proof.split(" were bounded, ")[1].split()[0].replace(",", ""))
    assert costed < result.feasible / 10


def test_exchanges_that_may_hide_are_left_out_of_a_bound():
    from steptime.estimate.work import Pass

    def over(ufunc, value):
        return ufunc.reduce(value) if isinstance(value, np.ndarray) else value

    near, far = np.array([10.0, 9.0]), np.array([5.0, 1.0])
    each = Pass(forward_s=near, backward_s=near, forward_exchange_s=far, backward_exchange_s=far)
    assert bounds._least(each, over, pairs=True).forward_s == 5.0
    assert bounds._least(each, over, pairs=False).forward_s == 9.0


@pytest.mark.parametrize(("model", "gpus"), [("llama3.1-70b", 128)])
def test_with_bounds_that_are_exact_what_is_shown_next_to_the_best_is_still_found(model, gpus, monkeypatch):
    job = {"model": model, "cluster": "dgx-h100", "gpus": gpus, "global_batch": gpus, "strategy": "1d", "top": 1}
    seen, front = [], ranking.Ranking.front
    monkeypatch.setattr(ranking, "ROUND", 1)
    monkeypatch.setattr(ranking, "BLOCK", 1)
    monkeypatch.setattr(ranking.Ranking, "front", lambda self: seen.append(self.time_s.copy()) or front(self))
    monkeypatch.setattr(ranking, "least_step_s", lambda planned, machine, table, shape: np.zeros(shape.shape))
    every = _found(job)
    monkeypatch.setattr(ranking, "least_step_s", lambda planned, machine, table, shape: seen[0])
    assert _found(job) == every and len(every["risky"]) == ranking.RISKY_SHOWN
