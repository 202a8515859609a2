"""Hooks see every request, response and item of an application, and cannot go round what was decided."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal import Drop, Page, Request, Response, Retry, Shoal
from shoal.app import Session
from shoal.demo.books import BOOKS, DemoSite, pages
from shoal.errors import NothingFetched
from shoal.fetch.port import Ask
from shoal.model import Counts, Selection
from shoal.registry import open_frontier
from shoal.scrape import hooks as module
from shoal.scrape.page import HEAVY
from shoal.settings import load
from tests.rig import redis_server as redis
from tests.rig.command import Shell, wait_until
from tests.rig.fleet import Fleet

FAST: dict[str, Any] = {"frontier": "memory:", "rate": "none", "allow_private": True}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with DemoSite() as site:
        yield site.url


class Shelf:
    """A fetcher without a network: what was asked, and answers by path."""

    def __init__(self, answers: Mapping[str, tuple[int, str]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def fetch(self, ask: Ask) -> Response:
        path = "/" + ask.url.split("/", 3)[3]
        if path == "/robots.txt":
            return Response(ask.url, 200, (), b"User-agent: *\nDisallow: /private", 0.0)
        self.asked.append((path, dict(ask.headers)))
        status, said = self.answers[path]
        kind = ("location", said) if status in (301, 302) else ("content-type", "text/html")
        return Response(ask.url, status, (kind,), said.encode(), 0.0)

    async def close(self) -> None:
        raise AssertionError("a user's fetcher is not ours to close")


async def crawled(app: Shoal, **settings: Any) -> list[dict[str, Any]]:
    return [item async for item in app.crawl("http://shelf.example/", **settings)]


def shelf(**more: tuple[int, str]) -> tuple[Shelf, Shoal]:
    links = "".join(f"<a href=/{name}>{name}</a>" for name in more)
    found = Shelf({"/": (200, f"<title>Home</title>{links}"), **{f"/{k}": v for k, v in more.items()}})
    return found, Shoal(fetcher=found, frontier="memory:", rate="none", cache=0, retries=1)


# -- requests ----------------------------------------------------------------------------------


async def test_a_request_gets_headers_in_the_order_of_registration() -> None:
    found, app = shelf()

    @app.on_request
    def first(request: Request) -> dict[str, str]:
        return {"X-One": "1", "X-Two": "1"}

    @app.on_request
    async def second(request: Request) -> dict[str, str] | None:
        assert request.headers == {"X-One": "1", "X-Two": "1"}
        return {"X-Two": "2"}

    @app.on_request
    def third(request: Request) -> None:
        pass

    await crawled(app)
    assert found.asked == [("/", {"X-One": "1", "X-Two": "2"})]


async def test_a_vetoed_request_is_not_sent() -> None:
    found, app = shelf(logout=(200, ""), two=(200, ""))

    @app.on_request
    def veto(request: Request) -> None:
        if "logout" in request.url:
            raise Drop("never log out")

    summary = await app.crawl("http://shelf.example/")
    assert [path for path, _ in found.asked] == ["/", "/two"]
    assert (summary.pages, summary.failed) == (2, 0)


async def test_what_robots_forbids_never_reaches_a_hook() -> None:
    _, app = shelf(private=(200, ""), out=(200, ""))
    seen: list[str] = []

    @app.on_request
    def look(request: Request) -> None:
        seen.append(request.url)

    await crawled(app, exclude=["*/out"])
    assert seen == ["http://shelf.example/"]


async def test_headers_of_a_hook_stay_with_one_request() -> None:
    """They may be secrets: neither a redirect takes them elsewhere nor does the frontier keep them."""
    found, app = shelf(here=(302, "/there"), there=(200, ""), broken=(500, ""))

    @app.on_request
    def sign(request: Request) -> dict[str, str] | None:
        return {"Authorization": "secret"} if request.url.endswith(("/here", "/broken")) else None

    frontier = await open_frontier("memory:")
    await crawled(app, frontier=frontier)
    assert ("/here", {"Authorization": "secret"}) in found.asked
    assert ("/there", {}) in found.asked
    [letter] = await frontier.dead(Selection())
    assert letter.request.headers is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda request: msgspec.structs.replace(request, url="http://10.0.0.1/"), "returned Request"),
        (lambda request: {"Host": "10.0.0.1"}, "the header Host cannot be set"),
    ],
    ids=["another URL", "another host"],
)
async def test_a_hook_cannot_send_a_visit_elsewhere(given: Any, told: str) -> None:
    found, app = shelf()
    app.on_request(given)
    with pytest.raises(NothingFetched, match=told):
        await crawled(app)
    assert found.asked == []


async def test_a_hook_may_put_a_visit_off() -> None:
    found, app = shelf()
    times = iter([True, False])

    @app.on_request
    def later(request: Request) -> None:
        if next(times):
            raise Retry(after=0.0)

    assert len(await crawled(app)) == 1
    assert len(found.asked) == 1


async def test_a_hook_that_hangs_ends_its_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    found, app = shelf()

    @app.on_request
    async def hang(request: Request) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingFetched, match="request hooks took more than"):
        await crawled(app, retries=0)
    assert found.asked == []


# -- responses ---------------------------------------------------------------------------------


async def test_a_response_of_any_status_can_be_seen_and_replaced() -> None:
    _, app = shelf(gone=(404, "soft"), fine=(200, "<title>old</title>"))
    seen: list[tuple[str, int]] = []

    @app.on_response
    def mend(page: Page) -> Response | None:
        seen.append((page.url, page.response.status))
        if page.response.status == 404:
            return msgspec.structs.replace(page.response, status=200, body=b"<title>mended</title>")
        return None

    @app.on_response
    async def then(page: Page) -> Response:
        body = page.body.replace(b"mended", b"mended twice")
        return msgspec.structs.replace(page.response, body=body)

    titles = {item["url"].rsplit("/", 1)[1]: item["title"] for item in await crawled(app)}
    assert titles == {"": "Home", "gone": "mended twice", "fine": "old"}
    assert sorted(status for _, status in seen) == [200, 200, 404]


async def test_a_rejected_response_stores_nothing_and_a_retried_one_comes_again() -> None:
    found, app = shelf(captcha=(200, "captcha"), thin=(200, ""))
    tried: list[str] = []

    @app.on_response
    def judge(page: Page) -> None:
        if page.url.endswith("/thin"):
            raise Drop("nothing on it")
        if page.body == b"captcha" and not tried:
            tried.append(page.url)
            raise Retry(after=0.0, reason="captcha")

    assert len(await crawled(app)) == 2
    assert sorted(path for path, _ in found.asked) == ["/", "/captcha", "/captcha", "/thin"]


async def test_another_url_for_a_response_is_refused() -> None:
    _, app = shelf()

    @app.on_response
    def lie(page: Page) -> Response:
        return msgspec.structs.replace(page.response, url="http://elsewhere.example/")

    with pytest.raises(NothingFetched, match="a Response of the same URL"):
        await crawled(app)


# -- items -------------------------------------------------------------------------------------


async def test_items_are_changed_dropped_and_fanned_out_in_order(site: str) -> None:
    app = Shoal(**FAST)

    @app.scraper("books", start=[site], rate="none")
    async def books(page: Page) -> Any:
        for request in page.follow_all("ul.shelf a", label="book"):
            yield request
        for request in page.follow_all("a[href*='/catalogue/']"):
            yield request

    @books.handler("book")
    def book(page: Page) -> dict[str, str]:
        return {"title": page.text("article h1")}

    @app.on_item
    def only_short(item: dict[str, Any], page: Page) -> None:
        if len(item["title"]) > 12:
            raise Drop("long title")
        item["url"] = page.url  # None: the item as it is now

    @app.on_item
    async def twice(item: dict[str, Any], page: Page) -> list[dict[str, Any]]:
        return [item | {"copy": 1}, item | {"copy": 2}]

    @app.on_item
    def count(item: dict[str, Any], page: Page) -> dict[str, Any]:
        return {**item, "seen": True}

    items = [item async for item in app.crawl("books")]
    short = [each.title for each in BOOKS if len(each.title) <= 12]
    assert short, "the demo site has books with short titles"
    assert sorted((item["title"], item["copy"]) for item in items) == sorted(
        (title, copy) for title in short for copy in (1, 2)
    )
    assert all(item["seen"] and "/books/" in item["url"] for item in items)


async def test_items_of_the_site_scraper_go_through_the_hooks_and_links_are_followed(site: str) -> None:
    app = Shoal(**FAST)

    @app.on_item
    def only_books(item: dict[str, Any], page: Page) -> dict[str, Any] | None:
        if "/books/" not in page.url:
            raise Drop("no book")
        return {"title": item["title"]}

    summary = await app.crawl(site)
    assert summary.items < summary.pages == len(pages())
    assert {tuple(item) async for item in app.crawl(site)} == {("title",)}


async def test_items_of_heavy_pages_go_through_the_hooks() -> None:
    _, app = shelf(heavy=(200, "<title>Heavy</title>" + "<p>word</p>" * (HEAVY // 10)))

    @app.on_item
    def short(item: dict[str, Any], page: Page) -> dict[str, Any]:
        return {"title": item["title"], "heavy": page.is_heavy}

    assert {(item["title"], item["heavy"]) for item in await crawled(app)} == {
        ("Home", False),
        ("Heavy", True),
    }


@pytest.mark.parametrize("broken", [lambda item, page: "text", lambda item, page: {"a": b"bytes"}])
async def test_what_is_no_item_is_a_dead_letter(broken: Any) -> None:
    _, app = shelf()
    app.on_item(broken)
    with pytest.raises(NothingFetched) as caught:
        await crawled(app)
    assert caught.value.error == "item_invalid"


async def test_without_hooks_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a hook was asked for")

    for name in ("on_request", "on_response", "on_items"):
        monkeypatch.setattr(module.Hooks, name, never)
    _, app = shelf(two=(200, ""))
    assert len(await crawled(app)) == 2


# -- where an application is loaded by its name -------------------------------------------------

APP = """
import os
from shoal import Drop, Shoal

