"""The job service under load: many clients that submit and poll, and a result of a million items.

python -m bench.load                      200 clients for 60 s, then a million items
python -m bench.load --clients 20 --seconds 5 --items 100000

Clients are one process with a connection each, so the machine is shared by them, the service and its
worker. p99 is that of a progress request as the client sees it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, to_builtins

from shoal.demo.site import ProcessSite, generated_site
from shoal.frontier.port import Backend
from shoal.model import Done, JobSpec, Request
from shoal.registry import open_frontier
from tests.rig.command import Shell
from tests.rig.service import ENDED, Service

GOAL_P99 = 0.25
HOSTS = 50
POLL = 1.0
"""Seconds between two looks of one client at its job."""


class Figures(Struct, frozen=True):
    jobs: int
    progress_calls: int
    errors: int
    p50: float
    p99: float
    submit_p99: float
    seconds: float


class Connection:
    """One client's connection: HTTP/1.1 by hand, so that the clients cost little."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        lines = answer.decode().lower().split("\r\n")
        length = next((line for line in lines if line.startswith("content-length:")), "content-length: 0")
        return int(lines[0].split()[1]), await self._reader.readexactly(int(length.partition(":")[2]))


class Clients:
    def __init__(self, service: str, hosts: list[str], seconds: float) -> None:
        self._service = service
        self._hosts = hosts
        self._end = time.monotonic() + seconds
        self.polls: list[float] = []
        self.submits: list[float] = []
        self.errors = 0
        self.jobs = 0

    async def one(self, number: int) -> None:
        connection = Connection(self._service)
        # Not all in the same moment: people do not either.
        await asyncio.sleep(POLL * (number % 100) / 100)
        await connection.open()
        while time.monotonic() < self._end:
            job = await self._submit(connection, self._hosts[number % len(self._hosts)])
            if job is not None:
                await self._follow(connection, job)
        connection.close()

    async def _submit(self, connection: Connection, host: str) -> str | None:
        urls = [f"{host}size/{number}" for number in range(100, 105)]
        asked = json.dumps({"urls": urls, "scope": "page", "rate": "none", "per_host": 4}).encode()
        started = time.perf_counter()
        status, body = await connection.ask("POST", "/scrape", asked)
        self.submits.append(time.perf_counter() - started)
        if status != 202:
            self.errors += 1
            return None
        return str(json.loads(body)["job_id"])

    async def _follow(self, connection: Connection, job: str) -> None:
        while time.monotonic() < self._end:
            await asyncio.sleep(POLL)
            started = time.perf_counter()
            status, body = await connection.ask("GET", f"/scrape/{job}/progress")
            self.polls.append(time.perf_counter() - started)
            if status != 200:
                self.errors += 1
                return
            if json.loads(body)["status"] in ENDED:
                self.jobs += 1
                return


def load(service: str, hosts: list[str], *, clients: int, seconds: float) -> Figures:
    async def run() -> Figures:
        crowd = Clients(service, hosts, seconds)
        started = time.monotonic()
        await asyncio.gather(*(crowd.one(number) for number in range(clients)))
        return Figures(
            jobs=crowd.jobs,
            progress_calls=len(crowd.polls),
            errors=crowd.errors,
            p50=quantile(crowd.polls, 0.5),
            p99=quantile(crowd.polls, 0.99),
            submit_p99=quantile(crowd.submits, 0.99),
            seconds=time.monotonic() - started,
        )

    return asyncio.run(run())


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else float("inf")


def fill(db: Path, job: str, items: int, *, size: int) -> None:
    """A job with this many items of about `size` bytes, as if a crawl had brought them."""

    async def run() -> None:
        frontier = await open_frontier(f"{db}")
        try:
            await _fill(frontier, job, items, "x" * (size - 120))
        finally:
            await frontier.close()

    asyncio.run(run())


