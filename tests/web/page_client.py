"""A client of the page without a socket, and the words of its bodies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from steptime.web.server import application

JOB: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 64}
URL = "http://127.0.0.1:8733"


@contextmanager
def client(**settings: Any) -> Iterator[TestClient]:
    """A client of a page of its own."""
    with TestClient(application(**settings), base_url=URL, raise_server_exceptions=False) as found:
        yield found


def with_plan(**plan: Any) -> dict[str, Any]:
    """The job with a plan."""
    return {**JOB, "plan": plan}


def endless(started: threading.Event, ended: threading.Event) -> Any:
    """An answer that works until it is stopped, and says when it starts and ends."""

    def answer(document: Any, own: Any, progress: Any) -> dict[str, Any]:
        try:
            started.set()
            while True:
                progress(1, 2)
                time.sleep(0.002)
        finally:
            ended.set()

    return answer
