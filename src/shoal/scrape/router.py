"""Scrapers: which function handles a page, and what it makes of it.

A handler is a function of a page: `async def` or `def`, a generator or not. It yields or returns items (dict,
dataclass, pydantic model, msgspec Struct) and requests (`page.follow`), one at a time or in lists, or None.
Everything else is the error `item_invalid`, raised here and not when a batch of verdicts is written.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, is_dataclass
from functools import update_wrapper
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from shoal import urls
from shoal.errors import BadUrl, FetchError, UsageError
from shoal.model import DEFAULT_PRIORITY, DEFAULT_QUEUE, Request, Scope
from shoal.politeness.pacing import parse_rate
from shoal.queues import check_queue, validate
from shoal.scrape.page import Page, scrub

Handler = Callable[[Page], Any]
Execution = Literal["single", "distributed"]

RUN_LEASE = 300.0
"""Named scrapers have longer leases than crawls: their handlers are the users' own code."""
MAX_YIELDS = 100_000
"""How many items and requests one page may have. A handler that never ends would otherwise fill the
memory."""


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a scraper took out of one page: items as JSON, links by their URLs, and its own requests."""

    items: list[bytes]
    links: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


Scrape = Callable[[Page], Awaitable[Scraped]]


class Scraper:
    """A named function, with handlers by label and the options of its jobs. Callable like the function."""

    def __init__(
        self,
        name: str,
        function: Handler,
        *,
        start: str | Sequence[str] = (),
        scope: Scope = "host",
        rate: str = "1/s",
        per_host: int = 1,
        execution: Execution = "single",
        retries: int = 2,
        lease: float = RUN_LEASE,
        queue: str = DEFAULT_QUEUE,
        fetcher: str = "http",
        priority: int = DEFAULT_PRIORITY,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Raises UsageError about a bad option, where the scraper is defined and not when it runs."""
        if not name or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise UsageError(
                f"bad scraper name {name!r}", hint="use letters, digits, - and _, for example my-shop"
            )
        if execution not in ("single", "distributed"):
            raise UsageError(
                f"scraper {name!r}: bad execution {execution!r}", hint="use single or distributed"
            )
        if scope not in get_args(Scope):
            raise UsageError(
                f"scraper {name!r}: bad scope {scope!r}", hint=f"use one of: {', '.join(get_args(Scope))}"
            )
        if fetcher != "http":
            # Plain HTTP in its place could bring another page than a browser, or give away who visits.
            raise UsageError(f"scraper {name!r}: there is no fetcher {fetcher!r}", hint="leave fetcher out")
        check_queue(queue)
        if not 1 <= priority <= 9:
            raise UsageError(
                f"scraper {name!r}: priority {priority} is not between 1 and 9",
                hint="5 is normal, 9 is urgent",
            )
        if per_host < 1 or retries < 0 or lease <= 0 or timeout <= 0:
            raise UsageError(
                f"scraper {name!r}: a limit is too small",
                hint="per_host is at least 1, retries at least 0, lease and timeout are above 0",
            )
        self.name = name
        self.start = tuple(urls.canonical(url) for url in ([start] if isinstance(start, str) else start))
        self.scope = scope
        self.gap = parse_rate(rate)
        self.per_host = per_host
        self.execution = execution
        self.retries = retries
        self.lease = lease
        self.queue = queue
        self.fetcher = fetcher
        self.priority = priority
        self.headers = dict(headers) if headers else None
        self.timeout = timeout
        self.handlers: dict[str, Handler] = {"": function}
        update_wrapper(self, function)

    def __call__(self, page: Page) -> Any:
        return self.handlers[""](page)

    def __repr__(self) -> str:
        return f"<Scraper {self.name}>"

    def handler(self, label: str) -> Callable[[Handler], Handler]:
        """Decorator: the function handles the pages that were followed with `label`."""

        def register(function: Handler) -> Handler:
            if label in self.handlers:
                raise UsageError(f"scraper {self.name!r} has two handlers for {label!r}")
            self.handlers[label] = function
            return function

        return register

    def handler_for(self, label: str) -> Handler:
        """Returns the handler for a label. Raises FetchError `no_such_scraper`, so that a request with an
        unknown label ends dead."""
        found = self.handlers.get(label)
        if found is None:
            known = ", ".join(repr(name) for name in self.handlers)
            raise FetchError(
                "no_such_scraper", f"scraper {self.name!r} has no handler for {label!r}, only {known}"
            )
        return found

    async def scrape(self, page: Page) -> Scraped:
        """Run the handler of the page's label. Raises as `collect` does."""
        return await collect(self.handler_for(page.label), page, timeout=self.timeout)


async def collect(
    handler: Handler,
    page: Page,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - it becomes our error, not the caller's TimeoutError
) -> Scraped:
    """Run `handler` on `page`. Returns everything that it yields or returns.

    A plain `def` runs on a thread of its own, so it may block; `async def` runs here and must not.
    Raises FetchError `handler_timeout` after `timeout` seconds, `item_invalid` about something that
    cannot be stored, and everything that the handler raises (`Retry` and `Drop` included). A thread cannot
    be stopped: after a timeout it is left running, and its results are discarded.
    """
    basket = _Basket(page)
    function = handler.handlers[""] if isinstance(handler, Scraper) else handler
    try:
        async with asyncio.timeout(timeout) as limit:
            if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
                result = function(page)
            else:
                result = await in_thread(lambda: basket.drain(function(page)))
            await basket.take_async(result)
    except TimeoutError:
        if not limit.expired():
            raise  # the handler's own, from something that it waited for
        raise FetchError("handler_timeout", f"the handler took more than {timeout:g} s") from None
    return Scraped(basket.items, requests=basket.requests)


