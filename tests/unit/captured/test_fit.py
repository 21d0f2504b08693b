"""Each technique of `steptime fit` saves and costs what it should on a small captured model; answers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

pytest.importorskip("torch")

import itertools

import steptime
from steptime.captured.fit.bench import Bench, gradient_bytes, state_bytes
from steptime.captured.fit.captured import Captured
from steptime.captured.fit.choice import Checkpoints, Choice, Point, front_of, thinned
from steptime.captured.fit.driver import cheapest_of
from steptime.captured.fit.estimated import Estimated
from steptime.captured.fit.techniques import TECHNIQUES, Change, Step
from steptime.captured.fitting import fit
from steptime.captured.report.fit import SHOWN, print_fit, telling
from steptime.errors import UserError
from steptime.hardware import load_device
from steptime.search.modes import MODES

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/gpt.py"


@pytest.fixture(scope="module")
def engine() -> Captured:
    bench = Bench(text=f"{EXAMPLE}:tiny", device=load_device("rtx-3090"))
    return Captured(bench=bench, batch=8, host_Bps=20e9, allow=Change.TRAINING)


def with_checkpoints(engine: Captured, choice: Choice, key: str) -> Choice:
    found = [one for one in engine.checkpoints(choice.precision, choice.micro_batch) if one.key == key]
    return replace(choice, checkpoints=found[0])


def test_fused_optimizer_has_no_temporaries(engine: Captured) -> None:
    default, fused = (engine.verified(engine.plain("fp32", name)) for name in ("default", "fused"))
    gradients = gradient_bytes(engine.bench.run("fp32", 8).program)
    assert default.phases_bytes["optimizer"] - fused.phases_bytes["optimizer"] == pytest.approx(gradients, rel=0.01)
    assert fused.step_s < default.step_s
    assert default.phases_bytes["passes"] == fused.phases_bytes["passes"]


def test_states_leave_or_shrink(engine: Captured) -> None:
    program = engine.bench.run("fp32", 8).program
    fused, narrow, paged, offload = (
        engine.proposed(engine.plain("fp32", name)) for name in ("fused", "8bit", "paged", "offload")
    )
    assert fused.memory_bytes - paged.memory_bytes == state_bytes(program)
    assert fused.memory_bytes - narrow.memory_bytes == state_bytes(program) - state_bytes(program, "8bit")
    assert paged.memory_bytes == offload.memory_bytes
    assert paged.step_s - fused.step_s == pytest.approx(2 * state_bytes(program) / 20e9)


def test_a_tiny_module_keeps_its_optimiser_on_the_device(engine: Captured) -> None:
    """Each of its tensors crosses twice and is updated by a call of its own: longer than one fused kernel."""
    fused, offload = (engine.proposed(engine.plain("fp32", name)) for name in ("fused", "offload"))
    tensors = sum(one.trained for one in engine.bench.run("fp32", 8).program.parameters)
    assert offload.step_s - fused.step_s > (3 * tensors - 2) * engine.bench.timer("fp32").host_s > 0


@pytest.mark.slow
def test_accumulation_takes_less_memory_and_more_launches(engine: Captured) -> None:
    whole = engine.plain("fp32", "fused")
    points = [engine.verified(replace(whole, micro_batch=micro)) for micro in (8, 4, 2, 1)]
    assert [p.choice.accumulation for p in points] == [1, 2, 4, 8]
    assert all(b.memory_bytes < a.memory_bytes and b.step_s > a.step_s for a, b in itertools.pairwise(points))


@pytest.mark.quick(without=["all", "groups", "optimal"])
@pytest.mark.parametrize("key", ["all", "every", "groups", "selective", "optimal", "8bit-activations"])
def test_checkpoints_trade_time_for_memory(engine: Captured, key: str) -> None:
    plain = engine.verified(engine.plain("fp32", "fused"))
    proposed = engine.proposed(with_checkpoints(engine, engine.plain("fp32", "fused"), key))
    one = engine.verified(proposed.choice, proposed)
    assert one.memory_bytes < plain.memory_bytes
    assert one.step_s > plain.step_s
    assert one.basis == "capture"
    assert one.proposed_bytes == pytest.approx(one.memory_bytes, rel=0.01)


def test_swapping_frees_memory_and_is_exposed_on_a_slow_link(engine: Captured) -> None:
    plain = engine.proposed(engine.plain("fp32", "fused"))
    choice = replace(engine.plain("fp32", "fused"), swapped=0.75)
    one = engine.proposed(choice)
    slow = Captured(bench=engine.bench, batch=8, host_Bps=1e9).proposed(choice)
    assert one.memory_bytes < plain.memory_bytes
    assert one.basis == "simulation"
    assert slow.step_s > one.step_s >= plain.step_s


def test_precisions_follow_the_device(engine: Captured) -> None:
    assert engine.precisions == ("fp32", "tf32", "bf16", "pure-bf16")
    old = Captured(bench=replace_device(engine, "p100-pcie-16gb"), batch=8, host_Bps=20e9)
    assert "bf16" not in old.precisions
    exact = Captured(bench=engine.bench, batch=8, host_Bps=20e9, allow=Change.NONE)
    assert exact.precisions == ("fp32",)
    assert "8bit" not in exact.optimizers
    pure, mixed = (engine.proposed(engine.plain(name, "fused")) for name in ("pure-bf16", "bf16"))
    assert pure.memory_bytes < mixed.memory_bytes


def replace_device(engine: Captured, name: str) -> Bench:
    return Bench(text=engine.bench.text, device=load_device(name))


def test_micro_batches_divide_the_batch(engine: Captured) -> None:
    def of(batch: int) -> tuple[int, ...]:
        return Captured(bench=engine.bench, batch=batch, host_Bps=20e9).micro_batches

    assert of(8) == (8, 4, 2, 1)
    assert of(12) == (12, 6, 3, 1)
    assert of(7) == (7, 1)
    assert of(1) == (1,)


# -- answers ----------------------------------------------------------------------------------------------------------


def point(step_s: float, memory: float, *, fits: bool = True, risk: float = 0.0, **choice: Any) -> Point:
    return Point(
        choice=Choice(batch=8, **{"micro_batch": 8, **choice}), step_s=step_s, bracket_s=(step_s, step_s), band_s=None,
        memory_bytes=memory, reserved_bytes=memory, device_bytes=memory, fits=fits, oom_probability=risk,
        basis="capture",
    )  # fmt: skip


def test_the_front_by_hand() -> None:
    a, b, c, d = point(1, 10), point(2, 8), point(3, 9), point(4, 5)
    assert front_of([d, c, b, a]) == (a, b, d)
    assert thinned((a, point(2, 9.9), b, d)) == (a, b, d)
    assert thinned((a, last := point(2, 9.9)), 0.1) == (a, last)
    assert thinned((a, b, last := point(3, 7.9)), 0.1) == (a, last)


def test_points_that_take_as_much_on_the_device_are_not_shown() -> None:
    context = 1400.0
    tiny = [replace(point(t, m), device_bytes=context + m) for t, m in ((1, 91), (2, 30), (4, 15), (8, 8), (16, 4))]
    assert telling(tiny) == tiny[:2]
    last = [replace(point(t, 99.5 - t, fits=t > 1), device_bytes=99.5 - t) for t in (1, 2)]
    assert telling(last) == last, "the first that fits is shown, however little it saves"
    many = [point(2.0**n, 2.0**-n) for n in range(30)]
    assert len(telling(many)) == SHOWN and telling(many)[0] == many[0] and telling(many)[-1] == many[-1]
    assert telling(many[:1]) == many[:1]


def test_what_the_user_did_not_allow_is_told_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for allow, told in (("rounding", True), ("training", False)):
        print_fit(fit("llama3-70b", "rtx-4090", batch=1, allow=allow))
        shown = " ".join(capsys.readouterr().out.split())
        assert "nothing fits" in shown and ("--allow training): products in fp8" in shown) == told


def test_of_points_as_good_as_equal_the_safe_and_simple_one_is_taken() -> None:
    fast, risky = point(1.0, 9, optimizer="8bit"), point(0.999, 10, risk=0.4)
    simple, slow = point(1.005, 9), point(1.2, 3)
    assert cheapest_of([fast, risky, simple, slow]) is simple
    assert cheapest_of([risky, slow]) is risky
    assert cheapest_of([point(1, 9, fits=False), point(2, 4, fits=False)]).memory_bytes == 4


def test_every_technique_is_described() -> None:
    assert {one.step for one in TECHNIQUES.values()} == set(Step)
    for key, one in TECHNIQUES.items():
        assert one.key == key
        assert one.settings and one.memory and one.time and one.numerics
        words = {word for text in one.settings.values() for _, word, *_ in Formatter().parse(text)} - {None}
        assert words <= {"device_type", "micro", "count", "batch", "k", "segments", "tree", "rank", "targets"}


def test_settings_are_filled_in() -> None:
    groups = Checkpoints(key="groups", name="groups of 3", values=(("k", "3"), ("segments", "4")))
    choice = Choice(precision="bf16", optimizer="8bit", batch=8, micro_batch=2, checkpoints=groups)
    assert choice.keys == ("bf16", "groups", "accumulation", "8bit-optimizer")
    assert choice.changes is Change.ROUNDING
    said = choice.settings("cuda")
    assert said["accumulation"]["Hugging Face"] == "per_device_train_batch_size=2, gradient_accumulation_steps=4"
    assert said["groups"]["PyTorch"].startswith("torch.utils.checkpoint.checkpoint_sequential(blocks, 4, x")
    assert said["8bit-optimizer"]["Hugging Face"] == 'optim="adamw_bnb_8bit"'


def test_a_model_by_its_dimensions() -> None:
    result = fit("llama3-8b", "h100-sxm", batch=8)
    assert result.captures == 0
    assert result.fits and result.cheapest is not None
    assert "offload-optimizer" in result.cheapest.choice.keys
    assert result.cheapest.band_s is not None
    assert not result.baseline.fits
    steps = [one.step for one in result.guide]
    assert steps == [step for step in Step if step in steps]
    assert next(one.added for one in result.guide) == ("bf16",)


def test_where_nothing_fits_the_least_and_what_is_missing_are_told() -> None:
    result = fit("llama3-70b", "rtx-4090", batch=1)
    assert not result.fits
    assert result.missing_bytes == pytest.approx(result.least.device_bytes - result.capacity_bytes)
    record = result.to_json()
    assert record["fits"] is False and record["cheapest"] is None and record["missing_bytes"] > 0


def test_adapters_only_where_training_may_change() -> None:
    usual, all_allowed = (
        fit("llama3-8b", "rtx-4090", batch=1, seq=1024, allow=name) for name in ("rounding", "training")
    )
    assert not any("qlora" in p.choice.keys for p in usual.front)
    assert any("qlora" in p.choice.keys for p in all_allowed.front)
    assert all_allowed.least.memory_bytes < usual.least.memory_bytes


def test_products_of_four_bit_weights_run_in_sixteen() -> None:
    device = load_device("h100-sxm")
    engine = Estimated(
        make=lambda kind: pytest.fail(f"{kind} is evaluated"), strategy=MODES["corrected"].method.strategies["1d"],
        batch=8, matrix_dtypes=frozenset(device.matrix_flops_per_s), allow=Change.TRAINING,
    )  # fmt: skip
    assert {"tf32", "fp8-te"} <= set(engine.precisions)
    assert {kind.precision for kind in engine.kinds() if kind.weights == "qlora"} == {"bf16"}
    (reason,) = engine.left_out
    assert "adapters on frozen 4-bit weights are not combined with TF32 products or products in fp8: " in reason
    found = fit("llama3-8b", "h100-sxm", batch=1, seq=1024, allow="training")
    assert found.notes[1:] == (reason,)
    assert not any({"fp8", "qlora"} <= set(point.choice.keys) for point in found.front)
    assert replace(engine, allow=Change.ROUNDING).left_out == ()
    assert fit("llama3-8b", "h100-sxm", batch=1, seq=1024).notes == found.notes[:1]


def test_two_names_of_an_optimiser_cost_the_same() -> None:
    first, second = (fit("llama3-8b", "h100-sxm", batch=1, optimizer=name) for name in ("sgd-momentum", "momentum"))
    assert first.cheapest == second.cheapest and first.front == second.front
    plan = {"tp": 8}
    one, other = (
        steptime.api.estimate("llama3-8b", "dgx-h100", gpus=8, plan=plan, optimizer=name)
        for name in ("sgd-momentum", "momentum")
    )
    assert one == other


def test_the_link_to_the_host_is_the_devices_or_the_given_one() -> None:
    """A copy over a link of a tenth of the rate takes ten times as long, for a model that is estimated too."""
    own, slow = fit("gpt2", "h100-sxm", batch=32), fit("gpt2", "h100-sxm", batch=32, host_bandwidth_Bps=4e9)
    assert (own.host_Bps, slow.host_Bps) == (40e9, 4e9)
    assert "datasheet: NVIDIA H100" in own.provenance["host_bandwidth"]
    assert "(assumed: given)" in slow.provenance["host_bandwidth"]
    hosted = [next(one for one in result.guide if one.step is Step.HOST) for result in (own, slow)]
    assert hosted[1].after.step_s > hosted[0].after.step_s


@pytest.mark.each(
    ("given", "message"),
    [
        ({"batch": 0}, "batch"), ({"allow": "all"}, "allow"), ({"host_bandwidth_Bps": -1.0}, "host_bandwidth"),
        ({"optimizer": "adamw-loop"}, "optimizer: adamw-loop is for a module that is captured"),
        ({"optimizer": "adamm"}, "optimizer"), ({"inputs": ["8x4"]}, "inputs"), ({"seq": "x"}, "seq"),
        ({"optimizer": ["adamw"]}, "optimizer"),
    ],
)  # fmt: skip
def test_wrong_input_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit("llama3-8b", "h100-sxm", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": 8}, "inputs: 8 is not a list of texts"), ({"inputs": [8]}, "inputs: .* is not a list of texts"),
        ({"optimizer": ["adamw"]}, "optimizer: .* is not a text"),
        ({"inputs": "0x3"}, "its inputs hold no sample: their leading dim is 0"),
    ],
)  # fmt: skip
def test_wrong_input_of_a_captured_module_is_told(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """Halves of no sample would never end."""
    (tmp_path / "line.py").write_text("from torch import nn\n\ndef line():\n    return nn.Linear(3, 3)\n")
    with pytest.raises(UserError, match=message):
        fit(f"{tmp_path}/line.py:line", "h100-sxm", **given)
