"""Reader of launch files into runs: options become concepts, missing ones the software's defaults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, PlanError, UserError, first_few, shown
from steptime.formats.run_spec import RunSpec, read_description
from steptime.launch.job import (
    DIMENSIONS,
    EXPERTS,
    LATENT,
    Launch,
    defaults_of,
    dimensions,
    node_size,
    run_text,
    spec_of,
)
from steptime.launch.rules import check_rules
from steptime.launch.shell import options_of
from steptime.launch.syntax import READERS, Text, Unread, nested, tables_text
from steptime.launch.table import (
    READ_ONLY,
    SOFTWARE,
    Options,
    Software,
    is_off,
    plain,
    real_options,
    same,
    software_called,
)
from steptime.launch.values import (
    NEUTRAL,
    OVERLAPS,
    PRODUCTS,
    Values,
    expert_layers,
    meshed,
    multiplied,
    relevant,
    unfolded,
    without_parts,
)
from steptime.model.known import catalogue_names, load_catalogue_model
from steptime.store.files import is_file

#: Option of a launcher -> concept.
LAUNCHERS: Final = {
    **dict.fromkeys(("--nnodes", "--num_nodes", "--num_machines", "--nodes", "-N"), "nodes"),
    **dict.fromkeys(
        ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--nproc", "-n", "--gpus-per-node"), "node_devices"
    ),
    **dict.fromkeys(("--num_processes", "--world_size"), "gpus"),
}
ARGUMENTS: Final = "arguments"
_LINE: Final = re.compile(r"(?:^|\s)--[a-z]")
TEXTS: Final = ("model.name", "model.experts.pattern")
WHOLE: Final = frozenset(name for product in PRODUCTS for name in (product.whole, *product.parts)) - {"shard"}
LISTS: Final = ("mesh_shape", "mesh_names", "fsdp_mesh")
#: Counts of devices and samples are below this.
LARGEST: Final = 10**12
DEGREES: Final = frozenset({"tp", "cp", "pp", "dp"})
_SYNTAX: Final = {".json": ("json",), ".toml": ("toml",), ".yaml": ("yaml",), ".yml": ("yaml",)}
_LAUNCHER_WORDS: Final = frozenset(
    {"--master_addr", "--master_port", "--node_rank", "--rdzv_backend", "--rdzv_endpoint"}
)
MODEL_FIELDS: Final = (
    *(f"model.{name}" for name in DIMENSIONS),
    *(f"model.experts.{name}" for name in EXPERTS),
    *(f"model.latent.{name}" for name in LATENT),
)
#: Tokenizer of Megatron-LM with a fixed vocabulary -> its size.
VOCABULARIES: Final = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
#: Dimension -> its value in a model that does not have it.
_NOTHING: Final = {"model.experts.shared_ffn_hidden": 0, "model.mtp_depth": 0}
MIN_DIMENSIONS: Final = frozenset({"model.layers", "model.hidden", "model.heads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The content of a launch file as a run."""

    software: str
    launch: Launch
    kept: Mapping[str, Any]
    """Options without a key of a run, as given."""
    unknown: tuple[str, ...]
    """Kept options that the software itself does not have, in the version that steptime knows."""
    notes: tuple[str, ...]
    model_table: Mapping[str, Any] = field(default_factory=dict)
    """Dimensions of the model for its TOML file, if no model of the catalogue has them."""

    @property
    def model_text(self) -> str:
        """Text of the model's file; empty: the run names a model, or the launch file has too few dimensions."""
        return tables_text(self.model_table) if self.model_table else ""

    @property
    def run(self) -> RunSpec:
        """The run, as :func:`steptime.estimate` takes it."""
        from steptime.formats.run_spec import parse_run
        from steptime.store.files import parse_toml

        return parse_run(parse_toml(self.text, "imported"), "")

    @property
    def text(self) -> str:
        """``RUN.toml``."""
        head = (f"Read by steptime from a launch file of {software_called(self.software).title}.", *self.notes)
        return run_text(self.launch, kept=self.kept, notes=head)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "software": self.software,
            "run": self.text,
            "kept": dict(self.kept),
            "unknown": list(self.unknown),
            "notes": list(self.notes),
        }


