"""A crawl against an independent walk of the same files: every page once, none left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply, StaticSite, generated_site, serve_in_process
from shoal.model import Selection
from tests.rig.command import Shell, read_lines

MANUAL = Path("/usr/share/doc/python3.11/html")
"""Real pages, if this machine has them: the Python manual of the Debian package python3-doc."""


class Anchors(HTMLParser):
    """What the standard library sees of a page: where its links go."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.base = url
        self.hrefs: list[str] = []
        self._based = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        href = values.get("href")
        if href is None or "nofollow" in (values.get("rel") or "").lower().split():
            return
        if tag == "base" and not self._based:
            self._based = True
            self.base = urljoin(self.base, href)
        elif tag in ("a", "area"):
            self.hrefs.append(href)

    @property
    def links(self) -> set[str]:
        return {urldefrag(urljoin(self.base, href.strip())).url for href in self.hrefs}


Read = Callable[[str], tuple[int, str, bytes]]
"""From a URL to status, where it redirects to, and the body if that is HTML."""


def walk(start: str, read: Read) -> tuple[set[str], set[str]]:
    """The pages of the start's host that answer, and those that do not."""
    good: set[str] = set()
    bad: set[str] = set()
    waiting, known = [start], {start}
    while waiting:
        url = waiting.pop()
        status, target, body = read(url)
        links = {urldefrag(urljoin(url, target)).url} if target else set()
        if status == 200:
            good.add(url)
            anchors = Anchors(url)
            anchors.feed(body.decode("utf-8", "replace"))
            links = anchors.links
        elif not target:
            bad.add(url)
        for link in links:
            if link not in known and urlsplit(link)[:2] == urlsplit(start)[:2]:
                known.add(link)
                waiting.append(link)
    return good, bad


def files(root: Path) -> Read:
    """The files of a directory as a static server shows them."""

    def read(url: str) -> tuple[int, str, bytes]:
        path = root / unquote(urlsplit(url).path).lstrip("/")
        if path.is_dir():
            if not urlsplit(url).path.endswith("/"):
                return 301, f"{urlsplit(url).path}/", b""
            path /= "index.html"
        if not path.is_file():
            return 404, "", b""
        return 200, "", path.read_bytes() if path.suffix == ".html" else b""

    return read


def write_site(root: Path) -> Path:
    """A few hundred pages in folders that link to each other in all the usual ways."""
    for number in range(300):
        folder = root / f"part-{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        other = (number * 7 + 1) % 300
        html = (
            f"<html><head><title>{number}</title></head><body>"
            f"<a href='../part-{other % 10}/{other}.html#top'>a</a> <a href='{number}.html'>me</a>"
            f"<a href='../part-{(number + 1) % 10}/{(number + 1) % 300}.html'>next</a>"
            f"<a href='../part-{(number + 1) % 10}'>folder</a> <a href='missing-{number % 3}.html'>gone</a>"
            "<a href='mailto:a@b.example'>mail</a> <a href='#'>top</a> <a href='notes.txt'>notes</a>"
            "</body></html>"
        )
        (folder / f"{number}.html").write_text(html)
        (folder / "notes.txt").write_text("<a href='nowhere.html'>not a link</a>")
        (folder / "index.html").write_text(f"<title>part</title><a href='{number}.html'>x</a>")
    (root / "index.html").write_text("<title>home</title><a href='part-0/0.html'>begin</a>")
    return root


def assert_exactly_once(shell: Shell, url: str, good: set[str], bad: set[str], *options: str) -> None:
    words = ["--allow-private", "--rate", "none", "--per-host", "16", "--out", "x.jsonl", "--json"]
    ended = shell.run("crawl", url, *words, *options)
    assert ended.code == (1 if bad else 0), ended.err
    summary = ended.json()
    assert (summary["status"], summary["dead"]) == ("done", len(bad))
    found = Counter(item["final_url"] for item in read_lines(shell.root / "x.jsonl"))
    assert not set(found) - good, "pages that are not there"
    assert not good - set(found), "pages that were left out"
    assert not {page: n for page, n in found.items() if n > 1}, "pages that came twice"
    assert summary["items"] == summary["pages"] == len(good)
    assert Counter(item["final_url"] for item in shell.items(summary["job"])) == found
    assert shell.check() == []


