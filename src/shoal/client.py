"""Clients of `shoal serve` in Python, with and without async.

    with shoal.Client("http://127.0.0.1:8000") as client:
        job = client.scrape("https://example.com/", expected_pages=50)
        client.wait(job)
        for item in client.items(job):
            print(item["title"])

`AsyncClient` has the same methods as coroutines. Options have the names of the API's fields.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from shoal.blocking import LoopThread
from shoal.errors import FetchError, ShoalError, UsageError
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Limits

DEFAULT_URL = "http://127.0.0.1:8000"
ENDED = ("SUCCESS", "FAILURE", "REVOKED")
MAX_ANSWER = 512 * 1024 * 1024
"""Maximum bytes of one response. Pages of items are far smaller; a whole result need not be."""

Json = dict[str, Any]
T = TypeVar("T")


class ApiError(ShoalError):
    """The service refused a request, or did not respond (`status` 0). `problem` is its problem document."""

    def __init__(self, status: int, message: str, *, hint: str = "", problem: Json | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem or {}


class AsyncClient:
    """A client for one event loop. Use it in `async with`, or call `close`."""

    def __init__(self, url: str = "", token: str = "", *, timeout: float = 60.0) -> None:
        """`url` and `token` default to SHOAL_URL and SHOAL_TOKEN in the environment."""
        self._url = (url or os.environ.get("SHOAL_URL", "") or DEFAULT_URL).rstrip("/")
        self._token = token or os.environ.get("SHOAL_TOKEN", "")
        self._timeout = timeout
        self._closed = False
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"bad address {self._url!r}", hint=f"write it like {DEFAULT_URL}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        # Its address may be private: the user named this endpoint, and the client requests no other.
        self._http = HttpFetcher(guard=Guard(allow={f"{host}:{port}"}), concurrency=64)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        self._closed = True
        await self._http.close()

    async def scrape(self, url: str = "", *, idempotency_key: str = "", **options: Any) -> str:
        """Submit a job. Returns its id. Options: urls, expected_pages, output_format, priority…"""
        body = ({"url": url} if url else {}) | options
        answer = await self._json("POST", "/scrape", body, key=idempotency_key)
        return str(answer["job_id"])

    async def business(self, url: str, *, idempotency_key: str = "", **options: Any) -> str:
        """Submit a scrape of a company's pages. Returns the job's id."""
        answer = await self._json("POST", "/scrape/business", {"url": url} | options, key=idempotency_key)
        return str(answer["job_id"])

    async def progress(self, job: str) -> Json:
        """Returns the job's progress."""
        return await self._json("GET", f"/scrape/{_quoted(job)}/progress")

    async def wait(self, job: str, *, timeout: float | None = None, poll: float = 0.5) -> Json:  # noqa: ASYNC109
        """Wait until the job has ended. Returns its progress. Raises TimeoutError."""
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        while True:
            progress = await self.progress(job)
            if progress["status"] in ENDED:
                return progress
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{job} has not ended after {timeout} s")
            await asyncio.sleep(min(poll, left))

    async def page(
        self, job: str, *, cursor: str = "0", limit: int = 1000, partial: bool = False
    ) -> tuple[list[Json], str | None]:
        """Returns the items after a cursor, and the next cursor; None if these are the last."""
        query = urlencode(
            {"format": "json", "cursor": cursor, "limit": limit, "partial": str(partial).lower()}
        )
        answer = await self._json("GET", f"/scrape/{_quoted(job)}/result?{query}")
        return answer["items"], answer["next_cursor"]

    async def items(self, job: str, *, partial: bool = False) -> AsyncIterator[Json]:
        """Yields all items of the job, page by page."""
        cursor: str | None = "0"
        while cursor is not None:
            found, cursor = await self.page(job, cursor=cursor, partial=partial)
            for item in found:
                yield item

    async def result(self, job: str, *, format: str = "", partial: bool = False) -> bytes:
        """Returns the result as one document. `format` is json, jsonl, csv, markdown or parquet; "" means the
        job's `output_format`."""
        query = urlencode({"partial": str(partial).lower()} | ({"format": format} if format else {}))
        return (await self._send("GET", f"/scrape/{_quoted(job)}/result?{query}"))[1]

    async def cancel(self, job: str) -> Json:
        """Cancel the job. Returns its progress."""
        return await self._json("DELETE", f"/scrape/{_quoted(job)}")

    async def batch(
        self,
        urls: Iterable[str],
        *,
        distributed: bool = False,
        timeout: float = 300.0,  # noqa: ASYNC109 - the server's, which returns the results so far
        idempotency_key: str = "",
        **options: Any,
    ) -> Json:
        """Visit these URLs. Returns their contents and statistics, after `timeout` seconds at most."""
        body = {"urls": list(urls), "distributed": distributed, "timeout": timeout, "options": options}
        return await self._json(
            "POST", "/api/crawl/batch", body, key=idempotency_key, within=timeout + self._timeout
        )

    async def add_schedule(
        self,
        name: str,
        url: str = "",
        *,
        cron: str = "",
        every: str = "",
        idempotency_key: str = "",
        **options: Any,
    ) -> Json:
        """Add a schedule that submits a job at the given times. Returns it. Options: those of `scrape`,
        timezone, overlap, replace…"""
        given = {"url": url, "cron": cron, "every": every}
        body = {"name": name} | {key: value for key, value in given.items() if value} | options
        return await self._json("POST", "/schedules", body, key=idempotency_key)

    async def schedules(self) -> list[Json]:
        """Returns all schedules, ordered by name."""
        found: list[Json] = []
        cursor: str | None = ""
        while cursor is not None:
            query = urlencode({"limit": 1000} | ({"cursor": cursor} if cursor else {}))
            answer = await self._json("GET", f"/schedules?{query}")
            found += answer["schedules"]
            cursor = answer["next_cursor"]
        return found

    async def schedule(self, name: str) -> Json:
        """Returns the schedule."""
        return await self._json("GET", f"/schedules/{_quoted(name)}")

    async def change_schedule(self, name: str, **changes: Any) -> Json:
        """Change a schedule. Returns it. Changes: cron, every, timezone, overlap, catch_up, paused."""
        return await self._json("PATCH", f"/schedules/{_quoted(name)}", changes)

    async def remove_schedule(self, name: str) -> None:
        """Remove a schedule. The jobs that it has submitted stay."""
        await self._send("DELETE", f"/schedules/{_quoted(name)}")

    async def run_schedule(self, name: str, *, idempotency_key: str = "") -> str:
        """Submit the schedule's job now. Returns the job's id."""
        answer = await self._json("POST", f"/schedules/{_quoted(name)}/run", key=idempotency_key)
        return str(answer["job_id"])

    async def queue_status(self) -> Json:
        """Returns every queue, every worker and the throughput."""
        return await self._json("GET", "/queue/status")

    async def health(self) -> Json:
        """Returns the service's health, also if `healthy` is false."""
        status, body = await self._send("GET", "/health", accepted=(503,))
        answer = _decoded(body)
        if "healthy" not in answer:
            raise _refused(status, answer)
        return answer

    async def _json(
        self, method: str, path: str, body: Json | None = None, *, key: str = "", within: float = 0.0
    ) -> Json:
        return _decoded((await self._send(method, path, body, key=key, within=within))[1])

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        key: str = "",
        within: float = 0.0,
        accepted: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """Returns status and body. Raises ApiError for a status of 300 or more that is not `accepted`."""
        if self._closed:
            raise UsageError("this client is closed", hint="create a new one, or close it later")
        headers = [("Accept", "application/json")]
        if self._token:
            headers.append(("Authorization", f"Bearer {self._token}"))
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        if key:
            headers.append(("Idempotency-Key", key))
        total = within or self._timeout
        limits = Limits(first_byte=total, idle=total, total=total, min_rate=1, body=MAX_ANSWER)
        data = msgspec.json.encode(body) if body is not None else None
        try:
            response = await self._http.fetch(
                Ask(self._url + path, method, tuple(headers), data, limits=limits)
            )
        except FetchError as error:
            raise ApiError(
                0,
                f"{self._url} is not responding: {error.message or error.error}",
                hint="is `shoal serve` running there?",
            ) from None
        if response.status >= 300 and response.status not in accepted:
            raise _refused(response.status, _decoded(response.body))
        return response.status, response.body


