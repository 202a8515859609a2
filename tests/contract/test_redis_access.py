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
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.move import move
from shoal.frontier.redis import RedisFrontier
from shoal.model import Beat, Done, Pace, Request, Selection
from shoal.testing.chapters.moving import eventful, served
from shoal.testing.clock import FakeClock
from shoal.testing.redis_server import RedisServer, available, redis_server

pytestmark = pytest.mark.skipif(not available(), reason="redis-server is not installed")

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/redis.md"


class Clock:
    """What `eventful` needs of a harness."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


def acl_line() -> list[str]:
    found = re.search(r"^ACL SETUSER (.+)$", GUIDE.read_text(), re.MULTILINE)
    assert found, "the guide must name the line that is tried here"
    return found[1].split()


async def test_the_privileges_of_the_guide_are_enough(server: RedisServer) -> None:
    root = await RedisFrontier.open(server.url)
    await root._command("ACL", "SETUSER", *acl_line())
    await root.close()
    time = Clock()
    address = server.url.replace("redis://", "redis://shoal:secret@")
    frontier = await RedisFrontier.open(address, clock=time.clock)
    try:
        await eventful(frontier, time)  # type: ignore[arg-type]
        await frontier.beat(Beat("w"))
        assert len(await frontier.workers()) == 1
        await frontier.leave("w")
        await frontier.pace("a.example", Pace(blocked=1.0, floor=0.1))
        await frontier.note("key", b"value", 60.0)
        assert await frontier.noted("key") == b"value"
        assert await frontier.lock("name", "me", 9.0) == "me"
        await frontier.unlock("name", "me")
        assert await frontier.queues()
        assert await frontier.lanes()
        assert await frontier.find("http://a.example/1")
        assert await frontier.dead_groups(Selection())
        assert await frontier.remarks() == []
        await frontier.wait(0.2)
        await frontier.pause("job")
        await frontier.resume("job")
        model = MemoryFrontier(clock=time.clock)
        await move(frontier, model, "job", to="there", owner="me")
        other = await RedisFrontier.open(f"{address}?prefix=second", clock=time.clock)
        try:
            await move(model, other, "job", to="back", owner="me")
            time.advance(60.0)
            await other.revive(Selection(job="job"))
            assert await served(other)
            await other.add([Request("http://c.example/", "job")])
            [lease] = (await other.claim(1, worker="w", lease=9.0)).leases
            assert await other.extend([lease], 9.0) == []
            assert (await other.settle([Done(lease)])).lost == []
            await other.purge(Selection())
            await other.cancel("job")
            assert await other.check() == []
        finally:
            await other.close()
        assert await frontier.check() == []
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("GET", "secret of others")):
            with pytest.raises(FrontierError, match="refuses"):
                await frontier._command(*command)
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
        time = Clock()
        await eventful(frontier, time, advance=False)  # type: ignore[arg-type]
        assert await frontier.check() == []
        await frontier.close()
        with pytest.raises(FrontierError, match="certificate") as caught:
            await RedisFrontier.open(address)
        assert "ssl_ca_certs" in caught.value.hint
