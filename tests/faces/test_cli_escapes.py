"""What a page says must not steer the terminal of whoever reads it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.rig.command import Ran

ODD = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x08"
BODY = f"""<title>A {ODD}title</title><meta name=description content="{ODD}"><p>Wörds{ODD}\xa0and\r\nmore
<a href="/a{ODD}b">link</a>"""
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"" if self.path == "/robots.txt" else BODY.encode()
            self.send_response(404 if self.path == "/robots.txt" else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("format", ["markdown", "text", "html", "links", "json"])
def test_scrape_lets_no_terminal_escape_through(shoal: Callable[..., Ran], url: str, format: str) -> None:
    ran = shoal("scrape", url, "--allow-private", "--format", format)
    assert ran.code == 0
    assert not STEERING.search(ran.out)
    assert not STEERING.search(ran.err)
    if format == "json":
        assert "\x9b" in json.loads(ran.out)["title"]  # escaped, not lost
    elif format != "links":
        assert "Wörds" in ran.out


def test_results_let_no_terminal_escape_through(shoal: Callable[..., Ran], url: str) -> None:
    shoal("crawl", url, "--allow-private", "--max-pages", "1", "--json")
    [job] = json.loads(shoal("jobs", "--json").out)
    ran = shoal("results", job["job_id"])
    assert not STEERING.search(ran.out)
    assert "\x9b" in json.loads(ran.out.splitlines()[0])["title"]
