"""Distributions of tokens over experts: from names and files, against draws, and what a job makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from steptime import api
from steptime.api.expert_load import expert_load_of
from steptime.api.models import load_model
from steptime.cost.experts import fullest_share, kept_share, lognormal_shares
from steptime.errors import UserError

MODEL = load_model("mixtral-8x7b")
JOB = {"gpus": 64, "global_batch": 256, "framework": "ideal"}


def step_s(**plan):
    return api.estimate("mixtral-8x7b", "dgx-h100", plan={"ep": 8, **plan}, **JOB).step_time_s


def test_a_file_is_its_shares(tmp_path):
    rows, document = tmp_path / "load.csv", tmp_path / "load.json"
    rows.write_text("expert,tokens\n" + "".join(f"{n},{10 + n}\n" for n in range(8)))
    document.write_text(json.dumps([10 + n for n in range(8)]))
    found = [expert_load_of(str(path), MODEL) for path in (rows, document)]
    assert found[0].shares == found[1].shares == tuple((10 + n) / 108 for n in range(8))
    assert step_s(expert_load=str(rows)) == pytest.approx(step_s(expert_imbalance=8 * 17 / 108))
    assert step_s(expert_load=str(rows), ep=4) == pytest.approx(step_s(expert_imbalance=4 * 33 / 108, ep=4))


def test_an_even_load_is_none():
    assert step_s(expert_load="uniform") == step_s() == pytest.approx(step_s(expert_load="zipf:0"))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("few.csv", "1\n2\n", "has 2 experts, and mixtral-8x7b has 8"),
        ("none.json", "[0,0,0,0,0,0,0,0]", "no expert has a token"),
        ("minus.json", "[1,1,1,-1,1,1,1,1]", "expert 3 has '-1' tokens"),
        ("words.csv", "a\n" * 8, "expert 0 has 'a' tokens"),
        ("broken.json", "[1,", "not valid JSON"),
        ("table.json", "{}", "no list of numbers"),
    ],
)
def test_a_file_of_no_load_is_refused(tmp_path, name, text, told):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        expert_load_of(str(path), MODEL)


@pytest.mark.parametrize("text", ["zipf:-1", "zipf:x", "lognormal:nan", "pareto:2", "absent.csv"])
def test_a_distribution_that_is_none_is_refused(text):
    with pytest.raises(UserError):
        expert_load_of(text, MODEL)


def test_it_does_not_go_with_an_imbalance():
    with pytest.raises(UserError, match="say the same thing"):
        step_s(expert_load="zipf:1", expert_imbalance=1.2)


def test_drawn_tokens_are_dropped_as_the_share_says():
    shares = np.array(lognormal_shares(64, 0.5))
    tokens = np.random.default_rng(0).multinomial(2_000_000, shares)
    slots = 1.25 * tokens.sum() / 64
    assert np.minimum(tokens, slots).sum() / tokens.sum() == pytest.approx(kept_share(shares.tolist(), 1.25), rel=2e-3)
    fullest = max(tokens[at : at + 8].sum() for at in range(0, 64, 8)) / tokens.sum() * 8
    assert fullest == pytest.approx(fullest_share(shares.tolist(), 8), rel=1e-2)


def test_a_search_costs_each_degree_by_its_fullest_rank():
    found = api.plan("mixtral-8x7b", "dgx-h100", fix={"expert_load": "lognormal:0.5"}, oom_limit=1.0, **JOB).plans[0]
    again = api.estimate("mixtral-8x7b", "dgx-h100", plan=found.plan, **JOB)
    assert again.step_time_s == pytest.approx(found.step_time_s) and found.plan["expert_load"] == "lognormal:0.5"
