"""Searches that leave out what a lower bound rules out against searches that cost every candidate."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from steptime.api import plan
from steptime.errors import UserError
from steptime.estimate.layer import part_times
from steptime.search import bounds, kept, layers, ranking

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


@st.composite
def _turned_knobs(draw):
    """Jobs of which each differs from the one before in one thing."""
    job = {
        **draw(_jobs()),
        "model": draw(st.sampled_from(("llama3.1-8b", "mixtral-8x7b"))),
        "limit": (),
        "top": 5,
        "fix": {},
    }
    knobs = {
        "global_batch": st.sampled_from((16, 24, 48, 96, 192, 256)),
        "gpus": st.sampled_from((8, 16, 24, 32)),
        "cluster": st.sampled_from(CLUSTERS),
        "framework": st.sampled_from(FRAMEWORKS),
        "link": st.sampled_from(("nvlink", "network")),
    }
    jobs = [job]
    for _ in range(draw(st.integers(2, 4))):
        name = draw(st.sampled_from(sorted(knobs)))
        jobs.append({**jobs[-1], name: draw(knobs[name])})
    return jobs


def _on_a_machine(job, folder):
    """The job, on a cluster with another link where it asks for one."""
    job = dict(job)
    link = job.pop("link", None)
    if link is not None and job["cluster"] == "dgx-h100":
        path = folder / f"{link}.toml"
        path.write_text(f'base = "dgx-h100"\n[levels.{link}]\nbandwidth = "31 GB/s"\n')
        job["cluster"] = str(path)
    return job


@settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
)
@given(_turned_knobs())
def test_what_is_kept_changes_nothing(tmp_path_factory, jobs):
    folder = tmp_path_factory.mktemp("machines")
    jobs = [_on_a_machine(job, folder) for job in jobs]
    warm = [_found(job) for job in jobs]
    for job, found in zip(jobs, warm, strict=True):
        kept.forget()
        assert _found(job) == found


def test_another_batch_costs_few_new_layers():
    kept.forget()
    plan("llama3.1-70b", "dgx-h100", gpus=64, global_batch=512)
    computed = []
    with mock.patch.object(layers, "part_times", lambda *given: computed.append(given) or part_times(*given)):
        plan("llama3.1-70b", "dgx-h100", gpus=64, global_batch=512)
        assert not computed
        plan("llama3.1-70b", "dgx-h100", gpus=64, global_batch=256)
        assert not computed
        plan("llama3.1-70b", "dgx-b200", gpus=64, global_batch=512)
    assert computed


def test_a_kept_table_grows_by_what_is_new():
    table: kept.Kept[dict[str, object]] = kept.Kept()
    asked: list[list[int]] = []

    def squares(numbers):
        def made(places):
            asked.append(numbers[places].tolist())
            return {"square": numbers[places] ** 2.0, "one": 1.0}

        return table.get(numbers, made)

    assert squares(np.array([3, 1]))["square"].tolist() == [9.0, 1.0]
    found = squares(np.array([1, 2, 3]))
    assert (found["square"].tolist(), found["one"], asked) == ([1.0, 4.0, 9.0], 1.0, [[3, 1], [2]])
