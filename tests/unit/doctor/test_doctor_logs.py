"""Logs of training: what is read out of them, and the statistics of their steps."""

from __future__ import annotations

import gzip
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from steptime.doctor import kind_of, merged, read_log, series_of
from steptime.doctor.findings import log_findings
from steptime.doctor.records import Log, Stated
from steptime.doctor.stated import catalogue_model, model_contradictions
from steptime.errors import InputFileError
from steptime.model.known import load_catalogue_model

DATA = Path(__file__).resolve().parents[2] / "data/doctor"


def sample(name: str) -> Log:
    return read_log(str(DATA / f"{name}.log"))


def megatron_log(tmp_path: Path, times_ms: list[float], every: int = 1, extra: str = "") -> Log:
    path = tmp_path / "x.log"
    lines = [
        f" iteration {i * every:8d}/ 1000 | elapsed time per iteration (ms): {ms} |" for i, ms in enumerate(times_ms, 1)
    ]
    path.write_text("\n".join(lines) + "\n" + extra)
    return read_log(str(path))


def test_megatron_log_is_read():
    log = sample("megatron")
    assert log.framework == "megatron"
    assert len(log.steps) == 200
    assert log.stated.settings == {"gpus": 64, "global_batch": 256, "seq": 4096, "dtype": "bf16", "optimizer": "adam"}
    assert log.stated.plan == {
        "dp": 32, "tp": 2, "pp": 1, "cp": 1, "micro_batch": 1, "zero": 1, "overlap": "none", "recompute": "none",
    }  # fmt: skip
    assert log.stated.model == {"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008}
    assert log.timers["all-grads-sync"] == pytest.approx((0.12, 0.17))
    assert "save-checkpoint" not in log.timers
    assert [(e.kind, e.after_step, e.time_s) for e in log.events][:2] == [
        ("checkpoint", 50, 11.99), ("checkpoint", 100, 11.99),
    ]  # fmt: skip
    assert log.peak_memory_bytes == 24100.25 * 2**20
    assert log.tflops_per_gpu == pytest.approx(468.2, abs=1)


def test_megatron_series_has_its_spikes_and_the_time_between_steps():
    series = series_of(sample("megatron"), {})
    assert series.warmup_lines == 1
    assert series.median_s == pytest.approx(1.5, abs=0.003)
    assert series.spikes.numbers == (40, 80, 120, 160, 200)
    assert series.spikes.period == 40
    assert series.spikes.lost_s == pytest.approx(5 * 0.7 / 199, rel=0.03)
    assert series.outside_s == pytest.approx(3 * 12 / 198, abs=0.01)
    assert series.drift == 0.0


def test_deepspeed_log_is_read():
    log = sample("deepspeed")
    assert log.framework == "deepspeed"
    assert log.stated.settings == {"gpus": 8, "global_batch": 64, "dtype": "bf16", "optimizer": "adamw"}
    assert log.stated.plan == {"micro_batch": 2, "zero": 3, "overlap": "none"}
    assert log.timers["backward_allreduce"] == pytest.approx((0.5202, 0.5202))
    assert not any("microstep" in name for name in log.timers)
    assert log.peak_memory_bytes == pytest.approx(71.9 * 2**30)
    assert sum(event.kind == "allocator_retry" for event in log.events) == 6
    assert series_of(log, log.stated.settings).median_s == pytest.approx(4.0, abs=0.01)


def test_long_names_of_deepspeed_have_no_dots(tmp_path):
    """The dots fill names up to 29 characters; behind a longer one stand two spaces."""
    text = (DATA / "deepspeed.log").read_text()
    assert "train_micro_batch_size_per_gpu ... 2" in text
    path = tmp_path / "d.log"
    path.write_text(text.replace("train_micro_batch_size_per_gpu ... 2", "train_micro_batch_size_per_gpu  2"))
    assert read_log(str(path)).stated.plan["micro_batch"] == 2


def test_torchtitan_log_is_read_through_colours_and_ranks():
    log = sample("torchtitan")
    assert log.framework == "torchtitan"
    assert log.stated.settings == {"gpus": 8, "global_batch": 8, "seq": 8192}
    assert log.stated.plan == {"dp": 8, "zero": 3, "micro_batch": 1}
    assert set(log.rank_steps) == {0, 1}
    assert len(log.steps) == 60
    assert log.capacity_bytes == 79.10 * 2**30
    assert log.peak_memory_bytes == 77.01 * 2**30
    series = series_of(log, log.stated.settings)
    assert series.median_s == pytest.approx(1.45, abs=0.004)
    assert series.spikes.period == 10


def test_throughput_without_the_batch_falls_back_on_times_of_day():
    log = sample("torchtitan")
    series = series_of(log, {"seq": 8192})
    assert series.basis == "from times of day"
    assert series.median_s == pytest.approx(1.45, abs=0.01)


def test_new_mesh_line_and_ranks_without_prefix(tmp_path):
    path = tmp_path / "t.log"
    step = (
        "[titan] 2026-03-01 12:00:0{i},000 - root - INFO - step: {i}  loss: 2.0  memory: 10.0GiB(12.5%)  tps: 1,000\n"
    )
    mesh = "Building device mesh with parallelism: pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=1, etp=1\n"
    path.write_text(mesh + "".join(step.format(i=i) * 3 for i in range(1, 6)))
    log = read_log(str(path))
    assert len(log.steps) == 5
    assert log.stated.settings["gpus"] == 32
    assert {axis: log.stated.plan[axis] for axis in ("pp", "dp", "tp")} == {"pp": 2, "dp": 8, "tp": 2}
    assert log.capacity_bytes == pytest.approx(80 * 2**30)


def test_drift_is_seen_and_noise_is_not(tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(5):
        noise = 1000.0 + rng.normal(0, 150, 200)
        assert series_of(megatron_log(tmp_path, noise.tolist()), {}).drift == 0.0
    noise = 1000.0 + rng.normal(0, 30, 200)
    growing = noise + np.linspace(0, 200, 200)
    assert series_of(megatron_log(tmp_path, growing.tolist()), {}).drift == pytest.approx(0.2 / 1.1, rel=0.15)


def test_averaged_lines_stand_for_their_steps(tmp_path):
    series = series_of(megatron_log(tmp_path, [2000.0] + [1000.0] * 9, every=10), {})
    assert (series.steps, series.lines, series.warmup_lines) == (100, 10, 1)
    assert series.mean_s == 1.0


def test_timers_of_one_value_and_of_all_ranks(tmp_path):
    extra = (
        "max time across ranks (ms):\n    optimizer .......: 20.00\n"
        "times across ranks (ms):\n  forward-compute:\n     rank  0: 100.00\n     rank  1: 150.00\n"
        " iteration 9/ 1000 | elapsed time per iteration (ms): 1000.0 |\n"
    )
    timers = megatron_log(tmp_path, [1000.0] * 3, extra=extra).timers
    assert timers == {"optimizer": (0.02, 0.02), "forward-compute": (0.1, 0.15)}


def test_skipped_steps_count_only_once_the_scale_has_settled(tmp_path):
    path = tmp_path / "ds.log"
    step = (
        "[Rank 0] step={i}, skipped={s}, lr=[0.1], mom=[(0.9, 0.999)]\n"
        "epoch=0/micro_step={i}/global_step={i}, RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=8.0\n"
    )
    path.write_text("".join(step.format(i=i, s=min(i, 10) + max(0, i - 190)) for i in range(1, 201)))
    assert read_log(str(path)).skipped_steps == 10


BAD = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \n", "is empty"),
    "binary": (b"\x00\x01\x02", "is binary"),
    "utf16": (" iteration 1/ 9 |\n".encode("utf-16"), "is UTF-16 text\n  save it as UTF-8"),
    "prose": (b"hello world\n", "none with the time of a step"),
    "zero": (b" iteration 1/ 9 | elapsed time per iteration (ms): 0.0 |\n", "no usable time"),
    "nan": (b" iteration 1/ 9 | elapsed time per iteration (ms): nan |\n", "no usable time"),
    "huge": (b" iteration 1/ 9 | elapsed time per iteration (ms): 1e99 |\n", "no usable time"),
    "rubbish": (b"\xff\xfe\xfd" * 500, "no UTF-8 text"),
}  # fmt: skip


@pytest.mark.each("name", BAD)
def test_bad_logs_give_one_message(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as caught:
        assert kind_of(str(path)) == "log"
        read_log(str(path))
    assert str(caught.value).startswith(str(path))


def test_throughput_alone_names_the_options_that_are_missing(tmp_path):
    path = tmp_path / "t.log"
    path.write_text("step: 1  loss: 2.0  tps: 100\nstep: 2  loss: 2.0  tps: 100\n")
    with pytest.raises(InputFileError, match="--global-batch and --gpus"):
        series_of(read_log(str(path)), {"seq": 4096})


def test_a_cut_off_gzip_gives_what_was_read(tmp_path):
    path = tmp_path / "m.log.gz"
    whole = gzip.compress((DATA / "megatron.log").read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    log = read_log(str(path))
    assert 20 < len(log.steps) < 200
    assert "cut off" in log.warnings[-1]


def test_what_is_given_wins_and_contradictions_are_named():
    stated = Stated(settings={"gpus": 64, "seq": 4096, "dtype": "bf16", "optimizer": "adam"},
                    plan={"tp": 2, "dp": 32, "zero": 1})  # fmt: skip
    job = merged({"gpus": 32, "optimizer": "adamw"}, {"tp": 2}, stated)
    assert job.settings == {"gpus": 32, "seq": 4096, "dtype": "bf16", "optimizer": "adamw"}
    assert job.plan == {"tp": 2, "zero": 1}
    assert job.contradictions == ("gpus is given as 32, but the run says 64",)
    assert job.filled == ("seq 4096", "dtype bf16", "zero 1")


def test_the_model_is_compared_by_its_dimensions():
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008}
    assert catalogue_model(sizes) == "llama2-7b"
    assert catalogue_model({"layers": 32}) is None
    assert catalogue_model({**sizes, "layers": 31}) is None
    wrong = model_contradictions(load_catalogue_model("llama2-13b"), sizes)
    assert "llama2-13b has layers 40, but the run says 32" in wrong


def test_one_halt_is_not_time_that_every_step_waits(tmp_path: Path) -> None:
    """Ten hours between two steps were 360 s between any two of them, for which more data workers were advised."""
    lines = []
    for i in range(1, 101):
        at = datetime(2025, 3, 1, 10) + timedelta(seconds=4.65 * i + (36000 if i >= 50 else 0))
        lines.append(f" [{at:%Y-%m-%d %H:%M:%S}] iteration {i:8d}/ 500 | elapsed time per iteration (ms): 4600.0 |")
    path = tmp_path / "x.log"
    path.write_text("\n".join(lines) + "\n")
    log = read_log(str(path))
    series = series_of(log, {})
    assert series.outside is not None and series.outside.rest_s == pytest.approx(0.05, abs=0.02)
    (found,) = log_findings(log, series, ())
    assert (found.code, found.title) == ("halt", "the job stood still once, for 10 h, before step 50")
    assert found.lost_s is None
    assert not any("worker" in line for line in found.advice)
    waiting = replace(series.outside, rest_s=0.5)
    assert [f.code for f in log_findings(log, replace(series, outside=waiting), ())] == ["halt", "outside"]


@pytest.mark.parametrize(("batch", "told"), [(64, False), (96, True)])
def test_a_batch_of_deepspeed_that_its_own_parts_contradict_is_told(tmp_path, batch, told):
    path = tmp_path / "ds.log"
    path.write_text((DATA / "deepspeed.log").read_text().replace("train_batch_size ............. 64",
                                                                 f"train_batch_size ... {batch}"))  # fmt: skip
    log = read_log(str(path))
    assert log.stated.settings["global_batch"] == batch
    notes = [note for note in log.warnings if "contradicts itself: train_batch_size 96 is not" in note]
    assert bool(notes) == told and all(
        "per_gpu 2 x gradient_accumulation_steps 4 x world_size 8 = 64" in n for n in notes
    )
