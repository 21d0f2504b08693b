"""Frameworks: what their parameters do, whether a fit finds them again, the file, and the band of what is unknown."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fits import STACKS, fit_text
from steptime import api
from steptime.errors import FieldError, UserError
from steptime.estimate.band import band_of as step_band
from steptime.estimate.communication import boundary_times_s, collective_over, message_time_s
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.kernels import models_of, of_device
from steptime.hardware import load_device
from steptime.measure.runs.bands import Band, left_out_both, packaged, to_toml
from steptime.measure.runs.fitting import (
    APART,
    BUSY_COLUMNS,
    DEVICE_SPREAD,
    PARAMETERS,
    Fitted,
    FrameworkFit,
    device_spread,
    framework_of,
)
from steptime.measure.runs.reading import read_runs
from steptime.measure.runs.samples import Modelled, Setting, modelled, settings_of
from steptime.num import Array
from steptime.plan.framework import BUSY, IDEAL, NORMAL_95, SHARES, Framework, kernel_factor, widening
from steptime.plan.framework import PARAMETERS as NAMES
from steptime.plan.framework_file import FIT, framework_names, framework_table, habits_of, load_framework
from steptime.plan.job import PRECISIONS
from steptime.schema import checked

PUBLISHED = Path(__file__).parents[2] / "data" / "published_runs.csv"
UNKNOWN = "unheard-of"


@pytest.fixture(autouse=True)
def only_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("STEPTIME_PATH", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield


@pytest.fixture(scope="module")
def runs() -> Modelled:
    """Every third published run."""
    return modelled(read_runs(PUBLISHED).timed[::3])


@pytest.fixture(scope="module")
def settings() -> list[Setting]:
    """The likeliest setting of every fifth published run, and of those that exchange contexts between many ranks."""
    timed = read_runs(PUBLISHED).timed
    context = [run for run in timed if run.degrees is not None and run.degrees.cp > 2]
    return [settings_of(run)[0] for run in [*timed[::5], *context]]


def truth(fit: FrameworkFit, seed: int) -> Fitted:
    """Parameters drawn as a fit believes them: common ones, what frameworks add, factors of devices."""
    draw = np.random.default_rng(seed)
    common = np.array([p.inward(p.prior) + 0.7 * p.doubt * draw.uniform(-1, 1) for p in PARAMETERS])
    own = {name: np.array([p.spread for p in PARAMETERS]) * draw.uniform(-1, 1, len(PARAMETERS)) for name in fit.names}
    none = np.zeros(len(PARAMETERS))
    return Fitted(
        common=common, frameworks=own, common_doubt=none, framework_doubts=dict.fromkeys(fit.names, none),
        devices={name: device_spread(name) * draw.uniform(-1, 1, len(BUSY)) for name in fit.device_names},
        device_doubts=dict.fromkeys(fit.device_names, 0.0), rounds=0,
    )  # fmt: skip


def measured_as(fit: FrameworkFit, fitted: Fitted) -> FrameworkFit:
    """The same runs with the times that the parameters give."""
    return FrameworkFit(fit.samples, replace(fit.runs, measured_s=np.exp(fit.log_s(fitted))))


def everything(fit: FrameworkFit) -> Array:
    return np.ones(fit.count, dtype=bool)


@pytest.mark.quick(without=["1"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_fit_finds_known_parameters_again(runs: Modelled, seed: int) -> None:
    """Of runs that follow the model without noise; what they do not tell stays in doubt, and says so."""
    known = truth(runs.fit, seed)
    fit = measured_as(runs.fit, known)
    start = replace(known, common=np.array([p.inward(p.prior) for p in PARAMETERS]), frameworks={}, devices={})
    before = np.abs(fit.log_s(start) - fit.log_measured)
    fitted = fit.fit(everything(fit))
    after = np.abs(fit.log_s(fitted) - fit.log_measured)
    assert np.median(after) < 0.02 < np.median(before) and np.quantile(after, 0.95) < 0.1
    assert after.mean() < before.mean() / 3
    scaled = [
        (known.columns(name, UNKNOWN) - fitted.columns(name, UNKNOWN)) / fitted.framework_doubts[name]
        for name in fit.names
    ]
    assert np.mean(np.abs(scaled) < 2) > 0.9, "doubts are honest"
    matrix = [p.name for p in PARAMETERS].index("matrix")
    assert fitted.common_doubt[matrix] < PARAMETERS[matrix].doubt, "what the runs tell is in doubt less than before"


@pytest.mark.slow
def test_a_framework_that_is_far_from_the_others_pulls_the_common_values_less(
    runs: Modelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose products take eight times as long is another kind of software, not news of all."""
    matrix = [p.name for p in PARAMETERS].index("matrix")
    known = truth(runs.fit, 1)
    name = str(runs.fit.runs.framework[0])
    far = known.frameworks[name].copy()
    far[matrix] += np.log(8.0)
    fit = measured_as(runs.fit, replace(known, frameworks={**known.frameworks, name: far}))
    near = measured_as(runs.fit, known).fit(everything(runs.fit)).common[matrix]
    pulled = fit.fit(everything(fit)).common[matrix] - near
    monkeypatch.setattr("steptime.measure.runs.fitting.APART", 1e9)
    pulled_evenly = fit.fit(everything(fit)).common[matrix] - near
    assert 0 <= pulled < 0.6 * pulled_evenly


