"""Ways of keeping replicas consistent, from an estimate: what is played is what the estimate and the formulas say."""

from __future__ import annotations

from typing import Any

import pytest

import steptime
from steptime.cost.data_parallel import pull_s, push_s
from steptime.errors import UserError
from steptime_lab.replicas.updates import MODES, Consistency, consistency

JOB: dict[str, Any] = {"gpus": 16, "global_batch": 64, "plan": {"tp": 2}, "clocks": 40}


def played(**changed: Any) -> Consistency:
    return consistency("llama3-8b", "dgx-h100", **{**JOB, **changed})


def test_without_jitter_an_all_reduce_takes_the_step_of_the_estimate() -> None:
    found = played(jitter=0.0, servers=1000)
    step = steptime.api.estimate("llama3-8b", "dgx-h100", gpus=16, global_batch=64, plan={"tp": 2, "zero": 0})
    assert found.workers == 8 and found.devices_per_worker == 2
    assert found.step_s == step.step_time_s == pytest.approx(found.mode("all-reduce").clock_s)
    assert found.mode("all-reduce").samples_per_s == pytest.approx(step.samples_per_s)
    assert found.compute_s + found.exchange_s == pytest.approx(step.step_time_s)
    assert all(one.wait_share == pytest.approx(0.0, abs=0.02) for one in found.modes)


def test_a_worker_of_servers_computes_all_but_the_optimiser_and_shows_its_transfers() -> None:
    plan = {"tp": 2, "zero": 0, "overlap": "none"}
    found = played(jitter=0.0, servers=10_000, plan=plan)
    step = steptime.api.estimate("llama3-8b", "dgx-h100", gpus=16, global_batch=64, plan=plan)
    optimizer_s = sum(value for path, value in step.time.items() if path.startswith("optimizer/"))
    assert optimizer_s > 0.01 * step.step_time_s
    alone_s = found.compute_s - optimizer_s + 2 * found.servers.worker_link_s
    for name in ("bsp", "ssp", "asp"):
        assert found.mode(name).clock_s == pytest.approx(alone_s, rel=1e-3)
        assert found.mode(name).exchange_share == pytest.approx(2 * found.servers.worker_link_s / alone_s, rel=1e-2)


def test_the_modes_are_in_the_order_of_their_slack() -> None:
    found = played(jitter=0.2, slow=1.5, staleness=2)
    assert [one.mode for one in found.modes] == list(MODES)
    bsp, ssp, asp = (found.mode(name) for name in ("bsp", "ssp", "asp"))
    assert bsp.samples_per_s <= ssp.samples_per_s * 1.01 < asp.samples_per_s
    assert bsp.wait_share >= ssp.wait_share - 0.01 and asp.wait_share == 0
    assert (bsp.most_behind, ssp.most_behind) == (0, 2) and asp.most_behind > 2
    assert ssp.bound == 2 and asp.bound is None
    for one in found.modes:
        assert one.compute_share + one.exchange_share + one.wait_share == pytest.approx(1.0)
        assert sum(one.behind) == pytest.approx(1.0)
        together = one.mode in ("all-reduce", "bsp")
        assert one.updates_per_s == pytest.approx(one.samples_per_s / (64 if together else 8))
        assert (one.mean_delay == 0) == together


def test_the_servers_are_what_push_and_pull_say() -> None:
    found = played(servers=2, server_Bps=50e9)
    s = found.servers
    assert s.push_bytes == pytest.approx(2 * 8.03e9, rel=1e-3) == s.pull_bytes
    assert s.push_s == push_s(s.push_bytes, 8, 2, s.worker_Bps, 50e9, 5e-6)
    assert s.pull_s == pull_s(s.pull_bytes, 8, 2, s.worker_Bps, 50e9, 5e-6)
    assert s.received_bytes == pytest.approx(8 * s.push_bytes / 2) and s.bottleneck == "servers"
    assert played(servers=s.enough, server_Bps=50e9).servers.bottleneck == "workers"
    assert played(servers=s.enough - 1, server_Bps=50e9).servers.bottleneck == "servers"
    ceiling = s.server_Bps * 2 / s.push_bytes
    assert played(servers=1, server_Bps=1e9).mode("asp").updates_per_s == pytest.approx(ceiling / 100, rel=0.02)


