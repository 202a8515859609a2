"""Kinds of answers that nobody reads are left after their head; headers that are not sent are refused."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.fetch.port import is_readable
from tests.rig.command import Shell

FILM = b"\0" * 9_000_000
WORDS = ("--allow-private", "--no-robots", "--rate", "none", "--json")
APP = """
from shoal import Shoal

app = Shoal()

@app.scraper("films", start=["{url}/film"], retries=0)
async def films(page):
    yield {{"url": page.url, "size": len(page.body)}}
"""


class Films(ThreadingHTTPServer):
    """A page that links to a film; `taken` is what was sent of it."""

    daemon_threads = True
    taken = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Films

    def do_GET(self) -> None:
        film = self.path == "/film"
        body = FILM if film else b"<a href=/film>the film</a>"
        self.send_response(200)
        self.send_header("Content-Type", "Video/MP4; codecs=x" if film else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            return
        self.server.taken += len(body) if film else 0

    def log_message(self, *_words: object) -> None:
        return


@pytest.fixture
def films() -> Iterator[Films]:
    with Films(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_film_is_skipped_and_is_no_error(shell: Shell, films: Films) -> None:
    ended = shell.run("crawl", films.url, *WORDS)
    assert ended.code == 0, ended.err
    [job] = shell.jobs()
    assert (job.counts.done, job.counts.skipped, job.errors) == (2, 1, {})
    assert ended.json()["items"] == 1
    assert films.taken == 0


def test_any_kind_can_be_asked_for(shell: Shell, films: Films) -> None:
    ended = shell.run("crawl", films.url, *WORDS, env={"SHOAL_KINDS": "any"})
    assert ended.json()["items"] == 2
    assert films.taken == len(FILM)


def test_a_scraper_of_your_own_gets_every_kind(shell: Shell, films: Films, tmp_path: Path) -> None:
    (tmp_path / "films.py").write_text(APP.format(url=films.url))
    ended = shell.run("run", "films", "--app", "films.py", "--allow-private", "--no-robots")
    assert ended.code == 0, ended.err
    [job] = shell.jobs()
    assert [item["size"] for item in shell.items(job.id)] == [len(FILM)]


@pytest.mark.parametrize(
    "kind",
    ["video/mp4", "AUDIO/ogg", "image/png", "font/woff2", "application/zip", "application/x-tar",
     "application/octet-stream", "application/x-7z-compressed", "application/gzip"],
)  # fmt: skip
def test_nothing_to_read(kind: str) -> None:
    assert not is_readable(kind)
    assert not is_readable(f"{kind}; charset=utf-8")


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/html",
        "application/json",
        "image/svg+xml",
        "application/pdf",
        "rubbish",
        "application/xhtml+xml",
    ],
)
def test_something_to_read(kind: str) -> None:
    assert is_readable(kind)


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "Connection"])
@pytest.mark.parametrize("command", ["crawl", "scrape"])
def test_a_header_that_would_not_be_sent_is_refused(shell: Shell, command: str, name: str) -> None:
    ended = shell.run(command, "http://127.0.0.1:9/", "--header", f"{name}: x")
    assert ended.code == 2
    assert f"the header {name} cannot be set" in ended.err
    assert "hint" in ended.err
