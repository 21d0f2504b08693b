"""``steptime serve``: the page on this machine; ``steptime report``: one file that opens without a server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, takes
from steptime.errors import UserError, shorten
from steptime.registry import require

if TYPE_CHECKING:
    import uvicorn

PORT: Final = 8733


def serve(
    host: Annotated[
        str, flag("--host", metavar="ADDRESS", help="Address to listen on; other than loopback: anyone there.")
    ] = "127.0.0.1",
    port: Annotated[int, number("--port", "N", "Port; 0: one that is free.", 0, 65_535)] = PORT,
    open_page: Annotated[bool, flag("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the page: pick a model and a cluster, see ranked plans, change a degree, compare, download.

    It listens on this machine alone unless told otherwise, and needs no network. Ctrl+C stops it.
    """
    for library in ("starlette", "uvicorn"):
        require(library, "the page")
    import uvicorn

    from steptime.web.guard import is_loopback

    listening = _listening(host, port)
    settings = server_settings(host)
    address = _address(host, listening.getsockname()[1])
    print(f"steptime page: {address}  (Ctrl+C stops it)", flush=True)
    if not is_loopback(host):
        print(f"warning: whoever reaches {host} can use this page; it has no login", flush=True)
    if open_page:
        import webbrowser

        webbrowser.open(address)
    with listening:
        uvicorn.Server(settings).run(sockets=[listening])


def server_settings(host: str) -> uvicorn.Config:
    """Settings of the server: only HTTP/1.1, short request heads that arrive in time, no log of requests."""
    import uvicorn

    from steptime.web.connection import Prompt
    from steptime.web.server import application

    return uvicorn.Config(
        application(host),
        http=Prompt,
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16_384,
    )


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        UserError: this machine does not have the address, or the port is taken.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {shorten(host)!r}: {error}", hint="for example --host 127.0.0.1") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(where)
        bound.listen(128)  # whoever opens the address at once waits, and is not refused
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise UserError(f"{host} port {port}: {reason}", hint="--port 0 takes one that is free") from None
    return bound


def _address(host: str, port: int) -> str:
    """Address to open in a browser.

    >>> _address("::1", 80), _address("0.0.0.0", 8733)
    ('http://[::1]:80/', 'http://127.0.0.1:8733/')
    """
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"


@takes({**o.JOB, **o.TRAINING})
def report(
    model: Annotated[str, positional(metavar="MODEL|RUN.toml|FILE.json", help="Model, run, or what --json wrote.")],
    out: Annotated[Path, flag("-o", "--out", metavar="FILE.html", help="Where to write it.")] = Path("report.html"),
    top: Annotated[int, number("--top", "K", "Ranked plans next to the one shown; 0: none.", 0, 200)] = 40,
    **job: Any,
) -> None:
    """Write one file with charts, tables and formulas that opens in a browser without server or network.

    Takes the options of estimate. Without a plan it shows the best one of all.
    """
    length = o.training_given(job)
    from steptime.web.report_file import page_of

    text = page_of(model, job, length, top=top)
    from steptime.store.files import refuse_special, write_whole

    refuse_special(out)
    write_whole(out, text)
    print(f"wrote {out} ({len(text.encode()) / 1000:,.0f} kB)")
