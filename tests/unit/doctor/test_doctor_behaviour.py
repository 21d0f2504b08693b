"""Which fitted framework a run behaves like, and how what it states joins what the user gives."""

from __future__ import annotations

import pytest

from steptime.doctor import merged
from steptime.doctor.advice import advice_for
from steptime.doctor.log import fitted_framework
from steptime.doctor.records import Stated


@pytest.mark.parametrize(
    ("flags", "fitted"),
    [
        ({}, "megatron-core"),
        ({"use_mcore_models": "True", "transformer_impl": "transformer_engine"}, "megatron-core"),
        ({"use_mcore_models": "False"}, "megatron"),
        ({"use_legacy_models": "True"}, "megatron"),
        ({"DDP_impl": "local", "use_flash_attn": "True"}, "megatron"),
        ({"DDP_impl": "local", "activations_checkpoint_method": "uniform"}, "megatron-2021"),
        ({"checkpoint_activations": "True", "DDP_impl": "local"}, "megatron-2021"),
    ],
)
def test_old_releases_of_megatron_are_known_by_their_arguments(flags, fitted):
    assert fitted_framework("megatron", flags) == fitted


def test_each_framework_has_its_fit_and_a_trainer_none():
    names = ("nemo", "torchtitan", "deepspeed", "maxtext", "megatron-deepspeed", "trainer", "")
    assert [fitted_framework(name, {}) for name in names] == [
        "megatron-core", "torchtitan", "deepspeed", "maxtext", "megatron-deepspeed", "", "",
    ]  # fmt: skip
    assert fitted_framework("megatron-deepspeed", {"checkpoint_activations": "True"}) == "megatron-deepspeed-2021"
    assert fitted_framework("megatron-deepspeed", {"checkpoint_activations": "True", "use_flash_attn_v2": "True"}) == (
        "megatron-deepspeed"
    )


def test_the_framework_of_the_log_is_used_unless_another_is_named():
    stated = Stated(framework="megatron-core", settings={"gpus": 8})
    job = merged({}, {}, stated)
    assert (job.settings, job.framework) == ({"gpus": 8, "framework": "megatron-core"}, "megatron-core")
    named = merged({"framework": "generic"}, {}, stated)
    assert (named.settings["framework"], named.framework, named.contradictions) == ("generic", "", ())
    assert "framework" not in merged({"mode": "published"}, {}, stated).settings
    assert "framework" not in merged({}, {}, Stated(framework="no such fit")).settings


def test_what_qualifies_a_choice_of_the_run_goes_with_it():
    stated = Stated(plan={"recompute": "full", "recompute_every": 2, "zero": 3, "shard": 8})
    assert merged({}, {}, stated).plan == stated.plan
    assert merged({}, {"recompute": "none", "tp": 2}, stated).plan == {"recompute": "none", "tp": 2, "zero": 3}


def test_megatron_deepspeed_takes_the_advice_of_megatron():
    assert "--overlap-grad-reduce" in advice_for("dp_comm", "megatron-deepspeed")[0]


@pytest.mark.parametrize(
    ("framework", "given", "read"),
    [
        ("NeMo", "selective", "attention"), ("torchtitan", "selective", "norm+activation+outputs"),
        ("axolotl", "selective", "attention"), ("torchtitan", "attention", "attention"),
        ("torchtitan", "selective+attention", "norm+activation+outputs+attention"),
    ],
)  # fmt: skip
def test_the_plan_that_the_user_gives_is_in_the_words_of_the_framework(framework, given, read):
    assert merged({"framework": framework}, {"recompute": given}, Stated()).plan["recompute"] == read