def each_file_once(shell: Shell, root: Path, workers: int) -> None:
    with serve_in_process(StaticSite(str(root))) as site:
        good, bad = walk(site.url, files(root))
        assert len(good) > 200
        assert_exactly_once(shell, site.url, good, bad, "--workers", str(workers))
        visits = Counter(hit.url for hit in site.log() if not hit.url.endswith("/robots.txt"))
        assert set(visits) == good | bad | {url for url in visits if is_folder(root, url)}
        assert max(visits.values()) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_each_file_once(shell: Shell, workers: int) -> None:
    each_file_once(shell, write_site(shell.root / "site"), workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_each_page_of_a_real_manual_once(shell: Shell, workers: int) -> None:
    if not MANUAL.is_dir():
        pytest.skip(f"{MANUAL} is not installed")
    each_file_once(shell, MANUAL, workers)


def is_folder(root: Path, url: str) -> bool:
    path = urlsplit(url).path
    return not path.endswith("/") and (root / unquote(path).lstrip("/")).is_dir()


# Every page says the same in many ways; what counts is how few pages there are in the end.
TRICKY: dict[str, str | tuple[int, str]] = {
    "/": "<a href='a'>1</a><a href='/a#x'>2</a><a href='./b/../a'>3</a><a href='old'>4</a><a href='b/'>5</a>"
    "<a href='based'>6</a><a href='q?x=1&amp;y=2'>7</a><a href='q?y=2&amp;x=1'>8</a><a href='chain-3'>9</a>"
    "<a href='//{host}/a'>10</a><a href='http://{host}'>11</a><a href='loop-1'>12</a><a href=' b/ '>13</a>"
    "<a href='%7Etilde'>14</a><a href='ünder'>15</a><a href='away'>16</a><a href='frag'>17</a>",
    "/a": "<a href='?page=2'>more</a><a href=''>me</a><a href='#'>me</a><a href='/'>home</a>",
    "/a?page=2": "<a href='?page=2#again'>me</a><a href='?'>empty</a>",
    "/a?": "an empty query is another URL",
    "/old": (301, "/a"),
    "/b/": "<a href='c'>c</a><a href='../a'>a</a><area href='d'>",
    "/b/c": "<base href='/deep/er/'><a href='e'>e</a><base href='/wrong/'>",
    "/b/d": "d",
    "/based": "<base href='/deep/'><a href='er/e'>e</a><a href='#here'>the base itself</a>",
    "/deep/er/e": "e",
    "/deep/": "what a lone fragment means under a base is within the page: never asked for",
    "/q?x=1&y=2": "one order",
    "/q?y=2&x=1": "another order is another page until somebody says otherwise",
    "/chain-3": (302, "/chain-2"),
    "/chain-2": (307, "chain-1"),
    "/chain-1": (308, "/b/d#end"),
    "/loop-1": (302, "/loop-2"),
    "/loop-2": (302, "/loop-1"),
    "/%7Etilde": "escaped stays escaped",
    "/%C3%BCnder": "",
    "/away": (302, "http://127.0.0.2:{port}/"),
    "/frag": (301, "/b/c#middle"),
}
NEVER = {"/deep/"}


def test_tricky_links_and_redirects(shell: Shell) -> None:
    def respond(call: Call) -> Reply:
        answer = TRICKY.get(call.path)
        if answer is None or call.address != "127.0.0.1":
            return Reply(404, b"no such page")
        place = {"host": f"127.0.0.1:{call.port}", "port": call.port}
        if isinstance(answer, tuple):
            return Reply(answer[0], headers=(("Location", answer[1].format(**place)),))
        return Reply(200, f"<html><body>{answer.format(**place)}</body></html>".encode())

    with LoopbackSite(respond, hosts=2) as site:
        origin = site.url.rstrip("/")
        good = {
            f"{origin}{path}"
            for path, answer in TRICKY.items()
            if isinstance(answer, str) and path not in NEVER
        }
        # Two pages redirect to each other: the second says so, and each is asked for once.
        circle = f"{origin}/loop-2"
        assert_exactly_once(shell, site.url, good, {circle}, "--workers", "1")
        (letter,) = shell.ask(lambda frontier: frontier.dead(Selection(), limit=10))
        assert (letter.request.url, letter.failure.error) == (circle, "too_many_redirects")
        visits = Counter(hit.url for hit in site.log() if not hit.url.endswith("/robots.txt"))
        assert visits == Counter(f"{origin}{path}" for path in TRICKY if path not in NEVER)
        # The one that was redirected is known by the name under which it was asked for first.
        items = {item["final_url"]: item["url"] for item in read_lines(shell.root / "x.jsonl")}
        assert items[f"{origin}/b/d"] in (f"{origin}/b/d", f"{origin}/chain-3")


def test_a_url_somebody_asked_for_is_followed_wherever_it_leads(shell: Shell) -> None:
    """Also by a job that visits just the pages it is given."""
    with LoopbackSite(generated_site(pages=3, links=1), hosts=2) as site:
        elsewhere = f"http://127.0.0.2:{site.port}/etag/x"
        asked = f"http://127.0.0.1:{site.port}/redirect/to?url={elsewhere}&code=302"
        flags = ["--rate", "none", "--allow-private", "--no-robots"]
        assert shell.run("enqueue", "list", asked, *flags).code == 0
        assert shell.run("worker", "--drain").code == 0
        [item] = [json.loads(line) for line in shell.run("results", "list").out.splitlines()]
        assert (item["url"], item["final_url"]) == (asked, elsewhere)
