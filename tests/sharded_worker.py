"""Runs sharded steps in the processes of a job: losses, and the collectives that PyTorch counts with their bytes."""

import importlib.util
import os
import traceback
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import _CommModeModuleTracker
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.errors import UserError
from steptime.sharding.devices import Devices, Piece, box_of, part
from steptime.sharding.moves import graph_of
from steptime.sharding.script import Move

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


class Collectives(TorchDispatchMode):
    """Each collective by its name, with the bytes of a gather's result and of any other's input."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            name = func._schema.name.split("::")[1]
            tensor = result if name.startswith("all_gather") else args[0]
            self.seen[name, tensor.numel() * tensor.element_size()] += 1
        return result


class Counts(CommDebugMode):
    """PyTorch's count of collectives without its hooks in modules, which add views of their own to the step."""

    def __enter__(self):
        self.advanced_module_tracker.__class__ = Unhooked
        return super().__enter__()


class Unhooked(_CommModeModuleTracker):
    def __enter__(self):
        self.name, self.module_parents_dict = "Global", {"Global": set()}
        return self

    def __exit__(self, *_):
        return None


def batches(inputs):
    """Inputs of each step: integers in another order, other numbers."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        yield tuple(
            each[torch.randperm(len(each), generator=generator)] if not each.is_floating_point()
            else torch.randn(each.shape, generator=generator)
            for each in inputs
        )  # fmt: skip


def unsharded(module, inputs, loss, optimizer):
    """Losses of the module as it is."""
    made, out = OPTIMIZERS[optimizer](module.parameters()), []
    for each in batches(inputs):
        value = loss(module(*each))
        value.backward()
        made.step()
        made.zero_grad()
        out.append(value.item())
    return out


def sharded(path, module, inputs, loss, optimizer):
    """Losses, counts by PyTorch, collectives with their bytes, parameters afterwards."""
    spec = importlib.util.spec_from_file_location("plan", path)
    plan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    trainer = plan.trainer(module, OPTIMIZERS[optimizer], loss=loss)
    losses, counts, seen = [], [], []
    for each in batches(inputs):
        counter, collectives = Counts(), Collectives()
        with counter, collectives:
            piece = trainer.step(*each)
        losses.append(trainer.whole(piece).item())
        counts.append({str(op).rpartition(".")[2]: count for op, count in counter.get_comm_counts().items()})
        seen.append(dict(collectives.seen))
    return losses, counts, seen


def refused(path, module, inputs, loss, optimizer):
    """What a step says that is not the planned one."""
    spec = importlib.util.spec_from_file_location("plan", path)
    plan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    try:
        plan.trainer(module, OPTIMIZERS[optimizer], loss=loss).step(*inputs)
    except UserError as error:
        return str(error)
    return "nothing"


def moves(sizes, reduction, shape=(8, 16)):
    """Every step between layouts of a matrix, the collective that it calls, and whether the whole stays the same."""
    devices, graph = Devices(sizes), graph_of(sizes, len(shape), (reduction,))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for move in graph.moves:
        source, target = graph.layouts[move.source], graph.layouts[move.target]
        local = part(whole, tuple((0, size) for size in shape), box_of(source, shape, sizes, devices.at)).clone()
        counter = Counts()
        with counter:
            step = Move(move.kind, move.axes, source, target, shape)
            made = devices.moved(Piece(term_of(local, source, sizes, devices.at), shape, source), step)
        same = devices.whole(made)
        ok = torch.tensor(float(torch.allclose(same, whole, atol=1e-5)))
        dist.all_reduce(ok, dist.ReduceOp.MIN)
        names = [str(op).rpartition(".")[2] for op in counter.get_comm_counts()]
        yield move.kind, str(source), str(target), names, bool(ok)


def term_of(local, layout, sizes, at):
    """A device's term: unequal terms whose sum, mean or largest is the tensor."""
    axes = [axis for axis, term in enumerate(layout.terms) if term]
    if not axes:
        return local
    number, count = 0, 1
    for axis in axes:
        number, count = number * sizes[axis] + at[axis], count * sizes[axis]
    share = 2 * (number + 1) / (count * (count + 1))
    reduction = next(term for term in layout.terms if term)
    return {"sum": local * share, "avg": local * share * count, "max": local - number}[reduction]


def every_move(sizes):
    return [row for reduction in ("sum", "avg", "max") for row in moves(sizes, reduction)]


def work(rank, size, port, jobs, queue):
    """All jobs with n = `size` processes; `jobs`: name -> function and its arguments, or functions that make them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = {}
    for name, (run, *arguments) in jobs.items():
        torch.manual_seed(0)
        try:
            found[name] = run(*(each for given in arguments for each in (given() if callable(given) else (given,))))
        except Exception:
            found[name] = traceback.format_exc()
            break
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()