async def _fill(frontier: Backend, job: str, items: int, text: str) -> None:
    await frontier.open_job(job, JobSpec(gap=0.0, width=10_000, dedicated=True))
    pages = max(1, items // 1000)
    await frontier.add([Request(f"http://example.com/{number}", job) for number in range(pages)])
    made = 0
    while made < items:
        claim = await frontier.claim(100, worker="fill", lease_seconds=60.0, job=job)
        for lease in claim.leases:
            bodies = [
                json.dumps({"url": f"http://example.com/{made + n}", "title": str(n), "text": text}).encode()
                for n in range(1000)
            ]
            made += len(bodies)
            await frontier.settle([Done(lease, bodies)])


def read_result(service: str, job: str, form: str) -> tuple[int, int]:
    """Lines and bytes of a result, read as it comes."""

    async def run() -> tuple[int, int]:
        parts = urlsplit(service)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        path = f"/scrape/{job}/result?format={form}&partial=true"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        lines = size = 0
        while chunk := await reader.read(1 << 20):
            lines += chunk.count(b"\n")
            size += len(chunk)
        writer.close()
        return lines, size

    return asyncio.run(run())


def memory(pid: int) -> tuple[int, int]:
    """What a process has now, and had at most, in MiB."""
    text = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return int(text["VmRSS"].split()[0]) // 1024, int(text["VmHWM"].split()[0]) // 1024


def main() -> int:
    options = ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--items", type=int, default=1_000_000)
    options.add_argument("--json", action="store_true", help="figures for other programs")
    given = options.parse_args()
    told: dict[str, Any] = {"clients": given.clients, "items": given.items}
    with TemporaryDirectory() as folder, Shell(Path(folder)) as shell:
        with ProcessSite(generated_site(pages=1), hosts=HOSTS) as site:
            allow = [word for url in site.urls for word in ("--allow-endpoint", url.split("/")[2])]
            service = Service(shell, "--workers", "1", "--quiet", *allow)
            warm = load(service.url, site.urls, clients=given.clients, seconds=given.seconds / 6)
            before = memory(service.running.pid)[0]
            figures = load(service.url, site.urls, clients=given.clients, seconds=given.seconds)
            after = memory(service.running.pid)[0]
        told |= to_builtins(figures) | {"errors": figures.errors + warm.errors, "memory": [before, after]}
        fine = figures.p99 <= GOAL_P99 and not told["errors"] and after <= before * 1.25 + 10
        service.running.kill()
        fill(shell.db, "large", given.items, size=1_000)
        service = Service(shell, "--workers", "0", "--quiet")
        before = memory(service.running.pid)[0]
        for form in ("jsonl", "csv"):
            started = time.monotonic()
            lines, size = read_result(service.url, "large", form)
            took = time.monotonic() - started
            most = memory(service.running.pid)[1]
            told[form] = {"lines": lines, "mib": size >> 20, "seconds": took, "memory": [before, most]}
            fine = fine and lines >= given.items and most <= before + 100
    print(json.dumps(told) if given.json else described(told))
    print("met" if fine else "MISSED", file=sys.stderr)
    return 0 if fine or given.json else 1


def described(told: dict[str, Any]) -> str:
    lines = [
        f"{told['clients']} clients for {told['seconds']:.0f} s: {told['jobs']} jobs",
        (
            f"  progress: {told['progress_calls']} requests, p50 {told['p50'] * 1000:.1f} ms,"
            f" p99 {told['p99'] * 1000:.1f} ms (goal {GOAL_P99 * 1000:.0f})"
        ),
        f"  submit: p99 {told['submit_p99'] * 1000:.1f} ms; errors {told['errors']}",
        f"  memory of the service: {told['memory'][0]} MiB after a sixth, {told['memory'][1]} MiB at the end",
    ]
    for form in ("jsonl", "csv"):
        one = told[form]
        lines.append(
            f"{one['lines']} lines of {form}, {one['mib']} MiB in {one['seconds']:.1f} s; memory"
            f" {one['memory'][0]} MiB before, {one['memory'][1]} MiB at most"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