def read_launch(
    path: str, software: str | None = None, *, model: str | None = None, cluster: str | None = None
) -> Imported:
    """Read a launch file, a launch script, or one line of arguments.

    Args:
        path: the file; a text that has options (``--name``) is taken as the arguments themselves.
        software: software of the file; None: recognised.
        model: name or file of the model; None: taken from the file.
        cluster: cluster of the run; None: taken from the file.
    Raises:
        UserError: it cannot be read, its software is not recognised, or its options contradict each other.
    """
    is_line = _LINE.search(path) is not None and not is_file(path)
    where, text = (ARGUMENTS, path) if is_line else (path, read_description(path))
    chosen, found = _parsed(where, text, software)
    options = found.options if is_line else _with_deepspeed(found.options, where)
    given = {"model": model, "cluster": cluster}
    extra = {**found.extra, **{name: value for name, value in given.items() if value is not None}}
    try:
        reader = _Reader(chosen, options, found.launcher, extra)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    unknown = tuple(name for name in reader.kept if not _is_real(chosen, name))
    return Imported(
        software=chosen.name,
        launch=reader.launch,
        kept=reader.kept,
        unknown=unknown,
        notes=tuple(reader.notes),
        model_table=reader.model_table,
    )


def launch_read(software: Software, options: Options, launcher: str, extra: Mapping[str, Any]) -> Launch:
    """The launch described by options.

    Raises:
        PlanError: they contradict each other.
    """
    return _Reader(software, options, launcher, extra).launch


def _is_real(software: Software, name: str) -> bool:
    real = real_options(software.name)
    if not real:
        return True
    return name in real or name in LAUNCHERS or name in _LAUNCHER_WORDS or name.startswith(software.whole or ("\0",))


def _parsed(where: str, text: str, software: str | None) -> tuple[Software, Text]:
    """The software, and the text parsed in its syntax.

    Raises:
        UserError: it fits no software, or several.
    """
    if software is not None:
        chosen = software_called(software)
        syntax = "shell" if where == ARGUMENTS else chosen.syntax
        return chosen, READERS[_syntax(where, text, syntax)](text, where)
    said = re.search(r'^# steptime: for = "([\w-]+)"$|"for": "([\w-]+)"', text, re.MULTILINE)
    if said and (name := said[1] or said[2]) in SOFTWARE:
        return _parsed(where, text, name)
    counts = {name: sum(mark in text for mark in software_called(name).marks) for name in (*SOFTWARE, *READ_ONLY)}
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    best = [name for name in best if name in SOFTWARE] or best
    if not most or len(best) > 1:
        what = f"it could be of {' or '.join(best)}" if most else "none of its options is known"
        raise InputFileError(where, f"which software it is for is not to be seen: {what}", hint="give --from NAME")
    return _parsed(where, text, best[0])


def _with_deepspeed(options: Options, where: str) -> Options:
    """Options with those of the DeepSpeed file that they name, found from the launch file; missing: stage left open."""
    named = options.get("deepspeed")
    if not isinstance(named, str) or not named.endswith(".json"):
        return options
    for folder in (Path(where).parent, Path()):
        if is_file(path := folder / named):
            inner = READERS["json"](read_description(str(path)), str(path)).options
            return options | {f"deepspeed.{name}": value for name, value in inner.items()}
    return options | {"deepspeed.zero_optimization.stage": Unread(named)}


def _syntax(where: str, text: str, usual: str) -> str:
    """The syntax of a file: by its ending, a script also by its first line; else the syntax of its software."""
    by_name = next((kinds[0] for end, kinds in _SYNTAX.items() if where.endswith(end)), None)
    if where == ARGUMENTS:
        return "shell"
    if by_name is None and (text.startswith("#!") or where.endswith((".sh", ".bash", ".slurm", ".sbatch"))):
        return "shell"
    return by_name or usual


