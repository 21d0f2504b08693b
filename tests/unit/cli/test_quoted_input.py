"""What a user gives is quoted in part however long or nested it is, and keys that are no text are refused as such."""

from __future__ import annotations

from typing import Any

import pytest

from steptime import api
from steptime.errors import MESSAGE, FieldError, InputFileError, UserError, bounded

JOB: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
LONG = ["a" * 200_000, "[" * 100_000, {"x": "a" * 200_000}, b"x" * 200_000, "a b " * 50_000]


@pytest.mark.parametrize("key", [b"x", (), -0.0, None, 1, frozenset()])
def test_keys_that_are_no_text_are_a_user_error(key: Any) -> None:
    for more in ({"plan": {key: 1}}, {"lora": {key: 1}}, {"plan": {"placement": {key: 1}}}):
        with pytest.raises(UserError, match="there is no"):
            api.estimate(**JOB, **more)


@pytest.mark.each("given", LONG, ids=lambda given: type(given).__name__)
@pytest.mark.each("name", ["lora", "optimizer", "dtype", "model", "recompute", "overlap", "placement", "tp"])
def test_long_values_are_quoted_in_part(name: str, given: Any) -> None:
    more = {name: given} if name in ("lora", "optimizer", "dtype", "model") else {"plan": {name: given}}
    with pytest.raises(UserError) as caught:
        api.estimate(**(JOB | more))
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("given", [one for one in LONG if isinstance(one, str)], ids=["letters", "nested", "words"])
def test_every_message_is_bounded(given: str) -> None:
    errors = (UserError(given, hint=given), FieldError(given, "x", given), InputFileError(given, given))
    assert all(len(str(one)) <= 2 * MESSAGE + 3 for one in errors)
    assert len(bounded(given)) <= MESSAGE and bounded("tp: 3 is wrong") == "tp: 3 is wrong"
