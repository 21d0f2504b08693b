"""Answers are those of the Python API; what a client sends leads to no file, no module and no path."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_client import JOB, client, endless, with_plan
from starlette.testclient import TestClient

from steptime import api
from steptime.cli.output import plain
from steptime.report.plots.results import result
from steptime.report.plots.series import chart
from steptime.web import answers
from steptime.web.asked import MAX_BODY_BYTES, MAX_TEXT
from steptime.web.timeline import MAX_ACTIONS

CONFIG = json.dumps(
    {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000,
     "intermediate_size": 4096, "max_position_embeddings": 2048}
)  # fmt: skip
TOML = "layers = 8\nhidden = 1024\nheads = 8\nvocab = 32000\nffn_hidden = 4096\nseq_len = 2048\n"
CLUSTER = 'base = "dgx-h100"\n[device]\nbase = "h100-sxm"\nmemory = "40 GB"\n[levels.nvlink]\nbandwidth = "100 GB/s"\n'


@pytest.fixture(scope="module")
def page() -> Iterator[TestClient]:
    with client() as found:
        yield found


def given(**job: Any) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name not in ("model", "cluster")}


def same(response: Any, expected: Any) -> bool:
    assert response.status_code == 200, response.text
    found = response.json()
    for document in (found, wanted := plain(expected)):
        document.get("stop", {}).pop("elapsed_cpu_s", None)
    return bool(found == wanted)


def test_an_estimate_is_that_of_the_api(page: TestClient) -> None:
    plan = {"tp": 4, "pp": 2, "micro_batch": 2}
    expected = api.estimate(JOB["model"], JOB["cluster"], plan=plan, **given(**JOB))
    assert same(page.post("/api/estimate", json=with_plan(**plan)), expected.to_json())
    assert same(page.post("/api/estimate", json={**with_plan(**plan), "explain": True}), expected.to_json(explain=True))


def test_a_search_is_that_of_the_api(page: TestClient) -> None:
    asked = {**JOB, "top": 3, "fix": {"tp": 2}, "limit": ["pp<=2"]}
    expected = api.plan(JOB["model"], JOB["cluster"], top=3, fix={"tp": 2}, limit=["pp<=2"], **given(**JOB)).to_json()
    assert same(page.post("/api/plan", json=asked), expected)


@pytest.mark.slow
def test_other_questions_are_those_of_the_api(page: TestClient) -> None:
    first, second = with_plan(tp=2), with_plan(tp=4, pp=2)
    pair = [api.estimate(JOB["model"], JOB["cluster"], plan=one["plan"], **given(**JOB)) for one in (first, second)]
    assert same(page.post("/api/diff", json={"a": first, "b": second}), api.diff(*pair).to_json())
    assert same(page.post("/api/ledger", json={"model": "llama3-8b"}), api.ledger("llama3-8b").to_json())
    guide = page.post("/api/guide", json=JOB).json()
    assert [one["question"] for one in guide["decisions"]]


def test_the_whole_run_and_the_roofline_are_those_of_the_api(page: TestClient) -> None:
    plan = {"tp": 4, "pp": 2, "micro_batch": 2}
    found = api.estimate(JOB["model"], JOB["cluster"], plan=plan, **given(**JOB), training={"tokens": "1T"})
    asked = {**with_plan(**plan), "training": {"tokens": "1T"}}
    assert same(page.post("/api/estimate", json=asked), found.to_json())
    drawn = chart("roofline", [result("a", found.to_json(explain=True))]).to_json()
    assert same(page.post("/api/roofline", json=with_plan(**plan)), drawn)
    for wrong in ({"tokens": "many"}, {"tokens": "1T", "samples": 1}, {"days": 3}):
        answer = page.post("/api/estimate", json={**with_plan(**plan), "training": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_timeline_has_every_pass_of_the_simulated_step(page: TestClient) -> None:
    found = page.post("/api/simulate", json=with_plan(tp=2, pp=4)).json()
    line = found["timeline"]
    passes = 2 * found["ranks"] * found["micro_batches"]  # a forward and a backward pass each
    assert (len(line["rank"]), {len(column) for column in line.values()}) == (passes, {passes})
    assert set(line["kind"]) == {"F", "B"}
    assert max(line["end_ns"]) <= 1e9 * found["pipeline_s"] + 1
    ends: dict[int, int] = {}
    for rank, start, end in zip(line["rank"], line["start_ns"], line["end_ns"], strict=True):
        assert ends.get(rank, 0) <= start < end  # a rank does one pass at a time
        ends[rank] = end
    trace = json.loads(page.post("/api/trace", json=with_plan(tp=2, pp=4)).json()["chrome"])
    assert trace["otherData"] == {"predicted_by": "steptime"}


def test_a_timeline_that_nobody_can_read_is_refused(page: TestClient) -> None:
    asked = {**with_plan(tp=2, pp=4), "global_batch": 2 * MAX_ACTIONS}
    refused = page.post("/api/simulate", json=asked)
    assert (refused.status_code, "passes" in refused.json()["error"]["message"]) == (400, True)
    assert "steptime simulate --trace" in refused.json()["error"]["hint"]


def test_an_infeasible_plan_is_an_answer(page: TestClient) -> None:
    found = page.post("/api/estimate", json={**with_plan(dp=16), "model": "llama3-70b"}).json()
    assert (found["feasible"], found["reasons"]) == (False, ["memory"])


@pytest.mark.each("text", [CONFIG, TOML])
def test_a_pasted_model_is_estimated_and_its_file_goes(page: TestClient, text: str) -> None:
    found = page.post("/api/estimate", json={**JOB, "model": {"text": text}})
    assert found.status_code == 200, found.text
    assert found.json()["provenance"]["model"] == "pasted"
    assert "/tmp" not in found.text
    assert "steptime-page-" not in found.text
    assert not list(Path("/tmp").glob("steptime-page-*/1/pasted.*"))


def test_a_pasted_cluster_changes_numbers_of_the_catalogue(page: TestClient) -> None:
    found = page.post("/api/estimate", json={**with_plan(tp=8), "cluster": {"text": CLUSTER}}).json()
    usual = page.post("/api/estimate", json=with_plan(tp=8)).json()
    assert found["memory_capacity_bytes"] == 40e9
    assert found["step_time_s"] > usual["step_time_s"]  # slower links, and nothing else changed for the time


FILE_HINT = "the page takes names of the catalogue and pasted text"
PATHS = [
    ("model", "./config.json"),
    ("model", "/etc/hostname"),
    ("model", "../../etc/passwd"),
    ("model", "src"),
    ("model", "."),
    ("model", "os:getcwd"),
    ("model", "/tmp/evil.py:factory"),
    ("model", "file:///etc/passwd"),
    ("model", "model.onnx"),
    ("cluster", "./cluster.toml"),
    ("cluster", "/etc/passwd"),
    ("cluster", "x/../../y.toml"),
    ("cluster", {"text": 'base = "./other.toml"'}),
    ("cluster", {"text": 'base = "/etc/passwd"'}),
    ("cluster", {"text": 'base = "dgx-h100"\ndevice = "/etc/passwd"'}),
    ("cluster", {"text": 'base = "dgx-h100"\n[device]\nbase = "~/device.toml"'}),
    ("cluster", {"text": 'base = "dgx-h100"\n[device]\nbase = "h100-sxm"\ncurves = "machine.curves.toml"'}),
    ("cluster", {"text": 'base = "dgx-h100"\n[device]\nbase = "h100-sxm"\ncluster = "a/b.toml"'}),
    ("cluster", {"text": 'base = "dgx-h100"\n[levels.nvlink]\nlink = "../link.toml"'}),
]


@pytest.mark.each(("field", "value"), PATHS)
def test_no_path_of_a_client_reaches_the_file_system(
    page: TestClient, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = Path.open

    def watched(self: Path, *arguments: Any, **more: Any) -> Any:
        opened.append(str(self))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", watched)
    refused = page.post("/api/estimate", json={**JOB, field: value})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["hint"].startswith((FILE_HINT, "did you mean"))
    inside = str(Path(api.__file__).parent.parent)
    assert [path for path in opened if not path.startswith((inside, "/tmp/steptime-page-"))] == []


def test_schedules_and_frameworks_of_a_client_are_names(page: TestClient) -> None:
    for key, value in (("schedule", "/tmp/order.csv"), ("schedule", "order.csv")):
        refused = page.post("/api/simulate", json=with_plan(pp=2, **{key: value}))
        assert (refused.status_code, "there is no schedule" in refused.json()["error"]["message"]) == (400, True)
    refused = page.post("/api/estimate", json={**JOB, "framework": "../generic"})
    assert (refused.status_code, "there is no framework" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.each("kind", ["models", "clusters", "devices", "frameworks", "schedules"])
def test_catalogues(page: TestClient, kind: str) -> None:
    every = page.get(f"/api/{kind}").json()[kind]
    names = [one if isinstance(one, str) else one["name"] for one in every]
    assert names
    one = page.get(f"/api/{kind}/{names[-1]}")
    assert (one.status_code, one.json()["schema_version"]) == (200, 1)
    for wrong in ("no-such-name", "..", "..%2f..%2fetc%2fpasswd", "a.toml", "%00"):
        refused = page.get(f"/api/{kind}/{wrong}")
        assert (refused.status_code, bool(refused.json()["error"]["message"])) == (404, True)


def test_bodies_are_limited(page: TestClient) -> None:
    large = page.post(
        "/api/estimate", content=b"[" * (MAX_BODY_BYTES + 1), headers={"content-type": "application/json"}
    )
    assert large.status_code == 413
    refused = page.post("/api/estimate", json={**JOB, "model": {"text": "x" * (MAX_TEXT + 1)}})
    assert (refused.status_code, "at most" in refused.json()["error"]["message"]) == (400, True)
    deep = page.post("/api/estimate", content=b"[" * 100_000, headers={"content-type": "application/json"})
    assert (deep.status_code, deep.json()["error"]["message"]) == (400, "the request is nested too deeply")


def test_what_is_missing_or_unknown_is_named(page: TestClient) -> None:
    lacking = page.post("/api/estimate", json={"model": "llama3-8b"}).json()["error"]
    assert lacking["message"] == "the request: cluster, gpus, global_batch: missing"
    unknown = page.post("/api/estimate", json={**JOB, "gpu": 8}).json()["error"]
    assert unknown == {"message": "the request: gpu: unknown key", "hint": "did you mean gpus?"}
    degrees = page.post("/api/estimate", json=with_plan(tp=3)).json()["error"]
    assert "16" in degrees["message"]


def test_a_search_tells_how_far_it_is(page: TestClient) -> None:
    headers = {"accept": "text/event-stream"}
    with page.stream("POST", "/api/plan", json=JOB, headers=headers) as response:
        events = "".join(response.iter_text()).strip().split("\n\n")
    names = [event.partition("\n")[0] for event in events]
    assert (names[0], names[-1], set(names[:-1])) == ("event: progress", "event: result", {"event: progress"})
    last = json.loads(events[-2].partition("data: ")[2])
    result = json.loads(events[-1].partition("data: ")[2])
    assert last["done"] == last["known"] == result["candidates"]
    with page.stream("POST", "/api/plan", json={**JOB, "gpus": 0}, headers=headers) as response:
        assert "".join(response.iter_text()).startswith("event: error")


def test_a_question_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()
    monkeypatch.setitem(answers.ANSWERS, "plan", endless(started, ended))  # type: ignore[arg-type]
    with client(answer_s=0.05) as page:
        late = page.post("/api/plan", json=JOB)
    assert (late.status_code, "no answer within" in late.json()["error"]["message"]) == (408, True)
    assert started.is_set()
    assert ended.wait(5)


def test_a_defect_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("of ours")

    monkeypatch.setitem(answers.ANSWERS, "plan", broken)  # type: ignore[arg-type]
    with client() as page:
        failed = page.post("/api/plan", json=JOB)
    assert (failed.status_code, "a defect of steptime" in failed.json()["error"]["message"]) == (500, True)