class Client:
    """The same without async. Works in notebooks too, where an event loop is running already."""

    def __init__(self, url: str = "", token: str = "", *, timeout: float = 60.0) -> None:
        self.aio = AsyncClient(url, token, timeout=timeout)
        self._thread = LoopThread("shoal-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        if self._thread.closed:
            return
        self._run(self.aio.close())
        self._thread.close()

    def scrape(self, url: str = "", *, idempotency_key: str = "", **options: Any) -> str:
        """Submit a job. Returns its id. Options: urls, expected_pages, output_format, priority…"""
        return self._run(self.aio.scrape(url, idempotency_key=idempotency_key, **options))

    def business(self, url: str, *, idempotency_key: str = "", **options: Any) -> str:
        """Submit a scrape of a company's pages. Returns the job's id."""
        return self._run(self.aio.business(url, idempotency_key=idempotency_key, **options))

    def progress(self, job: str) -> Json:
        """Returns the job's progress."""
        return self._run(self.aio.progress(job))

    def wait(self, job: str, *, timeout: float | None = None, poll: float = 0.5) -> Json:
        """Wait until the job has ended. Returns its progress. Raises TimeoutError."""
        return self._run(self.aio.wait(job, timeout=timeout, poll=poll))

    def items(self, job: str, *, partial: bool = False) -> Iterator[Json]:
        """Yields all items of the job, page by page."""
        cursor: str | None = "0"
        while cursor is not None:
            found, cursor = self._run(self.aio.page(job, cursor=cursor, partial=partial))
            yield from found

    def result(self, job: str, *, format: str = "", partial: bool = False) -> bytes:
        """Returns the result as one document. `format` is json, jsonl, csv, markdown or parquet; "" means the
        job's `output_format`."""
        return self._run(self.aio.result(job, format=format, partial=partial))

    def cancel(self, job: str) -> Json:
        """Cancel the job. Returns its progress."""
        return self._run(self.aio.cancel(job))

    def batch(
        self,
        urls: Iterable[str],
        *,
        distributed: bool = False,
        timeout: float = 300.0,
        idempotency_key: str = "",
        **options: Any,
    ) -> Json:
        """Visit these URLs. Returns their contents and statistics, after `timeout` seconds at most."""
        return self._run(
            self.aio.batch(
                urls, distributed=distributed, timeout=timeout, idempotency_key=idempotency_key, **options
            )
        )

    def add_schedule(
        self,
        name: str,
        url: str = "",
        *,
        cron: str = "",
        every: str = "",
        idempotency_key: str = "",
        **options: Any,
    ) -> Json:
        """Add a schedule that submits a job at the given times. Returns it. Options: those of `scrape`,
        timezone, overlap, replace…"""
        return self._run(
            self.aio.add_schedule(
                name, url, cron=cron, every=every, idempotency_key=idempotency_key, **options
            )
        )

    def schedules(self) -> list[Json]:
        """Returns all schedules, ordered by name."""
        return self._run(self.aio.schedules())

    def schedule(self, name: str) -> Json:
        """Returns the schedule."""
        return self._run(self.aio.schedule(name))

    def change_schedule(self, name: str, **changes: Any) -> Json:
        """Change a schedule. Returns it. Changes: cron, every, timezone, overlap, catch_up, paused."""
        return self._run(self.aio.change_schedule(name, **changes))

    def remove_schedule(self, name: str) -> None:
        """Remove a schedule. The jobs that it has submitted stay."""
        self._run(self.aio.remove_schedule(name))

    def run_schedule(self, name: str, *, idempotency_key: str = "") -> str:
        """Submit the schedule's job now. Returns the job's id."""
        return self._run(self.aio.run_schedule(name, idempotency_key=idempotency_key))

    def queue_status(self) -> Json:
        """Returns every queue, every worker and the throughput."""
        return self._run(self.aio.queue_status())

    def health(self) -> Json:
        """Returns the service's health, also if `healthy` is false."""
        return self._run(self.aio.health())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)


def _quoted(job: str) -> str:
    return quote(job, safe="")


def _decoded(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _refused(status: int, problem: Json) -> ApiError:
    detail = str(problem.get("detail") or problem.get("title") or "the service refused")
    return ApiError(status, f"{detail} ({status})", hint=str(problem.get("hint") or ""), problem=problem)
