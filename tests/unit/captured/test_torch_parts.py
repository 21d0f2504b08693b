"""Private parts of PyTorch are reached through one module, which says what a version lacks and takes newer ones."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.torch_version import TorchVersion  # noqa: E402

from steptime.captured import torch_parts as parts  # noqa: E402
from steptime.captured.record.values import signature  # noqa: E402
from steptime.errors import UserError  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PRIVATE_NAME = re.compile(r"_[a-zA-Z]\w*|__dynamo\w*")
UNSTABLE = re.compile(r"torch\.(?!ops\.)(\w+\.)*?(_(?!_)\w+|ao\b|experimental\b)")
LOOKUPS = {"getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller", "object"}


def of_objects() -> frozenset[str]:
    """Private attributes of the objects that PyTorch hands out; operators have names of their own."""
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    objects = [
        torch.Tensor, torch.nn.Module(), torch.UntypedStorage, torch.ops.aten.add.Tensor, node, parts.FakeTensorMode(),
        parts.FakeTensor, torch.autograd.function.BackwardCFunction, torch.autograd.Variable,
    ]  # fmt: skip
    named = {name for each in objects for name in dir(each) if PRIVATE_NAME.fullmatch(name)}
    return frozenset({*named, "_schema", "_sequence_nr", "_raw_saved_tensors", "_local_tensor", "_is_param"})


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """What an expression of names and dots stands for, with what was imported under another name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return before and f"{before}.{node.attr}"
    return ""


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the file, what it is) of an import."""
    if isinstance(node, ast.Import):
        yield from ((each.asname or each.name.partition(".")[0], each.name) for each in node.names)
    if isinstance(node, ast.ImportFrom):
        yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def private_parts(source: str, objects: frozenset[str]) -> list[str]:
    """The private parts of PyTorch that a file names, each with its line."""
    tree, found = ast.parse(source), []
    names = {name: what for node in ast.walk(tree) for name, what in imported(node) if what.startswith("torch")}
    own = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    own |= {ast.unparse(each.target) for each in ast.walk(tree) if isinstance(each, ast.AnnAssign)}
    for node in ast.walk(tree):
        said = [what for _, what in imported(node)]
        if isinstance(node, ast.Attribute):
            said.append(dotted(node, names))
            inside = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if node.attr in objects - own and not inside and not is_super:
                found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            said.append(node.value)
        looked: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOKUPS:
            looked = node.args
        if isinstance(node, ast.Subscript) and (
            "vars(" in ast.unparse(node.value) or "__dict__" in ast.unparse(node.value)
        ):
            looked = [node.slice]
        found += [f"{node.lineno}: {each.value}" for each in looked
                  if isinstance(each, ast.Constant) and each.value in objects]  # fmt: skip
        found += [f"{node.lineno}: {each}" for each in said if UNSTABLE.match(each)]
    return found


@pytest.mark.slow
def test_one_module_alone_names_private_parts_of_torch() -> None:
    objects, package = of_objects(), ROOT / "src/steptime"
    files = [path for path in package.rglob("*.py") if "torch" in path.read_text(encoding="utf-8")]
    assert len(files) > 50 and {"_modules", "_cdata", "_base", "_schema"} <= objects
    found = {
        path.relative_to(package).as_posix(): private_parts(path.read_text(encoding="utf-8"), objects) for path in files
    }
    # What is written into exported files imports PyTorch alone, so that it cannot ask the one module.
    written = "sharding/dtensor.py"
    assert {name for name, named in found.items() if named} == {"captured/torch_parts.py", written}, found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo", "from torch._subclasses import fake_tensor", "from torch.utils import _pytree",
        "import torch\ntorch._C._current_autograd_node()", "from torch import utils as u\nu._pytree",
        "from torch.fx.experimental import proxy_tensor", "import torch.ao", "name = 'torch._inductor.config'",
        "from torch.distributed.tensor import _ops", "storage._cdata", "vars(module)['_modules']",
        "getattr(module, '_forward_hooks')", "overload._schema.name",
    ],
)  # fmt: skip
def test_the_search_for_private_parts_sees(line: str) -> None:
    assert private_parts(line, of_objects())


@pytest.mark.parametrize(
    "line",
    ["import torch\ntorch.ops.aten._softmax.default", "self._modules", "from torch.nn import functional", "x._own"],
)
def test_the_search_for_private_parts_leaves_alone(line: str) -> None:
    assert not private_parts(line, of_objects())


def test_a_version_below_the_range_is_refused_and_none_above() -> None:
    said = r"PyTorch 2.8.0 is too old\n  steptime runs with torch>=2\.9; .* were tested"
    with pytest.raises(UserError, match=said), parts.taking(TorchVersion("2.8.0")):
        pass
    for version in ("2.9.0", "2.13.0+cpu", "2.100.0", "3.0.1"):
        with parts.taking(TorchVersion(version)):
            pass


def in_a_process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    head = "import sys, torch\nfrom steptime.__main__ import run\n"
    return subprocess.run([sys.executable, "-c", head + code, *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["torch._C._dispatch_key_set", "torch.autograd._get_sequence_nr"])
def test_a_part_that_a_version_lacks_is_named_in_one_sentence(absent: str) -> None:
    words = ["profile", "examples/gpt.py:tiny", "--device", "h100-sxm"]
    done = in_a_process(f"del {absent}\nrun()\n", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert (
        f"PyTorch {torch.__version__} lacks a part that steptime needs: " in said and absent.rpartition(".")[2] in said
    )
    assert f"steptime runs with torch>={parts.OLDEST};" in said


@pytest.mark.slow
def test_an_operator_that_a_version_lacks_is_a_row_that_never_matches() -> None:
    code = """
space = type(torch.ops.aten)
def without(found):
    def lookup(self, name):
        if name in ("_grouped_mm", "_ctc_loss", "masked_select"):
            raise AttributeError(name)
        return found(self, name)
    return lookup
lookups = space.__getattribute__, space.__getattr__
space.__getattribute__, space.__getattr__ = map(without, lookups)
from steptime.captured.record import capture, environment
space.__getattribute__, space.__getattr__ = lookups  # PyTorch itself needs them
assert not environment.SHAPES
assert "relu" in [call.node.op for call in capture(torch.nn.ReLU(), [torch.ones(2)], training=False).calls]
"""
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_operators_are_the_overloads_that_are_there() -> None:
    assert [signature(each).name for each in parts.operators("eq.Tensor", "eq.Nothing", "nothing.Tensor")] == ["eq"]


def test_the_range_is_the_one_of_the_extra_and_the_pins_are_in_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert extras["torch"] == [f"torch>={parts.OLDEST}"]
    assert TorchVersion(pins["torch"]) >= parts.OLDEST and "torchvision" in pins
    page = (ROOT / "docs/profile.md").read_text()
    tested = re.findall(r"[\d.]*\d", parts.TESTED)
    assert pins["torch"] in tested and tested == re.findall(r"^\| ([\d.]+) \|", page, re.M)
    assert f"torch>={parts.OLDEST}" in page and f"{parts.TESTED} were tested" in page
