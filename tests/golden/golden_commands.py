"""Runs steptime as a user does, in process: the only module of the golden files that imports steptime.

Commands run in a folder of their own, in which the inputs have short relative paths, so that no answer depends on
where the checkout lies; they see neither files of the user nor the bulk measurements, and print at 80 columns.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import re
import shlex
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import doctor_logs
from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main

HERE = Path(__file__).parent
TESTS = HERE.parent
LINKS = {
    "clusters": HERE / "clusters", "frozen": HERE / "frozen", "inputs": HERE / "inputs", "data": TESTS / "data",
    "examples": TESTS.parent / "examples",
}  # fmt: skip

#: Figures that change from run to run, in reports and in JSON.
MASKED_TEXT = re.compile(r"\d[\d,.]* (?:ns|us|ms|s|min) CPU")
MASKED_KEYS = frozenset({"elapsed_cpu_s", "steptime_version"})

#: Lines of logs that frameworks print, made here; the other logs lie in tests/data/doctor.
LOGS = {
    "experts.log": doctor_logs.arguments(
        num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336, num_query_groups=8,
        world_size=64, seq_length=4096, expert_model_parallel_size=8, num_experts=8, moe_router_topk=2,
    ) + "".join(doctor_logs.iteration(step, 2500.0 + 10 * step) for step in range(1, 9)),
    "titan.log": doctor_logs.MODELS["json"] + doctor_logs.STEPS,
}  # fmt: skip
#: Answers of commands that other commands read.
ANSWERS = {
    "tp8.json": "estimate llama3.1-70b --cluster clusters/dgx-h100.toml --framework ideal --gpus 64 "
    "--global-batch 256 --tp 8 --pp 2 --json",
    "fsdp.json": "estimate llama3.1-70b --cluster clusters/dgx-h100.toml --framework ideal --gpus 64 "
    "--global-batch 256 --zero 3 --recompute full --json",
}


def estimate(**arguments: Any) -> Any:
    """The estimate of the Python interface."""
    return api.estimate(**arguments)


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the inputs, as the current one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, target in LINKS.items():
            Path(name).symlink_to(target)
        Path("empty").mkdir()
        for name, text in LOGS.items():
            Path(name).write_text(text, encoding="utf-8")
        for name, command in ANSWERS.items():
            Path(name).write_text(printed(command)["stdout"], encoding="utf-8")
        yield


def printed(command: str, *, frozen: bool = True) -> dict[str, Any]:
    """What a command prints: standard output, standard error where there is any, and the exit code unless 0.

    `frozen`: devices, time curves and fitted frameworks are those of tests/golden/frozen.
    """
    env = {"COLUMNS": "80", "STEPTIME_DEBUG": "1", "STEPTIME_PATH": "frozen" if frozen else "",
           "STEPTIME_DATA": "empty", "XDG_CONFIG_HOME": "empty"}  # fmt: skip
    result = CliRunner().invoke(main, shlex.split(command), env=env)
    found = {"stdout": result.stdout, "stderr": result.stderr, "exit": result.exit_code}
    return {name: value for name, value in found.items() if value or name == "stdout"}


def report(command: str, *, frozen: bool) -> str:
    """What a command prints as text, with the lines of standard error marked and changing figures masked."""
    found = printed(command, frozen=frozen)
    lines = [line.rstrip() for line in found["stdout"].splitlines()]
    lines += [f"! {line.rstrip()}".rstrip() for line in found.get("stderr", "").splitlines()]
    lines += [f"! exit code {found['exit']}"] if "exit" in found else []
    return MASKED_TEXT.sub("# s CPU", "\n".join(lines)).rstrip("\n")


def answer(command: str, *, frozen: bool) -> dict[str, Any]:
    """The JSON of a command, messages, exit code, and the rows of its ``--out`` by their numbers."""
    found: dict[str, Any] = printed(f"{command} --json", frozen=frozen)
    text = found.pop("stdout")
    if text:
        found["json"] = _masked(json.loads(text))
    _, _, out = command.partition(" --out ")
    if out:
        with Path(out).open(newline="", encoding="utf-8") as file:
            found["rows"] = dict(_row(cells) for cells in csv.DictReader(file))
    return found


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: "#" if key in MASKED_KEYS else _masked(one) for key, one in value.items()}
    return [_masked(one) for one in value] if isinstance(value, list) else value


def _row(cells: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Number of a row, and its cells that are not empty; the first column has the number."""
    (_, number), *others = cells.items()
    return number, {name: _cell(text) for name, text in others if text}


def _cell(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def lacking(packages: tuple[str, ...]) -> list[str]:
    """The packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def export_models() -> None:
    """Write the ONNX files that commands read: a matrix product by hand, and modules as PyTorch exports them."""
    _write_line("line.onnx")
    if not lacking(("torch",)):
        for name in ("mlp", "resnet", "gpt_eager"):
            _export(name)


def _write_line(path: str) -> None:
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kind, ["rows", 8])
    y = helper.make_tensor_value_info("y", kind, ["rows", 4])
    w = helper.make_tensor("w", kind, [8, 4], [0.0] * 32)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def _export(name: str) -> None:
    import torch

    from models import FACTORIES

    torch.manual_seed(0)
    module, inputs = FACTORIES[name]()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(), inputs, f"{name}.onnx", dynamo=False, opset_version=17, do_constant_folding=False,
                input_names=[f"input{n}" for n in range(len(inputs))],
            )  # fmt: skip
    finally:
        logging.disable(disabled)