def _is_valid(concept: str, value: Any) -> bool:
    """True if a concept can have a value of this type."""
    if concept in LISTS or isinstance(value, (list, tuple, dict)):
        return False
    usual = 0 if concept == "zero" else NEUTRAL.get(concept)
    if isinstance(usual, float):
        return isinstance(value, (int, float))
    return usual is None or value is None or type(value) is type(usual)


class _Reader:
    """Conversion of the options of a launch file into a launch, concept by concept."""

    def __init__(self, software: Software, options: Options, launcher: str, extra: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self.model_table: dict[str, Any] = {}
        self._software = software
        chosen = {name for choice in software.choices for case in choice.cases for name in case.options}
        named = {self._of_section(name): value for name, value in options.items()}
        known = software.options | LAUNCHERS.keys()
        self._options = {
            name: value
            for name, value in named.items()
            if (value != "None" or name in chosen) and (not isinstance(value, Unread) or name in known)
        }
        self._open: set[str] = set()
        """Keys of a run whose options have values that are not understood."""
        self._used = {name for name, value in software.constant.items() if self._options.get(name) == value}
        self._said: dict[str, str] = {}
        self._values: Values = {}
        self._refuse_exclusive()
        self._numbers(launcher)
        self._extra(extra)
        self._choices(written=set(extra))
        self._chosen = set(self._values)
        self._complete()
        self.launch = self._launch(extra)
        self.kept = {name: value for name, value in self._options.items() if name not in self._used}

    def _of_section(self, name: str) -> str:
        """The software's name of an option that was given to a class."""
        first, dot, rest = name.partition(".")
        return f"{self._software.sections.get(first, first)}{dot}{rest}"

    def _refuse_exclusive(self) -> None:
        for group in self._software.exclusive:
            given = [name for name in group if not is_off(said := self._options.get(name)) and plain(said) != "auto"]
            if len(given) > 1:
                raise PlanError(f"{' and '.join(given)} contradict each other", hint="give one of them")

    def _set(self, concept: str, value: Any, by: str) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST
        if concept in WHOLE and not whole:
            raise PlanError(f"{by} says {concept.replace('_', ' ')} {shown(value)}; it must be a whole number from 1")
        held = self._values.get(concept)
        if held is not None and held != value:
            raise PlanError(
                f"{by} says {concept.replace('_', ' ')} {value}, but {self._said[concept]} says {held}",
                hint="they contradict each other: drop one",
            )
        self._values[concept] = value
        self._said[concept] = by

    def _numbers(self, launcher: str) -> None:
        table = {option: concept for concept, option in self._software.numbers.items()} | dict(self._software.read)
        automatic = {}
        for option, given in self._options.items():
            concept = table.get(option) or LAUNCHERS.get(option)
            if concept is None:
                continue
            self._used.add(option)
            value = plain(given)
            if concept in TEXTS and not isinstance(given, Unread):
                value = given
            elif isinstance(given, Unread):
                self._leave_open(concept, option)
                continue
            elif isinstance(value, str):
                self._hold_text(option, given)
                automatic[option] = concept
                continue
            elif isinstance(value, (bool, dict)) or (concept in LISTS) is not isinstance(value, tuple):
                raise PlanError(f"{option} is {shown(given)}; it must be a number")
            if value != -1 or concept == "data_axis":
                self._set(concept, value, option)
        for option, concept in automatic.items():
            if concept not in self._values:
                self.notes.append(f"{option} is {self._options[option]}: left open")
        self._launcher_numbers(launcher)

    def _launcher_numbers(self, launcher: str) -> None:
        """Set numbers from the command that starts the run, such as devices of a node."""
        try:
            words = options_of(shlex.split(launcher.replace(" -n ", " --nproc "))) if launcher else {}
        except ValueError as error:
            raise PlanError(f"its line '# launch: {shown(launcher)}' cannot be read: {error}") from None
        for option, given in words.items():
            if option in LAUNCHERS and isinstance(value := plain(given), int):
                self._set(LAUNCHERS[option], value, f"the launcher's {option}")

    def _hold_text(self, option: str, given: Any) -> None:
        """Refuse a shell variable in place of a number; ``auto`` leaves the value open."""
        if str(given).lower() not in ("auto", "null", "none"):
            raise PlanError(
                f"{option} is {shown(given)}, which is no number", hint="put the number there, or set the variable"
            )

    def _leave_open(self, concept: str, option: str) -> None:
        """Leave open a concept whose option has a value that is not understood."""
        keys = ("recompute", "recompute_every") if concept.startswith("recompute.") else (concept,)
        self._open |= set(keys)
        self._values.pop(concept, None)
        self.notes.append(f"{option} {shown(self._options[option])}: not understood, {keys[0]} is left open")

    def _extra(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if name in ("for", "model", "cluster", "framework") or name.startswith("placement."):
                continue
            if not _is_valid(name, value):
                raise PlanError(f"a comment of steptime's says {shown(name)} {shown(value)}, which it cannot be")
            self._set(name, value, "a comment of steptime's")
        for concept, value in self._software.defaults.items():
            self._values.setdefault(concept, value)
        values = unfolded(self._values)
        self._experts(values)
        for concept in ("tp", "cp", "pp", *(() if "virtual_layers" in values else ("vpp",))):
            values.setdefault(concept, 1)
        layers = self._layers(extra.get("model"), values)
        self._values = multiplied(meshed({**({} if layers is None else {"model.layers": layers}), **values}))

    def _experts(self, values: Values) -> None:
        """Set the number of layers with experts from the pattern of layers."""
        pattern, layers = values.pop("model.experts.pattern", None), values.get("model.layers")
        if pattern is None or not values.get("model.experts.experts"):
            return
        count = expert_layers(pattern, layers)
        if count is None:
            self.notes.append(f"layers with experts {shown(pattern)}: not understood, taken as all layers")
        else:
            values["model.experts.moe_layers"] = count

    def _layers(self, given: str | None, values: Values) -> int | None:
        """Number of layers of the model named by the file or the caller; the stages of a pipeline follow from it."""
        named = given or self._named(values.get("model.name"))
        for choice in self._software.choices:
            if choice.concept == "model" and named is None:
                best, _, _ = choice.value_in(self._options, values)
                named = None if best is None else best.value
        return None if named is None else spec_of(str(named)).layers

    def _named(self, name: Any) -> str | None:
        """Catalogue model by the file's name of it, or by a checkpoint's name without its publisher."""
        if name is None:
            return None
        last = str(name).rstrip("/").rpartition("/")[2]
        for each in (str(name), last, last.removeprefix("Meta-")):
            try:
                spec_of(each)
            except UserError:
                continue
            return each if Path(each).exists() else spec_of(each).name
        return str(name)

    def _choices(self, written: set[str]) -> None:
        self._used |= {row.option for row in self._software.words if row.option in self._options}
        for choice in self._software.choices:
            best, seen, strange = choice.value_in(self._options, self._values)
            meant = set() if best is None else set(best.options)
            strange -= self._used | meant
            if strange and not meant & set(self._options) and choice.concept not in written:
                self._leave_open(choice.concept, min(strange))
                continue
            self._used |= meant | {name for name in seen if same(self._options[name], False)}
            if choice.concept in written:
                continue
            if best is not None:
                if meant or choice.concept not in self._values:
                    self._values[choice.concept] = best.value
                if choice.concept == "sp" and best.value == "on" and meant and self._values.get("tp", 1) == 1:
                    self.notes.append(f"{min(meant)}: tp is 1, so the software ignores it")
            for name in sorted(seen - self._used):
                how = "understood" if name in strange else "modelled"
                self.notes.append(f"{name} {shown(self._options[name])}: not {how}, kept")
        for row in self._software.words:
            given = self._options.get(row.option)
            if given is not None and row.concept not in written:
                self._words(row.concept, row.option, given, row.words, row.separator)
        if self._values.get("vpp", 1) > 1 and self._values.get("pp", 1) == 1 and "pp" not in self._open:
            option = self._said.get("vpp", "vpp")
            raise PlanError(f"{option} without pp: pp is 1", hint=f"drop {option}, or give pp of 2 or more")

    def _words(self, concept: str, option: str, given: Any, words: Mapping[str, str], separator: str) -> None:
        listed = [str(word) for word in given] if isinstance(given, (list, tuple)) else [str(given)]
        listed = separator.join(listed).split(separator) if separator else listed
        ours = {word: name for name, word in words.items()}
        known = [ours[word] for word in listed if word in ours]
        if unknown := [word for word in listed if word not in ours]:
            self.notes.append(f"{option} {first_few(unknown, 5)}: not modelled, left out")
        self._values[concept] = tuple(sorted(known))

    def _complete(self) -> None:
        """Set concepts without an option to the software's defaults."""
        if self._values.pop("lora.on", True) is False:
            self._values = {name: value for name, value in self._values.items() if not name.startswith("lora.")}
        values = without_parts(self._values)
        for concept, value in NEUTRAL.items():
            values.setdefault(concept, value)
        zero = values.get("zero")
        framework = self._software.framework_with(zero)
        for concept, value in defaults_of(framework, zero or 0, values["dtype"]).items():
            values.setdefault(concept, value)
        if values["schedule"] == "1f1b" and values["vpp"] > 1:
            values["schedule"] = "interleaved"
        self._values = multiplied(values)
        self._framework = framework

    def _launch(self, extra: Mapping[str, Any]) -> Launch:
        values = self._without_open()
        cluster = extra.get("cluster")
        model = self._model(extra.get("model"))
        devices = values.get("node_devices") or (node_size(cluster) if cluster is not None else 8)
        spec = {} if not model else dimensions(spec_of(model))
        self._hold_model(model, spec)
        own = {name: value for name, value in values.items() if name in _KEYS}
        if {"zero", "pp", "dp"} <= values.keys() and spec:
            check_rules(self._software, {**_PERMISSIVE, **self._values, **spec})
        size = spec or {name: value for name, value in values.items() if name.startswith("model.")}
        kept = relevant(own | size)
        return Launch(
            model=model,
            cluster=cluster,
            node_devices=devices,
            framework=self._run_by(extra),
            values={name: value for name, value in kept.items() if name in own or name in spec},
            placement={name.partition(".")[2]: n for name, n in extra.items() if name.startswith("placement.")},
        )

    def _without_open(self) -> Values:
        """The values without open ones, and without values that were derived from open ones."""
        left_open = set(self._open)
        if self._open & DEGREES:
            left_open |= {"dp", "gpus", "global_batch", "micro_batch"} - self._said.keys()
        if {"nodes", "node_devices"} <= self._said.keys():
            left_open -= {"gpus"}
        if "dtype" in self._open and "gradient_dtype" not in self._chosen:
            left_open.add("gradient_dtype")
        return {name: value for name, value in self._values.items() if name not in left_open}

    def _run_by(self, extra: Mapping[str, Any]) -> str:
        """The framework for the prediction: the software's, unless the file names another."""
        named = extra.get("framework", self._framework)
        if named is None:
            self.notes.append(f"framework {self._framework}: that of the software; the plan was priced without one")
        return str(named or self._framework)

    def _model(self, given: str | None) -> str:
        """Name of the model: as given, or the catalogue's with the dimensions of the file; empty: there is none."""
        if given is not None:
            return given
        if named := self._named(self._values.get("model.name", self._values.get("model"))):
            return named
        said = {name: self._values[name] for name in MODEL_FIELDS if name in self._values and name not in self._open}
        if not said.keys() >= MIN_DIMENSIONS:
            return ""
        drops = self._dropout()
        for name in catalogue_names():
            spec = load_catalogue_model(name)
            own = {} if spec.kinds else dimensions(spec)
            if own and all(own.get(concept, _NOTHING.get(concept)) == value for concept, value in said.items()):
                self.notes.append(f"model {name}: the dimensions of the file fit it")
                if drops not in (None, spec.dropout):
                    with_, without = ("with", "without") if drops else ("without", "with")
                    self.notes.append(f"the file trains {with_} dropout; {name} is priced {without} it")
                return name
        self.model_table = nested(
            {name.removeprefix("model."): value for name, value in self._own_model(said, drops).items()}
        )
        return ""

    def _dropout(self) -> bool | None:
        """True if training uses dropout; None: the file does not say, and the software has no default."""
        shares = [self._values[name] for name in ("dropout.hidden", "dropout.attention") if name in self._values]
        return any(share > 0 for share in shares) if shares else None

    def _own_model(self, said: Values, drops: bool | None) -> Values:
        """Dimensions of a model that is not in the catalogue, completed with the software's defaults."""
        experts = bool(said.get("model.experts.experts"))
        usual = {f"model.{name}": value for name, value in self._software.model.items()}
        out = said | {
            name: value
            for name, value in usual.items()
            if name not in said and name not in self._open and (experts or not name.startswith("model.experts."))
        }
        if experts and "model.ffn_hidden" in out:
            out.setdefault("model.experts.expert_ffn_hidden", out["model.ffn_hidden"])
        if drops:
            out["model.dropout"] = True
        if "model.vocab" not in out:
            tokenizer = str(self._options.get("--tokenizer-type", ""))
            if (size := VOCABULARIES.get(tokenizer)) is not None:
                out["model.vocab"] = size
                self.notes.append(f"vocabulary {size:,}: that of {tokenizer}")
            else:
                self.notes.append(
                    "no vocabulary is given: embedding, head and loss are left out; add vocab = N to the model's file"
                )
        return out

    def _hold_model(self, model: str, spec: Values) -> None:
        """Refuse options that contradict the named model."""
        wrong = [
            f"{name.removeprefix('model.')} {value}, {model} has {spec[name]}"
            for name, value in self._values.items()
            if name in spec and self._said.get(name) and spec[name] != value
        ]
        if wrong:
            raise PlanError(f"the options say {first_few(wrong, 4)}", hint="give --model with the model that they mean")


#: Values that rules use for concepts that a file does not have.
_PERMISSIVE: Final[Values] = {"instances": 1, "recompute_layers": 1, "replicate_outside": 1, "shard_outside": 1}
_KEYS: Final = frozenset(
    {
        *NEUTRAL,
        *("gpus", "global_batch", "seq", "dp", "micro_batch", "zero", "context", "gradient_dtype", "dispatcher"),
        *(f"overlap.{name}" for name in OVERLAPS),
    }
)


def with_model(imported: Imported, model_file: str | None) -> Imported:
    """The import with a named model.

    Args:
        imported: a launch file.
        model_file: path at which :attr:`Imported.model_text` can be written; None: nowhere.
    Raises:
        UserError: the file names no model, and no model of the catalogue has its dimensions.
    """
    if imported.launch.model:
        return imported
    if imported.model_table and model_file is not None:
        return replace(imported, launch=replace(imported.launch, model=model_file))
    if imported.model_table:
        raise UserError(
            "no model of the catalogue has the dimensions of the file",
            hint="give -o RUN.toml, next to which the model is written, or --model NAME|FILE",
        )
    raise UserError(
        "the file does not say which model it trains",
        hint="give --model NAME|FILE; steptime models lists those of the catalogue",
    )
