"""Launch files with what options never are: they are read or refused in a sentence, in bounded work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.errors import UserError
from steptime.launch import read_launch
from steptime.launch.shell import read_shell

HUGE = "0x" + "f" * 5000
VALUES = (
    "{1, 2}",
    'b"x"',
    "...",
    "3j",
    HUGE,
    "-" * 50_000 + "1",
    "not " * 50_000 + "1",
    "(1, {2}, [...])",
    '{"a": {1}}',
)
FIELDS = ("model.tensor_model_parallel_size", "mixed_precision", "model.recompute_modules", "foo.bar")
YAML = (
    "2024-01-01",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    HUGE,
    "9" * 5000,
    ".inf",
    "2024-99-99",
    "{? [1] : 2}",
    "1:30",
)


def read_or_refused(path: Path, software: str) -> None:
    try:
        read = read_launch(str(path), software, model="llama3-8b")
    except UserError as error:
        assert len(str(error)) < 1000
    else:
        assert read.text and json.dumps(read.to_json())


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
@pytest.mark.parametrize("field", FIELDS)
def test_values_of_python(field: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(f"cfg.{field} = {value}\nA = {value}\nf(a={value})\ncfg.train.micro_batch_size = 1\n")
    read_or_refused(path, "megatron-bridge")


@pytest.mark.parametrize("value", YAML, ids=lambda value: value[:12])
@pytest.mark.parametrize("key", ["num_processes", "mixed_precision", "zzz"])
def test_values_of_yaml(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: FSDP\n{key}: {value}\n")
    read_or_refused(path, "accelerate")


def nested(form: str, repeated: str) -> str:
    """Twelve levels, each of which names the one before nine times."""
    lines = (form.format(i, ",".join(repeated.format(n, i - 1) for n in range(9))) for i in range(1, 12))
    return "\n".join(["a0: &a0 {x: 1}", *lines, ""])


ALIASES = {
    "lists": (nested("a{0}: &a{0} [{1}]", "*a{1}"), "its aliases make more than 100,000 values"),
    "maps": (nested("a{0}: &a{0} {{{1}}}", "k{0}: *a{1}"), "its aliases make more than 100,000 values"),
    "merges": (nested("a{0}: &a{0} {{<<: [{1}]}}", "*a{1}"), "its aliases make more than 100,000 values"),
    "a map in itself": ("b: &b {x: *b}", "contains itself"),
    "a list in itself": ("b: &b [*b]", "contains itself"),
    "brackets": ("[" * 20_000, "nested too deeply"),
    "a zero byte": ("\x00", "not valid YAML"),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_of_yaml_are_bounded(name: str, tmp_path: Path) -> None:
    text, words = ALIASES[name]
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_launch(str(path), "accelerate", model="llama3-8b")


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("common: &c {num_machines: 2}\n<<: *c\nnum_processes: 16\nmixed_precision: bf16\n")
    assert read_launch(str(path), "accelerate", model="llama3-8b").launch.values["gpus"] == 16


SCRIPTS = {
    f"A={'9' * 4000}\ntrain.py --tensor-model-parallel-size $((A*A))": "which is no number",
    f"train.py --tensor-model-parallel-size {'9' * 4000}": "which is no number",
    "train.py --tensor-model-parallel-size $((9**9**9))": "which is no number",
    '# launch: torchrun "x\ntrain.py --tensor-model-parallel-size 2': "cannot be read: No closing quotation",
    "# steptime: dtype = []\ntrain.py --tensor-model-parallel-size 2": "'dtype' [], which it cannot be",
    '# steptime: zero = "x"\ntrain.py --tensor-model-parallel-size 2': "'zero' 'x', which it cannot be",
    "# steptime: mesh_shape = [[1]]\ntrain.py --tensor-model-parallel-size 2": "which it cannot be",
}


@pytest.mark.parametrize("text", SCRIPTS, ids=lambda text: text[:20])
def test_scripts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(text)
    with pytest.raises(UserError, match=SCRIPTS[text].replace("[", r"\[")):
        read_launch(str(path), "megatron-lm", model="llama3-8b")


@pytest.mark.parametrize("text", [
    "for ((;;)); do A+=1; done",
    "for ((i=0; i<1000000; )); do for ((j=0; j<9; )); do x=1; done; done",
    "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60,
    "if\nfi\nfor\ndone\nfi\nelse",
    "A=A\nB=$((A))",
])  # fmt: skip
def test_loops_without_end(text: str) -> None:
    assert read_shell(f"{text}\ntrain.py --micro-batch-size 1", "x") == {"--micro-batch-size": "1"}


def test_a_key_of_very_many_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(".".join(["a"] * 1200) + " = 1\n")
    with pytest.raises(UserError):
        read_launch(str(path), "torchtitan", model="llama3-8b")


@pytest.mark.parametrize("out", ["", "."])
def test_a_file_to_write_has_a_name(out: str) -> None:
    line = "train.py --tensor-model-parallel-size 1 --micro-batch-size 1"
    done = CliRunner().invoke(main, ["import", line, "--model", "llama3-8b", "-o", out])
    assert done.exit_code == 2 and "give the name of one, as -o run.toml" in done.output
