"""Data-movement limits: the numbers of the authors' notebook, devices of the catalogue, the API and the command."""

import json

import numpy as np
import pytest

import steptime
from cli_runner import CliRunner
from steptime.cost import matmul
from steptime.errors import FieldError, UnknownNameError
from steptime.hardware import load_cluster
from steptime_lab.cost import limits
from steptime_lab.limits import H100_SXM5, LimitDevice, LinearLayer, limit_device, load_matmul_devices

NOTEBOOK = (16384, 5 * 16384, 2048**2 / 128, 8, 40, 32)
LAYER = LinearLayer(d_in=16384, d_out=81920, tp_in=8, tp_out=40, dp=32, width_bytes=2)
H100 = (1979e12, 3352e9, 900e9, 0.8)


def test_notebook_numbers_are_reproduced_to_the_last_bit():
    assert limits.linear_layer_forward_backward_s(*NOTEBOOK, 2, *H100) == 3.2554072481051035e-05
    end = limits.linear_layer_end_of_batch_s(16384, 81920, 8, 40, 32, 2, *H100[1:])
    assert end == 2.7088213333333335e-05


def test_each_resource_of_the_notebook_layer():
    assert limits.forward_backward_flops(*NOTEBOOK) == 25_769_803_776
    assert limits.forward_backward_memory_words(*NOTEBOOK) == 30_513_561.6
    assert limits.forward_backward_network_words(*NOTEBOOK) == 11_639_193.6
    assert H100_SXM5.resources_s(LAYER, NOTEBOOK[2]) == {
        "flop": 3.2554072481051035e-05,
        "memory": 2.2757727923627685e-05,
        "network": 2.5864874666666665e-05,
    }


@pytest.mark.parametrize(
    ("factors", "binding"), [((1, 1, 1), "flop"), ((9, 0.1, 1), "memory"), ((9, 1, 0.1), "network")]
)
def test_the_slowest_resource_binds_and_sets_the_time(factors, binding):
    device = LimitDevice(
        name="x",
        flops_per_s_8bit=1979e12 * factors[0],
        memory_Bps=3352e9 * factors[1],
        network_Bps=900e9 * factors[2],
        utilization=0.8,
    )
    assert device.binding(LAYER, NOTEBOOK[2]) == binding
    seconds = device.resources_s(LAYER, NOTEBOOK[2])
    assert device.linear_layer_forward_backward_s(LAYER, NOTEBOOK[2]) == seconds[binding] == max(seconds.values())


def test_arrays_give_what_numbers_give():
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 50, size=(6, 200)) * np.array([[512], [512], [1024], [1], [1], [1]])
    together = limits.linear_layer_forward_backward_s(*shapes, 2, *H100)
    end = limits.linear_layer_end_of_batch_s(*shapes[[0, 1, 3, 4, 5]], 2, *H100[1:])
    for i, one in enumerate(shapes.T.tolist()):
        assert limits.linear_layer_forward_backward_s(*one, 2, *H100) == together[i]
        few = [one[k] for k in (0, 1, 3, 4, 5)]
        assert limits.linear_layer_end_of_batch_s(*few, 2, *H100[1:]) == end[i]


def test_run_laws():
    assert limits.optimal_parameters(1.2e24, 20) == 1e11
    assert limits.optimal_tokens(1.2e24, 20) == 2e12
    parameters = limits.optimal_parameters(3e27, 20)
    assert limits.training_flops(parameters, limits.optimal_tokens(3e27, 20)) == pytest.approx(3e27, rel=1e-12)
    assert limits.scaled_with_compute(1e25, 1e25, 2048**2, 1 / 6) == 2048**2
    width = limits.block_width(parameters, 150, 5)
    assert limits.scaled_with_compute(64e25, 1e25, 120, 1 / 6) == pytest.approx(240, rel=1e-12)
    assert 2 * 5 * width**2 * 150 == pytest.approx(parameters, rel=1e-12)


