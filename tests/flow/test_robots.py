"""robots.txt in whole crawls: what was asked, who we are in it, and hosts that do not answer."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.politeness.robots import MAX_BYTES
from tests.rig.command import Ended, Shell

FAST = ("--rate", "none", "--json")
OURS = ("--allow-private", *FAST)
HOME = b"<!doctype html><title>home</title><a href=/open>open</a> <a href=/private/1>private</a>"


@contextmanager
def serving(robots: bytes | Reply, page: Callable[[Call], Reply] | None = None) -> Iterator[LoopbackSite]:
    def respond(call: Call) -> Reply:
        if call.bare == "/robots.txt":
            return robots if isinstance(robots, Reply) else Reply(200, robots, "text/plain")
        return page(call) if page else Reply(200, HOME)

    with LoopbackSite(respond) as site:
        yield site


def visited(site: LoopbackSite) -> set[str]:
    """The pages that were asked for; forgets them."""
    seen = {hit.path for hit in site.log()} - {"/robots.txt"}
    site.clear()
    return seen


def job_of(ended: Ended) -> str:
    return str(json.loads(ended.out.splitlines()[-1])["job"])


FORBIDS = b"User-agent: *\nDisallow: /private\n"


def test_rules_that_were_never_asked_for_are_not_known(shell: Shell) -> None:
    with serving(FORBIDS) as site:
        refused = shell.run("crawl", site.url, *FAST)
        assert refused.code == 3
        assert site.log() == []
        told = json.loads(shell.run("explain", site.url, "--json").out)
        assert told["robots"] is None, "nobody asked"
        assert shell.run("crawl", site.url, *OURS).code == 0
        assert visited(site) == {"/", "/open"}


def test_what_a_job_learns_at_a_private_address_does_not_matter_to_one_that_may_not_go_there(
    shell: Shell,
) -> None:
    with serving(b"User-agent: *\nDisallow: /") as site:
        allowed = shell.run("crawl", site.url, *OURS)
        assert shell.job(job_of(allowed)).counts.skipped == 1
        site.clear()
        refused = shell.run("crawl", site.url, *FAST)
        job = shell.job(job_of(refused))
        assert (job.errors, job.counts.skipped) == ({"egress_blocked": 1}, 0)
        assert "disallowed by `Disallow: /`" in shell.run("explain", site.url, "--job", job_of(allowed)).out
        assert "not known yet" in shell.run("explain", site.url, "--job", job.id).out
        assert site.log() == []


def test_discover_that_is_refused_leaves_nothing_behind(shell: Shell) -> None:
    with serving(FORBIDS) as site:
        shell.run("crawl", site.url, *OURS, "--max-pages", "1", "--no-robots")  # now there is a frontier
        assert "egress_blocked" in shell.run("discover", site.url, *FAST[:2], "--enqueue", "found").err
        site.clear()
        assert shell.run("crawl", site.url, *OURS).code == 0
        assert visited(site) == {"/", "/open"}


def test_a_page_that_is_refused_says_so_and_not_that_robots_forbids_it(shell: Shell) -> None:
    with serving(FORBIDS) as site:
        refused = shell.run("scrape", site.url)
        assert "this address is not public" in refused.err and "disallowed" not in refused.err
        assert (
            "disallowed by `Disallow: /private`"
            in shell.run("scrape", f"{site.url}private/1", "--allow-private").err
        )


@pytest.mark.parametrize(
    ("agent", "group", "ours"),
    [
        ("", b"shoal/0.1.0", True),
        ("", b"sho", False),
        ("acmebot/1.0", b"AcmeBot", True),
        ("acmebot/1.0", b"shoal", False),
        ("Mozilla/5.0 (compatible; acmebot/1.0; +https://acme.example/bot)", b"acmebot", True),
    ],
)
def test_who_we_are(shell: Shell, agent: str, group: bytes, ours: bool) -> None:
    with serving(b"User-agent: " + group + b"\nDisallow: /private\n") as site:
        shell.run("crawl", site.url, *OURS, *(("--user-agent", agent) if agent else ()))
        assert visited(site) == ({"/", "/open"} if ours else {"/", "/open", "/private/1"})


def test_worker_processes_have_the_name_that_was_given(shell: Shell) -> None:
    with serving(b"User-agent: acmebot\nDisallow: /private\n") as site:
        shell.run("crawl", site.url, *OURS, "--workers", "2", "--user-agent", "acmebot/1.0")
        assert {hit.agent for hit in site.log()} == {"acmebot/1.0"}
        assert visited(site) == {"/", "/open"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_robots_txt_is_read_up_to_the_limit(shell: Shell, packed: bool) -> None:
    # The limit falls into the last rule, which would forbid everything if it were torn.
    start = FORBIDS + b"#" * (MAX_BYTES - len(FORBIDS) - len(b"\nDisallow: /"))
    body = start + b"\nDisallow: /nothing\n" + b"# and more\n" * 100_000
    headers = (("content-encoding", "gzip"),) if packed else ()
    robots = Reply(200, gzip.compress(body, 1) if packed else body, "text/plain", headers=headers)
    with serving(robots) as site:
        assert shell.run("crawl", site.url, *OURS).code == 0
        assert visited(site) == {"/", "/open"}


@contextmanager
def listening(answer: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """A port where every connection is closed after these bytes, at once for None; and how many came."""
    came: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    continue
                with caller:
                    came.append(1)
                    if answer is not None:
                        caller.recv(4096)
                        caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}/", came
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(
    ("scheme", "answer", "error", "tries"),
    [
        ("http", b"220 mail.example ESMTP ready\r\n", "not_http", 1),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "protocol_error", 1),
        ("https", b"220 mail.example ESMTP ready\r\n", "tls_invalid", 1),
        ("http", b"", "empty_reply", 3),
    ],
)
def test_a_host_that_is_no_web_server_fails_like_a_page_of_it(
    shell: Shell, scheme: str, answer: bytes, error: str, tries: int
) -> None:
    with listening(answer) as (place, came):
        began = time.monotonic()
        ended = shell.run("crawl", f"{scheme}://{place}", *OURS)
        assert time.monotonic() - began < 60
        assert ended.code == 3
        assert shell.job(job_of(ended)).errors == {error: tries}
        assert len(came) == tries, "each try is one, and a real one"


def test_a_robots_txt_that_answers_5xx_forbids_for_a_while(shell: Shell) -> None:
    with serving(Reply(503, b"")) as site:
        ended = shell.run("crawl", site.url, *OURS, env={"SHOAL_RETRIES": "0"})
        assert shell.job(job_of(ended)).errors == {"robots_unreachable": 1}
        assert "responded with status 503" in shell.run("explain", site.url).out
        assert (
            "responded with status 503"
            in shell.run("discover", site.url, *FAST[:2], "--enqueue", "found", "--allow-private").err
        )
        assert [hit.path for hit in site.log()] == ["/robots.txt"], "asked once"


def test_without_robots_nobody_asks(shell: Shell) -> None:
    with serving(FORBIDS) as site:
        shell.run("crawl", site.url, *OURS, "--no-robots")
        assert {hit.path for hit in site.log()} == {"/", "/open", "/private/1"}


def wishful(call: Call) -> Reply:
    home = b"<a href=/n>n</a> <a href=/f>f</a> <a href=/h>h</a> <a rel=nofollow href=/rel>rel</a>"
    pages = {
        "/": Reply(200, home),
        "/n": Reply(200, b"<meta name=robots content=noindex><a href=/n/next>next</a>"),
        "/f": Reply(200, b"<meta name=acmebot content=nofollow><a href=/f/next>next</a>"),
        "/h": Reply(200, b"<a href=/h/next>next</a>", headers=(("X-Robots-Tag", "acmebot: none"),)),
    }
    return pages.get(call.bare, Reply(200, b"<p>a leaf"))


@pytest.mark.parametrize("on", [False, True])
def test_what_pages_say_counts_when_it_is_set_for_every_worker(shell: Shell, on: bool) -> None:
    with serving(b"", wishful) as site:
        env = {"SHOAL_PAGE_ROBOTS": "1"} if on else {}
        agent = {"SHOAL_USER_AGENT": "acmebot/1"}
        flags = ("--job", "wishes", "--scope", "any", "--allow-private", "--rate", "none")
        shell.run("enqueue", site.url, *flags, env=env)
        # The setting belongs to the job: this worker knows nothing of it.
        assert shell.run("worker", "--drain", env=agent).code == 0
        every = {"/", "/n", "/n/next", "/f", "/f/next", "/h", "/h/next"}
        assert visited(site) == (every - {"/f/next", "/h/next"} if on else every)
        counts = shell.job("wishes").counts
        assert (counts.items, counts.skipped) == ((3, 2) if on else (7, 0))
