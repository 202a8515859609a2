"""Redis behind TLS and behind the least privileges that the guide names."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import FrontierError
from shoal.frontier.notes import Cursor, Lock, Presence
from shoal.frontier.redis import RedisFrontier
from shoal.model import (
    TRANSIT,
    Dead,
    Done,
    Failure,
    Heartbeat,
    JobSpec,
    JobState,
    Pace,
    Request,
    Retry,
    Selection,
)
from shoal.testing.chapters.chapter import add_all, claim, page, pages, requests
from shoal.testing.clock import FakeClock
from tests.rig.redis_server import RedisServer, available, redis_server

pytestmark = pytest.mark.skipif(not available(), reason="redis-server is not installed")

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/redis.md"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


def acl_line() -> list[str]:
    found = re.search(r"^ACL SETUSER (.+)$", GUIDE.read_text(), re.MULTILINE)
    assert found, "the guide must name the line that is tried here"
    return found[1].split()


async def half_done(frontier: RedisFrontier) -> None:
    """A job half done: every state, several lines on a lane, headers and bodies, retries, crashes, items."""
    failed = Failure("http_500", "no luck")
    spec = JobSpec(gap=0.0, width=50, start=(page(0),), max_per_host=40, retries=4)
    await frontier.open_job("job", spec)
    await add_all(frontier, requests(pages(6)))
    await add_all(frontier, requests(pages(4, start=10), priority=8))
    await add_all(frontier, requests(pages(3, start=20), queue="other"))
    rich = Request(page("rich"), "job", method="POST", headers={"x": "y"}, body=b"\x00\xff", hops=2)
    await add_all(frontier, [rich, Request(page("expiring"), "job", ttl=900.0)])
    await add_all(frontier, [Request(page("later"), "job", delay=50.0, ttl=900.0)])
    leases = await claim(frontier, 6)
    assert len(leases) == 6
    found = requests([page("found", host="http://b.example"), page(1)])
    await frontier.settle([Done(leases[0], items=[b"1", b"2"], found=found), Dead(leases[1], failed)])
    await frontier.settle([Retry(leases[2], 40.0, failed), Done(leases[3], skipped="robots")])
    await frontier.evict(["w"])  # two come back with a crash
    await frontier.bury(Request("nonsense", "job"), "url_invalid", "no scheme")
    await Cursor(frontier.notes, "job", "sink").save(1)


async def visited(frontier: RedisFrontier) -> int:
    """How many are visited from here on."""
    number = 0
    while leases := await claim(frontier, 2, queues=["scraping", "other"]):
        number += len(leases)
        await frontier.settle([Done(lease) for lease in leases])
    return number


async def test_the_privileges_of_the_guide_are_enough(server: RedisServer) -> None:
    root = await RedisFrontier.open(server.url)
    await root._client.command("ACL", "SETUSER", *acl_line())
    await root.close()
    clock = FakeClock()
    address = server.url.replace("redis://", "redis://shoal:secret@")
    frontier = await RedisFrontier.open(address, clock=clock)
    try:
        await half_done(frontier)
        clock.advance(10.0)
        await Presence(frontier.notes).heartbeat(Heartbeat("w"))
        assert len(await Presence(frontier.notes).workers()) == 1
        await Presence(frontier.notes).leave("w")
        await frontier.pace("a.example", Pace(blocked=1.0, floor=0.1))
        await frontier.notes.put("shelf", "key", b"value", 60.0)
        assert await frontier.notes.get("shelf", "key") == b"value"
        assert len(await frontier.notes.scan("shelf")) == 1
        lock = Lock(frontier.notes, "name", "me", 9.0)
        assert await lock.take()
        await lock.release()
        assert await frontier.leases() == await frontier.leases(limit=9)
        assert await frontier.queues()
        assert await frontier.lanes()
        assert await frontier.find("http://a.example/1")
        assert await frontier.dead_groups(Selection())
        assert (await frontier.info()).warnings == []
        await frontier.wait(0.2)
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.update_job("job", state=JobState.RUNNING)
        clock.advance(60.0)
        await frontier.revive(Selection(job="job"))
        assert await visited(frontier)
        await frontier.add([Request("http://c.example/", "job")])
        [lease] = (await frontier.claim(1, worker=f"{TRANSIT}pump", lease_seconds=9.0)).leases
        [lease] = (await frontier.take([lease], worker="w", lease_seconds=9.0)).leases
        assert await frontier.extend([lease], 9.0) == []
        assert (await frontier.settle([Done(lease)])).lost == []
        await frontier.purge(Selection())
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert await frontier.check() == []
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("GET", "secret of others")):
            with pytest.raises(FrontierError, match="refuses"):
                await frontier._client.command(*command)
    finally:
        await frontier.close()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A certificate authority of our own, and a certificate for 127.0.0.1 by it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca = ("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "2")
    use = ("-addext", "keyUsage=critical,keyCertSign")
    openssl("req", "-x509", *key, *ca, *use)
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.pem", *sign)
    return tmp_path


async def test_tls_with_a_private_authority(authority: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = ("--tls-cert-file", f"{authority}/server.pem", "--tls-key-file", f"{authority}/server.key")
    more = ("--tls-ca-cert-file", f"{authority}/ca.pem", "--tls-auth-clients", "no")
    with redis_server("--tls-port", str(port), *files, *more):
        address = f"rediss://127.0.0.1:{port}/0"
        frontier = await RedisFrontier.open(f"{address}?ssl_ca_certs={authority}/ca.pem&prefix=tls")
        await half_done(frontier)
        assert await frontier.check() == []
        await frontier.close()
        with pytest.raises(FrontierError, match="certificate") as caught:
            await RedisFrontier.open(address)
        assert "ssl_ca_certs" in caught.value.hint
