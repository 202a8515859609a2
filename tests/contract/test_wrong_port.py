"""Something listens where an address points to, but it is another kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.errors import FrontierError, FrontierUnreachable
from shoal.frontier.postgres import store
from shoal.registry import open_frontier


@asynccontextmanager
async def listening(answer: bytes | None) -> AsyncIterator[int]:
    """Answers this to whatever it hears, and hangs up; None: says nothing at all."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await ended.wait()
        else:
            await reader.read(1000)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        ended.set()
        server.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_no_redis_there(scheme: str) -> None:
    async with listening(b"") as port:
        with pytest.raises(
            FrontierUnreachable, match="accepts the connection, but does not answer as Redis"
        ) as told:
            await open_frontier(f"{scheme}://127.0.0.1:{port}/0")
    other = {"redis": "rediss://", "rediss": "redis://"}[scheme]
    assert "check the port" in told.value.hint and other in told.value.hint


async def test_an_answer_that_is_none_of_redis() -> None:
    async with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(FrontierError, match="does not answer as Redis does") as told:
            await open_frontier(f"redis://127.0.0.1:{port}/0")
    assert not isinstance(told.value, FrontierUnreachable), "waiting does not mend it"


@pytest.mark.parametrize("answer", [None, b""])
async def test_no_postgresql_there(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CONNECT_LIMIT", 0.3)
    async with listening(answer) as port:
        with pytest.raises(FrontierUnreachable, match="but does not answer as PostgreSQL does") as told:
            await open_frontier(f"postgresql://u:topsecret@127.0.0.1:{port}/x")
    assert "check the port" in told.value.hint and "secret" not in str(told.value)


@pytest.mark.parametrize(
    "address", ["redis://127.0.0.1:1/0", "rediss://127.0.0.1:1/0", "postgresql://127.0.0.1:1/x"]
)
async def test_nothing_there_is_told_as_before(address: str) -> None:
    with pytest.raises(FrontierUnreachable) as told:
        await open_frontier(address)
    assert "accepts the connection" not in str(told.value)
