"""Exported plans on four DTensor processes: losses and parameters of the unsharded step, and the plan's collectives."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from collections import Counter
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sharded_models as models  # noqa: E402
import sharded_worker as worker  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.ops.placement import text_of  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.export import boundaries_of, followed, python_file, runs  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import planned  # noqa: E402


def lies(way, *texts):
    return text_of(way.outputs[0]) in texts


def by_batch(name, way):
    """Small steps would stay whole: inputs are split."""
    return not name.startswith("input") or lies(way, "S(0)", "S(0) S(0)")


def zero(name, way):
    """Weights are whole, and updated in pieces."""
    if "weight" in name:
        return all(each.sharded == ("(update)" in name) for each in way.outputs[0])
    return by_batch(name, way)


def pieces(name, way):
    """Weights and their updates lie in pieces."""
    return all(each.sharded for each in way.outputs[0]) if "weight" in name else by_batch(name, way)


def by_rows(name, way):
    """Each device has the rows of its tokens, the last one fewer than the others."""
    if name == "wte.weight":
        return lies(way, "S(0)")
    return not name.endswith("wte: embedding") or way.strategy.dims == ("rows",)


MEGATRON = {
    "qkv: addmm": ("rows", "columns"), "mlp.0: addmm": ("rows", "columns"), "mlp.2: addmm": ("rows", "inner"),
    "wte: embedding": ("tokens0", "rows"),
}  # fmt: skip


def megatron(name, way):
    """Batch over the first axis, heads, hidden width and vocabulary over the second."""
    wanted = next((dims for end, dims in MEGATRON.items() if name.endswith(end)), None)
    if wanted is not None:
        return way.strategy.dims == wanted
    return not name.startswith("input") or lies(way, "S(0) R")


@dataclass(frozen=True)
class Case:
    make: object
    mesh: str
    keep: object = None
    optimizer: str = "sgd"
    share: float = inf
    """Limit of memory as a share of what the unsharded step needs."""


CASES = {
    "GPT, data parallel": Case(models.gpt, "4", by_batch),
    "GPT, Megatron": Case(models.gpt, "2x2", megatron),
    "GPT, ZeRO 1": Case(models.gpt, "4", zero, "adamw"),
    "GPT of equal blocks, ZeRO 3": Case(models.deep_gpt, "2x2", pieces),
    "GPT, a third of the memory": Case(models.gpt, "2x2", None, "adamw", 0.3),
    "GPT, 67 tokens over 4": Case(models.odd_gpt, "4", by_rows),
    "convolutions": Case(models.convolutions, "4", by_batch),
    "MoE": Case(models.moe, "4", by_batch),
}
AS_PLANNED = ("GPT, data parallel", "GPT, ZeRO 1")
"""DTensor's own backward pass exchanges what the plan does."""


def problem_of(module, inputs, loss, mesh, share=inf, optimizer="sgd"):
    with worker.attention():
        program = capture(module, inputs, loss=loss, optimizer=optimizer, target="cpu")
    cluster = load_cluster("dgx-h100")
    limit = share * Liveness(program).in_use_bytes.max()
    return built(flow_of(program), mesh_on(cluster, parse_axes(mesh)), Timer(device=cluster.device), limit)


def plan_of(case):
    torch.manual_seed(0)
    problem = problem_of(*case.make(), case.mesh, case.share, case.optimizer)
    return planned(followed(problem, case.keep), seconds=20)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each plan, the unsharded step, and what the processes found."""
    folder, out = tmp_path_factory.mktemp("plans"), {}
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor.debug"])
    jobs = {}
    for number, (name, case) in enumerate(CASES.items()):
        plan = plan_of(case)
        path = folder / f"plan_{number}.py"
        path.write_text(python_file(plan))
        torch.manual_seed(0)
        out[name] = SimpleNamespace(plan=plan, whole=worker.unsharded(*case.make(), case.optimizer), path=path)
        jobs[name] = (worker.sharded, str(path), case.make, case.optimizer)
    jobs["another module"] = (worker.refused, str(out["MoE"].path), models.gpt, "sgd")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = folder / "answers"
    torch.multiprocessing.start_processes(worker.work, (4, port, jobs, answers), 4, start_method="forkserver")
    for name, found in pickle.loads(answers.read_bytes()).items():
        out.setdefault(name, SimpleNamespace()).found = found
    return out


def found(results, name):
    each = results[name]
    assert not isinstance(each.found, str), each.found
    return each, *each.found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_unsharded_step(results, name):
    each, losses, _, _ = found(results, name)
    assert losses == pytest.approx(each.whole[0], rel=1e-4)
    assert len(set(losses)) == worker.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.optimizer == "sgd"])
def test_parameters_have_moved_along_the_same_gradients(results, name):
    """Adam's first steps are of one size, whatever the gradient, also where that is rounding alone."""
    each, _, parameters, _ = found(results, name)
    assert set(parameters) == set(each.whole[1])
    for path, whole in each.whole[1].items():
        np.testing.assert_allclose(parameters[path], whole, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_PLANNED)
def test_collectives_are_the_predicted_ones(results, name):
    each, _, _, counts = found(results, name)
    predicted = Counter()
    for transfer in each.plan.transfers:
        predicted[transfer.collective] += transfer.count
    assert counts == predicted


@pytest.mark.slow
def test_a_module_that_is_not_the_planned_one_is_refused(results):
    assert "the module and the plan differ in parameters" in results["another module"].found


@pytest.mark.slow
def test_only_what_dtensor_follows_is_planned(results):
    """Every way of the chosen plans is one that DTensor has, and none of them moves a value inside a module."""
    for name in CASES:
        plan = results[name].plan
        for item, ways, option in zip(plan.built.flow.items, plan.built.ways, plan.choice, strict=True):
            assert item.kind != "operator" or runs(item.node, ways[option]), f"{name}: {item.name}"


@pytest.mark.slow
def test_redistributions_stand_at_the_boundaries_of_modules(results):
    """Megatron's second product gives terms of a sum, which the block adds up as its MLP is left."""
    found = boundaries_of(results["GPT, Megatron"].plan)
    assert text_of(found.leaving["h.1.mlp"][8, 16, 32]) == "S(0) R"
    assert not found.entering.get("h.1.mlp.2")
    zero_3 = boundaries_of(results["GPT of equal blocks, ZeRO 3"].plan)
    assert text_of(zero_3.weights["h.3.mlp.0"]["h.3.mlp.0.weight"]) == "R R"


class Inner(torch.nn.Module):
    """A product whose result is read in the forward function that makes it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x):
        return ((x @ self.first).softmax(-1) @ self.second).sum()


def test_nothing_is_moved_inside_the_forward_function_of_a_module():
    problem = problem_of(Inner(), torch.randn(8, 64), None, "2")

    items = enumerate(problem.flow.items)
    by_columns = {n: [2] for n, item in items if item.node.op == "mm" and item.phase == "forward"}
    assert planned(problem.only(by_columns), seconds=5).step_s < inf
    with pytest.raises(UserError, match="_softmax"):
        planned(followed(problem).only(by_columns), seconds=5)


def test_operators_without_a_rule_of_dtensor_are_named():
    problem = problem_of(torch.nn.LSTM(8, 8), torch.zeros(4, 8), lambda y: y[0].sum(), "2")
    with pytest.raises(UserError, match="has no rule for mkldnn_rnn_layer"):
        python_file(planned(problem, seconds=20))
