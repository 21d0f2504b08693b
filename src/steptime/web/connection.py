"""Connections of the page that end by themselves when no request comes."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""Seconds in which the head of a request has to arrive, counted from the connection or from the last answer."""


class Prompt(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, closed where a head does not arrive whole within :data:`HEAD_S`.

    uvicorn limits the time after an answer alone: a client that sends nothing, or half a head, would stay for ever.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some bytes came; only a whole head stops the clock, however slowly it drips."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer is sent."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock where no request is at work."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
