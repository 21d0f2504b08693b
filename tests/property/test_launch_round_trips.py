"""Run -> launch file -> run, over random plans that each software can run; 500 each are in ``benchmarks/launch.md``."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from launch_plans import legal_launches
from steptime import api
from steptime.errors import UserError
from steptime.formats.run_spec import RunSpec
from steptime.launch import SOFTWARE, launch_of, read_launch, software_called
from steptime.launch.table import real_options
from steptime.launch.write import Exported, export_launch

PLANS = 12
#: What a comment may have to say, by software; everything else its options say, or the plan is refused.
NOWHERE = {"placement.tp", "expert_imbalance", "document_length", "graphs", "attention", "attention_dtype", "sp"}
# torchtitan overlaps traffic of tensor ranks in compiled models alone: then it cannot say that nothing is compiled.
UNSAID = {
    "megatron-lm": {"gradient_dtype"},
    "megatron-bridge": {"gradient_dtype"},
    "nemo": {"gradient_dtype"},
    "torchtitan": {"gradient_dtype", "model", "expert_capacity", "compile"},
    "torchtitan-python": {"gradient_dtype", "expert_capacity", "recompute_every", "optimizer", "compile"},
    "deepspeed": {"recompute", "recompute_every", "seq", "expert_capacity"},
    "accelerate": {"optimizer", "micro_batch", "global_batch", "seq", "gradient_dtype"},
    "fsdp2": {"zero"},
    "hf-trainer": {"seq", "gradient_dtype"},
    "lightning": {"recompute", "recompute_every", "optimizer", "gradient_dtype"},
    "maxtext": {"zero", "recompute_every"},
    "llm-foundry": {"gradient_dtype", "recompute_every"},
}
#: Further choices that software without an option has one fixed answer to.
FIXED = {"context", "dispatcher", "overlap.dp", "overlap.tp", "overlap.pp", "overlap.ep", "overlap.offload"}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", SOFTWARE)
def test_the_same_plan_comes_back(name: str, tmp_path: Path) -> None:
    software = software_called(name)
    for run, launch, exported in islice(legal_launches(name, seed=1), PLANS):
        path = tmp_path / exported.file
        path.write_text(exported.text)
        read = read_launch(str(path))
        named = launch if launch.framework else replace(launch, framework=read.launch.framework)
        assert read.launch == named, run
        assert launch_of(read.run) == named, run
        assert bool(launch.framework) is not any(note.startswith("framework ") for note in read.notes), run
        assert not read.kept, run
        unlisted = {option for option in exported.options if not option.startswith(software.whole or "\0")}
        assert unlisted <= real_options(name), run
        no_stage = {"zero", "shard"} if launch.values["dp"] == 1 else set() if launch.values["zero"] else {"shard"}
        assert set(exported.lost) <= NOWHERE | FIXED | UNSAID[name] | no_stage, run


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", SOFTWARE)
def test_the_options_alone_say_the_degrees(name: str, tmp_path: Path) -> None:
    """Without the comments the degrees are still those of the plan: they are in options, not in what steptime wrote."""
    degrees = {"tp", "cp", "pp", "dp", "vpp", "ep", "etp"}
    for run, launch, exported in islice(legal_launches(name, seed=2), 5):
        kept = ("for", "model", "cluster", "gpus", "nodes", "node_devices")
        lines = [line for line in exported.text.splitlines() if not line.startswith("# steptime: ")]
        path = tmp_path / exported.file
        if exported.file.endswith(".json"):
            continue
        path.write_text("\n".join([f'# steptime: for = "{name}"', *lines]))
        told = {axis: launch.values[axis] for axis in degrees if axis in launch.values}
        found = read_launch(str(path), model=launch.model, cluster=launch.cluster).launch.values
        assert {axis: found.get(axis) for axis in told} == told, (run, kept)


#: Runs whose traffic has no data ranks of its own: experts that tensor ranks hold whole, shards without a ZeRO stage.
EDGES = {
    "deepspeed": {"tp": 8, "dp": 1, "ep": 2, "zero": 1, "overlap": "dp", "micro_batch": 2},
    "torchtitan": {"tp": 4, "dp": 1, "zero": 1, "overlap": "dp,tp"},
    "accelerate": {"tp": 4, "dp": 1, "zero": 0},
    "megatron-bridge": {"tp": 2, "pp": 2, "dp": 16, "shard": 8, "zero": 0, "overlap": "dp,tp"},
}


def same_estimate(run: RunSpec, exported: Exported, folder: Path) -> None:
    """Time and memory of a run and of its launch file agree; a framework that nobody named has a note."""
    path = folder / exported.file
    path.write_text(exported.text)
    read = read_launch(str(path))
    framework = run.settings.get("framework", "generic")
    assert "framework" in run.settings or any(note.startswith("framework ") for note in read.notes), run
    runs = [replace(each, cluster=each.cluster or "dgx-h100") for each in (run, read.run)]
    first, second = (
        api.estimate(each.model, each.cluster, plan=each.plan, **{**each.settings, "framework": framework})
        for each in runs
    )
    assert second.step_time_s == pytest.approx(first.step_time_s, rel=1e-6), run
    assert second.peak_memory_bytes == pytest.approx(first.peak_memory_bytes, rel=1e-6), run


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", SOFTWARE)
def test_the_estimate_is_the_same(name: str, tmp_path: Path) -> None:
    """What a launch leaves out because it means nothing in the job changes no number."""
    for run, _, exported in islice(legal_launches(name, seed=77), 6):
        same_estimate(run, exported, tmp_path)


@pytest.mark.parametrize("name", EDGES)
def test_replicas_of_experts_on_tensor_ranks(name: str, tmp_path: Path) -> None:
    plan = EDGES[name]
    gpus = plan["tp"] * plan["dp"] * plan.get("pp", 1)
    settings = {"gpus": gpus, "global_batch": 32, "seq": 4096, "framework": "megatron-core"}
    run = RunSpec(model="mixtral-8x7b", cluster="dgx-h100", settings=settings, plan=plan)
    same_estimate(run, export_launch(launch_of(run), software_called(name)), tmp_path)


JUNK = (
    "null",
    "-1",
    "0",
    "1e400",
    '"x"',
    "[]",
    "{}",
    "[1,2]",
    "9" * 30,
    "$X",
    "auto",
    "~",
    "3.7",
    "None",
    "torch.x",
    "-5",
)


def damaged(text: str, random: Random) -> str:
    """The text with lines left out, doubled, cut, or with other values."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 3)):
        at, kind = random.randrange(len(lines)), random.random()
        separator = next((each for each in (": ", " = ", " ") if each in lines[at]), None)
        if kind < 0.2 and len(lines) > 1:
            del lines[at]
        elif kind < 0.3:
            lines.insert(at, random.choice(lines))
        elif kind < 0.4:
            lines[at] = lines[at][: random.randint(0, len(lines[at]))]
        elif separator is not None:
            lines[at] = f"{lines[at].rpartition(separator)[0]}{separator}{random.choice(JUNK)}"
    return "\n".join(lines)


@pytest.mark.parametrize("name", SOFTWARE)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    random = Random(name)
    _, _, exported = next(legal_launches(name, seed=5))
    path = tmp_path / exported.file
    for _ in range(15):
        path.write_text(damaged(exported.text, random))
        try:
            assert read_launch(str(path), name, model="llama3-8b").text
        except UserError as error:
            assert str(error)
