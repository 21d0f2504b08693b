"""Connections of the page that end by themselves when no request comes."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""Seconds in which the head of a request has to arrive, counted from the connection or from the last answer."""


class Prompt(H11Protocol):
    """uvicorn's HTTP/1.1 protocol that closes a connection if no complete head arrives within :data:`HEAD_S`.

    uvicorn limits only the time after an answer: a client that sends nothing, or half a head, would stay forever.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for a new client."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take received bytes; only a complete head stops the timer."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Restart the timer after an answer."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a client that is gone."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer if no request is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