def test_latency_figures_of_the_report():
    assert limits.layer_latency_s(4, 4.5e-6, 5e-6) == pytest.approx(38e-6, rel=1e-9)
    assert limits.layer_latency_s(8, 4.5e-6, 9.2e-6) == pytest.approx(110e-6, rel=5e-3)
    assert limits.tree_latency_s(7.4e-6, 2.75, 0.6e-6, 16, 5e-6) == pytest.approx(50.7e-6, rel=1e-9)
    several = limits.tree_latency_s(7.4e-6, 2.75, 0.6e-6, np.array([8, 16]), 5e-6)
    assert several[1] == limits.tree_latency_s(7.4e-6, 2.75, 0.6e-6, 16, 5e-6)
    assert limits.training_flops(7e14, 1.4e16) == pytest.approx(5.88e31, rel=1e-12)
    assert limits.serial_latency_s(1.4e16, 6e7, 901, 120e-6) == pytest.approx(2.5e7, rel=0.02)


def test_latency_wall():
    wall = limits.latency_wall_flops(7.889e6, 38e-6, 2048**2, 120, 20)
    assert wall == pytest.approx(120 * (7.889e6 * 2048**2 / (2400 * 38e-6)) ** 2, rel=1e-12)
    assert wall == pytest.approx(1.58e31, rel=2e-3)
    assert limits.latency_wall_flops(7.889e6, 33.8e-6, 2048**2, 120, 20) == pytest.approx(2.0e31, rel=5e-3)


@pytest.mark.parametrize("exponent", [0.0, 1 / 6, 1 / 3])
def test_the_largest_run_lasts_exactly_as_long_as_allowed(exponent):
    wall = limits.latency_wall_flops(7.889e6, 38e-6, 2048**2, 120, 20)
    batch = limits.scaled_with_compute(wall, 1e25, 2048**2, exponent)
    layers = limits.scaled_with_compute(wall, 1e25, 120, exponent)
    took = limits.serial_latency_s(limits.optimal_tokens(wall, 20), batch, layers, 38e-6)
    assert took == pytest.approx(7.889e6, rel=1e-9)


#: Microseconds of V100, A100, H100 PCIe, H100 SXM: product, and product of the weight gradient where it differs.
MATMULS = {
    (8192, 8192, 8192): ((9732.537, 4152.207, 2736.682, 1645.729), {2: 2647.258, 3: 1592.011}),
    (16384, 2048, 1024): ((612.502, 263.732, 178.653, 109.114), {2: 169.672, 3: 103.719}),
    (2048, 2048, 1024): ((80.500, 36.904, 25.147, 16.902), {}),
    (2048, 2048, 64): ((14.951, 6.525, 5.790, 5.275), {0: 23.965}),
    (512, 512, 512): ((6.875, 5.513, 5.145, 4.888), {}),
}


@pytest.mark.parametrize("shape", MATMULS)
def test_three_level_product(shape):
    forward, gradient = MATMULS[shape]
    for i, device in enumerate(load_matmul_devices().values()):
        assert device.matmul_s(*shape) * 1e6 == pytest.approx(forward[i], abs=1e-3)
        expected = gradient.get(i, forward[i])
        assert device.matmul_s(*shape, weight_gradient=True) * 1e6 == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", load_matmul_devices())
def test_three_level_product_of_arrays(name):
    device = load_matmul_devices()[name]
    shapes = np.array(list(MATMULS))
    for gradient in (False, True):
        together = device.matmul_s(*shapes.T, weight_gradient=gradient)
        alone = [device.matmul_s(*shape, weight_gradient=gradient) for shape in MATMULS]
        np.testing.assert_allclose(together, alone, rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "peak", "sustained"),
    [
        ("v100-sxm", 125.6e12, 113.0e12),
        ("a100-sxm", 311.9e12, 265.1e12),
        ("h100-pcie", 756.4e12, 416.0e12),
        ("h100-sxm", 989.4e12, 692.6e12),
    ],
)
def test_derived_peaks_of_the_device_table(name, peak, sustained):
    device = load_matmul_devices()[name]
    assert device.peak_flops_per_s == pytest.approx(peak, abs=0.05e12)
    assert device.sustained_flops_per_s == pytest.approx(sustained, abs=0.05e12)
    assert device.layer_latency_s == pytest.approx(38e-6, rel=1e-9)


