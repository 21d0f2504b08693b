"""TASO's shipped substitutions: exactly the wrong ones are flagged, all others are proved for all sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import InputFileError
from steptime_lab.data_root import require_data
from steptime_lab.rules import taso
from steptime_lab.rules.certify import certified, checked
from steptime_lab.rules.store import proved_axioms
from steptime_lab.rules.verify_random import Counterexample, fuzzed

EXTRACT = Path(__file__).parents[3] / "data" / "rules" / "taso_extract.json"
#: 98 and 105 (a sum of convolutions as one over joined channels) are wrong for the reason of the other nine: where the
#: convolutions are grouped, the groups of the joined one are others.
WRONG = {98, 99, 100, 105, 125, 126, 127, 128, 129, 130, 131}


def numbers(verdicts: list, word: str) -> set[int]:  # type: ignore[type-arg]
    return {int(each.rule.name.removeprefix("taso-")) for each in verdicts if each.word == word}


@pytest.mark.slow
def test_the_extract_is_split_into_wrong_and_proved() -> None:
    rules = taso.read(EXTRACT)
    verdicts = [checked(rule) for rule in rules]
    every = {int(rule.name.removeprefix("taso-")) for rule in rules}
    assert numbers(verdicts, "unsound") == every & WRONG == {98, 99, 105, 125, 127, 129, 130}
    assert numbers(verdicts, "proved") == every - WRONG


@pytest.mark.slow
@pytest.mark.shared
def test_exactly_the_wrong_ones_of_all_are_flagged_and_the_rest_is_proved_for_all_sizes() -> None:
    verdicts = certified(taso.read(require_data("taso_substitutions.json")), proved_axioms())
    assert numbers(verdicts, "unsound") == WRONG
    assert numbers(verdicts, "proved") == set(range(133)) - WRONG
    assert all(each.rule.certificate.generic for each in verdicts if each.word == "proved")
    assert sum(each.rule.certificate.egraph for each in verdicts) > 100
    assert not any(each.rule.certificate.egraph for each in verdicts if each.word == "unsound")


@pytest.mark.each("number", sorted(WRONG & {98, 99, 105, 125, 127}))
def test_torch_agrees_that_a_flagged_rule_is_wrong(number: int) -> None:
    torch = pytest.importorskip("torch")
    (rule,) = (each for each in taso.read(EXTRACT) if each.name == f"taso-{number}")
    found = fuzzed(rule)
    assert isinstance(found, Counterexample)
    arrays = {n: torch.tensor(v, dtype=torch.float64).reshape(found.shapes[n]) for n, v in found.values.items()}

    def run(term):  # type: ignore[no-untyped-def]
        if not term.operators:
            return arrays[term.name]
        args, sizes = [run(child) for child in term.children], [a.value(found.sizes) for a in term.attributes]
        if term.op == "conv":
            stride, pad, dilation, groups = sizes
            return torch.nn.functional.conv2d(*args, stride=stride, padding=pad, dilation=dilation, groups=groups)
        if term.op == "concat":
            return torch.cat(args, sizes[0])
        if term.op == "slice":
            return args[0].narrow(sizes[0], sizes[1], sizes[2] - sizes[1])
        return {"add": torch.add, "relu": torch.relu}[term.op](*args)

    a, b = run(rule.sources[found.output]), run(rule.targets[found.output])
    assert a[found.index] == found.source and b[found.index] == found.target and found.source != found.target


@pytest.mark.each("text", ["", "{}", '{"rules": [{}]}', "[1]", '{"rules": 3}', "\u0000", "[" * 9999])
def test_a_file_that_is_no_table_of_substitutions_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(InputFileError):
        taso.read(path)


@pytest.mark.parametrize("text", [
    '[]', '{"rules": [5]}', '{"rules": [{"rule": 0, "source": [5], "target": [], "outputs": []}]}',
    '{"rules": [{"rule": 0, "source": [], "target": [], "outputs": [{"source": 3, "target": "in0"}]}]}',
    '{"rules": [{"rule": 0, "source": [{"op": "concat", "inputs": ["in0"], "attributes": {"axis": "a"}}], '
    '"target": [], "outputs": [{"source": "op0.0", "target": "in0"}]}]}',
    '{"rules": [{"rule": 0, "source": [{"op": "relu", "inputs": ["op0.0"], "attributes": {}}], "target": [], '
    '"outputs": [{"source": "op0.0", "target": "in0"}]}]}',
])  # fmt: skip
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputFileError, match="is no file of TASO's substitutions"):
        taso.read(path)
