"""Checks before every answer: host and origin of the request, its type, and headers that limit what a page may load.

A page of another site can reach a server on loopback, by a form or by a name that resolves to it (DNS rebinding).
Therefore the host that a request names has to be this machine, and the origin that a browser sends has to be the page.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
)
"""Headers of every answer."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """True for an address or name of the loopback interface.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def host_of(header: str) -> str:
    """The host of a ``Host`` header without its port, in lower case; empty: malformed.

    >>> host_of("LocalHost:8733"), host_of("[::1]:80"), host_of("a@b"), host_of("evil.example/x")
    ('localhost', '::1', '', '')
    """
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return ""
    return "" if parts.path or parts.query or parts.fragment or "@" in header else (parts.hostname or "")


def is_allowed(host: str, bound: str) -> bool:
    """True if a request may name this host while the server is bound to ``bound``.

    On loopback only its addresses and names are allowed. Elsewhere any IP address (DNS cannot redirect it), the name
    that the server was started with, and the name of the machine.

    >>> is_allowed("localhost", "127.0.0.1"), is_allowed("evil.example", "127.0.0.1"), is_allowed("10.1.2.3", "0.0.0.0")
    (True, False, True)
    """
    if is_loopback(host):
        return True
    if is_loopback(bound) or not host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in {bound.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return True


def refusal(headers: Headers, method: str, bound: str) -> tuple[int, str, str] | None:
    """Status, message and hint for a refused request; None: it is answered."""
    if len(headers.getlist("host")) != 1 or not is_allowed(host_of(headers.get("host", "")), bound):
        return 421, "the request names another host", "open the address that steptime serve printed"
    if method in ("GET", "HEAD"):
        return None
    if method != "POST":
        return 405, f"no {method[:20]} here", "GET or POST"
    origin = headers.get("origin")
    if origin is not None and urlsplit_host(origin) != headers["host"].lower():
        return 403, "the request comes from another site", "use the page itself"
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return 403, "the request comes from another site", "use the page itself"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "the body is not application/json", "set the content type"
    return None


def urlsplit_host(origin: str) -> str:
    """Host and port of an origin; empty: it has none.

    >>> urlsplit_host("http://127.0.0.1:8733"), urlsplit_host("null")
    ('127.0.0.1:8733', '')
    """
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def problem(status: int, message: str, hint: str | None = None) -> JSONResponse:
    """An answer with an error message and a hint."""
    return JSONResponse({"error": {"message": message, "hint": hint}}, status_code=status)


class Guard:
    """ASGI middleware that refuses requests (:func:`refusal`) and adds headers to every answer."""

    def __init__(self, app: ASGIApp, bound: str) -> None:
        self._app = app
        self._bound = bound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        refused = refusal(Headers(scope=scope), scope["method"], self._bound)
        if refused is not None:
            await problem(*refused)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
