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
from suites import examples

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
            "optimizer": st.sampled_from(("adam", "muon", "soap")),
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


@pytest.mark.slow
@settings(max_examples=examples(25), derandomize=True, suppress_health_check=list(HealthCheck))
@given(_jobs())
def test_what_is_pruned_changes_nothing(job):
    pruned = _found(job)
    with mock.patch.object(ranking, "least_step_s", lambda inputs, framework, table, shape: np.zeros(shape.shape)):
        assert _found(job) == pruned


@pytest.mark.parametrize("model", ["jamba-v0.1", "whisper-large-v3"])
def test_layers_of_several_kinds_are_pruned_alike(model):
    job = {"model": model, "cluster": "dgx-h100", "gpus": 16, "global_batch": 48, "top": 3}
    pruned = _found(job)
    with mock.patch.object(ranking, "least_step_s", lambda inputs, framework, table, shape: np.zeros(shape.shape)):
        assert _found(job) == pruned
    assert pruned["plans"]


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
    monkeypatch.setattr(ranking, "least_step_s", lambda inputs, framework, table, shape: np.zeros(shape.shape))
    every = _found(job)
    monkeypatch.setattr(ranking, "least_step_s", lambda inputs, framework, table, shape: seen[0])
    assert _found(job) == every and len(every["risky"]) == ranking.RISKY_SHOWN


TURNED = (
    {"global_batch": 24},
    {"gpus": 16},
    {"levels.nvlink": "300 GB/s"},
    {"levels.network": "20 GB/s"},
    {"device": "400 TFLOP/s"},
    {"framework": "megatron-lm"},
    {"dtype": "fp8"},
    {"seq": 2048},
    {"fix": {"attention": "unfused"}},
    {"optimizer": "sgd"},
)


def _on_a_machine(job, folder):
    """The job, on a cluster with another link or device where it asks for one."""
    job, text = dict(job), 'base = "dgx-h100"\n'
    for name in [name for name in job if name.startswith(("levels.", "device"))]:
        key = "bandwidth" if name != "device" else "matrix.bf16"
        text += f'[{name}]\n{key} = "{job.pop(name)}"\n'
        job["cluster"] = str(folder / f"{name}.toml")
        (folder / f"{name}.toml").write_text(text)
    return job


@pytest.mark.quick("llama3.1-8b")
@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_no_search_changes_what_a_later_one_finds(tmp_path, model):
    """Jobs of which each differs from the first in one thing, after all others against alone."""
    first = {"model": model, "cluster": "dgx-h100", "gpus": 32, "global_batch": 48, "top": 3}
    jobs = [_on_a_machine(first | change, tmp_path) for change in ({}, *TURNED)]
    warm = [_found(job) for job in jobs]
    assert len({str(found) for found in warm}) == len(jobs)
    assert [_found(job) for job in reversed(jobs)] == warm[::-1]
