"""Whatever a client sends, the answer is one of ours or says what is wrong with the question: never a defect."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_client import JOB, client, endless
from page_in_browser import served
from starlette.testclient import TestClient

from steptime.hardware import cluster_names
from steptime.model.known import catalogue_names
from steptime.options import KEYS
from steptime.web.answers import ANSWERS, CATALOGUES
from suites import examples

FEW = settings(max_examples=examples(80), suppress_health_check=list(HealthCheck))

texts = st.text(max_size=40) | st.sampled_from(
    [
        "",
        "none",
        "full",
        "1f1b",
        "zb-v",
        "interleaved",
        "dualpipe",
        "dp,tp",
        "fp8",
        "mxfp8",
        "\x00",
        "\ud800",
        "../x",
        "a:b",
        "1e400",
    ]
)
whole = st.sampled_from([0, -1, 1, 2, 3, 4, 8, 16, 64, 1000, 2**31, 10**12, 10**400]) | st.integers(-5, 70)
odd = st.recursive(
    st.none() | st.booleans() | whole | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tomls = st.sampled_from(
    ["", "layers = 8\nhidden = 512\nheads = 8", "layers = 0", '{"model_type": "llama"}', "{", '{"model_type": 3}',
     '{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}',
     'base = "dgx-h100"', 'base = "dgx-h100"\n[levels.nvlink]\ndevices = 4', "[levels.x]", "\x00", "\ud800"]
)  # fmt: skip
plans = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*KEYS, "placement", "strategy", "wrong"), whole | texts | odd)
)
jobs = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from([*catalogue_names(), "x"]) | st.builds(lambda text: {"text": text}, tomls) | odd,
        "cluster": st.sampled_from([*cluster_names(), "h100"]) | st.builds(lambda text: {"text": text}, tomls) | odd,
        "gpus": st.sampled_from([1, 8, 12, 64]) | whole,
        "global_batch": st.sampled_from([1, 8, 96]) | whole,
        "seq": st.sampled_from([1, 512, 4096]) | whole,
        "dtype": st.sampled_from(["bf16", "fp8", "nvfp4"]) | texts,
        "optimizer": st.sampled_from(["adam", "sgd"]) | texts,
        "framework": st.sampled_from(["generic", "megatron-lm"]) | texts,
        "strategy": st.sampled_from(["auto", "2d"]) | texts,
        "mode": st.sampled_from(["published", "corrected"]) | odd,
        "lora": st.just({"rank": 8}) | odd,
        "plan": plans | odd,
        "explain": st.booleans() | odd,
        "top": st.sampled_from([1, 2]) | odd,
        "fix": plans | odd,
        "limit": st.just(["pp<=2"]) | odd,
    },
).map(lambda extra: {**JOB, **extra})
bodies = jobs | st.fixed_dictionaries({"a": jobs | odd, "b": jobs | odd}) | odd


@pytest.fixture(scope="module")
def page() -> Iterator[TestClient]:
    with client(answer_s=5.0) as found:
        yield found


def told(status: int, text: str, asked: object) -> None:
    """An answer is a document, or an error of the client with a message."""
    document = json.loads(text)
    if status != 200:
        assert 400 <= status < 500, (status, text, asked)
        assert document["error"]["message"].strip(), asked


@pytest.mark.slow
@FEW
@given(question=st.sampled_from(sorted(ANSWERS)), body=bodies)
def test_questions(page: TestClient, question: str, body: Any) -> None:
    answer = page.post(f"/api/{question}", content=json.dumps(body), headers={"content-type": "application/json"})
    told(answer.status_code, answer.text, (question, body))


@FEW
@given(question=st.sampled_from([*ANSWERS, *CATALOGUES, "x"]), body=st.binary(max_size=60))
def test_bytes(page: TestClient, question: str, body: bytes) -> None:
    answer = page.post(f"/api/{question}", content=body, headers={"content-type": "application/json"})
    told(answer.status_code, answer.text, body)


@FEW
@given(kind=st.sampled_from([*CATALOGUES, "x"]), name=texts)
def test_names(page: TestClient, kind: str, name: str) -> None:
    written = "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    answer = page.get(f"/api/{kind}/{written}")
    if not answer.headers["content-type"].startswith("text/html"):
        told(answer.status_code, answer.text, (kind, name))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served() as address:
        yield int(address.rstrip("/").rpartition(":")[2])


HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
RAW = [
    b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    f"POST /api/plan HTTP/1.1\r\n{HEAD}Content-Length: 2\r\n\r\n[]".encode(),
    f"POST /api/plan HTTP/1.1\r\n{HEAD}Content-Length: -1\r\n\r\n".encode(),
    f"POST /api/plan HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
]


@pytest.mark.each("sent", RAW)
def test_a_real_socket(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(sent)
        answer = b""
        while chunk := line.recv(65_536):
            answer += chunk
    status = re.match(rb"HTTP/1\.1 (\d)\d\d", answer)
    assert status is not None, answer[:200]
    assert status[1] == b"4"


@pytest.mark.each("accept", ["application/json", "text/event-stream"])
def test_a_question_ends_when_its_client_goes(port: int, accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()
    monkeypatch.setitem(ANSWERS, "plan", endless(started, ended))  # type: ignore[arg-type]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(f"POST /api/plan HTTP/1.1\r\n{HEAD}Accept: {accept}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert started.wait(10)
    assert ended.wait(10)
