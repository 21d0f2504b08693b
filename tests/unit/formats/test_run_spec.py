"""Runs that are taken without the gate, against the gate."""

from __future__ import annotations

import random

import pytest

from steptime.errors import UserError
from steptime.formats import run_spec
from steptime.formats.run_spec import is_plain, parse_run
from steptime.plan.keys import KEYS

VALUES = (
    0, 1, 8, -3, 10**7, 10**7 + 1, 10**12, 1.0, 2.5, 0.0, -1.0, float("nan"), float("inf"), True, "", "x", "1d",
    "corrected", "full", "y" * 65, "m" * 4097, [], ["dp"], [1], {}, {"tp": 8}, {"tp": 0}, {"no": 1}, {"dp": 2, "tp": 4},
)  # fmt: skip
JOB = ("model", "cluster", "gpus", "global_batch", "seq", "dtype", "optimizer", "strategy", "mode", "framework", "lora")


def _document(draw):
    job = {name: draw.choice(VALUES) for name in draw.sample((*JOB, "modell"), draw.randint(0, 4))}
    plan = {name: draw.choice(VALUES) for name in draw.sample((*KEYS, "placement", "no"), draw.randint(0, 4))}
    return {"model": "m"} | job | ({"plan": plan} if draw.random() < 0.8 else {})


def test_what_is_plain_the_gate_takes_as_it_is(monkeypatch):
    draw, taken = random.Random(3), 0
    for _ in range(4000):
        document = _document(draw)
        if not is_plain(document):
            continue
        taken += 1
        quick = parse_run(document, "run.toml")
        with monkeypatch.context() as patched:
            patched.setattr(run_spec, "is_plain", lambda _: False)
            checked = parse_run(document, "run.toml")
        assert quick == checked
        assert (list(quick.settings), list(quick.plan)) == (list(checked.settings), list(checked.plan))
    assert taken > 200


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"model": "m", "gpus": True}, "gpus"),
        ({"model": "m", "plan": {"tp": 0}}, "plan.tp"),
        ({"model": "m", "plan": 3}, "plan"),
        ({"gpus": 8}, "model"),
        ({"model": "m", "gpu": 8}, "unknown key"),
    ],
)
def test_what_is_not_plain_is_refused_in_the_words_of_the_gate(document, words):
    with pytest.raises(UserError, match=words):
        parse_run(document, "run.toml")
