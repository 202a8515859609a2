"""The HTTP fetcher: libcurl on a thread of its own.

    fetch()  ──inbox──▶  driver thread  ──one call per turn──▶  futures of the event loop
                         selector, CurlMulti, slots

Only the driver thread (`driver`) touches libcurl. A slot (`slot`) is a pooled easy handle: its callbacks are
bound once, and its state is reset for each request. Every address comes from the resolver (`guard`), is
pinned for the transfer, and is checked once more when libcurl asks for the socket.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import time
import weakref
from collections.abc import Callable

import certifi

from shoal.errors import FetchError, UsageError
from shoal.fetch.decode import ACCEPTED
from shoal.fetch.driver import Driver, Outcome
from shoal.fetch.guard import Guard, Resolver
from shoal.fetch.port import Ask
from shoal.fetch.slot import CONTROL, Job, Setup, header_lines, target_of
from shoal.model import Response

_METHOD = re.compile(r"[A-Z]{1,20}\Z")


def default_user_agent() -> str:
    """Returns `shoal/<version>`. A crawl should set a `user_agent` that also says where to complain."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("shoal")
    except PackageNotFoundError:
        release = "0"
    return f"shoal/{release}"


def _stop_at_exit(reference: weakref.ref[Driver]) -> None:
    """Stop the driver: a daemon thread inside libcurl may crash the interpreter as it exits."""
    driver = reference()
    if driver is not None and driver.is_alive():
        driver.stop()
        driver.join(2.0)


class HttpFetcher:
    """Fetches over HTTP/1.1 (and HTTP/2 over TLS if asked to). Belongs to one event loop.

    - It connects only to addresses that the guard permits, and never follows a redirect by itself.
    - A body is decoded, complete and at most `limits.body` long; otherwise a FetchError is raised.
    - It keeps up to `keep_alive` idle connections and runs up to `concurrency` transfers. Further transfers
      wait, and their waiting counts only against their total deadline.
    """

    def __init__(
        self,
        *,
        user_agent: str | None = None,
        guard: Guard | None = None,
        resolver: Resolver | None = None,
        http2: bool = False,
        ca_file: str | None = None,
        keep_alive: int = 256,
        concurrency: int = 512,
    ) -> None:
        agent = default_user_agent() if user_agent is None else user_agent
        if not agent.strip() or CONTROL.search(agent) or not agent.isascii():
            raise UsageError(
                "the user agent must be one line of ASCII text",
                hint="name your crawler, and a page or e-mail address where its owner can be reached",
            )
        if resolver is not None and guard is None:
            guard = resolver.guard
        self.guard = guard or Guard()
        self.resolver = resolver or Resolver(self.guard)
        headers = (
            ("User-Agent", agent),
            ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"),
            ("Accept-Language", "en;q=0.9,*;q=0.5"),
            ("Accept-Encoding", ACCEPTED),
        )
        self._headers = headers
        self._setup = Setup(
            guard=self.guard,
            headers=headers,
            lines=header_lines(headers, ()),
            ca_file=ca_file or certifi.where(),
            http2=http2,
        )
        self._concurrency = concurrency
        self._keep_alive = keep_alive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver | None = None
        self._closed = False
        self._at_exit: Callable[[], None] | None = None

    async def fetch(self, ask: Ask) -> Response:
        """Fetch one hop. Raises FetchError with one of `errors.CLASSES`, nothing else."""
        driver = self._driver
        if driver is None or driver.stopped:
            driver = self._open()
        started = time.monotonic()
        target = target_of(ask.url)
        if ask.headers:
            header_lines(self._headers, ask.headers)
        if ask.method != "GET" and not _METHOD.match(ask.method):
            raise FetchError("protocol_error", f"bad method {ask.method[:40]!r}")
        host, port = target.host, target.port
        addresses = self.resolver.known(host, port, ask.allow_private)
        if addresses is None:
            wait = min(ask.limits.dns, ask.limits.total)
            addresses = await self.resolver.resolve(host, port, allow_private=ask.allow_private, within=wait)
        private = self.guard.permits(host, port, ask.allow_private)
        assert self._loop is not None
        future: asyncio.Future[Response] = self._loop.create_future()
        job = Job(ask, target, addresses, private=private, future=future, started=started)
        driver.post(job)
        if driver.stopped:
            # Posted first and checked afterwards, so the job is ended either by the thread or here.
            future.cancel()
            raise FetchError("internal", "the fetcher is closed")
        try:
            response = await future
        except asyncio.CancelledError:
            job.cancelled = True
            driver.post(job)
            raise
        if response.address != addresses[0]:
            self.resolver.prefer(host, response.address)
        return response

    async def close(self) -> None:
        """End the thread. Transfers in flight fail. May be called twice."""
        self._closed = True
        self.resolver.close()
        driver = self._driver
        if driver is None:
            return
        driver.stop()
        await asyncio.to_thread(driver.join)
        self._forget()

    def _open(self) -> Driver:
        if self._closed:
            raise FetchError("internal", "the fetcher is closed")
        self._forget()  # a crashed thread is replaced: one bug must not end the worker
        self._loop = asyncio.get_running_loop()
        self._driver = driver = Driver(
            self._setup, self._hand_over, concurrency=self._concurrency, keep_alive=self._keep_alive
        )
        reference = weakref.ref(driver)
        self._at_exit = lambda: _stop_at_exit(reference)
        atexit.register(self._at_exit)
        driver.start()
        return driver

    def _forget(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._driver is not None:
            self._driver.dispose()
        self._driver = self._at_exit = None

    def _hand_over(self, outcomes: list[Outcome]) -> None:
        """Called by the driver thread: wakes the loop once for all outcomes of a turn."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_resolve, outcomes)
        except RuntimeError:
            return  # the loop is closed, so no task waits for them


def _resolve(outcomes: list[Outcome]) -> None:
    for job, response, error in outcomes:
        if job.future.done():
            continue  # cancelled in the meantime
        if error is not None:
            job.future.set_exception(error)
        elif response is not None:
            job.future.set_result(response)
