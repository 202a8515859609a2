"""Redirects that lead nowhere are told as that, and those that meet at one page are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from shoal.model import DeadLetter, Selection
from tests.rig.command import Shell

WORDS = ("--allow-private", "--no-robots", "--rate", "none", "--json")


@contextmanager
def site(pages: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    """Text is a page; a tuple is where a path redirects to, and the cookie it sets if it does."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = pages.get(self.path, "nothing here")
            body = page.encode() if isinstance(page, str) else b""
            self.send_response(200 if isinstance(page, str) else 302)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            if isinstance(page, tuple):
                self.send_header("Location", page[0])
                for cookie in page[1:]:
                    self.send_header("Set-Cookie", cookie)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def dead(shell: Shell) -> list[DeadLetter]:
    [job] = shell.jobs()
    return list(shell.ask(lambda frontier: frontier.dead(Selection(job=job.id))))


CIRCLES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "to itself": {"/": ("/",)},
    "to itself, by another name": {"/": ("/#top",)},
    "there and back": {"/": ("/b",), "/b": ("/",)},
    "into a circle": {"/": ("/a",), "/a": ("/b",), "/b": ("/c",), "/c": ("/a",)},
    "without end": {f"/{n or ''}": (f"/{n + 1}",) for n in range(30)},
}


@pytest.mark.parametrize("pages", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_a_failure(shell: Shell, pages: dict[str, str | tuple[str, ...]]) -> None:
    with site(pages) as url:
        ended = shell.run("crawl", url, *WORDS)
    assert ended.code == 3, ended.err
    assert (ended.json()["dead"], ended.json()["pages"]) == (1, 0)
    [letter] = dead(shell)
    assert letter.failure.error == "too_many_redirects"
    assert "cookie" not in letter.failure.message


GATES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "at once": {"/": ("/", "seen=1")},
    "over a page of its own": {"/": ("/gate",), "/gate": ("/", "seen=1")},
    "before it leaves": {"/": ("/gate", "seen=1"), "/gate": ("/",)},
}


@pytest.mark.parametrize("pages", GATES.values(), ids=GATES)
def test_a_gate_says_that_it_wants_a_cookie(shell: Shell, pages: dict[str, str | tuple[str, ...]]) -> None:
    with site(pages) as url:
        assert shell.run("crawl", url, *WORDS).code == 3
        [letter] = dead(shell)
        assert letter.failure.error == "too_many_redirects"
        assert "cookie" in letter.failure.message
        assert "--header" in letter.failure.message
        scraped = shell.run("scrape", url, "--allow-private", "--no-robots")
        assert "cookie" in scraped.err


def test_a_circle_of_pages_that_were_found_one_by_one(shell: Shell) -> None:
    pages: dict[str, str | tuple[str, ...]] = {
        "/": "<a href=/a>a</a> <a href=/b>b</a>",
        "/a": ("/b",),
        "/b": ("/a",),
    }
    with site(pages) as url:
        ended = shell.run("crawl", url, *WORDS)
    assert ended.code == 1, ended.err
    assert [letter.failure.error for letter in dead(shell)] == ["too_many_redirects"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ways_that_meet_at_one_page_are_fine(shell: Shell, workers: str) -> None:
    """Also if the page is known before, and again after a restart."""
    pages: dict[str, str | tuple[str, ...]] = {f"/{n}": ("/x" if n % 2 else "/end",) for n in range(10)}
    pages |= {"/x": ("/end",), "/end": "<a href=/1>1</a> <a href=/x>x</a>"}
    pages["/"] = "<a href=/end>end</a>" + "".join(f"<a href=/{n}>{n}</a>" for n in range(10))
    with site(pages) as url:
        first = shell.run("crawl", url, *WORDS, "--workers", workers, "--max-pages", "5")
        assert first.json()["dead"] == 0
        ended = shell.run("crawl", url, *WORDS, "--workers", workers, "--resume")
    assert ended.code == 0, ended.err
    assert all(job.counts.dead == 0 for job in shell.jobs())