class _Basket:
    """Sorts a handler's results into items and requests."""

    __slots__ = ("items", "page", "requests")

    def __init__(self, page: Page) -> None:
        self.page = page
        self.items: list[bytes] = []
        self.requests: list[Request] = []

    async def take_async(self, result: Any) -> None:
        if inspect.iscoroutine(result) or inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            if inspect.isasyncgen(result):
                # Closed at once if taking fails: its `finally` must not wait for the garbage collector.
                async with aclosing(result):
                    async for value in result:
                        self.take(value)
            else:
                async for value in result:
                    self.take(value)
            return
        if isinstance(result, Iterator):
            result = await in_thread(lambda: self.drain(result))
        self.take(result)

    def drain(self, result: Any) -> Any:
        """Take all results of a generator (on a thread, which may block). Returns anything else unchanged."""
        if not isinstance(result, Iterator):
            return result
        try:
            for value in result:
                self.take(value)
        finally:
            if inspect.isgenerator(result):
                result.close()
        return None

    def take(self, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, Request):
            self.requests.append(checked_request(value, self.page.request.job))
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            for one in value:
                self.take(one)
            return
        else:
            self.items.append(encode_item(value))
        if len(self.items) + len(self.requests) > MAX_YIELDS:
            raise FetchError("item_invalid", f"more than {MAX_YIELDS:,} items and requests from one page")


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` on a daemon thread of its own.

    Not `asyncio.to_thread`: its pool has cpu + 4 threads, so a few handlers that hang would stop
    all others, and the interpreter waits for them at exit. Measured: 79 µs for a call, 52 µs with the pool.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # timed out or cancelled meanwhile
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(work)
        except StopIteration as error:
            # A future refuses StopIteration, and the visit would wait for ever.
            failure = RuntimeError("the handler raised StopIteration")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(finish, result, failure)
        except RuntimeError:
            return  # the loop was closed in the meantime

    threading.Thread(target=run, name="shoal-handler", daemon=True).start()
    return await done


def checked_request(request: Request, job: str) -> Request:
    """Returns `request` as the frontier may store it: canonical, of this job, with data that is JSON.

    Raises FetchError `item_invalid`.
    """
    try:
        url = urls.canonical(request.url)
    except BadUrl as error:
        raise FetchError("item_invalid", f"a request for a {error}") from None
    try:
        validate(request)
    except UsageError as error:
        raise FetchError("item_invalid", f"a bad request: {error}") from None
    data = request.data
    if data is not None:
        data = msgspec.json.decode(_encode(data, "the data of a request"))
    if url == request.url and data == request.data and request.job == job:
        return request
    return msgspec.structs.replace(request, url=url, data=data, job=job)


def encode_item(value: Any) -> bytes:
    """Returns `value` as one JSON object. Raises FetchError `item_invalid` with the reason.

    Date and time become ISO 8601, Decimal a string, sets lists. NUL and lone surrogates in strings
    become U+FFFD: PostgreSQL and most readers of JSON refuse them.
    """
    if not _is_item(value):
        raise FetchError(
            "item_invalid",
            f"the handler returned {_shown(value)}; "
            "items are dicts, dataclasses, pydantic models or msgspec Structs, links are page.follow(…)",
        )
    return _encode(value, "an item")


def _is_item(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return isinstance(value, (dict, Struct)) or is_dataclass(value) or _is_pydantic(value)


def _is_pydantic(value: Any) -> bool:
    # Recognised by its method, so that pydantic is not imported where it is not used.
    return not isinstance(value, type) and callable(getattr(type(value), "model_dump", None))


def _encode(value: Any, what: str) -> bytes:
    try:
        if _is_pydantic(value):
            value = value.model_dump(mode="json")
        plain = msgspec.to_builtins(value, str_keys=True, builtin_types=(bytes, bytearray), enc_hook=_foreign)
        _refuse_bytes(plain)
        encoded = _try_encode(plain)
        if encoded is None or b"\\u0000" in encoded:
            encoded = msgspec.json.encode(_scrubbed(plain))
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise FetchError("item_invalid", f"{what} cannot be written as JSON: {error}") from None
    if not encoded.startswith(b"{"):
        raise FetchError("item_invalid", f"{what} is not a JSON object but {_shown(value)}")
    return encoded


def _try_encode(plain: Any) -> bytes | None:
    try:
        return msgspec.json.encode(plain)
    except UnicodeEncodeError:
        return None  # a lone surrogate


def _foreign(value: Any) -> Any:
    """Returns the plain form of a value that msgspec does not know."""
    if _is_pydantic(value):
        return value.model_dump(mode="json")
    raise TypeError(f"{_shown(value)} has no JSON form")


def _refuse_bytes(plain: Any) -> None:
    if isinstance(plain, dict):
        for one in plain.values():
            if type(one) is not str:
                _refuse_bytes(one)
    elif isinstance(plain, list):
        for one in plain:
            if type(one) is not str:
                _refuse_bytes(one)
    elif isinstance(plain, (bytes, bytearray)):
        raise TypeError("it contains bytes; decode them or encode them as text")


def _scrubbed(plain: Any) -> Any:
    if isinstance(plain, str):
        return scrub(plain)
    if isinstance(plain, dict):
        return {_scrubbed(name): _scrubbed(one) for name, one in plain.items()}
    if isinstance(plain, list):
        return [_scrubbed(one) for one in plain]
    return plain


def _shown(value: Any) -> str:
    """Returns a short name of a value for error messages: its repr may be huge, or raise."""
    kind = type(value).__name__
    return f"{kind} {value[:40]!r}" if isinstance(value, (str, bytes)) else f"a {kind}"
