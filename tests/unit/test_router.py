"""Handlers of every shape, and what may come out of them."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from shoal.errors import Drop, FetchError, UsageError
from shoal.model import Request, Response
from shoal.scrape.page import Page
from shoal.scrape.router import Scraper, collect, encode_item

PAGE = Page(
    Request(url="http://h.test/", job="j"),
    Response(
        url="http://h.test/",
        status=200,
        headers=(("content-type", "text/html"),),
        body=b"<a href=x>",
        seconds=0,
    ),
)


@dataclass
class Book:
    title: str
    price: Decimal


class Model(pydantic.BaseModel):
    at: datetime


class Row(msgspec.Struct):
    a: int


async def async_generator(page: Page) -> AsyncIterator[Any]:
    yield {"n": 1}
    yield page.follow("x")


async def coroutine(page: Page) -> Any:
    return [{"n": 1}, page.follow("x")]


def generator(page: Page) -> Iterator[Any]:
    yield {"n": 1}
    yield page.follow_all("a")
    yield None


def function(page: Page) -> Any:
    return {"n": 1}, page.follow("x")


def gives_generator(page: Page) -> Any:
    return (one for one in ({"n": 1}, page.follow("x")))


def gives_coroutine(page: Page) -> Any:
    return coroutine(page)


async def coroutine_of_generator(page: Page) -> Any:
    return generator(page)


def giving(value: Any) -> Callable[[Page], Any]:
    return lambda page: value


SHAPES = [
    async_generator,
    coroutine,
    generator,
    function,
    gives_generator,
    gives_coroutine,
    coroutine_of_generator,
]


@pytest.mark.parametrize("handler", SHAPES)
async def test_every_shape(handler: Callable[[Page], Any]) -> None:
    got = await collect(handler, PAGE, timeout=5)
    assert got.items == [b'{"n":1}']
    assert [one.url for one in got.requests] == ["http://h.test/x"]


async def test_nothing_is_fine() -> None:
    got = await collect(lambda page: None, PAGE)
    assert (got.items, got.requests) == ([], [])


async def test_plain_functions_do_not_block_the_loop() -> None:
    var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=0)
    var.set(5)

    def slow(page: Page) -> dict[str, Any]:
        time.sleep(0.2)
        return {"thread": threading.current_thread() is not threading.main_thread(), "var": var.get()}

    task = asyncio.create_task(collect(slow, PAGE))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 5
    assert json.loads((await task).items[0]) == {"thread": True, "var": 5}


async def test_timeouts() -> None:
    async def hangs(page: Page) -> None:
        await asyncio.sleep(60)

    release = threading.Event()

    def blocks(page: Page) -> None:
        release.wait(60)

    for handler in (hangs, blocks):
        with pytest.raises(FetchError) as caught:
            await collect(handler, PAGE, timeout=0.05)
        assert caught.value.error == "handler_timeout"
    release.set()

    async def own(page: Page) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await collect(own, PAGE, timeout=5)


async def test_errors_come_through() -> None:
    def drops(page: Page) -> None:
        raise Drop("thin")

    def stops(page: Page) -> None:
        raise StopIteration

    with pytest.raises(Drop, match="thin"):
        await collect(drops, PAGE)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await collect(stops, PAGE, timeout=5)


async def test_generators_are_closed_when_taking_fails() -> None:
    closed = []

    async def bad(page: Page) -> AsyncIterator[Any]:
        try:
            yield 5
        finally:
            closed.append("async")

    def bad_too(page: Page) -> Iterator[Any]:
        try:
            yield 5
        finally:
            closed.append("sync")

    for handler in (bad, bad_too):
        with pytest.raises(FetchError) as caught:
            await collect(handler, PAGE)
        assert caught.value.error == "item_invalid"
    assert closed == ["async", "sync"]


async def test_endless_generators_end() -> None:
    def endless(page: Page) -> Iterator[Any]:
        while True:
            yield {}

    with pytest.raises(FetchError, match="100,000"):
        await collect(endless, PAGE)


async def test_requests_are_made_fit_for_the_frontier() -> None:
    own = Request(url="HTTP://O.test", job="", data={"a": "x\0", "at": datetime(2026, 1, 2, tzinfo=UTC)})
    got = await collect(lambda page: own, PAGE)
    assert got.requests == [
        Request(url="http://o.test/", job="j", data={"a": "x\ufffd", "at": "2026-01-02T00:00:00Z"})
    ]
    for bad in (Request(url="nope", job="j"), Request(url="http://h/", job="j", data={"a": object()})):
        with pytest.raises(FetchError) as caught:
            await collect(giving(bad), PAGE)
        assert caught.value.error == "item_invalid"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"a": {1}, "d": Decimal("1.50")}, {"a": [1], "d": "1.50"}),
        (Book("x", Decimal(2)), {"title": "x", "price": "2"}),
        (Model(at=datetime(2026, 1, 2, tzinfo=UTC)), {"at": "2026-01-02T00:00:00Z"}),
        ({"m": [Model(at=datetime(2026, 1, 2, tzinfo=UTC))]}, {"m": [{"at": "2026-01-02T00:00:00Z"}]}),
        (Row(1), {"a": 1}),
        ({"a": "x\0y", "\0": ["\ud800", "\\u0000"]}, {"a": "x\ufffdy", "\ufffd": ["\ufffd", "\\u0000"]}),
        ({1: float("nan"), "u": "é"}, {"1": None, "u": "é"}),
        ({}, {}),
    ],
)
def test_items(item: Any, expected: Any) -> None:
    assert json.loads(encode_item(item)) == expected


def endless_item() -> dict[str, Any]:
    item: dict[str, Any] = {}
    item["self"] = item
    return item


class ArrayLike(msgspec.Struct, array_like=True):
    a: int


@pytest.mark.parametrize(
    "item",
    [
        5,
        "text",
        b"x",
        {"a": b"x"},
        {"a": [[b"x"]]},
        {"a": object()},
        {(1, 2): object()},
        Book,
        endless_item(),
        ArrayLike(1),
        PAGE,
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_is_no_item(item: Any) -> None:
    with pytest.raises(FetchError) as caught:
        encode_item(item)
    assert caught.value.error == "item_invalid"


def test_scraper() -> None:
    scraper = Scraper("books", function, start=["HTTP://h.test"], rate="2/s", per_host=2, headers={"a": "b"})

    @scraper.handler("book")
    def book(page: Page) -> None: ...

    assert scraper(PAGE)[0] == {"n": 1}
    assert vars(scraper)["__name__"] == "function"
    assert scraper.handler_for("") is function
    assert scraper.handler_for("book") is book
    with pytest.raises(FetchError) as caught:
        scraper.handler_for("nope")
    assert caught.value.error == "no_such_scraper"
    with pytest.raises(UsageError, match="two handlers"):
        scraper.handler("book")(book)
    assert (scraper.start, scraper.gap, scraper.per_host) == (("http://h.test/",), 0.5, 2)
    assert (scraper.retries, scraper.lease, scraper.headers) == (2, 300.0, {"a": "b"})


async def test_a_scraper_is_a_handler() -> None:
    assert (await collect(Scraper("s", async_generator), PAGE)).items == [b'{"n":1}']


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a b"},
        {"rate": "fast"},
        {"start": ["x"]},
        {"execution": "both"},
        {"per_host": 0},
        {"priority": 0},
        {"priority": 10},
    ],
)
def test_wrong_scrapers_are_told_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Scraper(**{"name": "s", "function": function, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"scope": "all"}, {"fetcher": "bogus"}, {"fetcher": "browser"}, {"fetcher": "tor"}, {"fetcher": "auto"}],
)
def test_what_cannot_be_is_told_where_the_scraper_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
        Scraper("s", generator, **wrong)


def test_one_start_url_needs_no_list() -> None:
    assert Scraper("s", generator, start="http://h.test/a").start == ("http://h.test/a",)