def test_what_is_believed_of_frameworks_is_the_slope_of_a_pseudo_huber_loss(runs: Modelled) -> None:
    own, step = slice(len(PARAMETERS), len(PARAMETERS) * (1 + len(runs.fit.names))), 1e-6
    spread = np.tile([p.spread for p in PARAMETERS], len(runs.fit.names))
    theta = np.random.default_rng(0).normal(size=runs.fit.values)
    below, above = (2 * APART**2 * np.hypot(1, (theta[own] + s) / (APART * spread)) for s in (-step, step))
    slope = (above - below) / (2 * step)
    assert 2 * np.diag(runs.fit._trust(theta))[own] * theta[own] == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_a_fit_without_runs_is_what_was_believed(runs: Modelled) -> None:
    fitted = runs.fit.fit(np.zeros(runs.fit.count, dtype=bool))
    assert fitted.common == pytest.approx([p.inward(p.prior) for p in PARAMETERS])
    assert all(not own.any() for own in fitted.frameworks.values())
    assert fitted.common_doubt == pytest.approx([np.hypot(p.doubt, p.spread) for p in PARAMETERS])


@pytest.mark.slow
def test_runs_that_are_left_out_have_no_say(runs: Modelled) -> None:
    fit = runs.fit
    wrong = FrameworkFit(fit.samples, replace(fit.runs, measured_s=fit.runs.measured_s * np.where(
        fit.runs.source == fit.runs.source[0], 3.0, 1.0)))  # fmt: skip
    used = fit.runs.source != fit.runs.source[0]
    one, other = fit.fit(used), wrong.fit(used)
    assert one.common == pytest.approx(other.common, abs=1e-9)


def test_unknown_frameworks_and_devices_add_nothing_and_are_doubted_more(runs: Modelled) -> None:
    fitted = runs.fit.fit(everything(runs.fit))
    name, device = str(runs.fit.runs.framework[0]), str(runs.fit.runs.device[0])
    assert np.array_equal(fitted.columns(None, UNKNOWN), fitted.common)
    assert np.array_equal(fitted.columns(UNKNOWN, UNKNOWN), fitted.common)
    assert (fitted.doubts(UNKNOWN, device)[0] > 0.9 * fitted.doubts(name, device)[0]).all()
    assert fitted.doubts(name, UNKNOWN)[1] == DEVICE_SPREAD >= fitted.doubts(name, device)[1]
    named, unnamed = (runs.fit.deviations(fitted, named=known) for known in (True, False))
    assert np.mean(unnamed > named) > 0.95


def test_texts_of_the_file_are_escaped(runs: Modelled) -> None:
    fitted, band = runs.fit.fit(everything(runs.fit)), Band(low=-1.5, high=2.25)
    source, odd = 'runs of "A"\\B,\nboth', 'my "own" C:\\stack'
    fitted = replace(
        fitted, frameworks={odd: fitted.common}, framework_doubts={odd: fitted.common_doubt},
        devices={odd: np.zeros(len(BUSY))}, device_doubts={odd: 0.1},
    )  # fmt: skip
    table = tomllib.loads(to_toml(fitted, named=band, generic=band, provenance={"source": source}, runs={odd: 1}))
    assert table["provenance"]["source"] == source
    assert list(table["framework"]) == [odd] == list(table["device"]) and "doubts" in table["framework"][odd]


