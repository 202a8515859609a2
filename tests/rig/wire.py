"""A wire to a server that can be cut: a proxy on loopback, for tests of broken connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wire:
    """Connect to `port` instead. `close` tears every connection without a word and accepts no more."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    async def to(cls, host: str, there: int, *, port: int = 0) -> Wire:
        """A wire to that server, from this port here or any free one."""
        wire = cls(host, there)
        wire._server = await asyncio.start_server(wire._carry, "127.0.0.1", port)
        wire.port = wire._server.sockets[0].getsockname()[1]
        return wire

    def tear(self) -> None:
        """Reset what is connected now; new connections are welcome."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.tear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(*self._to)
            self._writers |= {writer, there}
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, there))
                group.create_task(self._copy(back, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the end of this task's way: asyncio would only complain about being called off
        finally:
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)
            self._tasks.discard(task)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