def test_a_quarter_of_l2_is_not_usable():
    # 32 MiB of weights exceed 3/4 of 40 MiB: two tiles, sqrt(2) rows by sqrt(2) columns, memory binds
    byte_count = 2**25 + (3 * 2**0.5 - 1) * 4096 * 64 * 2
    expected = 4.5e-6 + byte_count / 1555e9
    assert load_matmul_devices()["a100-sxm"].matmul_s(4096, 4096, 64) == pytest.approx(expected, rel=1e-12)


def test_tiles_cover_the_matrix():
    for d1, d2 in ((8192, 64), (64, 8192), (300, 700), (16, 16)):
        tiles = matmul.tile_count(d1, d2, 2, 4096)
        rows = matmul.tile_rows(d1, d2, 2, 4096)
        assert 1 <= rows <= tiles
        assert rows <= max(1, d1)
        assert d1 * d2 * 2 / tiles <= 4096


def test_a_device_of_the_catalogue_has_its_figures():
    cluster = load_cluster("h100-sxm")
    found = limit_device("h100-sxm")
    assert (found.name, found.flops_per_s_8bit) == ("h100-sxm", cluster.device.matrix_flops_per_s["fp8"])
    assert (found.memory_Bps, found.network_Bps) == (cluster.device.memory_Bps, 2 * cluster.levels[0].link_Bps)
    assert found.utilization == cluster.device.matrix_efficiency
    assert found.layer_latency_s == pytest.approx(4 * (cluster.device.kernel_latency_s + 5e-6), rel=1e-12)
    old = load_cluster("v100-sxm2-32gb").device
    assert limit_device("v100-sxm2-32gb").flops_per_s_8bit == 2 * old.matrix_flops_per_s["fp16"], "no 8-bit rate"
    with pytest.raises(UnknownNameError, match="h100-sxm"):
        limit_device("h100-smx")


def test_the_api_gives_what_the_command_prints():
    result = steptime.api.limits(device="h100-sxm", tp_in=4, memory_Bps=1e12)
    assert result.to_json() == json.loads(run("--device", "h100-sxm", "--tp-in", "4", "--memory-bandwidth", "1 TB/s",
                                              "--json").stdout)  # fmt: skip
    assert (result.device.memory_Bps, result.device.name) == (1e12, "h100-sxm, changed")
    assert result.device.network_Bps == limit_device("h100-sxm").network_Bps
    with pytest.raises(FieldError, match="tp_in"):
        steptime.api.limits(tp_in=0)


def run(*arguments):
    from steptime.cli.main import main

    return CliRunner().invoke(main, ["limits", *arguments])


def test_command_prints_the_notebook_layer():
    result = run()
    assert result.exit_code == 0, result.stderr
    assert "32.55 us  <- binding" in result.stdout
    assert "27.09 us" in result.stdout
    assert "1.58e+31 FLOP" in result.stdout


