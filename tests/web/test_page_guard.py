"""A page of another site can neither ask nor show anything; every answer has its headers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from page_client import JOB, URL, client
from page_in_browser import served
from starlette.testclient import TestClient

from steptime.web import connection
from steptime.web.guard import HEADERS, is_allowed


@pytest.fixture(scope="module")
def page() -> Iterator[TestClient]:
    with client() as found:
        yield found


@pytest.mark.each(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8733",
        "127.0.0.1@evil.example",
        "10.0.0.1",
        "",
        "a b",
        "[",
    ],
)
def test_another_host_is_refused(page: TestClient, host: str) -> None:
    for answer in (page.get("/", headers={"host": host}), page.post("/api/plan", json=JOB, headers={"host": host})):
        assert (answer.status_code, answer.json()["error"]["message"]) == (421, "the request names another host")


@pytest.mark.each("host", ["127.0.0.1", "localhost:1", "[::1]:8733", "LOCALHOST", "127.1.2.3"])
def test_this_machine_is_answered(page: TestClient, host: str) -> None:
    assert page.get("/", headers={"host": host}).status_code == 200


def test_hosts_of_a_server_for_others() -> None:
    assert is_allowed("192.168.1.5", "0.0.0.0")
    assert is_allowed("box.example", "box.example")
    assert not is_allowed("evil.example", "0.0.0.0")
    assert not is_allowed("192.168.1.5", "127.0.0.1")


FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:9"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
]


@pytest.mark.each(("headers", "status"), FOREIGN)
def test_questions_of_other_sites_are_refused(page: TestClient, headers: dict[str, str], status: int) -> None:
    answer = page.post("/api/ledger", json={"model": "llama3-8b"}, headers=headers)
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (status, False)


def test_the_page_itself_is_answered(page: TestClient) -> None:
    own = {"origin": URL, "sec-fetch-site": "same-origin", "content-type": "application/json; charset=utf-8"}
    assert page.post("/api/ledger", json={"model": "llama3-8b"}, headers=own).status_code == 200


@pytest.mark.each("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X" * 99])
def test_other_methods_are_refused(page: TestClient, method: str) -> None:
    assert page.request(method, "/api/ledger").status_code == 405


@pytest.mark.each(
    ("path", "status"),
    [("/", 200), ("/page.js", 200), ("/api/choices", 200), ("/nothing", 404), ("/static/../server.py", 404),
     ("/..%2f..%2fetc%2fpasswd", 404), ("/api/plan", 405)],
)  # fmt: skip
def test_every_answer_has_its_headers(page: TestClient, path: str, status: int) -> None:
    answer = page.get(path)
    assert answer.status_code == status
    for name, value in HEADERS:
        assert answer.headers[name] == value
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_has_nothing_inline_and_nothing_of_others(page: TestClient) -> None:
    text = page.get("/").text
    assert "<style" not in text
    assert " style=" not in text
    assert "<script>" not in text
    assert "//" not in text.replace("</", "")


def test_a_body_that_lies_about_its_kind(page: TestClient) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"{", b'{"gpus": NaN}', b'{"gpus": 1e999}', b"1" * 5000):
        answer: Any = page.post("/api/estimate", content=body, headers=headers)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True)


@pytest.mark.each("load", ["/etc/passwd", "x.csv", "../x.json", "load.csv"])
def test_no_file_is_read_that_a_request_names(page: TestClient, load: str) -> None:
    job = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 64}
    answer = page.post("/api/estimate", json={**job, "plan": {"ep": 8, "expert_load": load}})
    assert (answer.status_code, "is a file" in answer.json()["error"]["message"]) == (400, True)
    assert page.post("/api/estimate", json={**job, "plan": {"ep": 8, "expert_load": "zipf:1"}}).status_code == 200


def test_a_pasted_key_of_many_parts_is_refused(page: TestClient) -> None:
    text = ".".join(["a"] * 90_000) + " = 1"
    for key in ("model", "cluster"):
        answer = page.post("/api/ledger", json={"model": "llama3-8b", key: {"text": text}})
        assert (answer.status_code, "parts" in answer.json()["error"]["message"]) == (400, True)


def test_connections_without_a_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with served() as address:
        place = (address.split("/")[2].split(":")[0], int(address.rsplit(":", 1)[1].strip("/")))
        with ExitStack() as open_ones:
            silent, half, again = (open_ones.enter_context(socket.create_connection(place, 60)) for _ in range(3))
            half.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n")
            again.sendall(b"GET /api/choices HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert again.recv(12) == b"HTTP/1.1 200"
            for each in (silent, half, again):  # the server closes each: reading comes to an end
                while each.recv(65_536):
                    pass
