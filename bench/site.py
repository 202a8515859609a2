"""A real documentation site on loopback, and what a perfect crawl of it would find.

The site is Debian's Python and PostgreSQL manuals behind a private nginx on one core.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import TypedDict
from urllib.parse import unquote, urldefrag, urljoin

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"
FOLDER = WORK / "site"
NGINX = Path("/usr/sbin/nginx")
MANUALS = {
    "python": Path("/usr/share/doc/python3.11/html"),
    "pg": Path("/usr/share/doc/postgresql-doc-15/html"),
}
HINT = "apt-get install python3-doc postgresql-doc-15 nginx-light"
INDEX = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>Manuals</title></head>
<body><a href="python/index.html">Python</a> <a href="pg/index.html">PostgreSQL</a></body></html>
"""
ORIGIN = "http://site.test"  # the truth is computed from files, so any origin does

CONFIG = """\
daemon off;
{user}
worker_processes 1;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {prefix}/body;
  proxy_temp_path {prefix}/proxy;
  fastcgi_temp_path {prefix}/fastcgi;
  uwsgi_temp_path {prefix}/uwsgi;
  scgi_temp_path {prefix}/scgi;
  types {{
    text/html html; text/css css; text/plain txt; text/xml xml;
    application/javascript js; application/json json; image/png png; image/svg+xml svg;
  }}
  default_type application/octet-stream;
  sendfile on;
  tcp_nopush on;
  keepalive_timeout 600;
  keepalive_requests 10000000;
  open_file_cache max=10000 inactive=600s;
  open_file_cache_valid 600s;
  server {{ {listen} root {root}; }}
}}
"""


class Page(TypedDict):
    """What a page holds."""

    title: str
    hrefs: int  # all links
    links: list[str]  # distinct paths on this site, other than its own
    elsewhere: int  # distinct pages of other sites


class Truth(TypedDict):
    """Every page reachable by links, and the linked paths that are no page, with the reason."""

    pages: dict[str, Page]
    others: dict[str, str]


def missing() -> list[str]:
    """The parts of the bench that are not installed."""
    return [str(path) for path in (NGINX, *MANUALS.values()) if not path.exists()]


def build() -> Path:
    """The folder to serve, copied once."""
    if gone := missing():
        sys.exit(f"missing {', '.join(gone)}: {HINT}")
    if not FOLDER.exists():
        fresh = FOLDER.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for name, source in MANUALS.items():
            subprocess.run(["cp", "-rL", source, fresh / name], check=True)
        (fresh / "index.html").write_text(INDEX)
        fresh.rename(FOLDER)
    return FOLDER


@contextmanager
def serve(core: int = 0, hosts: int = 1) -> Iterator[str]:
    """The site's URL while the block runs; nginx ends with it, and with this process at the latest.

    With several `hosts` the same site answers on 127.0.0.1, 127.0.0.2 and so on.
    """
    root = build()
    with tempfile.TemporaryDirectory(prefix="bench-nginx-") as prefix:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        user = "user root;" if os.geteuid() == 0 else ""
        config = Path(prefix, "nginx.conf")
        listen = "".join(f"listen 127.0.0.{n}:{port} backlog=4096; " for n in range(1, hosts + 1))
        config.write_text(CONFIG.format(prefix=prefix, listen=listen, root=root, user=user))
        command = ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", str(core)]
        command += [str(NGINX), "-p", prefix, "-e", f"{prefix}/error.log", "-c", str(config)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}/"
        finally:
            _end(process)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"nginx ended with code {process.returncode} before it listened")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError("nginx did not listen within 10 s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the master and its worker
        process.wait()


class _Reader(HTMLParser):
    """Title and hrefs of one page, by the standard library's parser: no contender uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.hrefs: list[str] = []
        self._in_title = False
        self._titles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._titles += 1
            self._in_title = self._titles == 1
        elif tag in ("a", "area"):
            self.hrefs += [value for name, value in attrs if name == "href" and value is not None]

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data


def truth() -> Truth:
    """What a crawl must find, by walking the links in the files; kept beside the copy of the site."""
    root = build()
    kept = WORK / "truth.json"
    if kept.exists() and kept.stat().st_mtime >= (root / "index.html").stat().st_mtime:
        loaded: Truth = json.loads(kept.read_text())
        return loaded
    found: Truth = {"pages": {}, "others": {}}
    seen, todo = {"/"}, ["/"]
    while todo:
        path = todo.pop()
        file = root / unquote(path).lstrip("/")
        if file.is_dir() and path.endswith("/"):
            file /= "index.html"
        if not file.is_file():
            found["others"][path] = "not found"
        elif file.suffix != ".html":
            found["others"][path] = "not HTML"
        else:
            page = _read(file, path)
            found["pages"][path] = page
            todo += [link for link in page["links"] if link not in seen]
            seen.update(page["links"])
    fresh = kept.with_suffix(".new")
    fresh.write_text(json.dumps(found))
    fresh.rename(kept)
    return found


def _read(file: Path, path: str) -> Page:
    reader = _Reader()
    reader.feed(file.read_text(encoding="utf-8", errors="replace"))
    reader.close()
    urls = {urldefrag(urljoin(ORIGIN + path, href.strip()))[0] for href in reader.hrefs}
    here = {local_path(url, ORIGIN) for url in urls}
    elsewhere = sum(url.startswith(("http://", "https://")) for url in urls if not local_path(url, ORIGIN))
    return {
        "title": " ".join(reader.title.split()),
        "hrefs": len(reader.hrefs),
        "links": sorted(here - {path, ""}),
        "elsewhere": elsewhere,
    }


def local_path(url: str, origin: str) -> str:
    """The path and query of `url` on the site at `origin`, or "" when it is elsewhere."""
    url = url.partition("#")[0]
    if url == origin:
        return "/"
    return url[len(origin) :] if url.startswith(origin + "/") else ""
