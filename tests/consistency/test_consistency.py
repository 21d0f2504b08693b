"""One job has one answer: what commands say that are asked the same, and every difference has a name."""

from __future__ import annotations

from typing import Final

import pytest

from consistency.answers import ANSWERS
from consistency.jobs import JOBS
from consistency.table import line_of, reference_of

LOOSE: Final = ("score",)
"""A row of measurements leaves out what its columns lack: those answers are averages over what was left out
(:mod:`test_score_and_estimate` holds rows that say everything)."""


def test_there_are_jobs_enough() -> None:
    assert len(JOBS) >= 40 and len({job.name for job in JOBS}) == len(JOBS)
    assert {job.gpus for job in JOBS} >= {1, 8, 64, 16384}


@pytest.mark.quick(
    "gpt2 1 rtx-4090 ideal", "llama3-8b 16384 published-b200-nvs8 tp8", "llama3-8b 8 dgx-h100 megatron-core tp2 pp2",
    "mixtral-8x7b 64 dgx-h100 ep8 tp2",
)  # fmt: skip
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_command_says_what_the_estimate_says(job) -> None:
    reference = reference_of(job)
    for command in ANSWERS:
        if command in LOOSE:
            continue
        line = line_of(job, command, reference)
        assert not line.unnamed, f"{command}: {line.unnamed}"
