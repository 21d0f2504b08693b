"""``steptime rules``: substitutions with proofs: listed, shown, checked, generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional
from steptime.errors import UserError, counted

if TYPE_CHECKING:
    from steptime_lab.rules.certify import Verdict
    from steptime_lab.rules.rule import Rule
    from steptime_lab.rules.store import RuleSet


def command(
    name: Annotated[str | None, positional(metavar="[NAME]", help="A rule to show; default: all.")] = None,
    check: Annotated[
        Path | None, flag("--check", metavar="FILE", help="Check the rules of a TOML or TASO file.")
    ] = None,
    generate: Annotated[bool, flag("--generate", help="Generate rules and write them to -o.")] = False,
    out: Annotated[Path | None, flag("-o", metavar="FILE", help="Where generated rules go.")] = None,
    seed: Annotated[int, number("--seed", "N", "Seed of generated rules.", 0, 2**31)] = 1,
    operators: Annotated[int, number("--operators", "N", "Operators of a generated term at most.", 1, 4)] = 4,
    svg: Annotated[Path | None, flag("--svg", metavar="FILE", help="Write a picture of the rule.")] = None,
    json: o.Json = False,
) -> None:
    """List substitutions with their certificates, show one, check a file, or generate.

    A certificate has four layers: random values on 50 shapes, exact polynomials on
    small shapes, a proof in an e-graph, and a proof for all sizes. A file with an
    unsound rule is rejected with its counter-example.
    """
    if sum((name is not None, check is not None, generate)) > 1:
        raise UserError("give one of NAME, --check and --generate")
    if svg is not None and name is None:
        raise UserError("--svg draws one rule", hint="give its NAME; steptime rules lists them")
    if generate != (out is not None):
        raise UserError("--generate and -o go together", hint="steptime rules --generate -o rules.tsv")
    if check is not None:
        _check(check, json)
    elif generate and out is not None:
        _generate(out, seed, operators, json)
    elif name is not None:
        _show(name, svg, json)
    else:
        _list(json)


def record(rule: Rule) -> dict[str, Any]:
    """A rule as plain data for JSON."""
    from steptime_lab.rules.store import code

    return {
        "name": rule.name,
        "variables": [str(each) for each in rule.variables],
        "source": [str(each) for each in rule.sources],
        "target": [str(each) for each in rule.targets],
        "conditions": [str(each) for each in rule.needs()],
        "lifts": rule.lifts,
        "origin": rule.origin,
        "certificate": {
            "text": code(rule.certificate),
            "random": rule.certificate.random,
            "exact": rule.certificate.exact,
            "egraph": rule.certificate.egraph,
            "generic": rule.certificate.generic,
        },
    }


def _json(rules: Sequence[dict[str, Any]], **more: object) -> None:
    from steptime.cli.output import document, print_json

    print_json(document(**more, rules=list(rules)))


def _list(json: bool) -> None:
    from steptime.report import text as t
    from steptime_lab.rules.store import shipped

    found = shipped()
    if json:
        _json([record(rule) for rule in found.rules], provenance=found.provenance)
        return
    out = t.console()
    table = t.grid(("rule", "from", "to", "proofs"), left=(0, 1, 2))
    for rule in found.rules:
        sides = ["; ".join(map(str, side)) for side in (rule.sources, rule.targets)]
        table.add_row(rule.name, *map(t.printable, sides), _proofs(rule))
    out.print(table)
    out.print()
    _summary(found, out)


def _proofs(rule: Rule) -> str:
    certificate = rule.certificate
    return " ".join(word for word, yes in (("egraph", certificate.egraph), ("sizes", certificate.generic)) if yes)


def _summary(found: RuleSet, out: Any) -> None:
    from steptime.report import text as t

    generic = sum(rule.certificate.generic for rule in found.rules)
    egraph = sum(rule.certificate.egraph for rule in found.rules)
    origins: dict[str, int] = {}
    for rule in found.rules:
        origins[rule.origin] = origins.get(rule.origin, 0) + 1
    total = len(found.rules)
    t.indented(
        out, f"{t.count(total)} rules, {t.count(generic)} proved for all sizes, {t.count(egraph)} in the e-graph.", by=0
    )
    t.indented(out, f"From: {', '.join(f'{name} {number}' for name, number in origins.items())}.", by=0)
    t.indented(out, f"Generator: {', '.join(f'{name} {value}' for name, value in found.provenance.items())}.", by=0)


def _show(name: str, svg: Path | None, json: bool) -> None:
    from steptime.report import text as t
    from steptime.store.files import write_whole
    from steptime_lab.rules.picture import drawn, tex
    from steptime_lab.rules.picture import svg as picture
    from steptime_lab.rules.store import shipped

    found = shipped()
    rule = found.named(name)
    if svg is not None:
        write_whole(svg, picture(rule))
    if json:
        _json([record(rule)], provenance=found.provenance)
        return
    out = t.console()
    out.print(rule.name, style="bold")
    out.print()
    out.print(drawn(rule))
    out.print()
    needs = rule.needs()
    latex = "; ".join(f"{tex(a)} = {tex(b)}" for a, b in zip(rule.sources, rule.targets, strict=True))
    for title, text in (
        ("where", ", ".join(map(str, needs)) or "the shapes fit"),
        ("leading dims", "any, the same for all variables" if rule.lifts else "none"),
        ("certificate", str(rule.certificate)),
        ("LaTeX", latex),
        ("from", f"{rule.origin}; version {found.provenance.get('version')}, seed {found.provenance.get('seed')}"),
    ):
        t.indented(out, f"{title}: {text}", by=0)


def _check(path: Path, json: bool) -> None:
    from steptime_lab.rules import declared, taso
    from steptime_lab.rules.certify import certified
    from steptime_lab.rules.store import proved_axioms

    rules = (taso if path.suffix.lower() == ".json" else declared).read(path)
    verdicts = certified(rules, proved_axioms())
    if json:
        _json([_verdict(each) for each in verdicts], unsound=sum(each.word == "unsound" for each in verdicts))
    else:
        _print_verdicts(verdicts)
    bad = [each for each in verdicts if each.counterexample is not None]
    if bad:
        first = bad[0]
        raise UserError(
            f"{path}: {counted(len(bad), 'rule')} of {len(verdicts)} unsound; "
            f"{first.rule.name}: {first.counterexample}",
            hint="give the rule conditions that exclude these shapes, or take it out",
        )


def _verdict(each: Verdict) -> dict[str, Any]:
    example = None if each.counterexample is None else each.counterexample.to_json()
    return {**record(each.rule), "verdict": each.word, "counterexample": example}


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    from steptime.report import text as t

    out = t.console()
    table = t.grid(("rule", "verdict", "why"), left=(0, 1, 2))
    for each in verdicts:
        why = each.rule.certificate if each.counterexample is None else each.counterexample
        table.add_row(t.printable(each.rule.name), each.word, t.printable(str(why)))
    out.print(table)


def _generate(out: Path, seed: int, operators: int, json: bool) -> None:
    import sys

    from steptime.report import text as t
    from steptime_lab.rules.pipeline import Job, generated

    def progress(line: str) -> None:
        print(t.printable(line), file=sys.stderr, flush=True)

    found = generated(Job(out=out, seed=seed, operators=operators), progress)
    if json:
        _json([record(rule) for rule in found.rules], provenance=found.provenance)
        return
    _summary(found, t.console())
