"""The HTTP fetcher: what it sends, what it returns, where it never connects, how it ends."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Sequence

import brotli
import pytest

from shoal.demo.site import LoopbackSite, Reply
from shoal.errors import CLASSES, FetchError, UsageError
from shoal.fetch.decode import decode, layers
from shoal.fetch.guard import Guard, Resolver
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Limits
from shoal.model import Private
from tests.rig.hostile import PAGE, HostileServer, hostile_server


@pytest.fixture
async def server() -> AsyncIterator[HostileServer]:
    async with hostile_server() as running:
        yield running


@pytest.fixture
async def fetcher(server: HostileServer) -> AsyncIterator[HttpFetcher]:
    made = HttpFetcher(guard=Guard(allow=server.endpoints))
    yield made
    await made.close()


async def fails(fetcher: HttpFetcher, ask: Ask) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(ask)
    assert caught.value.error in CLASSES
    return caught.value


# What comes back


async def test_a_page(server: HostileServer, fetcher: HttpFetcher) -> None:
    url = server.url("honest/x?q=1")
    response = await fetcher.fetch(Ask(url))
    assert response.url == url
    assert (response.status, response.body) == (200, PAGE)
    assert response.headers == (("content-type", "text/html"), ("content-length", str(len(PAGE))))
    assert (response.address, response.http, response.cached) == ("127.0.0.1", "1.1", False)
    assert 0 < response.seconds < 2
    assert server.hits[0].target == "/honest/x?q=1"


async def test_any_status_is_a_response(server: HostileServer, fetcher: HttpFetcher) -> None:
    assert (await fetcher.fetch(Ask(server.url("nothing-here")))).status == 404
    assert (await fetcher.fetch(Ask(server.url("status-999")))).status == 999


async def test_redirects_are_not_followed(server: HostileServer, fetcher: HttpFetcher) -> None:
    response = await fetcher.fetch(Ask(server.url("redirect-loop")))
    assert (response.status, response.body) == (302, b"")
    assert response.header("location") == "/redirect-loop"
    assert len(server.hits) == 1


async def test_folded_headers_are_one(server: HostileServer, fetcher: HttpFetcher) -> None:
    response = await fetcher.fetch(Ask(server.url("folded-header")))
    assert response.header("x-folded") == "one two"


async def test_the_limit_is_exact(server: HostileServer, fetcher: HttpFetcher) -> None:
    for path in ("honest", "deflate", "deflate-raw"):
        url = server.url(path)
        assert (await fetcher.fetch(Ask(url, limits=Limits(body=len(PAGE))))).body == PAGE
        error = await fails(fetcher, Ask(url, limits=Limits(body=len(PAGE) - 1)))
        assert error.error == "body_too_large"


async def test_an_error_does_not_keep_the_body(server: HostileServer, fetcher: HttpFetcher) -> None:
    """A traceback keeps the frames that it went through, and the one of the fetcher's thread keeps the error:
    a circle around ten megabytes, for the collector to find some minutes later."""
    error = await fails(fetcher, Ask(server.url("deflate"), limits=Limits(body=len(PAGE) - 1)))
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert not [name for name in frames if name.endswith(("driver.py", "slot.py", "decode.py"))]


# What is sent


async def test_default_headers(server: HostileServer, fetcher: HttpFetcher) -> None:
    await fetcher.fetch(Ask(server.url("honest")))
    sent = server.hits[0].headers
    assert sent["user-agent"].startswith("shoal/")
    assert sent["accept-encoding"] == "gzip, deflate, br"
    assert sent["host"] == f"127.0.0.1:{server.port}"
    assert set(sent) == {"user-agent", "accept", "accept-language", "accept-encoding", "host"}


async def test_own_headers_win_except_the_transport_s(server: HostileServer, fetcher: HttpFetcher) -> None:
    headers = (
        ("user-agent", "other/1"),
        ("X-Empty", ""),
        ("X-Text", "caf\u00e9"),
        ("Host", "evil.example"),
        ("Content-Length", "99"),
        ("Transfer-Encoding", "chunked"),
        ("Accept-Encoding", "zstd"),
    )
    await fetcher.fetch(Ask(server.url("honest"), headers=headers))
    sent = server.hits[0].headers
    assert sent["user-agent"] == "other/1"
    assert sent["x-empty"] == ""
    assert sent["x-text"].encode("latin-1").decode() == "caf\u00e9"
    assert sent["host"] == f"127.0.0.1:{server.port}"
    assert sent["accept-encoding"] == "gzip, deflate, br"
    assert "content-length" not in sent
    assert "transfer-encoding" not in sent


@pytest.mark.parametrize(
    "header",
    [("X-A", "a\r\nX-B: b"), ("X-A", "a\0b"), ("X A", "1"), ("", "1"), ("X:A", "1"), ("X-A", "\ud800")],
)
async def test_headers_cannot_break_out(
    server: HostileServer, fetcher: HttpFetcher, header: tuple[str, str]
) -> None:
    error = await fails(fetcher, Ask(server.url("honest"), headers=(header,)))
    assert error.error == "protocol_error"
    assert server.accepted == 0


async def test_nothing_leaks_into_the_next_request(server: HostileServer, fetcher: HttpFetcher) -> None:
    url = server.url("honest")
    secret = (("X-Secret", "s"), ("Content-Type", "text/plain"))
    await fetcher.fetch(Ask(url, headers=secret))
    await fetcher.fetch(Ask(url))
    await fetcher.fetch(Ask(url, method="POST", body=b"data", headers=secret))
    await fetcher.fetch(Ask(url))
    await fetcher.fetch(Ask(url, method="HEAD"))
    await fetcher.fetch(Ask(url))
    assert [hit.method for hit in server.hits] == ["GET", "GET", "POST", "GET", "HEAD", "GET"]
    assert [hit.body for hit in server.hits] == [b"", b"", b"data", b"", b"", b""]
    assert ["x-secret" in hit.headers for hit in server.hits] == [True, False, True, False, False, False]


async def test_methods_and_bodies(server: HostileServer, fetcher: HttpFetcher) -> None:
    url = server.url("honest")
    await fetcher.fetch(Ask(url, method="POST", body=b"\0\xff" * 1000))
    await fetcher.fetch(Ask(url, method="POST"))
    await fetcher.fetch(Ask(url, method="PUT", body=b"x" * 2_000_000))
    await fetcher.fetch(Ask(url, method="DELETE"))
    post, empty, put, delete = server.hits
    assert (post.method, post.body) == ("POST", b"\0\xff" * 1000)
    assert "content-type" not in post.headers
    assert (empty.method, empty.headers["content-length"]) == ("POST", "0")
    assert (put.method, len(put.body), "expect" in put.headers) == ("PUT", 2_000_000, False)
    assert (delete.method, delete.body) == ("DELETE", b"")
    head = await fetcher.fetch(Ask(server.url("closes-idle"), method="HEAD"))
    assert (head.status, head.body) == (200, b"")
    assert (await fails(fetcher, Ask(url, method="GET / HTTP/1.1\r\nX: y"))).error == "protocol_error"


async def test_conditions_may_be_answered_with_304(server: HostileServer, fetcher: HttpFetcher) -> None:
    ask = Ask(server.url("304-unasked"), headers=(("If-None-Match", '"x"'),))
    assert (await fetcher.fetch(ask)).status == 304


@pytest.mark.parametrize("agent", ["", "  ", "a\nb", "caf\u00e9"])
def test_the_user_agent_must_say_something(agent: str) -> None:
    with pytest.raises(UsageError):
        HttpFetcher(user_agent=agent)


async def test_the_environment_s_proxy_is_ignored(
    server: HostileServer, fetcher: HttpFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, server.refused_url)
    assert (await fetcher.fetch(Ask(server.url("honest")))).status == 200


# Where it connects


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::1]", "[::ffff:127.0.0.1]",
     "[::127.0.0.1]", "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460", "127\u30020\u30020\u30021"],
)  # fmt: skip
async def test_loopback_in_any_form_is_blocked_before_a_socket(server: HostileServer, host: str) -> None:
    fetcher = HttpFetcher()
    error = await fails(fetcher, Ask(f"http://{host}:{server.port}/honest"))
    assert error.error == "egress_blocked"
    assert "--allow-private" in error.hint
    await fetcher.close()
    assert server.accepted == 0


class Names:
    def __init__(self, **table: Sequence[str]) -> None:
        self.table = table

    def __call__(self, host: str) -> Sequence[str]:
        if host.partition(".")[0] not in self.table:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.table[host.partition(".")[0]]


async def test_names_that_lead_inside_are_blocked(server: HostileServer) -> None:
    names = Names(inside=["127.0.0.1"], mixed=["93.184.216.34", "127.0.0.1"])
    fetcher = HttpFetcher(resolver=Resolver(Guard(), lookup=names))
    for name in names.table:
        error = await fails(fetcher, Ask(f"http://{name}.example:{server.port}/honest"))
        assert error.error == "dns_not_found"
    await fetcher.close()
    assert server.accepted == 0


async def test_the_second_lock_holds_alone(server: HostileServer) -> None:
    class Lies(Resolver):
        def known(self, host: str, port: int, allow_private: Private = False) -> tuple[str, ...]:
            return ("127.0.0.1",)

    fetcher = HttpFetcher(resolver=Lies(Guard()))
    for host in ("127.0.0.1", "site.example", "2130706433"):
        error = await fails(fetcher, Ask(f"http://{host}:{server.port}/honest"))
        assert error.error == "egress_blocked"
    await fetcher.close()
    assert server.accepted == 0


async def test_only_the_allowed_endpoint_opens(server: HostileServer) -> None:
    fetcher = HttpFetcher(guard=Guard(allow={f"127.0.0.1:{server.port}"}))
    assert (await fetcher.fetch(Ask(server.url("honest")))).status == 200
    assert (await fails(fetcher, Ask(server.other_url("honest")))).error == "egress_blocked"
    assert (await fetcher.fetch(Ask(server.other_url("honest"), allow_private=True))).status == 200
    await fetcher.close()
    assert (len(server.hits), len(server.other_hits)) == (1, 1)


async def test_a_connection_made_for_a_private_job_serves_no_other(server: HostileServer) -> None:
    fetcher = HttpFetcher()
    url = server.url("honest")
    assert (await fetcher.fetch(Ask(url, allow_private=True))).status == 200
    assert (await fails(fetcher, Ask(url))).error == "egress_blocked"
    await fetcher.close()
    assert len(server.hits) == 1


async def test_the_next_address_is_tried_and_then_preferred(server: HostileServer) -> None:
    # The server listens on 127.0.0.1 only, so 127.0.0.2 refuses.
    resolver = Resolver(Guard(), lookup=Names(site=["127.0.0.2", "127.0.0.3", "127.0.0.1"]))
    fetcher = HttpFetcher(resolver=resolver)
    url = f"http://site.example:{server.port}/honest"
    for _ in range(2):
        response = await fetcher.fetch(Ask(url, allow_private=True))
        assert (response.status, response.address) == (200, "127.0.0.1")
    assert resolver.known("site.example", server.port, True) == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    assert server.hits[0].headers["host"] == f"site.example:{server.port}"
    await fetcher.close()


async def test_all_addresses_refusing_is_one_error(server: HostileServer) -> None:
    resolver = Resolver(Guard(), lookup=Names(site=["127.0.0.2", "127.0.0.3"]))
    fetcher = HttpFetcher(resolver=resolver)
    ask = Ask(f"http://site.example:{server.port}/", allow_private=True)
    assert (await fails(fetcher, ask)).error == "connect_refused"
    await fetcher.close()


async def test_names_do_not_share_connections(server: HostileServer) -> None:
    resolver = Resolver(Guard(), lookup=Names(a=["127.0.0.1"], b=["127.0.0.1"]))
    fetcher = HttpFetcher(resolver=resolver)
    for name in ("a", "b", "a", "b"):
        await fetcher.fetch(Ask(f"http://{name}.example:{server.port}/honest", allow_private=True))
    assert server.accepted == 2
    await fetcher.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://127.0.0.1/", "scheme_blocked"),
        ("file:///etc/passwd", "scheme_blocked"),
        ("gopher://127.0.0.1/", "scheme_blocked"),
        ("http://user:pw@127.0.0.1/", "url_userinfo"),
        ("http://127.0.0.1/a b", "url_invalid"),
        ("http://127.0.0.1/\r\nX: y", "url_invalid"),
        ("http://127.0.0.1:99999/", "url_invalid"),
        ("http://127.0.0.1:0/", "url_invalid"),
        ("http://[bad/", "url_invalid"),
        ("", "url_invalid"),
        ("http://127.0.0.1/" + "x" * 9000, "url_too_long"),
    ],
)
async def test_bad_urls(fetcher: HttpFetcher, url: str, error: str) -> None:
    assert (await fails(fetcher, Ask(url, allow_private=True))).error == error


# Connections


async def test_connections_are_kept(server: HostileServer, fetcher: HttpFetcher) -> None:
    for _ in range(20):
        await fetcher.fetch(Ask(server.url("honest")))
    await fetcher.fetch(Ask(server.url("redirect-nowhere")))
    await fetcher.fetch(Ask(server.url("honest")))
    assert server.accepted == 1


async def test_a_connection_that_was_closed_meanwhile_is_replaced(
    server: HostileServer, fetcher: HttpFetcher
) -> None:
    for _ in range(10):
        assert (await fetcher.fetch(Ask(server.url("closes-idle")))).body == PAGE


@pytest.mark.parametrize("path", ["length-and-chunked", "extra-bytes", "204-with-body"])
async def test_a_doubtful_connection_is_not_used_again(
    server: HostileServer, fetcher: HttpFetcher, path: str
) -> None:
    for _ in range(3):
        await fetcher.fetch(Ask(server.url(path)))
    assert (await fetcher.fetch(Ask(server.url("honest")))).body == PAGE
    assert server.accepted == 4


async def test_more_than_the_slots_wait(server: HostileServer) -> None:
    fetcher = HttpFetcher(guard=Guard(allow=server.endpoints), concurrency=4)
    asks = [fetcher.fetch(Ask(server.url(f"honest/{n}"))) for n in range(50)]
    assert {response.body for response in await asyncio.gather(*asks)} == {PAGE}
    assert server.accepted <= 4
    await fetcher.close()


async def test_waiting_for_a_slot_counts_against_the_total(server: HostileServer) -> None:
    fetcher = HttpFetcher(guard=Guard(allow=server.endpoints), concurrency=1)
    first = asyncio.ensure_future(fetcher.fetch(Ask(server.url("never-replies"))))
    await server.heard(1)
    error = await fails(fetcher, Ask(server.url("honest"), limits=Limits(total=0.1)))
    assert error.error == "deadline"
    first.cancel()
    assert (await fetcher.fetch(Ask(server.url("honest")))).status == 200
    await fetcher.close()


# Ends


def busy(fetcher: HttpFetcher) -> int:
    return len(fetcher._driver._active) if fetcher._driver else 0


async def test_cancelling_ends_the_transfer(server: HostileServer, fetcher: HttpFetcher) -> None:
    running = [asyncio.ensure_future(fetcher.fetch(Ask(server.url("never-replies")))) for _ in range(100)]
    await server.heard(100)
    for task in running:
        task.cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    # The driver handles its messages in order: after this answer the cancels are done.
    assert (await fetcher.fetch(Ask(server.url("honest")))).body == PAGE
    assert busy(fetcher) == 0


async def test_cancelling_at_any_moment_is_safe(server: HostileServer, fetcher: HttpFetcher) -> None:
    async def hasty(n: int) -> None:
        task = asyncio.ensure_future(fetcher.fetch(Ask(server.url(f"honest/{n}"))))
        for _ in range(n % 12):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for start in range(0, 600, 50):
        await asyncio.gather(*(hasty(n) for n in range(start, start + 50)))
    for _ in range(20):
        assert (await fetcher.fetch(Ask(server.url("honest")))).body == PAGE
    assert busy(fetcher) == 0


async def test_close_ends_everything(server: HostileServer) -> None:
    before = set(os.listdir("/proc/self/fd"))
    fetcher = HttpFetcher(guard=Guard(allow=server.endpoints))
    running = [asyncio.ensure_future(fetcher.fetch(Ask(server.url("never-replies")))) for _ in range(10)]
    await server.heard(10)
    began = time.monotonic()
    await fetcher.close()
    await fetcher.close()
    assert time.monotonic() - began < 1
    for result in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(result, FetchError)
        assert result.error == "internal"
    assert (await fails(fetcher, Ask(server.url("honest")))).error == "internal"
    assert not any(thread.name == "shoal-http" for thread in threading.enumerate())
    await server.end()
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_close_without_use() -> None:
    await HttpFetcher().close()


async def test_a_crash_of_the_thread_fails_what_runs_and_nothing_else(
    server: HostileServer, fetcher: HttpFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fetcher.fetch(Ask(server.url("honest")))
    driver = fetcher._driver
    assert driver is not None

    def broken() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(driver, "_take_in", broken)
    assert (await fails(fetcher, Ask(server.url("honest")))).error == "internal"
    assert (await fetcher.fetch(Ask(server.url("honest")))).body == PAGE


PROGRAM = """
    import asyncio, os, signal, sys
    from shoal.fetch.http import HttpFetcher
    from shoal.fetch.port import Ask
    from tests.rig.hostile import hostile_server

    async def main():
        context = hostile_server()
        server = await context.__aenter__()
        fetcher = HttpFetcher()
        names = ["never-replies", "endless-extension", "drip-body"] * 10
        asks = [Ask(server.url(name), allow_private=True) for name in names]
        running = [asyncio.ensure_future(fetcher.fetch(ask)) for ask in asks]
        await server.heard(len(names))
        for task in running:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        print("running", flush=True)
        {end}

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("return", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)],
)
def test_the_program_may_just_end(end: str, code: int) -> None:
    program = textwrap.dedent(PROGRAM).format(end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20, check=False)
    assert done.stdout == b"running\n"
    assert done.returncode == code, done.stderr
    assert b"Fatal" not in done.stderr