def test_experts_are_pushed_too_and_must_be_cut_as_the_rest() -> None:
    job: dict[str, Any] = {"gpus": 64, "global_batch": 64, "clocks": 20}
    found = consistency("mixtral-8x7b", "dgx-h100", plan={"tp": 8, "etp": 8}, **job)
    assert found.servers.push_bytes == pytest.approx(2 * 46.7e9, rel=2e-3)
    with pytest.raises(UserError, match="several times"):
        consistency("mixtral-8x7b", "dgx-h100", plan={"tp": 8}, **job)


def test_whole_tensors_fill_servers_unevenly() -> None:
    even, dealt = (played(servers=100, server_Bps=1e9, sharding=how) for how in ("even", "tensors"))
    assert even.servers.largest_share == 0.01 < dealt.servers.largest_share
    assert dealt.servers.largest_share == pytest.approx(525336576 / 8030261248), "the embedding is one tensor"
    assert dealt.servers.push_s == pytest.approx(6.54 * even.servers.push_s, rel=0.01)
    assert played(servers=1, sharding="tensors").servers.largest_share == 1.0


def test_failures_stop_all_reduce_and_every_server_and_not_asynchronous_workers() -> None:
    found = played(failures=[("worker", 20.0), ("server", 20.0)], down_s=30.0, jitter=0.05)
    worker = {one.mode: one.failures[0] for one in found.modes}
    assert [one.what for one in worker.values()] == ["worker"] * 4
    assert [worker[name].stops for name in MODES] == [True, True, True, False]
    assert worker["all-reduce"].lost_s > 30.0 > worker["ssp"].lost_s > worker["asp"].lost_s > 0
    assert worker["asp"].lost_s == pytest.approx(30.0 / 8, rel=0.5)
    assert len(found.mode("all-reduce").failures) == 1, "it has no server"
    for name in ("bsp", "ssp", "asp"):
        server = found.mode(name).failures[1]
        assert server.stops and server.stands_still_s == pytest.approx(30.0, rel=0.05)
        assert server.lost_gradients > 0 and server.lost_s > 30.0
    kept = played(failures=[("server", 20.0)], down_s=30.0, jitter=0.05, checkpoint_s=19.9)
    assert kept.mode("asp").failures[0].lost_gradients < found.mode("asp").failures[1].lost_gradients


def test_the_same_seed_gives_the_same_and_json_has_all() -> None:
    one, again, other = played(seed=1), played(seed=1), played(seed=2)
    assert one == again != other
    found = played(failures=[("worker", 10.0)]).to_json()
    assert found["servers"]["bottleneck"] in ("servers", "workers") and found["modes"][3]["bound"] is None
    assert found["modes"][0]["failures"][0]["stops"] is True and found["schema_version"] == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"plan": {"zero": 1}}, "drop zero"),
        ({"plan": {"tp": 16}}, "dp 1"),
        ({"lora": {"rank": 8}}, "lora"),
        ({"mode": "published"}, "published"),
        ({"servers": 0}, "from 1 to"),
        ({"staleness": -1}, "from 0 to"),
        ({"jitter": 5.0}, "nearest is 2"),
        ({"slow": 0.0}, "nearest is 0.1"),
        ({"slow_workers": 9}, "from 0 to 8"),
        ({"sharding": "eve"}, "did you mean even"),
        ({"failures": [("wroker", 1.0)]}, "did you mean worker"),
        ({"failures": [("worker", 1e6)]}, "more --clocks"),
        ({"failures": [("worker", 1.0)], "down_s": 1e7}, "shorter --down"),
        ({"clocks": 3}, "from 20 to"),
        ({"gpus": 12, "plan": {"tp": 8}}, "does not divide"),
    ],
)
def test_bad_input_says_what_to_do(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        played(**changed)
    assert words in str(raised.value)
