"""The process that reads large pages: kept while it does well, replaced when not, never left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shoal.errors import FetchError
from shoal.model import Request, Response
from shoal.scrape import apart
from shoal.scrape.apart import Reader
from shoal.scrape.page import Page

BOMB = "<p>" + "".join(f"<font a{n}>" for n in range(400)) + "<p>x" * 300_000


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader()
    yield made
    await made.close()
    assert children() == []


def children() -> list[int]:
    """Reading processes of this one. Servers that other tests keep for the session are not counted."""
    below = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in below if apart.__name__.encode() in command_of(pid)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended meanwhile


async def read(reader: Reader, html: str) -> dict[str, object]:
    headers = (("content-type", "text/html"),)
    response = Response(url="http://h.test/", status=200, headers=headers, body=html.encode(), seconds=0.0)
    item, links = await reader.site(Page(Request("http://h.test/", "j"), response), None, "now")
    return {**msgspec.json.decode(item, type=dict[str, object]), "links": links}


async def test_the_process_is_kept_for_the_next_page(reader: Reader) -> None:
    first = await read(reader, "<title>One</title><a href=/1>1</a>")
    (process,) = children()
    second = await read(reader, "<title>Two</title><a href=/2>2</a>")
    assert children() == [process]
    assert (first["title"], first["links"]) == ("One", ["http://h.test/1"])
    assert (second["title"], second["links"]) == ("Two", ["http://h.test/2"])


async def test_pages_of_several_visits_are_read_one_after_the_other(reader: Reader) -> None:
    items = await asyncio.gather(*(read(reader, f"<title>{number}</title>") for number in range(20)))
    assert [item["title"] for item in items] == [str(number) for number in range(20)]
    assert len(children()) == 1


async def test_a_page_that_is_too_much_costs_the_next_one_nothing(reader: Reader) -> None:
    await read(reader, "<title>One</title>")
    with pytest.raises(FetchError) as caught:
        await read(reader, BOMB)
    assert caught.value.error == "page_too_complex"
    assert (await read(reader, "<title>Two</title>"))["title"] == "Two"


async def test_each_page_has_its_own_seconds(reader: Reader) -> None:
    page = "<table>" + "<tr><td>cell</td></tr>" * 30_000
    spent = 0.0
    while spent < 1.5:
        await read(reader, page)
        (process,) = children()
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    await read(reader, page)
    (limit,) = re.findall(r"Max cpu time +(\d+)", Path(f"/proc/{process}/limits").read_text())
    assert int(limit) >= apart.SECONDS + spent


async def test_a_process_that_was_ended_meanwhile_is_replaced(reader: Reader) -> None:
    await read(reader, "<title>One</title>")
    (process,) = children()
    os.kill(process, signal.SIGKILL)
    assert (await read(reader, "<title>Two</title>"))["title"] == "Two"
    assert children() != [process]


async def test_it_leaves_when_there_is_nothing_to_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "KEPT", 0.0)
    await read(reader, "<title>One</title>")
    async with asyncio.timeout(10):
        while children():
            await asyncio.sleep(0.01)


async def test_a_visit_that_is_cancelled_ends_it(reader: Reader) -> None:
    reading = asyncio.ensure_future(read(reader, BOMB))
    async with asyncio.timeout(10):
        while not children():
            await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert children() == []