# Decoding


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


TEXT = b"".join(b"%d words and more " % n for n in range(20_000))


@pytest.mark.parametrize("size", [1, 7, 1000, 16_384, 10_000_000])
@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "br"])
def test_decodes_in_pieces_of_any_size(coding: str, size: int) -> None:
    text = TEXT[:20_000] if size == 1 else TEXT
    pack = {"deflate": zlib.compress, "br": brotli.compress}.get(coding, gzip.compress)
    assert decode(pieces(pack(text), size), layers(coding), len(text)) == text


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
@pytest.mark.parametrize("missing", [1, 2, 5, 100])
def test_a_cut_stream_is_truncated(coding: str, missing: int) -> None:
    pack = {"deflate": zlib.compress, "br": brotli.compress, "gzip": gzip.compress}[coding]
    with pytest.raises(FetchError) as caught:
        decode(pieces(pack(TEXT)[:-missing], 1000), layers(coding), len(TEXT))
    assert caught.value.error == "truncated"


def test_members_and_padding() -> None:
    packed = gzip.compress(b"one ") + gzip.compress(b"two") + b"\0" * 50
    assert decode(pieces(packed, 10), ["gzip"], 100) == b"one two"
    with pytest.raises(FetchError) as caught:
        decode([gzip.compress(b"") * 5000], ["gzip"], 100)
    assert caught.value.error == "decode_error"


