"""A connection of the API: uvicorn's, with a deadline for the head of a request.

Uvicorn closes a connection that is idle after an answer. One that never asks, or asks a byte a minute, it
keeps for ever, and there are only so many. Bodies have their deadline in the gate.
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
        self._begin()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Between two requests, or in what is left of a body that was answered before it was read.
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._begin()
        else:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP, or its head is too large")

    def _begin(self) -> None:
        """The time runs from the first byte, or the connection; more bytes do not make it longer."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._late)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"no whole request within {HEAD_SECONDS:.0f} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, detail: str) -> None:
        """An answer to what did not become a request, and the end of the connection."""
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
