"""The search against all plans one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from engine_cases import NAMES, cases, close, stacked
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.api.models import load_model
from steptime.estimate.evaluate import evaluate
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.num import divisors
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job, with_habits
from steptime.plan.plans import COLUMNS, FULL_RECOMPUTE, RECOMPUTE_CODES, Plans, broken_rules
from steptime.plan.space import Constraint, CorrectedSpace, micro_batch_choices, panels_worth_trying, virtual_stages
from steptime.plan.strategies import CORRECTED, Method, Strategy
from steptime.search.planner import find
from steptime_lab.published.mode import PublishedSpace
from steptime_lab.published.rows import PUBLISHED
from suites import examples

SPACES = {CORRECTED: CorrectedSpace(), PUBLISHED: PublishedSpace()}
FEW = settings(max_examples=examples(50), derandomize=True)


@st.composite
def searches(draw: st.DrawFn, methods: tuple[Method, ...] = (CORRECTED, PUBLISHED)) -> tuple[Setting, str]:
    """A job of few devices on a machine that may be too small for it."""
    case = draw(cases(methods=methods))
    model = replace(case.job.model, layers=draw(st.sampled_from([2, 3, 4, 6])), windowed_layers=0)
    gpus = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    job = replace(case.job, model=model, gpus=gpus, global_batch=draw(st.sampled_from([4, 6, 8, 12])))
    base = load_cluster("dgx-h100")
    inner = replace(base.levels[0], devices=draw(st.sampled_from([2, 3, 4, 8])))
    memory_bytes = 2.0 ** draw(st.integers(27, 40))
    cluster = replace(base, levels=(inner, base.levels[1]), device=replace(base.device, memory_bytes=memory_bytes))
    return Setting(method=case.method, job=job, cluster=cluster), case.strategy.name


def _meshes(axes: tuple[str, ...], gpus: int) -> list[dict[str, int]]:
    each = product(*[divisors(gpus)] * len(axes))
    return [dict(zip(axes, degrees, strict=True)) for degrees in each if int(np.prod(degrees)) == gpus]


def _all_plans(setting: Setting, strategy: Strategy) -> list[Plans]:
    """Every legal plan of the corrected space by plain loops, with every placement, also those that leave room."""
    job, out, domain = setting.job, [], setting.machine.fast_domain
    axes = (*strategy.tensor_axes, "dp", "pp")
    for mesh in _meshes(axes, job.gpus):
        share = -(-job.global_batch // mesh["dp"])
        longer = max(mesh["tp"], mesh.get("tp2", 1))
        panels = panels_worth_trying(job.model.hidden, longer) if strategy.name == "2d" else [1]
        zeros = [1, 3] if mesh["pp"] == 1 else [1]
        depths = virtual_stages(job.model.layers, mesh["pp"])
        choices = product(micro_batch_choices(share), [0, 2], zeros, panels, depths)
        for micro_batch, recompute, zero, panel, vpp in choices:
            plans = Plans(**mesh, micro_batch=micro_batch, recompute=recompute, zero=zero, panels=panel, vpp=vpp)
            if broken_rules(job, plans, setting.rules):
                continue
            for inside in product(*[divisors(mesh[axis]) for axis in axes]):
                if int(np.prod(inside)) <= domain and _has_room(job.gpus, domain, int(np.prod(inside))):
                    out.append(plans.with_columns({f"in_{a}": n for a, n in zip(axes, inside, strict=True)}))
    return out


def _has_room(gpus, domain, block):
    """Blocks fit the domains; a ninth of their devices may be idle unless the devices fill the domains exactly."""
    domains = -(-(gpus // block) // (domain // block))
    return domains <= -(-gpus // domain) or (gpus % domain > 0 and domains * domain * 8 <= gpus * 9)


def _identity(plans: Plans) -> tuple[int, ...]:
    return tuple(int(getattr(plans, name)) for name in COLUMNS)


@FEW
@given(searches(methods=(CORRECTED,)))
def test_the_best_is_the_minimum_over_all_plans(drawn):
    setting, name = drawn
    strategy = CORRECTED.strategies[name]
    (found,) = find(setting, CorrectedSpace(), {name: ()}, top=5)
    plans = _all_plans(setting, strategy)
    if not plans:
        assert not found.feasible
        return
    e = evaluate(CORRECTED, strategy, setting.job, setting.machine, stacked(plans))
    times, peaks = (np.broadcast_to(x, len(plans)) for x in (e.step_time_s, e.peak_bytes))
    fits = peaks <= setting.machine.memory_bytes
    assert bool(fits.any()) == bool(found.feasible)
    if not fits.any():
        assert found.nearest is not None
        lacking = evaluate(CORRECTED, strategy, setting.job, setting.machine, found.nearest.row(0)).peak_bytes
        assert close(float(lacking), float(peaks.min()))
        return
    assert close(float(found.best_s[0]), float(times[fits].min()))
    for time_s, peak in zip(times[fits], peaks[fits], strict=True):
        beats = (found.front_s <= time_s * (1 + 1e-12)) & (found.front_bytes <= peak * (1 + 1e-12))
        assert beats.any()


@FEW
@given(searches())
def test_every_listed_candidate_is_ranked_with_its_own_time(drawn):
    setting, name = drawn
    (found,) = find(setting, SPACES[setting.method], {name: ()}, top=10**5)
    assert len(found.best_s) == found.feasible
    assert found.feasible + sum(found.reasons.values()) >= found.candidates
    assert (np.diff(found.best_s) >= 0).all()
    identities = [_identity(found.best.row(i)) for i in range(found.feasible)]
    assert len(set(identities)) == found.feasible
    for i in range(0, found.feasible, max(found.feasible // 20, 1)):
        plans = found.best.row(i)
        e = evaluate(setting.method, setting.method.strategies[name], setting.job, setting.machine, plans)
        assert close(float(e.step_time_s), float(found.best_s[i]))
        assert e.peak_bytes <= setting.machine.memory_bytes
        assert not broken_rules(setting.job, plans, setting.rules)
        assert plans.ranks == setting.job.gpus and plans.domain_ranks <= setting.machine.fast_domain


@FEW
@given(searches(), st.sampled_from(["tp", "pp", "dp", "micro_batch", "zero", "recompute"]),
       st.sampled_from(["=", "<="]), st.sampled_from([1, 2, 3]))  # fmt: skip
def test_a_constraint_restricts_exactly(drawn, column, relation, value):
    setting, name = drawn
    constraint = Constraint(column=column, relation=relation, value=value)
    space = SPACES[setting.method]
    (every,) = find(setting, space, {name: ()}, top=10**5)
    (some,) = find(setting, space, {name: (constraint,)}, top=10**5)
    kept = {_identity(every.best.row(i)): t for i, t in enumerate(every.best_s) if constraint.holds(every.best.row(i))}
    ours = {_identity(some.best.row(i)): t for i, t in enumerate(some.best_s)}
    assert ours.keys() == kept.keys()
    assert all(close(float(ours[key]), float(kept[key])) for key in ours)


@FEW
@given(searches(), st.sampled_from(["memory_Bps", "kernel_latency_s", "link_Bps", "latency_s", "matrix_efficiency"]),
       st.floats(1.0, 8.0))  # fmt: skip
def test_a_faster_cluster_is_never_slower(drawn, field, factor):
    setting, name = drawn
    cluster = setting.cluster
    better = 1 / factor if field.endswith("_s") else factor
    if field in ("link_Bps", "latency_s"):
        levels = tuple(replace(level, **{field: getattr(level, field) * better}) for level in cluster.levels)
        faster = replace(cluster, levels=levels)
    else:
        device = replace(cluster.device, **{field: getattr(cluster.device, field) * better})
        faster = replace(cluster, device=device)
    space, both = SPACES[setting.method], (setting, replace(setting, cluster=faster))
    (before,), (after,) = (find(s, space, {name: ()}) for s in both)
    assert before.feasible == after.feasible
    if before.feasible:
        assert after.best_s[0] <= before.best_s[0] * (1 + 1e-12)


@FEW
@given(searches())
def test_more_memory_is_never_slower(drawn):
    setting, name = drawn
    device = setting.cluster.device
    larger = replace(setting.cluster, device=replace(device, memory_bytes=4 * device.memory_bytes))
    space = SPACES[setting.method]
    (before,), (after,) = (find(s, space, {name: ()}) for s in (setting, replace(setting, cluster=larger)))
    assert before.candidates == after.candidates and before.feasible <= after.feasible
    if before.feasible:
        assert after.best_s[0] <= before.best_s[0]


@FEW
@given(searches())
def test_searches_together_are_searches_apart(drawn):
    """Tasks that share their layers give what each gives alone."""
    from steptime.search.exhaustive import Task, search

    setting, name = drawn
    strategy, space = setting.method.strategies[name], SPACES[setting.method]
    tasks = [
        Task(setting=replace(setting, job=replace(setting.job, gpus=n)), strategy=strategy, space=space)
        for n in (1, 2, 4, 8)
    ]
    for together, task in zip(search(tasks, 3), tasks, strict=True):
        (alone,) = search([task], 3)
        assert np.array_equal(together.best_s, alone.best_s)
        assert (together.candidates, together.feasible) == (alone.candidates, alone.feasible)


def test_searches_of_other_constraints_together_are_searches_apart():
    """One task that recomputes attention beside one that recomputes nothing or whole layers."""
    from steptime.search.exhaustive import Task, search

    job = Job(model=load_model("llama2-7b"), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    setting = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100"))
    spaces = (CorrectedSpace(), CorrectedSpace().fixed({"recompute": RECOMPUTE_CODES["norm"]}))
    tasks = [Task(setting=setting, strategy=CORRECTED.strategies["1d"], space=space) for space in spaces]
    together = search(tasks, 3)
    for found, task in zip(together, tasks, strict=True):
        (alone,) = search([task], 3)
        assert np.array_equal(found.best_s, alone.best_s) and found.feasible == alone.feasible
        assert np.array_equal(found.front_bytes, alone.front_bytes)
    assert not set(together[0].front_bytes) & set(together[1].front_bytes)


@pytest.mark.parametrize(
    "changed", [{"shard": 1}, {"recompute": FULL_RECOMPUTE}, {"recompute": FULL_RECOMPUTE, "recompute_every": 4}]
)
def test_copies_of_gathered_weights_are_ranked_with_their_own_time(changed):
    """Replicas of one rank gather nothing, and layers that are recomputed find theirs gathered."""
    from steptime.search.exhaustive import Task, search

    job = Job(model=load_model("llama2-7b"), gpus=8, global_batch=8, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam8bit"])  # fmt: skip
    setting = Setting(method=CORRECTED, job=with_habits(job, "torchtitan"), cluster=load_cluster("dgx-b200"))
    strategy, space = CORRECTED.strategies["1d"], CorrectedSpace().fixed({"tp": 1, "pp": 1, "zero": 3, **changed})
    (found,) = search([Task(setting=setting, strategy=strategy, space=space)], 1)
    alone = evaluate(CORRECTED, strategy, setting.job, setting.machine, found.best.row(0))
    assert close(float(found.best_s[0]), float(alone.step.total_s))


@pytest.mark.parametrize("fixed", [{"dp": 1}, {"dp": 2}, {}])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_of_few_replicas_are_ranked_with_their_own_time(fixed, precision):
    """Shapes of layers that replicas do not tell apart, and those that they do, be it that all have one replica."""
    _ranked_as_alone("dgx-b200", 16, precision, fixed)


@pytest.mark.parametrize("cluster", ["dgx-h100-rail", "frontier-dragonfly", "tpu-v5p-torus", "h100-nvl-2"])
def test_experts_on_a_network_of_levels_are_ranked_with_their_own_time(cluster):
    """There it depends on the replicas how far the members of a group are apart."""
    _ranked_as_alone(cluster, 512, "bf16", {})


def _ranked_as_alone(cluster, gpus, precision, fixed):
    from steptime.search.exhaustive import Task, search

    job = Job(model=load_model("mixtral-8x7b"), gpus=gpus, global_batch=gpus, seq_len=4096,
              precision=PRECISIONS[precision], optimizer=OPTIMIZERS["adam8bit"])  # fmt: skip
    setting = Setting(method=CORRECTED, job=with_habits(job, "torchtitan"), cluster=load_cluster(cluster))
    limits = tuple(Constraint(column=name, relation="=", value=value) for name, value in fixed.items())
    strategy = CORRECTED.strategies["1d"]
    (found,) = search([Task(setting=setting, strategy=strategy, space=CorrectedSpace(), constraints=limits)], 20)
    assert len(found.best_s) == 20 and len(np.unique(found.best.ep)) > 1
    for n, step_s in enumerate(found.best_s):
        alone = evaluate(CORRECTED, strategy, setting.job, setting.machine, found.best.row(n))
        assert close(float(step_s), float(alone.step.total_s))


def test_all_strategies_are_searched_somewhere():
    assert set(NAMES) == set(CORRECTED.strategies) == set(PUBLISHED.strategies)
