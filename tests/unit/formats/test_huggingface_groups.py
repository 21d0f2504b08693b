"""Groups of experts of a configuration, of which a token chooses from some alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_huggingface import FOLDER, write

from steptime.errors import FieldError
from steptime.formats.huggingface import read_huggingface


@pytest.mark.parametrize(
    ("given", "groups"),
    [({}, (8, 4)), ({"n_group": None, "topk_group": None}, (1, 1)), ({"n_group": 4, "topk_group": None}, (4, 4))],
)
def test_groups_of_experts(tmp_path: Path, given: dict[str, Any], groups: tuple[int, int]) -> None:
    config = json.loads((FOLDER / "deepseek-v3.json").read_text(encoding="utf-8"))
    spec, report = read_huggingface(write(tmp_path, config | given))
    assert spec.experts and (spec.experts.groups, spec.experts.groups_per_token) == groups
    assert not {"n_group", "topk_group"} & report.ignored.keys()


@pytest.mark.parametrize(
    ("given", "problem"),
    [({"n_group": 7}, "n_group: is 7, with 256 experts"), ({"topk_group": 9}, "topk_group: is 9, with 8 groups")],
)
def test_groups_that_do_not_fit_the_experts(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    config = json.loads((FOLDER / "deepseek-v3.json").read_text(encoding="utf-8"))
    with pytest.raises(FieldError, match=problem):
        read_huggingface(write(tmp_path, config | given))
