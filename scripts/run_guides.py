"""Runs the guides: types what the pages tell their readers to type, from top to bottom.

    python scripts/run_guides.py [-v] [PAGE…]     exit code 1 if a command failed; -v shows what they printed

Commands are typed unchanged. Each page gets network, process and mount namespaces of its own, without a way
out: there `https://example.com`, `redis://queue.internal:6379/0` and `localhost:5672` are what is started
here, and everything ends with the page. This needs root. The rules, all of them:

- ```console: lines after `$ ` are commands of one shell, others what the command before them prints. Of that
  the words must appear; numbers, ids and what stands beside … may differ. Commands end with exit code 0.
- ```python: cells of one notebook. ```sql: goes to psql. ```toml: only saved. ```text: for the eyes.
- A block whose first line is a comment with a file's name is saved under it.
- What runs until it is stopped (`ENDLESS`) goes on in the background until the page ends. What says
  `# Ctrl-C` is interrupted as soon as it has printed something.
- `JOB` is the newest job. An id among what is printed stands for the one that was really printed.
- Comments that readers do not see say the rest, for the next block:
  <!-- run: skip: REASON -->      it is not run, and counted
  <!-- run: exit: 3 -->           its commands end like this
  <!-- run: output: REASON -->    what is printed is an example
  <!-- run: before: COMMAND -->   what readers have done before, or do because the text says so
  <!-- run: check: COMMAND -->    what holds after the block above
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import inspect
import json
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for tests.rig: the servers that the pages speak of
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]

# -- the reader's world ---------------------------------------------------------------------

SITES = ("example.com", "example.org", "books.example", "shop.example", "your.site")
SERVERS = ("queue.internal", "db.internal")
SCRAPERS = """
from shoal import Page, Shoal

app = Shoal()


@app.scraper("prices", start=["https://shop.example/"])
def prices(page: Page):
    return {"price": page.text(".price")}
