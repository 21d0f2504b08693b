"""What an estimate says it assumes of stragglers is what its framework does."""

from __future__ import annotations

import pytest

from steptime import api


@pytest.mark.parametrize(("framework", "grows"), [("generic", True), ("ideal", False)])
def test_stragglers_are_in_the_growth_of_a_framework(framework: str, grows: bool) -> None:
    e = api.estimate("llama2-7b", "dgx-h100", gpus=64, global_batch=64, framework=framework)
    assert ("scaling/growth_s" in e.time) == grows
    said = [text for text in e.provenance.assumptions if "lag" in text]
    assert said and all(("fitted growth" in text) == grows for text in said)
    assert not any("no stragglers" in text for text in e.provenance.assumptions)
