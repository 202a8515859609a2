"""A connection of the API: uvicorn's, with a deadline for the head of a request.

Uvicorn closes a connection that is idle after a response. It keeps for ever a connection that never sends a
request or sends one byte per minute, and the number of connections is limited. The gate sets the deadline
for bodies.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.api.problems import Problem

HEAD_SECONDS = 10.0


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Between two requests, or in the rest of a body that got its response before it was read.
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._start_deadline()
        else:
            self._clear_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not valid HTTP, or its headers are too large")

    def _start_deadline(self) -> None:
        """The time starts with the connection, or with the first byte of a later request. More bytes do not
        extend it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the request headers were not complete after {HEAD_SECONDS:.0f} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, detail: str) -> None:
        """Respond to an incomplete or invalid request, then close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = Problem(status, detail).response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=b""),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
