"""Generation of the shipped table: declared rules are proved, new ones generated, minimised, certified, numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from steptime.errors import UserError
from steptime.store.files import refuse_unwritable, write_whole
from steptime_lab.rules import store
from steptime_lab.rules.certify import Verdict, certified, checked, siblings, with_egraph
from steptime_lab.rules.generate import Found, explored, minimal
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.universes import UNIVERSES, Universe

SEED: Final = 1
SIBLINGS: Final = "siblings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A generation: universes, number of operators, seed, and output file."""

    out: Path
    seed: int = SEED
    operators: int = 4
    universes: Sequence[Universe] = UNIVERSES
    axioms: Sequence[Rule] | None = None
    """Declared rules as axioms; None: the rules of the package."""

    @property
    def partial(self) -> Path:
        """File of intermediate results."""
        return self.out.with_name(f"{self.out.name}.partial")

    def provenance(self, **more: object) -> dict[str, str]:
        """Provenance of the rules: version, seed, number of operators and further entries."""
        return {"version": str(store.VERSION), "seed": str(self.seed), "operators": str(self.operators)} | {
            name: str(value) for name, value in more.items()
        }


def generated(job: Job, progress: Callable[[str], None]) -> store.RuleSet:
    """Generate the table of rules and write it; an interrupted run resumes after the last finished universe.

    Raises:
        UserError: a file cannot be written, or z3 or egglog is not installed.
    """
    refuse_unwritable(job.out)
    axioms = proved_axioms(store.axioms() if job.axioms is None else job.axioms, progress)
    found, done = _resumed(job, progress)
    for universe in job.universes:
        if universe.name in done:
            continue
        explored(universe, found, job.seed, min(universe.operators, job.operators), progress)
        done.append(universe.name)
        rows = [replace(rule, name=f"r{number}") for number, rule in enumerate(found.rules)]
        write_whole(job.partial, store.written(rows, job.provenance(done="+".join(done), **found.counts)))
    kept = minimal(found.rules, progress)
    merged = [checked(rule) for rule in _merged([*axioms, *kept])]
    new = _shippable(with_egraph([*(Verdict(rule=rule) for rule in kept), *merged], axioms))
    rules = _numbered([*axioms, *new])
    provenance = job.provenance(**found.counts, found=len(found.rules), kept=len(kept))
    write_whole(job.out, store.written(rules, provenance))
    job.partial.unlink(missing_ok=True)
    return store.RuleSet(rules=tuple(rules), provenance=provenance)


def proved_axioms(declared: Sequence[Rule], progress: Callable[[str], None]) -> list[Rule]:
    """The declared rules after a proof for all sizes, which the e-graph requires.

    Raises:
        UserError: a declared rule is not proved.
    """
    verdicts = certified(declared, [])
    for each in verdicts:
        if not each.rule.certificate.generic:
            raise UserError(f"declared rule {each.rule.name} is {each.word}: {each.counterexample or each.rule}")
    progress(f"{len(verdicts)} declared rules proved for all sizes")
    return [replace(each.rule, origin=store.DECLARED) for each in verdicts]


def _resumed(job: Job, progress: Callable[[str], None]) -> tuple[Found, list[str]]:
    found = Found()
    if not job.partial.exists():
        return found, []
    before = store.loaded(job.partial)
    if any(before.provenance.get(name) != value for name, value in job.provenance().items()):
        raise UserError(f"{job.partial} is of another run", hint="delete it, or give its seed and operators")
    for rule in before.rules:
        found.add(replace(rule, name=""))
    found.counts |= {name: int(value) for name, value in before.provenance.items() if name in COUNTERS}
    done = [name for name in before.provenance["done"].split("+") if name]
    progress(f"going on after {len(done)} universes with {len(found.rules)} rules")
    return found, done


COUNTERS: Final = ("candidates", "equalities", "underivable", "false")


def _merged(rules: Sequence[Rule]) -> list[Rule]:
    made = (siblings(rule) for rule in rules)
    return [replace(rule, origin=SIBLINGS) for rule in made if rule is not None]


def _shippable(verdicts: Sequence[Verdict]) -> list[Rule]:
    return [each.rule for each in verdicts if each.rule.certificate.complete and each.counterexample is None]


def _numbered(rules: Sequence[Rule]) -> list[Rule]:
    """Distinct rules; those that are not declared are named by origin and number."""
    counts: dict[str, int] = {}
    out, seen = [], set[str]()
    for rule in rules:
        text = str(rule)
        if text in seen:
            continue
        seen.add(text)
        counts[rule.origin] = counts.get(rule.origin, 0) + 1
        name = rule.name if rule.origin == store.DECLARED else f"{rule.origin}-{counts[rule.origin]}"
        out.append(replace(rule, name=name))
    return out
