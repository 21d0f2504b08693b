"""The shards of a model add up to the model: parameters, work, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import pytest
from engine_cases import ENGINE, Case, cases, close
from hypothesis import given
from hypothesis import strategies as st

from steptime.api.models import load_model
from steptime.estimate.layer import BACKWARD, FORWARD
from steptime.estimate.memory import STAGES
from steptime.estimate.result import planned_job
from steptime.estimate.sizes import sizes_of
from steptime.model import catalogue_names
from steptime.model.parameters import parameter_terms
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Row
from steptime.plan.strategies import CORRECTED

T = TypeVar("T")


@st.composite
def divisible(draw: st.DrawFn, names: tuple[str, ...] = ("1d", "context", "2d")) -> tuple[Case, dict[str, int]]:
    """A corrected case without copies that only several ranks make, and tensor degrees that divide all its widths."""
    case = draw(cases(names=names, methods=(CORRECTED,)))
    model = case.job.model
    model = replace(model, vocab=2**15 if model.vocab else 0)
    if not model.vocab:
        model = replace(model, final_norm=False, embedding_norm=False, max_positions=0)
    degrees = {axis: draw(st.sampled_from([1, 2, 4])) for axis in case.strategy.tensor_axes}
    degrees["tp"] = min(degrees["tp"], model.kv_heads)
    return replace(case, job=replace(case.job, model=model, copied_parameters=False)), degrees


def _alike(rows: Iterable[T], row: Callable[[T], Row]) -> list[T]:
    """Without the passes over what several ranks gather."""
    return [each for each in rows if not row(each).name.endswith("_transpose")]


def _ranks(degrees: dict[str, int]) -> int:
    product = 1
    for n in degrees.values():
        product *= n
    return product


@ENGINE
@given(divisible(names=("1d", "context")))
def test_weights_over_tensor_ranks_make_the_model(drawn):
    """Context ranks hold all weights; what tensor ranks replicate counts once."""
    case, degrees = drawn
    sizes = sizes_of(case.strategy.block(case.job, Plans(**degrees)))

    def whole(part):
        return (part.weights - part.replicated) * degrees["tp"] + part.replicated

    total = whole(sizes.layer) * case.job.model.layers + whole(sizes.first) + whole(sizes.last)
    assert total == parameter_terms(case.job.model).total


@ENGINE
@given(divisible(names=("2d",)))
def test_weights_over_a_summa_grid_make_the_model(drawn):
    """Matrices and the token table are cut over both axes; a bias or a norm over one at most."""
    case, degrees = drawn
    whole, cut = (sizes_of(case.strategy.block(case.job, Plans(**d))) for d in ({}, degrees))
    block = case.strategy.block(case.job, Plans(**degrees))
    for row in block.layer:
        if row.operator == "blocked_matmul":
            alone = next(r for r in case.strategy.block(case.job, Plans()).layer if r.name == row.name)
            assert row.weights * _ranks(degrees) == alone.weights
    assert cut.layer.weights * _ranks(degrees) >= whole.layer.weights
    parameters = whole.layer.weights * case.job.model.layers + whole.first.weights + whole.last.weights
    assert parameters == parameter_terms(case.job.model).total


@ENGINE
@given(divisible())
def test_work_over_ranks_is_the_work_of_one(drawn):
    case, degrees = drawn
    whole, cut = case.evaluate(Plans()), case.evaluate(Plans(**degrees))
    for part in whole.times:
        ones, shards = (_alike(e.times[part], lambda time: time.row) for e in (whole, cut))
        for one, shard in zip(ones, shards, strict=True):
            assert (one.row.name, one.phase) == (shard.row.name, shard.phase)
            if one.phase in (FORWARD, BACKWARD):
                assert close(shard.matrix_flops * _ranks(degrees), one.matrix_flops), one.row.name


@ENGINE
@given(divisible())
def test_kept_activations_over_ranks_are_those_of_one(drawn):
    case, degrees = drawn
    whole, cut = (case.strategy.block(case.job, Plans(**d)) for d in ({}, degrees))
    for part in ("layer", "first", "last"):
        ones, shards = (_alike(getattr(block, part), lambda row: row) for block in (whole, cut))
        for one, shard in zip(ones, shards, strict=True):
            assert close(float(shard.kept_bytes * _ranks(degrees)), float(one.kept_bytes)), one.name
    assert whole.boundary_bytes == cut.boundary_bytes * _ranks(degrees)


@ENGINE
@given(divisible(), st.integers(1, 12), st.integers(1, 6))
def test_layers_over_stages_are_all_layers(drawn, pp, dp):
    case, _ = drawn
    layers = case.job.model.layers
    pp = min(pp, layers)
    split = CORRECTED.stage_split(case.job, Plans(pp=pp, dp=dp))
    middle, extra = max(pp - 2, 0), layers - layers // pp * pp
    assert all(getattr(split, stage) - layers // pp in (0, 1) for stage in STAGES)
    fewest, most = split.first + split.last + middle * (layers // pp), split.first + split.last + middle * split.middle
    if pp > 1:
        assert fewest <= layers <= most
    else:
        assert split.first == layers
    assert split.middle == layers // pp + (extra > 0)
    e = case.evaluate(Plans(pp=pp))
    one_layer_s = float(e.passes["layer"].both_s)
    ends_s = float(e.passes["first"].both_s + e.passes["last"].both_s)
    assert close(float(e.step.stage_s["all_stages_s"]), layers * one_layer_s + ends_s)


@ENGINE
@given(divisible(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 2, 3]))
def test_parameter_bytes_over_replicas(drawn, dp, zero):
    """ZeRO 1, 2 and 3 share out the states, then the gradients, then the weights."""
    case, _ = drawn
    from steptime.estimate.memory import stage_terms

    job = case.job

    def bytes_of(plans):
        sizes = sizes_of(case.strategy.block(job, plans))
        return stage_terms(planned_job(CORRECTED, case.strategy, job, plans, sizes), "first")

    alone, shared = bytes_of(Plans(zero=0)), bytes_of(Plans(dp=dp, zero=zero))
    for stage, name in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        path = f"{name}/parameter_bytes"
        assert close(shared[path] * (dp if zero >= stage else 1), alone[path])


DENSE = [name for name in catalogue_names() if not (load_model(name).experts or load_model(name).latent)]


@pytest.mark.each("strategy", ["1d", "context", "2d"])
@pytest.mark.each("name", DENSE)
def test_rows_of_one_device_hold_the_parameters_of_the_ledger(name, strategy):
    model = load_model(name)
    job = Job(model=model, gpus=1, global_batch=1, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    sizes = sizes_of(CORRECTED.strategies[strategy].block(job, Plans()))
    total = sizes.layer.weights * model.layers + sizes.first.weights + sizes.last.weights
    # The norm before the first layer of CLIP, 1024 weights and biases, is in no row.
    missing = 2 * 1024 if name == "clip-vit-l14" else 0
    assert total + missing == pytest.approx(parameter_terms(model).total, rel=1e-15 if model.kinds else 0, abs=0)
