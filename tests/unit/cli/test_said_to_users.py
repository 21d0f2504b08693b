"""What messages and reports say to whoever took a wrong name, and where a fitted number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fits import fit_text
from steptime import api
from steptime.api.frameworks import framework_record
from steptime.api.models import load_model
from steptime.captured.profiling import profile
from steptime.cli.job import parse_fix, parse_limits
from steptime.errors import FieldError, InputFileError, UnknownNameError, nearest
from steptime.formats.huggingface import read_huggingface
from steptime.hardware import load_cluster, load_device
from steptime.plan import framework_file
from steptime.plan.framework import IDEAL
from steptime.report.plan import print_plan_result

JOB: dict[str, Any] = {"gpus": 64, "global_batch": 64}


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def bases(framework: str | None, **plan: Any) -> Mapping[str, str]:
    found = api.estimate("mixtral-8x7b", "dgx-h100", framework=framework, plan={"pp": 2, "ep": 8, **plan}, **JOB)
    return {detail.function: detail.basis for detail in found.details}


@pytest.mark.parametrize(
    ("function", "parameter"),
    [("host.step_overhead_s", "step_s"), ("host.growth_s", "growth"), ("host.stage_issue_s", "stage_s"),
     ("host.issue_wait_s", "host_s"), ("host.router_wait_s", "router_s")],
)  # fmt: skip
def test_a_term_of_a_framework_says_which_parameter_it_rests_on(function: str, parameter: str) -> None:
    assert bases("megatron-core")[function].startswith(f"{parameter} of framework megatron-core, fitted to runs")
    assert "framework generic" in bases(None)[function]
    assert not bases(IDEAL.name).get(function)


def test_a_slower_attention_kernel_is_among_the_constants() -> None:
    def constants(framework: str, cluster: str, **plan: Any) -> Mapping[str, Any]:
        found = api.estimate("llama3-8b", cluster, framework=framework, plan=plan, **JOB)
        return {name: one for name, one in found.provenance.constants.items() if name.startswith("attention_kernel")}

    found = constants("deepspeed", "dgx-b200")["attention_kernel.flash2"]
    assert (found["value"], found["kind"]) == (2.5, "assumed") and "deepspeed is taken to run flash2" in found["source"]
    assert not constants("deepspeed", "dgx-b200", attention="unfused") and not constants("torchtitan", "dgx-b200")
    assert not constants("deepspeed", "dgx-a100-80gb") and not constants("megatron-core", "dgx-b200")


def test_a_level_that_the_base_lacks_is_told_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="the base has nvlink, network"):
        load_cluster(written(tmp_path, 'base = "dgx-h100"\n[levels.ib]\nlinks_per_device = 0.5\n'))
    with pytest.raises(FieldError) as error:
        load_cluster(written(tmp_path, 'device = "h100-sxm"\n[levels.ib]\ndevices = 8\n'))
    assert "the base" not in str(error.value) and "infiniband-ndr" in str(error.value)


def test_an_unknown_link_gets_the_near_ones_or_all(tmp_path: Path) -> None:
    def said(link: str) -> str:
        with pytest.raises(UnknownNameError) as error:
            load_cluster(written(tmp_path, f'device = "h100-sxm"\n[levels.net]\nlink = "{link}"\n'))
        return str(error.value)

    assert "did you mean infiniband-ndr?" in said("ndr")
    assert "valid: dcn-v4, " in said("quixotic") and "xgmi-mi355x" in said("quixotic")


def test_names_that_end_in_what_was_given_are_near_it() -> None:
    assert nearest("ndr", ["infiniband-hdr", "infiniband-ndr", "calendndr"]) == ["infiniband-ndr"]
    assert nearest("8b", ["llama3-8b"]) == []


def test_a_cluster_file_where_a_device_is_needed_is_told_what_shows_it(tmp_path: Path) -> None:
    path = written(tmp_path, 'base = "dgx-h100"\n[levels.network]\nlinks_per_device = 0.5\n')
    with pytest.raises(InputFileError) as error:
        load_device(path)
    assert f"steptime clusters {path} shows it" in str(error.value)


def test_what_a_report_abbreviates_is_a_key_of_fix_and_limit() -> None:
    assert parse_fix(["mbs=2"]) == {"micro_batch": 2} and parse_limits(["mbs<=2"]) == ["micro_batch<=2"]
    with pytest.raises(UnknownNameError, match="mbs of a report is micro_batch"):
        api.estimate("llama3-8b", "dgx-h100", plan={"mbs": 1}, **JOB)
    with pytest.raises(UnknownNameError, match="mbs of a report is micro_batch"):
        api.plan("llama3-8b", "dgx-h100", limit=["mbs<=1"], **JOB)


def test_an_unknown_framework_is_told_whose_file_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError) as error:
        framework_record("quixotic")
    assert "in use" not in str(error.value)
    own = written(tmp_path, fit_text(), framework_file.NAME)
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    for use in (framework_record, lambda name: api.estimate("gpt2", "dgx-a100", framework=name, **JOB)):
        with pytest.raises(UnknownNameError) as error:
            use("quixotic")
        assert f"{own} is in use, which has no others than ideal, generic" in str(error.value)


def test_types_that_are_read_as_another_are_among_the_supported(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        read_huggingface(written(tmp_path, '{"model_type": "quixotic"}', "config.json"))
    listed = str(error.value).partition("supported: ")[2].split(", ")
    assert {"granite", "olmo3", "ministral", "llama"} <= set(listed) and "gemma3_text" not in listed
    with pytest.raises(UnknownNameError, match="did you mean olmo3"):
        read_huggingface(written(tmp_path, '{"model_type": "olmo_3"}', "config.json"))


def test_a_search_says_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the length of a sequence, which is the model's unless given, nor adapters stood in the report."""
    job = {"gpus": 8, "global_batch": 16}
    for more, told in (({}, "of 8,192 tokens, mode"), ({"seq": 4096}, "of 4,096 tokens, mode"),
                       ({"lora": {"rank": 16}}, "of 8,192 tokens, LoRA rank 16 (linear), mode")):  # fmt: skip
        result = api.plan("llama3-8b", "dgx-h100", top=1, **job, **more)  # type: ignore[arg-type]
        print_plan_result(result, {"model": "llama3-8b", "cluster": "dgx-h100", **job})
        assert f"16 sequences {told}" in " ".join(capsys.readouterr().out.split())


def test_a_python_file_without_a_name_is_told_to_give_one(tmp_path: Path) -> None:
    """`fit mine.py` asked for a .toml or .json."""
    path = written(tmp_path, "", "mine.py")
    for use in (load_model, lambda name: profile(name, "h100")):
        with pytest.raises(InputFileError, match=r"mine\.py:NAME of a module's class, or of a function that returns"):
            use(str(path))


def test_a_device_by_the_name_of_a_driver_is_told_its_name() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean rtx-4090\?"):
        load_device("NVIDIA GeForce RTX 4090")
    with pytest.raises(FieldError, match="--lora-rank 16"):
        api.plan("llama3-8b", "dgx-h100", lora={"qlora": True}, **JOB)
