"""`Shoal`, the object that users hold: named scrapers and how they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from shoal import urls
from shoal.app.brokers import delivered
from shoal.app.discovery import Found, discovery
from shoal.app.jobs import items_as_they_come
from shoal.app.loading import Application
from shoal.app.local_run import Run, Summary
from shoal.app.parts import Parts
from shoal.app.runs import exclusive_run, open_run
from shoal.app.scrapers import SITE
from shoal.app.session import Session
from shoal.app.views import run_counts
from shoal.dispatch.port import Dispatch
from shoal.errors import FrontierError, UsageError
from shoal.export.formats import exporter_for
from shoal.fetch.port import Fetcher
from shoal.frontier.port import Backend
from shoal.scrape.hooks import ItemHook, RequestHook, ResponseHook
from shoal.scrape.router import Handler, Scraper
from shoal.settings import Settings, known, load


class Shoal(Application):
    """An application: named scrapers and how they run.

    app = Shoal()

    @app.scraper("books", start=["https://books.example/"], rate="2/s")
    async def books(page):
        for a in page.css("article h3 a"):
            yield page.follow(a, label="book")
    """

    def __init__(
        self,
        *,
        frontier: str | Backend | None = None,
        dispatch: str | Dispatch | None = None,
        fetcher: Fetcher | None = None,
        **settings: Any,
    ) -> None:
        """Settings by name (see `shoal.settings.Settings`); the environment fills in the rest.

        `frontier` and `dispatch` are addresses or objects. An object stays yours: it is used by every crawl
        of this application, one event loop at a time, and is not closed.
        """
        given = {"frontier": frontier, "dispatch": dispatch, "fetcher": fetcher}
        self._parts, self._given = Parts().taken_from(
            settings | {name: value for name, value in given.items() if value is not None}
        )
        known(self._given)
        super().__init__()

    def settings(self, **more: Any) -> Settings:
        return load(**(self._given | more))

    def session(self, *, create: bool = True, **given: Any) -> AbstractAsyncContextManager[Session]:
        """A session with these settings and objects over those of the application."""
        parts, settings = self._parts.taken_from(given)
        return Session.opened(self.settings(**settings), self, create=create, parts=parts)

    def scraper(self, name: str, **options: Any) -> Callable[[Handler], Scraper]:
        """Decorator: register the function as the scraper `name`."""

        def register(function: Handler) -> Scraper:
            if name in self.scrapers or name == SITE:
                raise UsageError(f"scraper {name!r} already exists", hint="choose another name")
            self.scrapers[name] = Scraper(name, function, **options)
            return self.scrapers[name]

        return register

    def on_request(self, hook: RequestHook) -> RequestHook:
        """Decorator: call this function with each request immediately before it is fetched.

        It returns headers to send, or None. It may raise Drop (the URL is not visited) or Retry. It runs
        when scope, robots.txt and the host's pace have let the request pass, and cannot change where it goes.
        """
        self.hooks.request.append(hook)
        return hook

    def on_response(self, hook: ResponseHook) -> ResponseHook:
        """Decorator: call this function with each page that was fetched, whatever its status.

        It returns a Response to use instead, or None. It may raise Drop or Retry.
        """
        self.hooks.response.append(hook)
        return hook

    def on_item(self, hook: ItemHook) -> ItemHook:
        """Decorator: call this function with each item, as a dict, and its page, before the item is stored.

        It returns an item or a list of items to store instead, or None for the item as it is now. It may
        raise Drop (this item is not stored) or Retry (nothing of the page is stored yet).
        """
        self.hooks.item.append(hook)
        return hook

    def crawl(self, *start: str, scraper: str = SITE, out: str | None = None, **settings: Any) -> Crawl:
        """Returns a crawl. `await` it for a summary, or iterate over its items as they come.

        `start` are URLs, or the name of a scraper: `app.crawl("books")`. If no page could be fetched, it
        raises NothingFetched at the end. If the frontier fails, the crawl logs it and retries for 60 seconds
        (the setting `give_up_after`), then raises the FrontierError.
        """
        if start and start[0] in self.scrapers:
            scraper, start = start[0], start[1:]
        known(Parts().taken_from(settings)[1])  # now, not when the crawl starts
        if out:
            exporter_for(out, "")
        return Crawl(self, start, scraper, out, settings)

    async def submit(
        self, name: str, urls: Iterable[str] | None = None, *, run_id: str = "", **settings: Any
    ) -> dict[str, Any]:
        """Enqueues a run of a scraper and returns at once: workers in other processes do the work."""
        async with self.session(**settings) as session:
            return (await open_run(session, name, urls, run_id=run_id)).queued

    async def run(
        self,
        name: str,
        urls: Iterable[str] | None = None,
        *,
        run_id: str = "",
        resume: bool = False,
        out: str | None = None,
        **settings: Any,
    ) -> Summary | dict[str, Any]:
        """Runs a scraper by its execution mode: here and to the end, or enqueued for workers.

        Raises NothingFetched if it ran here and no page could be fetched.
        """
        if out:
            exporter_for(out, "")  # now, not after the run
        async with self.session(**settings) as session:
            scraper = session.scraper(name)
            if scraper is not None and scraper.execution == "distributed":
                return (await open_run(session, name, urls, run_id=run_id, resume=resume)).queued
            async with exclusive_run(session, name):
                started = await open_run(session, name, urls, run_id=run_id, resume=resume)
                async with delivered(session, started.run_id) as frontier:
                    run = Run(session, started.run_id, out=out, frontier=frontier)
                    summary = await run.to_end()
                if run.nothing is not None:
                    raise run.nothing
                return summary

    async def discover(self, site: str, *, since: str = "", **settings: Any) -> AsyncIterator[Found]:
        """Yields the URLs in a site's sitemaps and feeds, as they are read.

        `since` is a date, or `7d` for seven days ago. Files that cannot be read are skipped.
        """
        from shoal.discover.entry import parse_since

        moment = parse_since(since) if since else None
        async with self.session(**({"frontier": "memory:"} | settings)) as session:
            async for entry in discovery(session, site, since=moment):
                yield entry

    async def status(self, run_id: str, **settings: Any) -> dict[str, int]:
        """Returns the counts of a run: pending, claimed, completed, failed, remaining."""
        async with self.session(create=False, **settings) as session:
            return run_counts((await session.frontier.job(run_id)).counts)


class Crawl:
    """A crawl that runs when it is awaited or iterated over."""

    def __init__(
        self, app: Shoal, start: tuple[str, ...], scraper: str, out: str | None, settings: dict[str, Any]
    ) -> None:
        self._app = app
        self._start = start
        self._scraper = scraper
        self._out = out
        self._settings = settings
        self.summary: Summary | None = None

    def __await__(self) -> Any:
        return self._run().__await__()

    async def _run(self) -> Summary:
        async for _ in self:
            pass
        assert self.summary is not None
        return self.summary

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async with self._app.session(**self._settings) as session:
            scraper = session.scraper(self._scraper)
            start = tuple(urls.canonical(url) for url in self._start) or (scraper.start if scraper else ())
            if not start:
                raise UsageError("no URL to start from", hint="give one, or a scraper with start=")
            spec = session.spec(self._scraper, start)
            job = await session.open_job(spec)
            await session.submit(job.id, start)
            async with delivered(session, job.id) as frontier:
                run = Run(session, job.id, out=self._out, frontier=frontier)
                worker = asyncio.create_task(run.to_end())
                try:
                    async for body in items_as_they_come(session, job.id, run.ended):
                        yield msgspec.json.decode(body)
                    self.summary = await worker
                    if run.nothing is not None:
                        raise run.nothing
                except FrontierError:
                    if run.ended.is_set():
                        await worker  # raises the error it gave up with
                    raise
                finally:
                    if not worker.done():
                        run.stop()
                        run.stop()
                        await asyncio.gather(worker, return_exceptions=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The same without async, for scripts and notebooks."""
        from shoal.blocking import iterate

        return iterate(self)
