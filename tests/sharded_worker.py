"""Runs sharded steps in the processes of a job, where steptime is not installed."""

import importlib.util
import os
import pickle
import sys
import traceback
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import _CommModeModuleTracker
from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


class Counts(CommDebugMode):
    """PyTorch's count of collectives without its hooks in modules, which do not go with hooks that are there before."""

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


def attention():
    """DTensor has no rule for fused attention on CPUs."""
    return sdpa_kernel(SDPBackend.MATH)


def unsharded(module, inputs, loss, optimizer):
    """Losses and parameters of the module as it is."""
    made, out = OPTIMIZERS[optimizer](module.parameters()), []
    for each in batches(inputs):
        with attention():
            value = loss(module(*each))
            value.backward()
        made.step()
        made.zero_grad()
        out.append(value.item())
    return out, {name: each.detach().numpy() for name, each in module.named_parameters()}


def loaded(path):
    """The exported file as a module; nothing of steptime can be imported."""
    sys.modules["steptime"] = None
    spec = importlib.util.spec_from_file_location("plan", path)
    plan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    return plan


def sharded(path, module, inputs, loss, optimizer):
    """Losses, parameters, and PyTorch's counts of collectives in the second step."""
    trainer = loaded(path).trainer(module, OPTIMIZERS[optimizer], loss=loss)
    losses, counts = [], {}
    for step, each in enumerate(batches(inputs)):
        counter = Counts() if step == 1 else nullcontext()
        with counter, attention():
            losses.append(trainer.step(*each).item())
        if step == 1:
            counts = {str(op).rpartition(".")[2]: count for op, count in counter.get_comm_counts().items()}
    return losses, {name: each.full_tensor().detach().numpy() for name, each in module.named_parameters()}, counts


def refused(path, module, inputs, loss, optimizer):
    """What a file says of a module that is not the planned one."""
    try:
        loaded(path).trainer(module, OPTIMIZERS[optimizer], loss=loss).step(*inputs)
    except ValueError as error:
        return str(error)
    return "nothing"


def work(rank, size, port, jobs, answers):
    """All jobs with n = `size` processes; `jobs`: name -> function and its arguments, or functions that make them.

    What they return is pickled to the file `answers`.
    """
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
        answers.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
