"""Options of training software: one row per concept for both directions, from one TOML file per software.

``[software]`` describes it; ``[numbers]`` has options that take a concept's number unchanged; a ``[[choice]]`` has the
options of each value of a concept; ``[[words]]`` an option that takes a list of words; ``[read]`` options that are read
but never written (older names). The real options of the software are listed in ``options/``, with their source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final

from steptime.errors import PlanError, UnknownNameError
from steptime.launch.values import NEUTRAL, STANDS_FOR, Values, above_one, matters

#: Names of the software on the command line, in the order of lists.
SOFTWARE: Final = (
    "megatron-lm",
    "megatron-bridge",
    "nemo",
    "torchtitan",
    "torchtitan-python",
    "deepspeed",
    "accelerate",
    "fsdp2",
    "hf-trainer",
    "lightning",
    "maxtext",
    "llm-foundry",
)
#: Software whose files are read and not written.
READ_ONLY: Final = ("axolotl", "llama-factory")
#: Value of an option in a case that matches any given value.
ANY: Final = "*"
Options = dict[str, Any]
LONGEST_NUMBER: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One value of a concept, and the options that mean it."""

    value: Any
    options: Mapping[str, Any]
    when: Mapping[str, bool] = field(default_factory=dict)
    """Degree -> True: it has to be above 1, False: it has to be 1."""
    written: bool = True
    """False: an alternative spelling, which is only read."""

    def applies(self, values: Values) -> bool:
        """True if the degrees fulfil the conditions of the case."""
        return all(above_one(name, values) is above for name, above in self.when.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A concept with options for each of its values."""

    concept: str
    cases: tuple[Case, ...]
    refused: bool = True
    """True: a value without a case is refused; False: it is not expressed."""

    def options_of(self, values: Values) -> Options | None:
        """The options of the concept's value; None: it has none."""
        value = values.get(self.concept)
        for case in self.cases:
            if case.written and case.value == value and case.applies(values):
                return dict(case.options)
        return None

    def value_in(self, options: Mapping[str, Any], values: Values) -> tuple[Case | None, set[str], set[str]]:
        """The case that matches most options, the names of the examined options, and of those with an unknown value.

        A case with options does not match if none of them is given: a missing option is not an option that is off.
        """
        names = {name for case in self.cases for name in case.options}
        meant: dict[str, list[Any]] = {}
        for case in self.cases:
            for name, value in case.options.items():
                meant.setdefault(name, []).append(value)
        strange = {
            name
            for name in names & set(options)
            if not is_off(options[name]) and not any(same(options[name], value) for value in meant[name])
        }
        fits = [
            case
            for case in self.cases
            if case.applies(values)
            and (not case.options or any(name in options for name in case.options))
            and all(same(options.get(name), value) for name, value in case.options.items())
        ]

        def given(case: Case) -> tuple[int, int, int]:
            """Number of options of the file in a case, minus its missing options, and its number of conditions."""
            present = sum(name in options for name in case.options)
            return present, present - len(case.options), len(case.when)

        best = max(fits, key=given, default=None)
        return best, names & set(options), strange


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A concept with several words, each with a word of the software."""

    concept: str
    option: str
    words: Mapping[str, str]
    separator: str = ""
    """Separator of words in one text; empty: a list."""
    experts_only: tuple[str, ...] = ()
    """Words that apply only to models with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """Form of a Python file: options are attributes of a variable, and arguments of calls."""

    variable: str
    setup: tuple[str, ...]
    """Lines at the start."""
    calls: Mapping[str, str]
    """First part of an option -> statement that passes such options, with a field ``arguments``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One training software: its launch file, and its options for every concept."""

    name: str
    title: str
    version: str
    file: str
    """Name of its launch file."""
    syntax: str
    frameworks: tuple[str, ...]
    """Framework of steptime by ZeRO stage; a single one: for all stages."""
    launcher: str
    """Command that starts it, with fields in braces; empty: the file itself is the command."""
    numbers: Mapping[str, str]
    read: Mapping[str, str]
    """Further option that is read -> concept."""
    omitted: frozenset[str]
    """Concepts that are not written at their neutral value."""
    choices: tuple[Choice, ...]
    words: tuple[Words, ...]
    constant: Options
    """Options that are always written."""
    defaults: Mapping[str, Any]
    """Concept -> default value, if it is not the neutral one."""
    marks: tuple[str, ...]
    """Texts by which its files are recognised."""
    exclusive: tuple[tuple[str, ...], ...]
    """Groups of mutually exclusive options."""
    python: Python
    """Form of its Python files."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Field of a model -> default value, for a model that is not in the catalogue."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Class of a configuration -> prefix of its options."""
    whole: tuple[str, ...] = ()
    """Prefixes of options that belong to the user's own classes."""

    def framework_with(self, zero: int | None) -> str:
        """The framework of steptime for a plan with a ZeRO stage."""
        return self.frameworks[min(zero or 0, len(self.frameworks) - 1)]

    def without_option(self, values: Values) -> list[str]:
        """Concepts with a non-neutral value for which the software has no option."""
        return [
            concept
            for concept, value in values.items()
            if concept not in self.concepts and matters(concept, values) and value != NEUTRAL.get(concept, value)
        ]

    def options_with(self, values: Values) -> Options:
        """Options for the values that the software has options for.

        Raises:
            PlanError: the software cannot run a value.
        """
        out: Options = dict(self.constant)
        for concept, option in self.numbers.items():
            value = values.get(concept)
            if value is not None and matters(concept, values) and not self._left_out(concept, value):
                out[option] = value
        for choice in self.choices:
            alone = not matters(choice.concept, values)
            if choice.concept == "zero":  # one data rank shards nothing, whatever copies the experts have
                alone |= values.get("dp") == 1 and values.get("cp", 1) == 1
            elif alone:
                continue
            found = choice.options_of({**values, "zero": 0} if alone else values)
            if found is not None:
                out |= found
            elif choice.concept in values and choice.refused and not alone:
                raise self._refusal(choice, values)
        for words in self.words:
            if (given := values.get(words.concept)) is not None:
                out[words.option] = self._joined(words, given, values)
        return out

    @property
    def options(self) -> frozenset[str]:
        """All options with a concept."""
        cases = (case for choice in self.choices for case in choice.cases)
        return frozenset(
            {*self.numbers.values(), *self.read, *(row.option for row in self.words)}.union(
                *(case.options for case in cases)
            )
        )

    @property
    def concepts(self) -> frozenset[str]:
        """Concepts with options."""
        rows = [*self.numbers, *(row.concept for row in self.choices), *(row.concept for row in self.words)]
        return frozenset(key for row in rows for key in (row, *STANDS_FOR.get(row, ())))

    def _left_out(self, concept: str, value: Any) -> bool:
        return concept in self.omitted and value == self.defaults.get(concept, NEUTRAL.get(concept, 1))

    def _refusal(self, choice: Choice, values: Values) -> PlanError:
        allowed = dict.fromkeys(str(case.value) for case in choice.cases if case.written and case.applies(values))
        said = choice.concept.partition(".")[0] if choice.concept.startswith("recompute") else choice.concept
        given = f"{said.replace('.', ' ')} {values[choice.concept]}"
        return PlanError(f"{self.title} cannot run {given}", hint=f"with this plan it has {', '.join(allowed)}")

    def _joined(self, words: Words, given: tuple[str, ...], values: Values) -> Any:
        dense = not values.get("model.experts.experts")
        unknown = [word for word in given if word not in words.words or (dense and word in words.experts_only)]
        if unknown:
            allowed = ", ".join(word for word in words.words if not (dense and word in words.experts_only))
            said = words.concept.partition(".")[0]
            kind = "a dense model" if dense else "a model with experts"
            raise PlanError(
                f"{self.title} cannot run {said} {'+'.join(unknown)} of {kind}", hint=f"it has none, full, {allowed}"
            )
        named = [words.words[word] for word in given]
        return words.separator.join(named) if words.separator else named


def same(given: Any, meant: Any) -> bool:
    """True if an option's value matches a case; texts are compared without case, numbers also as texts.

    >>> same("True", True), same("BF16", "bf16"), same(None, False), same("2", 2), same(1, True)
    (True, True, True, True, False)
    """
    if meant is False:
        return given is None or plain(given) is False
    if meant == ANY:
        return not is_off(given)
    return given is not None and type(plain(given)) is type(plain(meant)) and plain(given) == plain(meant)


def is_off(given: Any) -> bool:
    """True if an option is not given, null, or switched off."""
    return given is None or plain(given) in (False, "none", "null") or given in ([], {}, ())


def plain(value: Any) -> Any:
    """A value independent of the syntax: texts of numbers and switches are converted, other texts are in lower case.

    >>> plain("8"), plain("true"), plain("1e-3"), plain("Adam"), plain(["A", 2])
    (8, True, 0.001, 'adam', ('a', 2))
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if not isinstance(value, str):
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
    low = value.strip().lower()
    if low in ("true", "false"):
        return low == "true"
    for kind in (int, float) if len(low) <= LONGEST_NUMBER else ():
        try:
            return kind(low)
        except ValueError:
            continue
    return low


def software_called(name: str) -> Software:
    """The software of a name.

    Raises:
        UnknownNameError: the name is not in :data:`SOFTWARE`.
    """
    if name not in (known := (*SOFTWARE, *READ_ONLY)):
        raise UnknownNameError("training software", name, known)
    return _loaded(name)


@cache
def _loaded(name: str) -> Software:
    table = tomllib.loads(_file(f"software/{name}.toml"))
    own = table["software"]
    return Software(
        name=name,
        title=own["title"],
        version=own["version"],
        file=own["file"],
        syntax=own["syntax"],
        frameworks=tuple(own["frameworks"]),
        launcher=own.get("launcher", ""),
        numbers=table["numbers"],
        read=table.get("read", {}),
        omitted=frozenset(own.get("omitted", ())),
        choices=tuple(map(_choice, table.get("choice", ()))),
        words=tuple(_words(each) for each in table.get("words", ())),
        constant=table.get("constant", {}),
        defaults=table.get("defaults", {}),
        marks=tuple(own.get("marks", ())),
        exclusive=tuple(map(tuple, own.get("exclusive", ()))),
        python=Python(
            variable=own.get("variable", ""),
            setup=tuple(own.get("setup", ())),
            calls=table.get("calls", {}),
        ),
        sections=table.get("sections", {}),
        whole=tuple(own.get("whole", ())),
        model=table.get("model", {}),
    )


def _file(path: str) -> str:
    return files("steptime.launch").joinpath(path).read_text(encoding="utf-8")


def _choice(row: Mapping[str, Any]) -> Choice:
    return Choice(concept=row["concept"], cases=tuple(map(_case, row["cases"])), refused=row.get("refused", True))


def _case(row: Mapping[str, Any]) -> Case:
    return Case(
        value=row.get("is"),
        options=row.get("options", {}),
        when=row.get("when", {}),
        written=row.get("written", True),
    )


def _words(row: Mapping[str, Any]) -> Words:
    return Words(
        concept=row["concept"],
        option=row["option"],
        words=row["words"],
        separator=row.get("separator", ""),
        experts_only=tuple(row.get("experts_only", ())),
    )


@cache
def real_options(name: str) -> frozenset[str]:
    """The options of a software, from its file in ``options/``; lines with ``#`` name their source.

    >>> "--tensor-model-parallel-size" in real_options("megatron-lm")
    True
    """
    if name in READ_ONLY:
        return frozenset()
    lines = _file(f"options/{software_called(name).name}.txt").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
