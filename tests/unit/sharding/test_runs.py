"""Exported shardings on 4 and 8 processes: losses of the unsharded step, and the collectives that were predicted."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import sharded_models as models  # noqa: E402
import sharded_worker as worker  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import built, exchange_s  # noqa: E402
from steptime.sharding.devices import MOVES  # noqa: E402
from steptime.sharding.export import python_file, runs_only  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.ilp import solve  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import planned  # noqa: E402
from steptime.sharding.problem import pinned  # noqa: E402
from steptime.sharding.reshard import TORCH  # noqa: E402
from steptime.sharding.run import _placement  # noqa: E402


def split(name, way):
    """No device does what another one does, wherever an operator can be split: small steps would stay whole."""
    return way.strategy is None or all(way.strategy.dims)


def dims(**wanted):
    """Operators of modules whose name ends so, split so over the axes of the mesh."""

    def keep(name, way):
        module, _, op = name.partition(": ")
        for key, split_as in wanted.items():
            place, _, operator = key.rpartition("__")
            if op == operator and module.endswith(place.replace("_in_", ".")):
                return way.strategy is not None and way.strategy.dims == split_as
        return split(name, way)

    return keep


def megatron(name, way):
    """Batch over the first axis, heads, hidden width and vocabulary over the second."""
    return dims(
        qkv__addmm=("rows", "columns"), mlp_in_0__addmm=("rows", "columns"), mlp_in_2__addmm=("rows", "inner"),
        wte__embedding=("tokens0", "rows"), ___log_softmax=("d0", "d1"),
    )(name, way)  # fmt: skip


def zero(name, way):
    """Matrices lie in pieces over all devices, and are updated so; activations are split by batch."""
    if way.strategy is None and len(way.outputs) == 1 and "weight" in name:
        return all(each.sharded for each in way.outputs[0])
    return split(name, way)


def by_images(name, way):
    """Batch norms share their statistics over all devices."""
    return dims(norm_1__native_batch_norm=("images",) * 2, norm_2__native_batch_norm=("images",) * 2)(name, way)


@dataclass(frozen=True)
class Case:
    make: object
    mesh: str
    keep: object = split
    optimizer: str = "adamw"
    share: float = inf
    """Limit of memory as a share of what the unsharded step needs."""


CASES = {
    "GPT, best": Case(models.gpt, "2x2"),
    "GPT, Megatron": Case(models.gpt, "2x2", megatron),
    "GPT, ZeRO": Case(models.deep_gpt, "2x2", zero),
    "convolutions, best": Case(models.convolutions, "2x2", optimizer="sgd"),
    "MoE, best": Case(models.moe, "2x2", optimizer="sgd"),
    "a loss that learns": Case(models.learned_loss, "2x2"),
    "GPT, Megatron on 8": Case(models.gpt, "2x4", megatron),
    "GPT, a fifth of the memory, on 8": Case(models.gpt, "2x4", share=0.2),
    "convolutions, shared statistics, on 8": Case(models.convolutions, "2x4", by_images, optimizer="sgd"),
    "MoE, less memory, on 8": Case(models.moe, "2x4", optimizer="sgd", share=0.6),
}


def plan_of(case):
    torch.manual_seed(0)
    module, inputs, loss = case.make()
    program = capture(module, inputs, loss=loss, optimizer=case.optimizer)
    cluster = load_cluster("dgx-h100")
    flow, mesh = flow_of(program), mesh_on(cluster, parse_axes(case.mesh))
    whole = Liveness(program).in_use_bytes.max()
    problem = built(flow, mesh, Timer(device=cluster.device), case.share * whole)
    return planned(problem, seconds=20, solver=runs_only(problem, keep=case.keep))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Name of a case -> its plan, losses of the unsharded step, and what the processes found."""
    folder, out = tmp_path_factory.mktemp("plans"), {}
    multiprocessing.set_forkserver_preload(["steptime.sharding.run", "torch.distributed.tensor.debug"])
    jobs = {4: {}, 8: {}}
    for number, (name, case) in enumerate(CASES.items()):
        plan = plan_of(case)
        path = folder / f"plan_{number}.py"
        path.write_text(python_file(plan))
        torch.manual_seed(0)
        out[name] = SimpleNamespace(plan=plan, losses=worker.unsharded(*case.make(), case.optimizer), path=path)
        jobs[plan.built.mesh.devices][name] = (worker.sharded, str(path), case.make, case.optimizer)
    jobs[4]["moves"], jobs[8]["moves on 8"] = (worker.every_move, (2, 2)), (worker.every_move, (2, 4))
    wrong = {"another operator": models.gpt_with_relu, "another order": models.gpt_in_another_order}
    for name, make in wrong.items():
        jobs[4][name] = (worker.refused, str(out["GPT, best"].path), make, "adamw")
    for size, cases in jobs.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        queue = multiprocessing.get_context("forkserver").SimpleQueue()
        torch.multiprocessing.start_processes(
            worker.work, (size, port, cases, queue), size, start_method="forkserver", join=True
        )
        for name, found in queue.get().items():
            out.setdefault(name, SimpleNamespace()).found = found
    return out