def test_the_file_holds_the_fit(runs: Modelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, found on the search path and read, to the digits of the file; each framework as the fit has it."""
    fitted = runs.fit.fit(everything(runs.fit))
    bands = Band(low=-1.5, high=2.25), Band(low=-1.75, high=2.5)
    text = to_toml(fitted, named=bands[0], generic=bands[1], provenance={"source": "a test", "rows": 3})
    (tmp_path / "frameworks.toml").write_text(text)
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    back, read_bands = packaged()
    assert read_bands == bands and framework_names() == ["ideal", "generic", *sorted({*runs.fit.names, *STACKS})]
    for kind in ("frameworks", "devices", "framework_doubts", "device_doubts"):
        own, other = getattr(fitted, kind), getattr(back, kind)
        assert set(own) == set(other)
        assert all(np.allclose(own[key], other[key], rtol=1e-3, atol=2e-4) for key in own)
    for name, device in ((runs.fit.names[0], runs.fit.device_names[0]), (runs.fit.names[-1], UNKNOWN)):
        expected = framework_of(fitted.columns(name, device), name)
        loaded = load_framework(name, device)
        kernel = kernel_factor(habits_of(name).kernel, device)
        expected = replace(expected, attention=expected.attention * kernel)
        for parameter in NAMES:
            assert getattr(loaded, parameter) == pytest.approx(getattr(expected, parameter), rel=1e-3)
        assert loaded.spread is not None and loaded.spread.source == "a test"
        assert loaded.spread.device_doubt == pytest.approx(fitted.doubts(name, device)[1], rel=1e-3)


def test_the_file_of_the_package_is_whole() -> None:
    table = framework_table()
    checked(table, FIT, "f.toml")
    assert {*table["framework"]} >= {"megatron-core", "torchtitan"} and {*table["device"]} >= {"h100-sxm"}
    assert table["provenance"]["rows"] >= 1000
    broken = {**table, "common": {**table["common"], next(iter(SHARES)): 1.5}}
    with pytest.raises(FieldError, match=r"common\.data_exposed: 1\.5 is not a number from"):
        checked(broken, FIT, "f.toml")
    broken = {**table, "device": {"x": {"matrix": True, "attention": 1.0, "doubt": 1.0}}}
    with pytest.raises(UserError, match=r"device\.x\.matrix: True is not a number(?s:.*)device\.x\.narrow: is missing"):
        checked(broken, FIT, "f.toml")


def test_a_file_from_before_a_parameter_has_it_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[Setting]
) -> None:
    later = ("growth", "stage_links", "data_exposed", "narrow")
    text = fit_text()
    assert text.count("growth = ") > 4
    kept = [line for line in text.splitlines() if line.partition(" = ")[0] not in later]
    (tmp_path / "frameworks.toml").write_text("\n".join(kept))
    whole = load_framework("megatron-core", "h100-sxm")
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    old = load_framework("megatron-core", "h100-sxm")
    bare = replace(whole, **{name: getattr(IDEAL, name) for name in later})
    for setting in settings[::5]:
        times = [float(setting.evaluate(framework).step_time_s) for framework in (old, bare)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
        assert width(setting.evaluate(old)) > 0
    assert np.isfinite(packaged()[0].common).all()
    counts = [
        line for line in text.splitlines() if not line.startswith(("sources = ", "unknown_sources", "experts = "))
    ]
    (tmp_path / "frameworks.toml").write_text("\n".join([*counts, ""]))
    spread = load_framework("megatron-core", UNKNOWN).spread
    assert spread is not None and spread.widening == 1 and spread.experts < 1e-9


def test_a_band_that_is_no_number_has_an_end(settings: list[Setting]) -> None:
    setting = settings[0]
    framework = doubted(load_framework("generic", "h100-sxm"), high=1e9, low=-1e9)
    band = step_band(setting.evaluate(framework))
    assert band is not None and 0 <= band.low_s < band.high_s < float("inf")


def test_a_framework_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no framework 'megatron-cor'(?s:.*)megatron-core"):
        load_framework("megatron-cor", "h100-sxm")
    assert load_framework("ideal", "h100-sxm") is IDEAL
    generic = load_framework("generic", UNKNOWN)
    common = framework_table()["common"]
    slower = dict.fromkeys(("matrix", "vector", "attention"), framework_table()["generic"]["slower"])
    assert all(getattr(generic, name) == pytest.approx(common[name] * slower.get(name, 1.0)) for name in NAMES)


def width(e: Evaluation) -> float:
    band = step_band(e)
    assert band is not None and band.low_s < e.step_time_s < band.high_s
    assert sum(band.shares.values()) == pytest.approx(1)
    return float(np.log(band.high_s / band.low_s))


def doubted(framework: Framework, **changes: object) -> Framework:
    assert framework.spread is not None
    return replace(framework, spread=replace(framework.spread, **changes))  # type: ignore[arg-type]


def test_a_band_is_wider_for_what_is_doubted_more(settings: list[Setting]) -> None:
    framework = load_framework("megatron-core", "h100-sxm")
    assert framework.spread is not None
    spread = framework.spread
    for setting in settings[::6]:
        plain = width(setting.evaluate(framework))
        assert width(setting.evaluate(doubted(framework, device_doubt=2 * spread.device_doubt))) > plain
        assert width(setting.evaluate(doubted(framework, noise=2 * spread.noise))) > plain
        assert width(setting.evaluate(doubted(framework, widening=2 * spread.widening))) == pytest.approx(2 * plain)
        mixed = width(setting.evaluate(doubted(framework, experts=2 * spread.experts)))
        assert mixed == plain if setting.job.model.experts is None else mixed > plain
        for name in NAMES:
            more = dict(spread.doubts) | {name: 2 * spread.doubts[name]}
            assert width(setting.evaluate(doubted(framework, doubts=more))) >= plain * (1 - 1e-9)


def test_a_band_is_wider_where_few_sources_have_measured(runs: Modelled, settings: list[Setting]) -> None:
    """As Student's quantile beside the normal one, in the fit's own deviations as in the band of an estimate."""
    assert [round(NORMAL_95 * widening(n), 2) for n in (0, 1, 4)] == [2.88, 2.35, 1.94]  # t: 2.92, 2.35, 1.94
    fit, source = runs.fit, runs.fit.runs.source
    device = str(fit.runs.device[0])
    fitted = fit.fit(everything(fit))
    assert fitted.device_sources[device] == len(set(source[fit.runs.device == device]))
    assert fit.fit(source == source[0]).device_sources[device] == 1
    alone = replace(fitted, device_sources=dict(fitted.device_sources) | {device: 0.0})
    ratio = fit.deviations(alone) / fit.deviations(fitted)
    own = fit.runs.device == device
    assert np.allclose(ratio[own], widening(0) / widening(fitted.device_sources[device])) and (ratio[~own] == 1).all()
    known, unknown = (load_framework("megatron-core", d).spread for d in ("h100-sxm", UNKNOWN))
    assert known is not None and unknown is not None and 1 < known.widening < unknown.widening == widening(0)


def test_models_with_experts_are_doubted_more(runs: Modelled) -> None:
    fitted = runs.fit.fit(everything(runs.fit))
    plain = FrameworkFit(runs.fit.samples, replace(runs.fit.runs, experts=np.zeros(runs.fit.count, dtype=bool)))
    mixed = np.array([run.model.experts is not None for run in runs.runs])
    assert 0 < mixed.sum() < len(mixed) and np.array_equal(runs.fit.runs.experts, mixed)
    more = runs.fit.deviations(fitted) > plain.deviations(fitted)
    assert np.array_equal(more, mixed)


def test_messages_between_stages_are_scattered_without_sequence_shards(settings: list[Setting]) -> None:
    """Each of 8 ranks sends an eighth, and 8 ranks gather the whole; with sequence shards each has its part already."""
    s = next(s for s in settings if s.machine.fabric is not None and s.machine.fast_domain >= 8)
    plans, size = replace(s.plans, tp=8, in_tp=8, sp=0), 64e6
    whole, parts = (replace(s.job, scattered_messages=scattered) for scattered in (False, True))
    gather_s = collective_over("all_gather", s.machine, size, 8, 8)
    near_s, far_s = message_time_s(s.machine, size / 8)
    assert boundary_times_s(whole, s.machine, plans, size) == message_time_s(s.machine, size)
    assert boundary_times_s(parts, s.machine, plans, size) == pytest.approx((near_s + gather_s, far_s + gather_s))
    assert far_s + gather_s < message_time_s(s.machine, size)[1]
    shards = replace(plans, sp=1)
    assert boundary_times_s(parts, s.machine, shards, size) == message_time_s(s.machine, size)
    assert habits_of("megatron").scattered_messages and not habits_of("torchtitan").scattered_messages


def test_a_band_is_wider_without_a_known_framework_or_device(settings: list[Setting]) -> None:
    """With the same quantiles of residuals, which depend on what was measured."""
    known = load_framework("megatron-core", "h100-sxm")
    assert known.spread is not None
    quantiles = {"low": known.spread.low, "high": known.spread.high}
    generic = doubted(load_framework("generic", "h100-sxm"), **quantiles)
    foreign = load_framework("megatron-core", UNKNOWN)
    pairs = [[width(s.evaluate(f)) for f in (known, generic, foreign)] for s in settings[::3]]
    plain, unnamed, unknown = np.array(pairs).T
    assert np.mean(unnamed > plain) > 0.9 and unnamed.mean() > 1.1 * plain.mean()
    assert np.mean(unknown > plain) > 0.7 and unknown.mean() > plain.mean()


@pytest.mark.quick("matrix", "host_s", "data_exposed", "stage_links")
@pytest.mark.each("name", NAMES)
def test_no_parameter_makes_a_step_faster(settings: list[Setting], name: str) -> None:
    """Every one is a factor on a time, a share that is exposed, or seconds; somewhere each matters."""
    common = load_framework("generic", UNKNOWN)
    value = float(getattr(common, name))
    more = replace(common, **{name: value + (1 - value) / 2 if name in SHARES else 2 * value})
    change = np.array([
        float(s.evaluate(more).step_time_s) / float(s.evaluate(common).step_time_s) for s in settings
    ])  # fmt: skip
    assert change.min() >= 1 - 1e-12 and change.max() > 1 + 1e-6
    assert change.max() <= 2.2, "twice one part of a step is at most twice the step"


def test_narrow_products_alone_are_narrow(settings: list[Setting]) -> None:
    """A factor on them leaves runs in 16 bits as they are, and costs the others at most what their products take."""
    for setting in settings:
        e = setting.evaluate()
        slow = float(setting.evaluate(replace(IDEAL, narrow=3.0)).step_time_s) / float(e.step_time_s)
        work = e.works["layer"]["forward"]
        assert 0 <= float(work.narrow_s) <= float(work.matrix_s) * (1 + 1e-12)
        if setting.job.precision.matrix_dtype in ("fp8", "fp4"):
            assert float(work.narrow_s) > 0 and 1 < slow < 3
        else:
            assert float(work.narrow_s) == 0 and slow == 1


def test_a_device_without_measured_products_is_doubted_more() -> None:
    assert device_spread("h100-sxm") == DEVICE_SPREAD < device_spread("gaudi2") == device_spread("unheard-of")


def test_the_ideal_framework_has_no_band(settings: list[Setting]) -> None:
    assert step_band(settings[0].evaluate()) is None


@pytest.mark.slow
def test_left_out_groups_are_predicted_by_the_others(runs: Modelled) -> None:
    fit = measured_as(runs.fit, truth(runs.fit, 3))
    calls = []
    group = np.where(np.arange(fit.count) % 2 == 0, "even", "odd")
    found = left_out_both(fit, group, used=everything(fit), progress=lambda done, total: calls.append((done, total)))[0]
    assert calls == [(1, 2), (2, 2)] and found.residual.shape == found.deviation.shape == (fit.count,)
    other = fit.fit(group != "even")
    assert found.residual[::2] == pytest.approx((fit.log_s(other) - fit.log_measured)[::2])
    assert (found.deviation > 0).all()


def test_the_factor_of_a_device_is_that_of_dtypes_with_a_curve() -> None:
    """It was learnt with the curves; the datasheet's rates of other dtypes know nothing of it."""
    plain = load_framework("generic", UNKNOWN)
    for name, dtype, known in (("b200-sxm", "bf16", BUSY), ("b200-sxm", "fp32", ()), ("gaudi2", "bf16", BUSY)):
        device, own = load_device(name), framework_table()["device"][name]
        found = of_device(device, models_of(device, PRECISIONS[dtype]))
        assert found == set(known)
        framework = load_framework("generic", name, found)
        for parameter in ("matrix", "narrow"):
            factor = float(own[parameter]) if known else 1.0
            assert getattr(framework, parameter) == pytest.approx(getattr(plain, parameter) * factor)


def test_a_higher_peak_without_a_curve_is_a_faster_step() -> None:
    job = {"gpus": 8, "global_batch": 64, "dtype": "fp32"}
    slow, fast = (api.estimate("gpt2-xl", name, **job).step_time_s for name in ("h100-sxm", "b200-sxm"))
    assert fast < slow


def test_a_fit_sees_no_factor_of_a_device_where_it_does_not_act(runs: Modelled) -> None:
    fit, base = runs.fit, packaged()[0]
    double = replace(base, devices={name: np.full(len(BUSY), 0.7) for name in fit.device_names})
    none = replace(base, devices={})
    bare = FrameworkFit([replace(sample, of_device=()) for sample in fit.samples], fit.runs)
    assert np.allclose(bare.log_s(double), fit.log_s(none))
    assert (fit.log_s(double) > fit.log_s(none)).all()
    used, moved = np.ones(fit.count, bool), np.ones(fit.values)
    both = (one._columns(moved)[:, BUSY_COLUMNS] for one in (fit, bare))
    assert np.allclose(next(both) - next(both), fit.factored) and fit.factored.any()
    assert all(np.allclose(factors, 0.0, atol=1e-6) for factors in bare.fit(used).devices.values())
