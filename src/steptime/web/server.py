"""The server of the page: static files from memory, catalogues, and questions answered in threads.

A question is stopped when its client disconnects or its time is over: the next report of progress ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from steptime.cli.output import plain
from steptime.errors import UserError, shorten
from steptime.web.answers import ANSWERS, CATALOGUES, Answer, choices
from steptime.web.asked import MAX_BODY_BYTES, desk, document_of, message_of
from steptime.web.guard import Guard, problem
from steptime.web.report_file import STATIC, bundle

WORKERS: Final = 2
"""Number of questions answered at once."""
MAX_WAITING: Final = 16
"""Largest number of questions that wait or are being answered; further ones are refused."""
BODY_S: Final = 10.0
"""Time limit for the arrival of a body."""
ANSWER_S: Final = 60.0
"""Time limit for an answer."""


class Stopped(BaseException):
    """Signal that the client is gone or its time is over; a BaseException, so that no error handler catches it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Question:
    """One question in progress."""

    answer: Answer
    body: bytes
    told: Callable[[int, int], None]
    stopped: threading.Event = field(default_factory=threading.Event)

    def progress(self, done: int, known: int) -> None:
        """Report progress; Stopped: the question was stopped."""
        if self.stopped.is_set():
            raise Stopped
        self.told(done, known)

    def answered(self) -> tuple[int, str]:
        """Status and JSON text of the answer."""
        try:
            self.progress(0, 0)
            with desk() as own:
                found = self.answer(document_of(self.body), own, self.progress)
                return 200, own.without_paths(_json(found))
        except UserError as error:
            return 400, _problem_text(message_of(error), error.hint)
        except Stopped:
            return 408, _problem_text("the question was stopped", None)
        except Exception as error:
            what = shorten(f"{type(error).__name__}: {error}", 200)
            return 500, _problem_text(f"{what} (this is a defect of steptime, not of your input)", "please report it")


def _json(found: Any) -> str:
    return json.dumps(plain(found), allow_nan=False, separators=(",", ":"))


def _problem_text(message: str, hint: str | None) -> str:
    return _json({"error": {"message": message, "hint": hint}})


async def _body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: it is too large, or does not arrive in time.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_S:g} seconds") from None
    return bytes(data)


class Desks:
    """Threads that answer questions."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="steptime-page")
        self._answer_s = answer_s
        self._open = 0

    def prepare(self) -> None:
        """Read the catalogues before the first visitor asks for them."""
        self._threads.submit(choices)

    def close(self) -> None:
        """Shut down without waiting for threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def asked(self, request: Request, name: str) -> Response:
        """The answer to a question."""
        if self._open >= MAX_WAITING:
            return problem(429, f"{MAX_WAITING} questions are open already", "ask again in a moment")
        body = await _body(request)
        if "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(self._events(name, body), media_type="text/event-stream")
        status, text = await self._watched(request, Question(answer=ANSWERS[name], body=body, told=lambda *_: None))
        return Response(text, status, media_type="application/json")

    async def _worked_on(self, question: Question) -> tuple[int, str]:
        """Status and text of the answer; 408 after the time limit."""
        self._open += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, question.answered)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._answer_s)
        except TimeoutError:
            hint = "give fewer devices, fix some degrees, or use the command line"
            return 408, _problem_text(f"no answer within {self._answer_s:g} seconds", hint)
        finally:
            question.stopped.set()
            work.add_done_callback(self._closed)

    def _closed(self, _: object) -> None:
        self._open -= 1

    async def _watched(self, request: Request, question: Question) -> tuple[int, str]:
        """Status and text of the answer; ends when the client disconnects."""
        work = asyncio.ensure_future(self._worked_on(question))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _events(self, name: str, body: bytes) -> AsyncIterator[str]:
        """Server-sent events: ``progress`` during the work, then ``result`` or ``error``."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

        def told(done: int, known: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.put_nowait, (done, known))

        work = asyncio.ensure_future(self._worked_on(Question(answer=ANSWERS[name], body=body, told=told)))
        try:
            while not work.done():
                following = asyncio.ensure_future(news.get())
                await asyncio.wait((work, following), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                elif following.result() != (0, 0):
                    done, known = following.result()
                    yield f'event: progress\ndata: {{"done":{done},"known":{known}}}\n\n'
            status, text = work.result()
            yield f"event: {'result' if status == 200 else 'error'}\ndata: {text}\n\n"
        finally:
            work.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def sent(request: Request) -> Response:
        return Response(bundle()[name], media_type=STATIC[name], headers={"cache-control": "no-cache"})

    return sent


def _listed(call: Callable[[], Mapping[str, Any]]) -> JSONResponse | Response:
    try:
        return Response(_json(call()), media_type="application/json", headers={"cache-control": "no-cache"})
    except UserError as error:
        return problem(404, message_of(error), error.hint)


def _every(kind: str) -> Callable[[Request], Response]:
    return lambda request: _listed(CATALOGUES[kind].every)


def _one(kind: str) -> Callable[[Request], Response]:
    return lambda request: _listed(partial(CATALOGUES[kind].one, request.path_params["name"][:200]))


def _failed(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: "there is nothing at this address", 405: "not with this method"}.get(status)
    return problem(status, message or (error.detail if isinstance(error, HTTPException) else "a defect of steptime"))


def application(bound: str = "127.0.0.1", answer_s: float = ANSWER_S) -> Starlette:
    """The page as an ASGI application.

    Args:
        bound: host that the server is bound to.
        answer_s: time limit for an answer (s).
    """
    desks = Desks(answer_s)

    def question(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            return await desks.asked(request, name)

        return answered

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        desks.prepare()
        yield
        desks.close()

    routes = [
        Route("/", _file("index.html")),
        *(Route(f"/{name}", _file(name)) for name in STATIC),
        Route("/api/choices", lambda request: _listed(choices)),
        *(Route(f"/api/{kind}", _every(kind)) for kind in CATALOGUES),
        *(Route(f"/api/{kind}/{{name}}", _one(kind)) for kind in CATALOGUES),
        *(Route(f"/api/{name}", question(name), methods=["POST"]) for name in ANSWERS),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, bound=bound), Middleware(GZipMiddleware, minimum_size=2048, compresslevel=5)],
        exception_handlers={HTTPException: _failed, ClientDisconnect: lambda request, error: problem(408, "gone")},
        lifespan=lifespan,
    )
