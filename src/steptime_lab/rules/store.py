"""The shipped rules: a tab-separated table with certificates and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from steptime.errors import InputFileError, UnknownNameError, UserError
from steptime.store.files import read_text
from steptime_lab.rules.declared import read, rule_of
from steptime_lab.rules.rule import Certificate, Rule

MAX_FILE_BYTES: Final = 2**24
VERSION: Final = 1
"""Version of the generator, raised when it finds other rules."""
HERE: Final = Path(__file__).parent
FILE: Final = HERE / "rules.tsv"
AXIOMS: Final = HERE / "axioms.toml"
COLUMNS: Final = ("name", "variables", "source", "target", "where", "origin", "certificate")
HEAD: Final = "# steptime rules"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """Rules with certificates and provenance."""

    rules: tuple[Rule, ...]
    provenance: Mapping[str, str]

    def named(self, name: str) -> Rule:
        """The rule with a name.

        Raises:
            UnknownNameError: no rule has the name.
        """
        for rule in self.rules:
            if rule.name == name:
                return rule
        raise UnknownNameError("rule", name, [rule.name for rule in self.rules], otherwise="steptime rules lists them")


def axioms() -> list[Rule]:
    """The declared rules from which the e-graph proves others."""
    return read(AXIOMS)


@cache
def shipped() -> RuleSet:
    """The shipped table of rules."""
    return loaded(FILE)


DECLARED: Final = "declared"
"""Origin of rules that are written by hand."""


def proved_axioms() -> list[Rule]:
    """The declared rules of the shipped table, with their proofs."""
    return [rule for rule in shipped().rules if rule.origin == DECLARED]


def code(certificate: Certificate) -> str:
    """A certificate as one word.

    >>> code(Certificate(random=50, exact=3, egraph=True, generic=True)), certificate_of("50/3/eg").generic
    ('50/3/eg', True)
    """
    proofs = "e" * certificate.egraph + "g" * certificate.generic
    return f"{certificate.random}/{certificate.exact}/{proofs or '-'}"


def certificate_of(text: str) -> Certificate:
    """Parse the word of a certificate."""
    random, exact, proofs = text.split("/")
    return Certificate(random=int(random), exact=int(exact), egraph="e" in proofs, generic="g" in proofs)


def written(rules: Sequence[Rule], provenance: Mapping[str, str]) -> str:
    """The text of a table of rules."""
    head = f"{HEAD}: {', '.join(f'{name} {value}' for name, value in provenance.items())}"
    lines = [head, "\t".join(COLUMNS)]
    for rule in rules:
        sides = ["; ".join(map(str, side)) for side in (rule.sources, rule.targets)]
        where = ", ".join(map(str, rule.where))
        lines.append(
            "\t".join(
                (rule.name, " ".join(map(str, rule.variables)), *sides, where, rule.origin, code(rule.certificate))
            )
        )
    return "\n".join(lines) + "\n"


def loaded(path: Path) -> RuleSet:
    """Read a table of rules.

    Raises:
        InputFileError: it cannot be read, or is not a table of rules.
    """
    try:
        head, columns, *lines = read_text(path, MAX_FILE_BYTES, "a table of rules").splitlines()
    except ValueError:
        raise InputFileError(str(path), "is no table of rules") from None
    if not head.startswith(HEAD) or tuple(columns.split("\t")) != COLUMNS:
        raise InputFileError(str(path), "is no table of rules")
    pairs = (each.partition(" ") for each in head.partition(": ")[2].split(", "))
    rules = []
    for number, line in enumerate(lines, 3):
        try:
            name, variables, source, target, where, origin, word = line.split("\t")
            rule = rule_of(name, variables, source, target, where, origin=origin)
            rules.append(replace(rule, certificate=certificate_of(word)))
        except (ValueError, UserError) as error:
            raise InputFileError(str(path), f"line {number}: {error}") from None
    return RuleSet(rules=tuple(rules), provenance={name: value for name, _, value in pairs})