@pytest.mark.parametrize("value", ["", "identity", "utf-8", " none "])
def test_no_coding(value: str) -> None:
    assert layers(value) == []
    assert decode([b"a", b"b"], layers(value), 10) == b"ab"


def test_an_empty_body_is_an_empty_body() -> None:
    assert decode([], ["gzip"], 10) == b""
    assert decode([b""], ["br"], 10) == b""


@pytest.mark.parametrize("coding", ["", "gzip", "br"])
async def test_a_body_may_be_cut_at_its_limit(coding: str) -> None:
    page = bytes(range(256)) * 4096
    packed = {"": page, "gzip": gzip.compress(page), "br": brotli.compress(page)}[coding]
    headers = (("content-encoding", coding),) if coding else ()
    with LoopbackSite(lambda _: Reply(200, packed, headers=headers)) as site:
        fetcher = HttpFetcher()
        for limit in (1, 1000, 300_000, len(page), 2 * len(page)):
            ask = Ask(site.url, allow_private=True, limits=Limits(body=limit, cut=True))
            assert (await fetcher.fetch(ask)).body == page[:limit]
        await fetcher.close()


def test_what_was_cut_on_the_wire_is_unpacked_as_far_as_it_goes() -> None:
    page = os.urandom(100_000)
    for codings, packed in (
        (["gzip"], gzip.compress(page)),
        (["br"], brotli.compress(page)),
        (["gzip", "gzip"], gzip.compress(gzip.compress(page))),
    ):
        got = decode([packed[:50_000]], codings, 60_000, cut=True, torn=True)
        assert 0 < len(got) <= 60_000 and page.startswith(got)
        with pytest.raises(FetchError, match="stream is incomplete"):
            decode([packed[:50_000]], codings, 60_000, cut=True)
