"""Hooks: what an application does to every request, response and item, whichever scraper they belong to.

A hook is a function, `async def` or plain `def`. Several of a kind run in the order in which they were
registered, each on what the one before it left. For all of them: None means "as it is", `Drop` gives up what
the hook was given, `Retry` tries the visit again later.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from shoal.errors import Drop, FetchError
from shoal.fetch.port import check_headers
from shoal.model import Request, Response
from shoal.scrape.page import Page
from shoal.scrape.router import MAX_YIELDS, encode_item, in_thread

Headers = Mapping[str, str]
RequestHook = Callable[[Request], Headers | Awaitable[Headers | None] | None]
"""Returns headers to send with the request, besides those that it has."""
ResponseHook = Callable[[Page], Response | Awaitable[Response | None] | None]
"""Returns a response to be used instead."""
ItemHook = Callable[[dict[str, Any], Page], Any]
"""Returns an item to be stored instead, or a list of them."""

TIMEOUT = 60.0
"""Seconds that the hooks of one kind may take for one visit: a visit must end."""


class Hooks:
    """The hooks of an application, by kind."""

    def __init__(self) -> None:
        self.request: list[RequestHook] = []
        self.response: list[ResponseHook] = []
        self.item: list[ItemHook] = []

    def __bool__(self) -> bool:
        return bool(self.request or self.response or self.item)

    async def on_request(self, request: Request) -> Request:
        """The request with the headers that the hooks give. Everything else about it was checked by scope,
        robots.txt and pace, so it stays: a hook cannot send the visit elsewhere."""
        async with _deadline("request"):
            for hook in self.request:
                more = await _called(hook, request)
                if more is None:
                    continue
                if not isinstance(more, Mapping):
                    raise _mistake(hook, more, "headers or None; handlers follow other URLs")
                check_headers(more)
                merged = (request.headers or {}) | {str(name): str(value) for name, value in more.items()}
                request = msgspec.structs.replace(request, headers=merged)
        return request

    async def on_response(self, page: Page) -> Page:
        """The page, or one with the response that the hooks put in its place."""
        async with _deadline("response"):
            for hook in self.response:
                other = await _called(hook, page)
                if other is None:
                    continue
                if not isinstance(other, Response) or other.url != page.response.url:
                    raise _mistake(hook, other, "a Response of the same URL or None")
                page = Page(page.request, other)
        return page

    async def on_items(self, items: list[bytes], page: Page) -> list[bytes]:
        """The items of a page, as JSON, as the hooks leave them. One that a hook drops is not stored; the
        page is done all the same, and its links are followed."""
        if not items:
            return items
        documents = [msgspec.json.decode(item) for item in items]
        async with _deadline("item"):
            for hook in self.item:
                documents = await self._applied(hook, documents, page)
                if len(documents) > MAX_YIELDS:
                    raise FetchError("item_invalid", f"more than {MAX_YIELDS:,} items from one page")
        return [encode_item(document) for document in documents]

    async def _applied(self, hook: ItemHook, documents: list[Any], page: Page) -> list[Any]:
        left: list[Any] = []
        if inspect.iscoroutinefunction(hook):
            for document in documents:
                try:
                    _place(left, document, await hook(document, page))
                except Drop:
                    continue
            return left

        def apply() -> None:
            for document in documents:
                try:
                    _place(left, document, hook(document, page))
                except Drop:
                    continue

        await in_thread(apply)  # one thread for all items of a page
        return left


async def _called(hook: Callable[..., Any], given: Request | Page) -> Any:
    """What a hook returns. A plain `def` runs on a thread of its own, so it may block."""
    if inspect.iscoroutinefunction(hook):
        return await hook(given)
    return await in_thread(lambda: hook(given))


def _place(left: list[Any], document: Any, result: Any) -> None:
    """Put what a hook made of an item where it belongs, as the plain dict that the next hook is given."""
    if result is None:
        left.append(document)
    elif isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        left.extend(_plain(one) for one in result)
    else:
        left.append(_plain(result))


def _plain(item: Any) -> Any:
    return item if type(item) is dict else msgspec.json.decode(encode_item(item))


@asynccontextmanager
async def _deadline(kind: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TIMEOUT) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise  # the hook's own, about something it waited for
        raise FetchError("handler_timeout", f"the {kind} hooks took more than {TIMEOUT:g} s") from None


def _mistake(hook: Callable[..., Any], result: object, wanted: str) -> TypeError:
    name = getattr(hook, "__name__", repr(hook))
    return TypeError(f"the hook {name} returned {type(result).__name__}; it returns {wanted}")