def found(results, name):
    each = results[name]
    assert not isinstance(each.found, str), each.found
    return each, *each.found


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_unsharded_step(results, name):
    each, losses, _, _ = found(results, name)
    assert losses == pytest.approx(each.losses, rel=1e-4)
    assert len(set(losses)) == worker.STEPS


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_the_predicted_ones(results, name):
    each, _, counts, seen = found(results, name)
    predicted, named = Counter(), Counter()
    for transfer in each.plan.transfers:
        predicted[transfer.collective, round(transfer.size_bytes)] += transfer.count
        named[transfer.collective] += transfer.count
    for step in range(worker.STEPS):
        assert seen[step] == predicted
        assert counts[step] == named


@pytest.mark.parametrize("name", ["moves", "moves on 8"])
def test_every_step_of_resharding_keeps_the_tensor(results, name):
    rows = results[name].found
    assert not isinstance(rows, str), rows
    assert {kind for kind, *_ in rows} == set(MOVES)
    for kind, source, target, names, same in rows:
        assert same, f"{kind} from {source} to {target}"
        assert names == ([TORCH[kind]] if kind in TORCH else []), f"{kind} from {source} to {target}"


def test_what_cannot_be_run_is_not_exported():
    cluster = load_cluster("dgx-h100")
    module, (tokens,), loss = models.gpt()
    flow = flow_of(capture(module, (tokens[:1],), loss=loss))
    problem = built(flow, mesh_on(cluster, {"model": 2}), Timer(device=cluster.device))

    def by_tokens(problem_, **limits):
        options = {
            item.name: [n for n, way in enumerate(ways) if way.strategy.dims == ("tokens",)]
            for item, ways in zip(flow.items, problem.ways, strict=True)
            if item.node.op == "_scaled_dot_product_flash_attention_for_cpu"
        }
        return solve(pinned(problem_, options), **limits)

    plan = planned(problem, seconds=20, solver=by_tokens)
    with pytest.raises(UserError, match="split by tokens, cannot be run"):
        python_file(plan)


class Half(torch.nn.Module):
    """Changes a part of a tensor in place."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)

    def forward(self, x):
        y = self.first(x) * 2
        y[:, :8].mul_(0.5)
        return y.square().sum()


@pytest.mark.parametrize(
    "module, words",
    [
        (torch.nn.Sequential(torch.nn.LSTMCell(8, 8)), r"with 0 \(LSTMCell\) cannot be exported"),
        (torch.nn.LSTM(8, 8), r"with the module \(LSTM\) cannot be exported"),
        (Half(), "mul in the module changes a part of a tensor in place"),
    ],
)
def test_steps_whose_storages_are_not_followed_are_not_exported(module, words):
    cluster = load_cluster("dgx-h100")
    program = capture(module, torch.zeros(4, 8), loss=None if isinstance(module, Half) else lambda y: y[0].sum())
    problem = built(flow_of(program), mesh_on(cluster, {"data": 2}), Timer(device=cluster.device))
    with pytest.raises(UserError, match=words):
        python_file(planned(problem, seconds=20))


def test_a_step_that_is_not_the_planned_one_is_refused(results):
    assert "of the step is relu, the plan has gelu of h.0.mlp.1 there" in results["another operator"].found
    assert "reads other tensors than in the plan" in results["another order"].found


@pytest.mark.parametrize("name", CASES)
def test_ways_take_the_seconds_of_the_plan(results, name):
    plan = results[name].plan
    built, (_, data_s, others_s) = plan.built, plan.parts_s
    moving_s = sum(link.count * sum(leg.route.seconds for leg in plan.legs(link)) for link in built.flow.links)
    chosen = zip(built.flow.items, built.ways, plan.choice, strict=True)
    strategies = [(item.count, ways[n].strategy) for item, ways, n in chosen]
    inside_s = sum(count * exchange_s(each, built.mesh) for count, each in strategies if each is not None)
    updating_s = sum(
        built.seconds.inside[n][plan.choice[n]] for n, item in enumerate(built.flow.items) if item.kind == "update"
    )
    assert moving_s + inside_s + updating_s == pytest.approx(data_s + others_s, rel=1e-9)


def test_placements_of_a_file_need_pytorch_alone(results):
    each = results["GPT, ZeRO"]
    code = (
        "import runpy, sys; sys.modules['steptime'] = None; found = runpy.run_path(sys.argv[1]); "
        "print(found['MESH'], found['PARAMETERS']['h.1.mlp.0.weight'], found['INPUTS']['input.0'])"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(each.path)], capture_output=True, text=True, check=True)
    shown = str(tuple(_placement(one) for one in each.plan.parameters["h.1.mlp.0.weight"]))
    assert printed.stdout.startswith(f"{{'data': 2, 'model': 2}} {shown} (Shard(dim=0), ")