app = Shoal()

@app.scraper("titles", rate="none")
def titles(page):
    return {"title": page.title}

@app.on_request
def veto(request):
    if request.url.endswith("/about"):
        raise Drop("not this one")

@app.on_item
def mark(item, page):
    return {"title": item["title"], "pid": os.getpid()}
"""
QUICK = ("--rate", "none", "--per-host", "8", "--allow-private")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "hooked.py").write_text(APP)
    with Shell(tmp_path) as made:
        yield made


def stored(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_crawl_with_an_application(shell: Shell, site: str, workers: str) -> None:
    done = shell.run("crawl", site, "--app", "hooked.py", *QUICK, "--workers", workers)
    assert done.code == 1, done.err  # the demo site has one missing page
    items = stored(done.out)
    assert {tuple(sorted(item)) for item in items} == {("pid", "title")}
    assert len(items) == len(pages()) - 1, "all but the one that was vetoed"


def test_run_with_an_application(shell: Shell, site: str) -> None:
    done = shell.run("run", "titles", site, "--app", "hooked.py", "--allow-private")
    assert [sorted(item) for item in stored(done.out)] == [["pid", "title"]], done.err


def test_a_worker_knows_the_hooks_by_the_job(shell: Shell, site: str) -> None:
    """As it knows scrapers: the job says where its application is."""
    made = shell.run("crawl", site, "--app", "hooked.py", *QUICK, "--scope", "page", "--json").json()
    assert shell.run("enqueue", made["job"], f"{site}about", f"{site}contact").code == 0
    assert shell.run("worker", "--drain", "--job", made["job"]).code == 0
    items = stored(shell.run("results", made["job"]).out)
    assert [sorted(item) for item in items] == [["pid", "title"]] * 2


def test_a_worker_without_the_application_of_a_job_leaves_it_to_others(shell: Shell, site: str) -> None:
    """A veto must not be passed over because a file is not there."""
    made = shell.run("crawl", site, "--app", "hooked.py", *QUICK, "--scope", "page", "--json").json()
    shell.run("enqueue", made["job"], f"{site}about")
    (shell.root / "hooked.py").unlink()
    done = shell.run("worker", "--drain", "--job", made["job"])
    assert done.code == 2
    assert "hooked.py" in done.err


async def test_sessions_that_load_the_application_later_have_its_hooks(tmp_path: Path) -> None:
    """So do Celery workers and the API: they have settings, and nobody hands them an application."""
    where = tmp_path / "hooked.py"
    where.write_text(APP)
    async with Session.opened(load(frontier="memory:", app=str(where))) as session:
        job = await session.open_job(session.spec("site", ("http://shelf.example/",)))
        context = await session.context_for(job.id)
        assert context.on_request is not None
        assert context.on_response is None
        discovery = await session.open_job(
            session.settings.spec(("http://shelf.example/",), scraper="shoal:discover")
        )
        assert (await session.context_for(discovery.id)).on_request is None, "not its pages, but its own work"


@pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")
def test_celery_workers_run_the_hooks(tmp_path: Path, site: str) -> None:
    app = tmp_path / "hooked.py"
    app.write_text(APP)
    with redis.redis_server() as server, Fleet(tmp_path, server.url, SHOAL_APP=str(app)) as fleet:
        fleet.worker("w1", "-Q", "scraping")
        words = ("hooked", f"{site}about", f"{site}contact", "--rate", "none", "--allow-private")
        done = fleet.start("enqueue", *words, "--frontier", fleet.frontier).wait()
        assert done.code == 0, done.err

        def counts() -> Counts:
            return fleet.asked(lambda frontier: frontier.job("hooked")).counts

        wait_until(lambda: counts().done == 2, "two visits")
        assert (counts().items, counts().skipped) == (1, 1)
        [item] = fleet.asked(lambda frontier: frontier.items("hooked"))
        assert sorted(json.loads(item.body)) == ["pid", "title"]