"""
FILES = {
    "scrapers.py": SCRAPERS,
    "my_scrapers.py": SCRAPERS,
    "urls.txt": "https://example.com/\nhttps://example.com/new\nhttps://example.org/\n",
    "million.txt": "https://books.example/\nhttps://books.example/new\n",
}
ENVIRONMENT = {
    "PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "SHOAL_ALLOW_PRIVATE": "1",  # the sites are on loopback
    "PGHOST": "db.internal",
    "PGUSER": "me",
    "PGDATABASE": "crawls",
}
ENDLESS = re.compile(r"shoal (serve|up|worker(?!.*(--drain|--run-id)))\b|celery .*\b(worker|flower)\b")
CHECKOUT = re.compile(r"\bmake |\bscripts/|\bexamples/")
"""Commands that belong into a checkout; others into an empty folder."""
WRONG = re.compile(r"^(Traceback|error:|\{\"type\":\"about:blank)", re.MULTILINE)
"""What commands print that fail; `curl` ends with 0 even so."""
LIMIT = 120.0
VERBOSE = "-v" in sys.argv


class Site(BaseHTTPRequestHandler):
    """Any of the sites: a few pages, a sitemap of today, and /page, which is out of order."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        site = f"https://{self.headers['Host']}"
        pages = {
            "/": "<h1>Example</h1><article><h3><a href=/book/1>Salt</a></h3></article><a href=/new>new</a>",
            "/new": "<h1>New</h1><article><h3><a href=/book/2>Fog</a></h3></article>",
            "/book/1": "<h1>Salt</h1><b class=price>12</b>",
            "/book/2": "<h1>Fog</h1><b class=price>9</b>",
            "/news": "<h1>News</h1>",
            "/blog/1": "<h1>Fog is expected</h1>",
        }
        now = datetime.now(UTC).isoformat()
        rows = "".join(f"<url><loc>{site}{path}</loc><lastmod>{now}</lastmod></url>" for path in pages)
        sitemap = f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{rows}</urlset>'
        if self.path in pages:
            title = f"<!doctype html><title>Example {self.path}</title>"
            self._answer(200, "text/html", (title + pages[self.path]).encode())
        elif self.path == "/robots.txt":
            self._answer(
                200, "text/plain", f"User-agent: *\nAllow: /\nSitemap: {site}/sitemap.xml\n".encode()
            )
        elif self.path == "/sitemap.xml":
            self._answer(200, "application/xml", sitemap.encode())
        elif self.path == "/news/sitemap.xml.gz":
            self._answer(200, "application/gzip", gzip.compress(sitemap.encode()))
        else:
            self._answer(503 if self.path == "/page" else 404, "text/plain", b"out of order")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_sites(folder: Path) -> None:
    """On ports 80 and 443, by names that resolve to loopback, with a certificate that shoal trusts."""
    import certifi

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "this network has a way out"
    hosts = "127.0.0.1 localhost\n127.0.0.1 " + " ".join([*SITES, *SERVERS]) + "\n"
    names = ",".join(f"DNS:{name}" for name in SITES)
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=guides"
    )
    words = [*make.split(), "-addext", f"subjectAltName={names}", "-keyout", "key.pem", "-out", "site.pem"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    trusted = Path(certifi.where()).read_text() + (folder / "site.pem").read_text()
    for path, text in (("/etc/hosts", hosts), (certifi.where(), trusted)):
        instead = folder / Path(path).name
        instead.write_text(text)
        subprocess.run(["mount", "--bind", instead, path], check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem", folder / "key.pem")
    for port in (80, 443):
        server = ThreadingHTTPServer(("127.0.0.1", port), Site)
        if port == 443:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        Thread(target=server.serve_forever, daemon=True).start()


def start_servers(text: str, folder: Path, stack: ExitStack) -> None:
    """Those that the page speaks of, on the ports where everybody expects them."""
    from tests.rig.postgres_server import PostgresServer
    from tests.rig.rabbitmq_server import RabbitServer
    from tests.rig.redis_server import RedisServer

    for name in ("redis", "postgres", "rabbit"):
        (folder / name).mkdir()
    if "redis" in text or "celery" in text:
        redis = RedisServer(str(folder / "redis"))
        redis.port = 6379
        redis.start()
        stack.callback(redis.kill)
    if "postgresql://" in text:
        postgres = PostgresServer(folder / "postgres")
        postgres.port = 5432
        postgres.start()
        stack.callback(postgres.stop)
        roles = "".join(
            f'CREATE ROLE "{name}" LOGIN SUPERUSER;\n' for name in ("me", "shoal", "user", "owner")
        )
        make = f"{roles} CREATE DATABASE shoal;\n CREATE DATABASE scrapes;\n"
        words = ["psql", "-qh", "127.0.0.1", "-U", "postgres", "postgres"]
        subprocess.run(words, input=make, text=True, check=True)
    if "amqp://" in text:
        rabbit = RabbitServer(folder / "rabbit")
        rabbit.port = 5672
        rabbit.start()
        stack.callback(rabbit.close)


# -- reading a page -------------------------------------------------------------------------

ID = re.compile(r"(?:[a-z][\w.]*-)?\d{8}_\d{6}(?:-[0-9a-f]{4})?")
NAMED = re.compile(r"^(?:#|--) ([\w./-]+\.\w+)$")


@dataclass
class Step:
    """One command, cell or query of a page, or a file."""

    line: int
    kind: str
    text: str
    printed: str = ""
    exit: int = 0
    skip: str = ""
    file: str = ""


def steps(text: str) -> Iterator[Step]:
    """What a page tells its reader to do."""
    kind, begin, block, notes = "", 0, list[str](), dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        note = re.fullmatch(r"<!-- run: (skip|exit|output|before|check): (.*) -->", line)
        if note and note[1] in ("before", "check"):
            yield Step(number, "console", note[2])
        elif note:
            notes[note[1]] = note[2]
        elif kind and line == "```":
            if kind in ("console", "python", "sql", "toml"):
                yield from parts(kind, begin, block, notes)
            kind, notes = "", {}
        elif kind:
            block.append(line)
        elif line.startswith("```"):
            kind, begin, block = line[3:] or "text", number + 1, []


def parts(kind: str, begin: int, block: list[str], notes: dict[str, str]) -> Iterator[Step]:
    """The commands of a block; the block, if it is code."""
    how: dict[str, Any] = {"skip": notes.get("skip", ""), "exit": int(notes.get("exit", 0))}
    if kind != "console":
        named = NAMED.match(block[0])
        yield Step(begin, kind, "\n".join(block), file=named[1] if named else "", **how)
        return
    step = None
    for number, line in enumerate(block, begin):
        if step and step.text.endswith("\\"):
            step.text += "\n" + line
        elif line.startswith("$ "):
            if step:
                yield step
            step = Step(number, kind, line[2:], **how)
        elif step and "output" not in notes:
            step.printed += line + "\n"
    if step:
        yield step


def stable_words(printed: str) -> list[str]:
    """What must appear again: no ids, no figures, nothing beside an ellipsis."""
    left = ID.sub(" ", re.sub(r"\S*…\S*", " ", printed))
    return [word for word in re.findall(r"[\w-]+", left) if not re.search(r"\d", word)]


# -- typing it ------------------------------------------------------------------------------


@dataclass
class Reader:
    """A shell, a notebook, and what was printed."""

    page: Path
    folder: Path
    failures: list[str] = field(default_factory=list)
    ran: int = 0
    skipped: int = 0
    ids: dict[str, str] = field(default_factory=dict)
    background: list[tuple[Step, str, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        home = self.folder.parent / "home"
        home.mkdir()
        environment = {**ENVIRONMENT, "HOME": str(home), "PAGE": str(self.page)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        here: dict[str, Any] = {"cwd": self.folder, "env": environment}
        self._shell = subprocess.Popen(["bash", "--norc"], **pipes, **here)
        notebook = [f"{ROOT}/.venv/bin/python", __file__, "--notebook"]
        self._notebook = subprocess.Popen(notebook, **pipes, **here)

    def do(self, step: Step) -> None:
        if step.skip:
            self.skipped += 1
            print(f"    {step.line}: skipped, {step.skip}")
            return
        self.ran += 1
        began = time.monotonic()
        output = self.folder.parent / f"output-{self.ran}"
        answer = self._answer(step, self._typed(step.text), output)
        took = f"({time.monotonic() - began:.1f} s)" if answer else "in the background"
        print(f"    {step.line}: {step.text.splitlines()[0][:90]} {took}", flush=True)
        if answer:
            self._check(step, answer, output.read_text(errors="replace"))

    def end(self) -> None:
        """Stop what runs in the background. It must have been well until now."""
        for step, pid, output in reversed(self.background):
            code = self._ask(self._shell, f"kill {pid} 2>/dev/null; wait {pid}; echo $?")
            self._check(step, "0" if code == "143" else code, output.read_text(errors="replace"))

    def _typed(self, command: str) -> str:
        for shown, real in self.ids.items():
            command = command.replace(shown, real)
        if re.search(r"\bJOB\b", command):
            jobs = json.loads(self._ask(self._shell, "shoal jobs --json --limit 1 | tr -d '\\n'; echo"))
            command = re.sub(r"\bJOB\b", jobs[0]["job_id"] if jobs else "JOB", command)
        return command

    def _answer(self, step: Step, typed: str, output: Path) -> str:
        """The exit code; nothing if it goes on."""
        if step.file:
            Path(self._ask(self._shell, "pwd"), step.file).write_text(typed + "\n")
        bare, into = typed.partition(" #")[0], f">{output} 2>&1 </dev/null"
        output.touch()
        if step.kind == "toml":
            return "0"
        if step.kind == "python":
            return self._ask(self._notebook, json.dumps([str(output), typed]))
        if step.kind == "sql":
            query = self.folder.parent / "query.sql"
            query.write_text(typed)
            return self._ask(self._shell, f"psql -v ON_ERROR_STOP=1 -f {query} {into}; echo $?")
        if ENDLESS.search(typed):
            self.background.append((step, self._ask(self._shell, f"{bare} {into} & echo $!"), output))
            self._until_it_speaks(output, stable_words(step.printed))
            return ""
        if "# Ctrl-C" in typed:
            step.exit = 130
            wait = f"until [ -s {output} ]; do sleep 0.1; done"
            press = f"(set -m; {bare} {into} & {wait}; kill -INT $!; wait $!; echo $?)"
            return self._ask(self._shell, press)
        return self._ask(self._shell, f"{{ {typed}\n}} {into}; echo $?")

    def _ask(self, process: subprocess.Popen[str], code: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        print(code, file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], LIMIT)[0]:
            raise TimeoutError(f"no end after {LIMIT:.0f} s: {code}")
        return process.stdout.readline().strip()

    def _until_it_speaks(self, output: Path, words: list[str]) -> None:
        """What is typed next counts on it."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            told = output.read_text(errors="replace")
            if told and all(word in told for word in words):
                return
            time.sleep(0.05)

    def _check(self, step: Step, answer: str, output: str) -> None:
        missing = [word for word in stable_words(step.printed) if word not in output]
        wrong = []
        if answer != str(step.exit):
            wrong.append(f"exit code {answer} instead of {step.exit}")
        if missing:
            wrong.append(f"it did not print: {' '.join(missing)}")
        if not step.exit and WRONG.search(output):
            wrong.append("it printed an error")
        if VERBOSE:
            print(output[-3000:])
        if wrong:
            self.failures.append(f"line {step.line}: {step.text}\n{'; '.join(wrong)}\n{output[-3000:]}")
            print(f"    {self.failures[-1]}", flush=True)
        self.ids |= dict(zip(ID.findall(step.printed), ID.findall(output), strict=False))


def notebook() -> None:
    """Cells share their names and their event loop, and may await at their top level."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            output, code = json.loads(line)
            status = 0
            with Path(output).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
                try:
                    cell = compile(code, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    made = eval(cell, names)
                    if cell.co_flags & inspect.CO_COROUTINE:
                        runner.run(made)
                except BaseException:
                    traceback.print_exc(file=sink)
                    status = 1
            print(status, flush=True)


# -- page by page ---------------------------------------------------------------------------


def run_inside(page: Path) -> int:
    """In namespaces of our own: the whole page."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    text = page.read_text()
    began = time.monotonic()
    with TemporaryDirectory(prefix="shoal-guide-", ignore_cleanup_errors=True) as made, ExitStack() as stack:
        top = Path(made)
        top.chmod(0o755)
        serve_sites(top)
        start_servers(text, top, stack)
        folder = top / "here"
        folder.mkdir()
        for name, lines in FILES.items():
            (folder / name).write_text(lines)
        plan = list(steps(text))
        if any(CHECKOUT.search(step.text) for step in plan if step.kind == "console" and not step.skip):
            for path in ROOT.iterdir():
                if path.name not in (".git", ".shoal"):
                    (folder / path.name).symlink_to(path)
        reader = Reader(page, folder)
        for step in plan:
            reader.do(step)
        reader.end()
    counted = f"{reader.ran} ran, {reader.skipped} skipped, {len(reader.failures)} failed"
    print(f"{page.name}: {counted}, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if reader.failures else 0


def possible() -> bool:
    """Whether this process may make namespaces, and has what readers have."""
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "openssl", "curl")))


def run(page: Path) -> tuple[int, str]:
    """The exit code and what there is to tell. A shell in front takes in orphans, as init would."""
    spaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inside = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, __file__, "--inside", str(page)]
    inside += ["-v"] if VERBOSE else []
    done = subprocess.run([*spaces, *inside], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main(words: list[str]) -> int:
    if words[:1] == ["--notebook"]:
        notebook()
        return 0
    if words[:1] == ["--inside"]:
        return run_inside(Path(words[1]))
    if not possible():
        print(
            "error: guides run in namespaces of their own: this needs root, and unshare, ip, openssl and curl"
        )
        return 2
    worst = 0
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        for code, told in pool.map(run, [Path(word).resolve() for word in words if word != "-v"] or PAGES):
            print(told, end="", flush=True)
            worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
