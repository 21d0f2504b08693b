"""Dispatch and combine of experts: hand numbers, reading of rows, fits, profiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.cost.experts import Exchange, exchange_s, row_bytes
from steptime.hardware.profiles import load_fabric_profiles
from steptime.measure.table import Table
from steptime_lab.calibrate.collectives import predict_rows
from steptime_lab.calibrate.expert_exchange import LIBRARY, ExchangeRows, fit, predict, rows_of, usable

ONE = Exchange(
    start_s=1e-5, expert_s=1e-8, Bps=4e11, message_s=2e-6, message_Bps=1e10, blend=1.0, outer_start_s=5e-6,
    peer_s=1e-6, outer_Bps=5e10,
)  # fmt: skip


def test_dispatch_by_hand() -> None:
    seconds = exchange_s("dispatch", 200, 8, 132, 1e4, 8, 8, 132, ONE)
    assert seconds == pytest.approx(1e-5 + 1.32e-6 + 200 * 8 * 1e4 / 4e11 + 2 * (2e-6 + 1e-6))


def test_few_experts_keep_few_multiprocessors_busy() -> None:
    few, many = (exchange_s("dispatch", 1024, 2, e, 4e3, 8, 8, 132, ONE) for e in (8, 128))
    assert few - many == pytest.approx((128 - 8) * 2.4e-6 - 120e-8)
    halved = exchange_s("combine", 1024, 2, 264, 4e3, 8, 8, 132, ONE)
    whole = exchange_s("combine", 1024, 2, 132, 4e3, 8, 8, 132, ONE)
    assert halved - whole == pytest.approx(132e-8)


def test_between_nodes_the_share_that_leaves_the_node_passes_the_nic() -> None:
    seconds = exchange_s("combine", 4096, 8, 256, 1e4, 32, 8, 132, ONE)
    assert seconds == pytest.approx(1e-5 + 256e-8 + 5e-6 + 3e-6 + 4096 * 8 * 1e4 * 0.75 / 5e10)


def test_bytes_on_the_wire() -> None:
    assert row_bytes(7168, eight_bit=True) == 7168 + 56 * 4 + 16
    assert row_bytes(7168, eight_bit=False) == 14336


@given(st.sampled_from(["dispatch", "combine"]), st.integers(1, 4096), st.integers(1, 10), st.integers(8, 512))
def test_more_tokens_and_slower_links_take_longer(way: str, tokens: int, top_k: int, experts: int) -> None:
    time = exchange_s(way, tokens, top_k, experts, 8192.0, 16, 8, 132, ONE)
    assert exchange_s(way, 2 * tokens, top_k, experts, 8192.0, 16, 8, 132, ONE) >= time
    assert exchange_s(way, tokens, top_k, experts, 8192.0, 16, 8, 132, replace(ONE, Bps=1e11, outer_Bps=1e10)) >= time


def table(notes: list[str], **columns: list[object]) -> Table:
    count = len(notes)
    base: dict[str, list[object]] = {
        "source": ["new"] * count, "gpu": ["H100-SXM5-80GB"] * count, "interconnect": [""] * count,
        "n_gpus": [np.nan] * count, "gpus_per_node": [8.0] * count, "collective": ["ep_dispatch"] * count,
        "bytes": [np.nan] * count, "time_us": [50.0] * count, "dtype": [""] * count, "method": [""] * count,
        "notes": list(notes),
    }  # fmt: skip
    merged = base | columns
    kinds = {n: float if isinstance(v[0], float) else object for n, v in merged.items()}
    return Table({name: np.array(values, dtype=kinds[name]) for name, values in merged.items()})


def test_rows_are_read_from_keys_and_from_words() -> None:
    keys = "nodes=2;hidden=4096;tokens=64;topk=6;experts=160;h100_sxm/0.5"
    words = "128 tokens, hidden 7168, top-8; published RDMA bandwidth"
    groups = "4096 tokens, hidden 7168, top-4 groups, top-8; second block"
    last = "1 tokens, hidden 7168, top-4"
    rows = rows_of(table([keys, words, groups, last], n_gpus=[np.nan, 16.0, 16.0, 8.0]))
    assert list(rows.tokens) == [64, 128, 4096, 1]
    assert list(rows.top_k) == [6, 8, 8, 4]
    assert list(rows.experts) == [160, 256, 256, 256]
    assert list(rows.ranks) == [16, 16, 16, 8]
    assert usable(rows).all() and not usable(rows_of(table(["no sizes"]))).any()


def test_kernels_for_many_tokens_are_not_taken_for_the_low_latency_ones() -> None:
    note = "hidden=7168;tokens=4096;topk=8;experts=256"
    found = predict_rows(table([note], interconnect=["NVLink bottleneck (normal kernels)"]), load_fabric_profiles())
    assert "many tokens" in found.reason[0] and np.isnan(found.seconds[0])


def test_fit_finds_the_link_again() -> None:
    tokens, experts, hidden = (
        a.ravel().astype(float) for a in np.meshgrid([1, 16, 128, 1024], [8, 64, 128, 256], [2048, 4096, 8192])
    )
    one = np.ones(len(tokens))
    way = np.array(["dispatch"] * len(tokens), dtype=object)
    rows = ExchangeRows(way, tokens, 8 * one, experts, 1.03 * hidden, 8 * one, 8 * one, one)
    rows = replace(rows, measured_s=predict({f"dispatch_{n}": getattr(ONE, n) for n in ONE.__slots__}, 132, rows))
    found = fit(rows, 132, 450e9)
    assert found["dispatch_Bps"] == pytest.approx(4e11, rel=0.1)
    assert np.abs(predict(found, 132, rows) / rows.measured_s - 1).max() < 0.05


def test_catalogue_profiles_predict_exchanges_of_known_and_near_devices() -> None:
    profiles = load_fabric_profiles()
    assert [p for p in profiles if p.library == LIBRARY]
    note = "hidden=7168;tokens=128;topk=8;experts=256"
    found = predict_rows(table([note] * 3, gpu=["H100-SXM5-80GB", "H800-SXM", "no-such-gpu"]), profiles)
    assert list(found.reason[:2]) == ["", ""] and found.reason[2] != ""
    assert 2e-5 < found.seconds[0] < 6e-5
    assert (found.low_s[:2] < found.seconds[:2]).all() and (found.seconds[:2] < found.high_s[:2]).all()
