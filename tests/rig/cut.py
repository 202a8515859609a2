"""A cable that can be cut: a proxy between a frontier and its server that loses answers.

    with Cable(server.port) as cable:
        frontier = await open_frontier(f"redis://127.0.0.1:{cable.port}/0")
        cable.lose_next_answer()
        with pytest.raises(FrontierUnreachable):
            await frontier.settle(verdicts)  # the server has taken them; nobody was told

What the client said reaches the server whole. The server's next answer is swallowed and the connection is
closed on both sides: the moment between "committed" and "acknowledged" that no test hits by luck.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Cable:
    """Listens on a free loopback port and forwards to another. Lives on a thread of its own."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._to = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cable", daemon=True)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._needle: bytes | None = None
        self._begins = b""
        self._doomed: asyncio.StreamWriter | None = None
        self.port = 0
        self.cuts = 0
        """Answers that were lost so far."""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def lose_next_answer(self, needle: bytes = b"", *, begins: bytes = b"") -> None:
        """The next answer to something that contains `needle` and begins so is lost, and its connection
        with it."""
        self._doomed, self._needle, self._begins = None, needle, begins

    def cut_all(self) -> None:
        """Close every connection, now."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def _cut_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut_all()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            server, on = await asyncio.open_connection(*self._to)
        except OSError:
            back.transport.abort()
            self._open.discard(task)
            return
        self._writers |= {on, back}
        try:
            await asyncio.gather(self._forward(client, on, back), self._answer(server, back, on))
        finally:
            self._writers -= {on, back}
            self._open.discard(task)
            for writer in (on, back):
                writer.transport.abort()

    async def _forward(
        self, client: asyncio.StreamReader, on: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await client.read(65536):
                if self._needle is not None and self._needle in data and data.startswith(self._begins):
                    self._needle, self._doomed = None, back
                on.write(data)
                await on.drain()
        on.transport.abort()

    async def _answer(
        self, server: asyncio.StreamReader, back: asyncio.StreamWriter, on: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await server.read(65536):
                if back is self._doomed:
                    # The server has answered, so it has done what it was asked.
                    self._doomed = None
                    self.cuts += 1
                    on.transport.abort()
                    break
                back.write(data)
                await back.drain()
        back.transport.abort()