def test_command_json_is_one_document_with_the_exact_numbers():
    result = run("--json")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["forward_backward_s"] == document["flop_s"] == 3.2554072481051035e-05
    assert document["memory_s"] == 2.2757727923627685e-05
    assert document["network_s"] == 2.5864874666666665e-05
    assert document["end_of_batch_s"] == 2.7088213333333335e-05
    assert document["binding"] == "flop"
    wall = limits.latency_wall_flops(91.3125 * 86400, 38e-6, 2048**2, 120, 20)
    assert document["latency_wall_flops"] == pytest.approx(wall, rel=1e-12)
    growth = (wall / 1e25) ** (1 / 6)
    assert document["latency_wall_batch_tokens"] == pytest.approx(2048**2 * growth, rel=1e-12)
    assert document["latency_wall_layers"] == pytest.approx(120 * growth, rel=1e-12)
    weights = 2 * 5 * document["latency_wall_width"] ** 2 * document["latency_wall_layers"]
    assert weights == pytest.approx(document["latency_wall_parameters"], rel=1e-12)


def reproduced(*arguments):
    from steptime.cli.main import main

    return CliRunner().invoke(main, ["reproduce", "limits", *arguments])


def test_stated_figures_are_what_the_formulas_give():
    found = {each["name"]: each for each in json.loads(reproduced("--json").stdout)["figures"]}
    assert found["linear layer, both passes"]["error"] == 0
    assert abs(found["product, 4e26 FLOP in 1e7 s"]["error"]) < 5e-5
    assert all(abs(each["error"]) < 0.03 for name, each in found.items() if not name.startswith("wall"))
    assert found["wall, three months"]["computed"] == pytest.approx(1.58e31, rel=2e-3)
    assert found["wall, nine months, 120 us"]["computed"] == pytest.approx(5.2e31, rel=0.01)
    assert found["wall, nine months, 400 us"]["computed"] == pytest.approx(7.8e30, rel=0.01)


def test_products_of_the_reproduction_are_those_of_the_devices():
    found = json.loads(reproduced("--json").stdout)["products"]
    times = {(each["rows"], each["columns"], each["tokens"], each["device"]): each for each in found}
    for shape, (forward, _) in MATMULS.items():
        for device, expected in zip(load_matmul_devices(), forward, strict=True):
            assert times[*shape, device]["forward_s"] * 1e6 == pytest.approx(expected, abs=1e-3)
    printed = reproduced()
    assert printed.exit_code == 0, printed.stderr
    assert "2737 / 2647" in printed.stdout


OTHER = {
    "--device": ("a100-sxm-80gb", "flop_s"),
    "--d-in": ("1024", "flop_s"),
    "--d-out": ("1024", "flop_s"),
    "--tokens": ("64", "flop_s"),
    "--tp-in": ("2", "flop_s"),
    "--tp-out": ("2", "flop_s"),
    "--dp": ("2", "end_of_batch_s"),
    "--width-bytes": ("1", "flop_s"),
    "--flops-8bit": ("1 PFLOP/s", "flop_s"),
    "--memory-bandwidth": ("1 TB/s", "memory_s"),
    "--network-bandwidth": ("50 GB/s", "network_s"),
    "--utilization": ("0.5", "memory_s"),
    "--duration": ("10 days", "latency_wall_flops"),
    "--layer-latency": ("1 ms", "latency_wall_flops"),
    "--batch-tokens": ("1000000", "latency_wall_flops"),
    "--layers": ("60", "latency_wall_flops"),
    "--tokens-per-parameter": ("10", "latency_wall_flops"),
}


@pytest.mark.each("option", OTHER)
def test_every_option_changes_what_it_should(option):
    value, field = OTHER[option]
    assert json.loads(run(option, value, "--json").stdout)[field] != json.loads(run("--json").stdout)[field]


@pytest.mark.each("option", [option for option in OTHER if option != "--device"])
@pytest.mark.each("value", ["0", "-1", "nan", "inf", "1e400", "", "x", "9" * 400])
def test_bad_values_exit_2_and_name_the_option(option, value):
    result = run(option, value, "--json")
    assert result.exit_code == 2
    assert option in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("value", ["0 s", "1e300 days", "3 GB", "-4 us"])
def test_bad_durations_exit_2(value):
    result = run("--duration", value)
    assert result.exit_code == 2
    assert "--duration" in result.stderr
