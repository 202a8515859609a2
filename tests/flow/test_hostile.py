"""Every misbehaviour of the hostile server: its class, its time, its memory; then all at once."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.errors import CLASSES, FetchError
from shoal.fetch.driver import SWEEP
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Limits
from shoal.fetch.redirects import follow
from tests.rig.command import Shell
from tests.rig.hostile import CASES, PAGE, Case, HostileServer, bomb, hostile_server

MB = 1024 * 1024
BODY = 2 * MB
LIMITS = Limits(
    dns=1, connect=1, first_byte=0.5, idle=0.5, total=3, min_rate=1024, rate_window=0.6, body=BODY
)
# The longest wait of a single phase, twice the sweep's lateness, and room for a busy machine.
SLOWEST = 0.6 + 2 * SWEEP + 1.0
# The body twice (pieces and whole), and what the server beside us in this process needs to send.
MEMORY = 2 * BODY + 12 * MB


@pytest.fixture(scope="module", autouse=True)
def _bombs() -> None:
    for coding in ("gzip", "br", "gzip, gzip"):
        bomb(coding)


@pytest.fixture
async def server() -> AsyncIterator[HostileServer]:
    async with hostile_server() as running:
        yield running


@pytest.fixture
async def fetcher(server: HostileServer) -> AsyncIterator[HttpFetcher]:
    made = HttpFetcher(guard=Guard(allow=server.endpoints))
    yield made
    await made.close()


class Memory:
    """How far this process grew since `start`, at its highest."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.base = self._read("VmRSS")

    def grown(self) -> int:
        return self._read("VmHWM") - self.base

    def _read(self, name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise AssertionError(name)


async def visit(fetcher: HttpFetcher, server: HostileServer, case: Case) -> None:
    """Fetch one case and check that it is taken as it should be."""
    try:
        response, _ = await follow(fetcher, Ask(server.url(case.name), limits=LIMITS))
    except FetchError as failure:
        assert failure.error == (case.error or "no error"), (
            f"{case.name}: {failure.error} ({failure.message})"
        )
        assert failure.error in CLASSES
        return
    assert not case.error, f"{case.name}: got {response.status} instead of {case.error}"
    assert response.status == case.status
    if case.body is not None:
        assert response.body == case.body


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_case(server: HostileServer, fetcher: HttpFetcher, case: Case) -> None:
    memory = Memory()
    memory.start()
    began = time.monotonic()
    await visit(fetcher, server, case)
    assert time.monotonic() - began < SLOWEST
    assert memory.grown() < MEMORY
    # Whatever happened, the next page comes as it should.
    assert (await fetcher.fetch(Ask(server.url("honest"), limits=LIMITS))).body == PAGE
    if not case.error.endswith(("timeout", "transfer")):
        # The same on a connection that has been good so far: libcurl words its errors differently.
        await visit(fetcher, server, case)


async def test_everything_at_once(server: HostileServer, fetcher: HttpFetcher) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = Memory()
    memory.start()
    began = time.monotonic()
    limits = Limits(dns=1, connect=5, first_byte=5, idle=5, total=20)

    async def honest(n: int) -> bool:
        response = await fetcher.fetch(Ask(server.url(f"honest/{n}"), limits=limits))
        return response.body == PAGE

    async def hostile(case: Case) -> str:
        try:
            await follow(fetcher, Ask(server.url(case.name), limits=LIMITS))
        except FetchError as failure:
            return failure.error
        return ""

    attacks = [asyncio.ensure_future(hostile(case)) for case in CASES.values() for _ in range(2)]
    assert all(await asyncio.gather(*(honest(n) for n in range(200))))
    errors = await asyncio.gather(*attacks)
    assert set(errors) <= set(CLASSES) | {""}
    assert "internal" not in errors
    assert time.monotonic() - began < LIMITS.total + 5
    assert memory.grown() < 100 * MB
    await fetcher.close()
    await server.end()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_refused(server: HostileServer, fetcher: HttpFetcher) -> None:
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(Ask(server.refused_url, limits=LIMITS))
    assert caught.value.error == "connect_refused"


async def test_secrets_do_not_cross_origins(server: HostileServer, fetcher: HttpFetcher) -> None:
    headers = (("Authorization", "Bearer s3cret"), ("Cookie", "a=s3cret"), ("X-Api-Key", "s3cret"))
    response, passed = await follow(fetcher, Ask(server.url("redirect-other-origin"), headers=headers))
    assert response.body == PAGE
    assert passed == [server.url("redirect-other-origin")]
    assert server.hits[0].headers["x-api-key"] == "s3cret"
    assert "s3cret" not in str(server.other_hits)


async def test_announced_size_is_enough(server: HostileServer, fetcher: HttpFetcher) -> None:
    began = time.monotonic()
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(Ask(server.url("huge-length"), limits=LIMITS))
    assert caught.value.error == "body_too_large"
    assert "announced" in caught.value.message
    assert time.monotonic() - began < 1


TLS = {
    "expired": "tls_invalid",
    "self-signed": "tls_invalid",
    "wrong-host": "tls_invalid",
    "silent": "tls_timeout",
}


async def test_tls() -> None:
    async with hostile_server(tls=True) as server:
        fetcher = HttpFetcher(guard=Guard(allow=server.endpoints), ca_file=server.ca_file)
        response = await fetcher.fetch(Ask(server.tls_url("good"), limits=LIMITS))
        assert response.body == PAGE
        for name, error in TLS.items():
            with pytest.raises(FetchError) as caught:
                await fetcher.fetch(Ask(server.tls_url(name), limits=LIMITS))
            assert caught.value.error == error, name
        await fetcher.close()
        assert len(server.hits) == 1

        public = HttpFetcher(guard=Guard(allow=server.endpoints))
        with pytest.raises(FetchError) as caught:
            await public.fetch(Ask(server.tls_url("good"), limits=LIMITS))
        assert caught.value.error == "tls_invalid"
        await public.close()


async def test_plain_http_where_tls_is_expected(server: HostileServer, fetcher: HttpFetcher) -> None:
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(Ask(server.url("honest").replace("http:", "https:"), limits=LIMITS))
    assert caught.value.error in ("tls_invalid", "tls_timeout")


def test_a_host_that_does_not_answer_ends_the_crawl_soon(shell: Shell) -> None:
    """Robots are asked for first: that nobody answers is told as what it is, and not waited out."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        words = ["--allow-private", "--rate", "none", "--per-host", "4"]
        ended = shell.run("crawl", *(f"{url}/{n}" for n in range(6)), *words)
    assert ended.code == 3, ended.err
    [job] = shell.jobs()
    assert (job.counts.dead, job.errors) == (6, {"connect_refused": 18})
