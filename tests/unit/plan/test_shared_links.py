"""Data-parallel traffic beside a pass whose own transfers use the same links; and the rules of what hides."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module

import pytest

from cli_runner import CliRunner
from explained_terms import tape_of
from machine_without_latencies import machine_of
from steptime.api.frameworks import overlap_records
from steptime.api.models import load_model
from steptime.cli.main import main
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.options import choices_of
from steptime.plan.framework import Framework
from steptime.plan.framework_file import framework_names, habits_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.overlap import RULES
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

RATES = [1e13, 1e12, 3e11, 1e11]
"""Rates of links at which transfers take from a tenth of a layer's pass to several of it."""


def evaluated(plans: Plans, link_Bps: float, domain: int = 64, count: int = 1, **changes: object) -> Evaluation:
    machine = machine_of(link_Bps, memory_Bps=1e13, fast_domain=domain)
    model = replace(load_model("llama2-7b"), vocab=8)
    job = Job(model=model, gpus=16, global_batch=count * int(plans.dp), seq_len=1024, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], overlap=frozenset({"dp"}))  # fmt: skip
    return evaluate(CORRECTED, CORRECTED.strategies["1d"], replace(job, **changes), machine, plans)  # type: ignore[arg-type]


def tensor_s(e: Evaluation, direction: str) -> float:
    """Time that transfers of a layer over tp take in one direction."""
    links = float(e.job.framework.links("tp"))
    return sum(links * float(t.busy_s) for time in e.times["layer"] if time.direction == direction
               for t in time.transfers)  # fmt: skip


@pytest.mark.each("zero", [1, 3])
@pytest.mark.each("link_Bps", RATES)
def test_links_carry_both(link_Bps: float, zero: int) -> None:
    """No backward pass of one micro-batch ends before its links have carried what its tp and dp ranks send.

    Under ZeRO-3 the pass of the head, too short to matter here, counts as that of a layer.
    """
    e = evaluated(Plans(tp=4, dp=4, in_tp=4, in_dp=4, zero=zero), link_Bps)
    layers = float(e.inputs.first_layers)
    shown_s, busy_s = (each["gradients"] + each["weights_again"] for each in (e.step.data_s, e.step.data_busy_s))
    lasting_s = (layers + (zero == 3)) * float(e.step.behind_backward_s) + float(shown_s)
    carried_s = layers * tensor_s(e, "backward") + float(busy_s)
    assert lasting_s >= carried_s * (1 - 1e-9)


@pytest.mark.each(("in_tp", "in_dp", "shared"), [(4, 4, True), (4, 1, False), (1, 4, False), (1, 1, True)])
@pytest.mark.each("links", [1.0, 2.0])
def test_only_the_same_links_are_shared(in_tp: int, in_dp: int, shared: bool, links: float) -> None:
    """Traffic inside a fast domain leaves the links out of it alone."""
    framework = Framework(tensor_links=links)
    e = evaluated(Plans(tp=4, dp=4, in_tp=in_tp, in_dp=in_dp), 3e12, in_tp * in_dp, framework=framework)
    for direction, pass_s in (("forward", e.step.behind_forward_s), ("backward", e.step.behind_backward_s)):
        busy_s = tensor_s(e, direction)
        free_s = float(pass_s) - (busy_s if shared else 0.0)
        behind_s = tape_of(e).calls[f"dp_comm/{direction}"][0].arguments["behind_s"]
        assert busy_s > 0 and behind_s == pytest.approx(free_s, rel=1e-9)


def test_every_word_of_overlap_has_rules_and_every_rule_its_formula() -> None:
    assert {rule.word for rule in RULES} == {"", *choices_of("overlap")}
    for rule in RULES:
        module, name = rule.formula.split(".")
        assert getattr(import_module(f"steptime.cost.{module}"), name).__doc__, rule


def test_rules_of_a_framework() -> None:
    """Those of its habits, and what hides whatever the words."""
    found = [
        {
            rule["word"]
            for rule in json.loads(CliRunner().invoke(main, ["frameworks", *name, "--overlap", "--json"]).stdout)[
                "overlap"
            ]
        }
        for name in ([], ["megatron-core"], ["megatron-2021"])
    ]
    assert found == [{"", *choices_of("overlap")}, {"", "dp", "tp", "ep"}, {""}]


@pytest.mark.parametrize(
    ("name", "traffic"),
    [
        ("ddp", ["gradients, and weights after the update (ZeRO 0 to 2)"]),  # no ZeRO-3, no other axes
        ("megatron-2021", ["panels of a product over tp and tp2"]),
    ],
)
def test_rules_of_a_framework_are_of_traffic_that_it_has(name: str, traffic: list[str]) -> None:
    assert [rule["traffic"] for rule in overlap_records(name)] == traffic


def test_what_only_some_software_hides_is_a_rule_of_that_alone() -> None:
    asynchronous = {name for name in framework_names() if habits_of(name).asynchronous_tp}
    assert asynchronous == {name for name in framework_names() if _hides_sums(name)} != set()


def _hides_sums(name: str) -> bool:
    return any(rule["habit"] == "asynchronous_tp" for rule in overlap_records(name))


def test_rules_of_a_name_that_means_another_framework_say_so() -> None:
    shown = " ".join(CliRunner().invoke(main, ["frameworks", "fsdp2", "--overlap"]).stdout.split())
    assert "note: framework fsdp2 was taken as torchtitan" in shown
    found = json.loads(CliRunner().invoke(main, ["frameworks", "torchtitan", "--overlap", "--json"]).stdout)
    assert found["notes"] == []
