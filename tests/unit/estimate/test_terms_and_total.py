"""The terms of a step are its time: one without the other is told as a defect."""

from __future__ import annotations

import pytest

from steptime import api
from steptime.errors import InternalError
from steptime.estimate import ledger
from steptime.terms import Term


def test_a_term_without_its_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ledger._layer_terms
    extra = Term(path="compute/lost", calls=(), factors={}, exposed_s=0.5, hidden_s=0.0, part_s=0.0)
    monkeypatch.setattr(ledger, "_layer_terms", lambda e, tape: [*real(e, tape), extra])
    with pytest.raises(InternalError, match=r"add up to .* s, the step takes"):
        api.estimate("gpt2", "dgx-h100", gpus=8, global_batch=64)
