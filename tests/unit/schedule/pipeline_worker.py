"""One rank of a pipeline on CPU: loads schedules from CSV files with PyTorch's runtime and compares gradients.

usage: pipeline_worker.py RANK RANKS FOLDER MICRO_BATCHES    every FILE.csv of the folder; FILE.comms.csv has messages
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from steptime.simulation.pytorch_csv import read_csv

WIDTH, ROWS = 8, 2


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def largest_difference(path: Path, rank: int, micro_batches: int) -> float:
    """Largest difference of a gradient of this rank to that of a run without a pipeline."""
    table = read_csv(path)
    mine, stages = sorted({*table.stage[table.rank == rank].tolist()}), table.stages
    torch.manual_seed(0)
    layers = [layer() for _ in range(stages)]
    data, target = torch.randn(2, ROWS * micro_batches, WIDTH)
    whole = copy.deepcopy(torch.nn.Sequential(*layers))
    loss_of(whole(data), target).backward()
    held = [PipelineStage(layers[each], each, stages, torch.device("cpu")) for each in mine]
    schedule = _PipelineScheduleRuntime(held, micro_batches, loss_fn=loss_of)
    schedule._load_csv(str(path), format="compute_comms" if ".comms" in path.name else "compute_only")
    losses: list[torch.Tensor] = []
    schedule.step(*([data] if 0 in mine else []), target=target if stages - 1 in mine else None, losses=losses)
    differences = [
        (one.grad - other.grad).abs().max()
        for each in mine
        for one, other in zip(layers[each].parameters(), whole[each].parameters(), strict=True)
    ]
    return float(max(differences))


def main(rank: int, ranks: int, folder: Path, micro_batches: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=60))  # fmt: skip
    for path in sorted(folder.glob("*.csv")):
        print(path.name, largest_difference(path, rank, micro_batches), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
