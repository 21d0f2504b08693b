"""The best shardings of a transformer's block and of a wide ResNet are those that practice found, limit by limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from models import megatron  # noqa: E402
from planner_models import wide  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.ops.placement import text_of  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import Built, built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.ilp import least_memory  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import ShardingPlan, planned  # noqa: E402
from steptime.sharding.recipes import followed  # noqa: E402

MACHINES = load_cluster("dgx-h100")
WEIGHTS = ("qkv", "out", "up", "down")
DATA_PARALLEL = {"qkv": "rows", "attention": "batch", "out": "rows", "up": "rows", "down": "rows"}
MEGATRON = {"qkv": "columns", "attention": "heads", "out": "inner", "up": "columns", "down": "inner"}
"""Dims that the products of a block shard: column-parallel into the heads and the hidden width, row-parallel back."""
MANY_TOKENS = [(256, 64, 256), (512, 128, 256), (1024, 64, 256)]
FEW_TOKENS = [(1024, 4, 256), (1024, 1, 512), (2048, 2, 256)]
"""Width, samples, tokens."""
SHARES = (0.6, 0.25, 0.05)
"""Limits: of the way from the least memory that any sharding has to that of the optimum without a limit."""


@cache
def block(width: int, batch: int, tokens: int, axes: str = "4") -> Built:
    """A step of a GPT of one block on a mesh."""
    module = megatron.Megatron(1, width, width // 64, 512, tokens)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    program = capture(module, (ids,), loss=megatron.loss, optimizer="adamw", training=True, target="cuda")
    mesh = mesh_on(MACHINES, parse_axes(axes), prod(map(int, axes.split("x"))))
    return built(flow_of(program), mesh, Timer(device=MACHINES.device))


@cache
def best(width: int, batch: int, tokens: int, share: float | None = None, axes: str = "4") -> ShardingPlan:
    """Its best shardings, proved, with a limit or without one."""
    given = block(width, batch, tokens, axes)
    if share is not None:
        low = least_memory(given.problem(None))
        assert low is not None and low.proved
        high_bytes = best(width, batch, tokens, axes=axes).memory_bytes[1:].max()
        assert high_bytes > low.peak_bytes
        given = replace(given, limit_bytes=low.peak_bytes + share * (high_bytes - low.peak_bytes))
    plan = planned(given, overlaps=False, gap=1e-4, seconds=60)
    assert plan.gap <= 1e-4
    return plan


def sharded_dims(plan: ShardingPlan) -> dict[str, set[str]]:
    """Dims that the products and the attention of the block shard on all axes, forward."""
    found = {}
    for item, ways, option in zip(plan.built.flow.items, plan.built.ways, plan.choice, strict=True):
        place, _, op = item.name.partition(": ")
        name = "attention" if "attention" in op else place.removeprefix("blocks.0.")
        strategy = ways[option].strategy
        if place.startswith("blocks.0") and item.phase == "forward" and name in MEGATRON and strategy is not None:
            found[name] = set(strategy.dims)
    assert set(found) == set(MEGATRON)
    return found


def each(**dims: str) -> dict[str, set[str]]:
    return {name: {dim} for name, dim in dims.items()}


def weights(plan: ShardingPlan) -> dict[str, str]:
    return {name: text_of(plan.parameters[f"blocks.0.{name}.weight"]) for name in WEIGHTS}


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("axes", ["4", "8", "2x4"])
@pytest.mark.parametrize("sizes", MANY_TOKENS)
def test_without_a_limit_every_product_is_data_parallel_and_weights_are_whole(sizes, axes) -> None:
    plan = best(*sizes, axes=axes)
    assert sharded_dims(plan) == each(**DATA_PARALLEL)
    assert set("".join(weights(plan).values())) <= {"R", " "}
    (tokens,) = [n for n, item in enumerate(plan.built.flow.items) if item.node.op == "input"]
    assert text_of(plan.sharding_of(tokens)) == " ".join(["S(0)"] * len(plan.built.mesh.sizes))


@pytest.mark.quick("sizes0-0.25", "sizes0-0.05")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sizes", MANY_TOKENS[1:])
def test_with_many_tokens_a_limit_spreads_states_then_weights_as_fsdp(sizes, share) -> None:
    plan = best(*sizes, share=share)
    assert plan.memory_bytes[1:].max() <= plan.built.limit_bytes * (1 + 1e-9)
    assert sharded_dims(plan) == each(**DATA_PARALLEL)
    updates = [plan.sharding_of(plan.built.flow.update_of[f"blocks.0.{name}.weight"]) for name in WEIGHTS]
    assert any(text_of(each) != "R" for each in updates), "states of the optimiser are spread"
    spread = [name for name, text in weights(plan).items() if text != "R"]
    if share < max(SHARES):
        assert spread, "some weights are gathered for their product"
    if share == min(SHARES):
        assert set(spread) == set(WEIGHTS)
    gathered = {transfer.source for transfer in plan.transfers if "all_gather" in transfer.collective}
    assert {f"blocks.0.{name}.weight" for name in spread} <= gathered


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("share", [*SHARES, None])
@pytest.mark.parametrize("sizes", FEW_TOKENS)
def test_with_few_tokens_it_is_megatrons_column_and_row_split(sizes, share) -> None:
    plan = best(*sizes, share=share)
    assert sharded_dims(plan) == each(**MEGATRON)
    assert weights(plan) == {"qkv": "S(0)", "out": "S(1)", "up": "S(0)", "down": "S(1)"}


@pytest.mark.quick(without=["512"])
@pytest.mark.parametrize("width", [256, 512])
def test_a_sequence_of_128_k_is_sharded_by_tokens(width) -> None:
    plan = best(width, 1, 128 * 1024)
    dims = sharded_dims(plan)
    assert {name: dims[name] for name in ("out", "up", "down")} == each(out="rows", up="rows", down="rows")
    named = {item.name: n for n, item in enumerate(plan.built.flow.items) if item.phase == "forward"}
    for name in ("norm_1", "norm_2"):
        (norm,) = [n for text, n in named.items() if text == f"blocks.0.{name}: native_layer_norm"]
        assert text_of(plan.sharding_of(norm)) == "S(1)"
    assert dims["attention"] in ({"heads"}, {"queries"})


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("axes", ["4", "2x4", "2x8"])
@pytest.mark.parametrize("width", [128, 512, 1024])
def test_a_wide_resnet_is_never_slower_than_data_or_filter_parallel(width, axes) -> None:
    module, inputs, loss = wide(width, 32, 8)
    program = capture(module, inputs, loss=loss, optimizer="adamw", training=True, target="cuda")
    mesh = mesh_on(MACHINES, parse_axes(axes), prod(map(int, axes.split("x"))))
    plan = planned(built(flow_of(program), mesh, Timer(device=MACHINES.device)), overlaps=False, gap=1e-6, seconds=60)
    problem = plan.built.problem(None)
    for name in ("data parallel", "filter parallel"):
        found, why = followed(name, plan.built, problem)
        assert found is not None, why
        assert plan.step_s <= found.total_s * (1 + 1e-9), name
        assert plan.bound_s <= found.total_s * (1 + 1e-9), name
