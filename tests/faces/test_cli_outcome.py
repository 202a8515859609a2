"""How a crawl ends that brings nothing, or whose output cannot be written: in a sentence, with a way out, and
without harm to what an earlier one left."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal as package
from shoal import Drop, Page, Shoal
from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.errors import NothingFetched, UsageError
from shoal.model import JobState
from tests.rig.command import SHOAL, Ran, Shell, wait_until
from tests.rig.ports import free_port

Command = Callable[..., Ran]

FAST = ("--allow-private", "--rate", "none", "--per-host", "8", "--retries", "0")
QUICK: dict[str, Any] = {"frontier": "memory:", "allow_private": True, "rate": "none", "retries": 0}
ADDRESSES = (
    "s3://bucket/x.jsonl",
    "S3://bucket/x.jsonl",
    "gs://bucket/x.csv",
    "az://box/x.parquet",
    "postgresql://u:secret@h/db/table",
    "sqlite:///x.db",
    "http://127.0.0.1/x.jsonl",
    "https://127.0.0.1/x/",
    "file:///tmp/x.jsonl",
    "nonsense+x://y.json",
)
FILES = ("last.jsonl", "last.json", "last.csv", "last.parquet", "last.md/")

SCRAPERS = """
from shoal import Drop, Shoal

app = Shoal()


@app.scraper("silent")
def silent(page):
    return []


@app.scraper("dropping")
def dropping(page):
    raise Drop("not wanted")


@app.scraper("broken")
def broken(page):
    raise ValueError("no price on this page")
"""


def pages(call: Call) -> Reply:
    if call.bare == "/robots.txt":
        return Reply(200, b"User-agent: *\nDisallow: /private\n", type="text/plain")
    if call.bare == "/gone":
        return Reply(404)
    if call.bare == "/moved":
        return Reply(302, headers=(("Location", "/gone"),))
    return Reply(200, b"<title>A page</title><p>Text</p>")


@pytest.fixture
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(pages) as made:
        yield made


@pytest.fixture
def closed() -> str:
    """A place where nobody listens."""
    return f"http://127.0.0.1:{free_port()}/"


def below(path: Path) -> dict[str, bytes]:
    """What is there, by name; the frontier aside."""
    return {
        str(each.relative_to(path)): each.read_bytes()
        for each in sorted(path.rglob("*"))
        if each.is_file() and not {".shoal", "__pycache__"} & set(each.parts)
    }


# -- addresses nobody writes ---------------------------------------------------------------


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_no_file(shoal: Command, place: Path, site: LoopbackSite, address: str) -> None:
    assert shoal("crawl", site.url, *FAST, "-q").code == 0
    (job,) = shoal("jobs", "--json").json
    site.clear()
    scheme = address.partition("://")[0]
    for words in (
        ("export", job["job_id"], "--to", address),
        ("crawl", site.url, *FAST, "--out", address),
        ("run", "books", site.url, "--out", address),
    ):
        said = shoal(*words)
        assert said.code == 2, said
        assert f"nothing here writes to {scheme}://" in said.err and ".jsonl" in said.err
        assert "secret" not in said.err
    with pytest.raises(UsageError, match="nothing here writes to"):
        Shoal().crawl(site.url, out=address, **QUICK)
    with pytest.raises(UsageError, match="nothing here writes to"):
        asyncio.run(Shoal().run("books", out=address, **QUICK))
    assert below(place) == {}
    assert site.log() == [] and len(shoal("jobs", "--json").json) == 1, "nothing was begun"


@pytest.mark.parametrize("name", ["a:b.jsonl", "C:x.jsonl", "s3:/bucket/x.jsonl", "s3:x.csv", "x/s3:y.json"])
def test_a_colon_makes_no_address(shoal: Command, place: Path, site: LoopbackSite, name: str) -> None:
    assert shoal("crawl", site.url, *FAST, "--out", name, "-q").code == 0
    assert (place / name).stat().st_size > 0


# -- the file of before --------------------------------------------------------------------


@pytest.mark.parametrize("out", FILES)
def test_a_crawl_without_an_item_leaves_the_file_of_before(
    shoal: Command, place: Path, site: LoopbackSite, closed: str, out: str
) -> None:
    (place / "app.py").write_text(SCRAPERS)
    assert shoal("crawl", site.url, *FAST, "--out", out, "-q").code == 0
    before = below(place)
    assert before[out if out[-1] != "/" else f"{out}index.md"]
    for words, code in (
        (("crawl", closed, *FAST), 3),
        (("crawl", closed, *FAST, "--quiet"), 3),
        (("crawl", f"{site.url}gone", *FAST), 3),
        (("run", "silent", site.url, "--app", "app.py", "--allow-private"), 0),
        (("run", "dropping", site.url, "--app", "app.py", "--allow-private"), 0),
    ):
        said = shoal(*words, "--out", out)
        assert said.code == code, said
        assert f"{out} was not changed" in said.err, said
        assert below(place) == before
    (job,) = [each["job_id"] for each in shoal("jobs", "--json").json if each["scraper"] == "silent"]
    said = shoal("export", job, "--to", out)
    assert said.code == 0 and f"{job} has no items; {out} was not changed" in said.err
    assert below(place) == before


def test_the_first_crawl_without_an_item_makes_an_empty_file(
    shoal: Command, place: Path, closed: str
) -> None:
    said = shoal("crawl", closed, *FAST, "--out", "first.json")
    assert said.code == 3 and "was not changed" not in said.err
    assert below(place) == {"first.json": b"[]\n"}


def test_half_a_result_of_an_interrupted_crawl_stays_too(shell: Shell, closed: str) -> None:
    """Its frontier may have been in memory: then nothing else is left of it."""

    def slow(call: Call) -> Reply:
        links = "".join(f'<a href="/{number}">x</a>' for number in range(200))
        return Reply(200, links.encode(), delay=0.02)

    part = shell.root / "o.jsonl.part"
    with LoopbackSite(slow) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--out", "o.jsonl", "--no-robots")
        wait_until(lambda: part.exists() and part.stat().st_size > 0, "the first items")
        crawl.signal(signal.SIGINT)
        assert crawl.wait().code == 130
        half = part.read_bytes()
        other = shell.run("crawl", closed, *FAST, "--out", "o.jsonl")
        assert other.code == 3 and "o.jsonl was not changed" in other.err
        assert part.read_bytes() == half
        assert shell.run("crawl", site.url, *FAST, "--out", "o.jsonl", "--resume").code == 0
    lines = (shell.root / "o.jsonl").read_text().splitlines()
    assert len({json.loads(line)["url"] for line in lines}) == len(lines) == 201
    assert not part.exists()


def test_an_interrupt_before_the_first_item_leaves_the_file_of_before(shell: Shell) -> None:
    (shell.root / "o.jsonl").write_text('{"url": "before"}\n')
    with LoopbackSite(lambda call: Reply(200, b"x", delay=30.0)) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--out", "o.jsonl", "--no-robots")
        wait_until((shell.root / "o.jsonl.part").exists, "the export")
        crawl.signal(signal.SIGINT)
        crawl.signal(signal.SIGINT)
        wait_until(lambda: "stopping" in crawl.err, "the first word")
        if not crawl.over:
            crawl.signal(signal.SIGINT)
        assert crawl.wait().code == 130
    assert (shell.root / "o.jsonl").read_text() == '{"url": "before"}\n'


# -- nothing fetched -----------------------------------------------------------------------


def test_why_nothing_could_be_fetched_is_said(shoal: Command, site: LoopbackSite, closed: str) -> None:
    refused = shoal("crawl", closed, *FAST)
    assert refused.code == 3
    assert "error: nothing could be fetched: connect_refused, " in refused.err
    assert f"cannot connect ({closed})" in refused.err
    assert "hint: check that the server is running" in refused.err
    blocked = shoal("crawl", site.url)
    assert blocked.code == 3 and "nothing could be fetched: egress_blocked, " in blocked.err
    assert "this address is not public" in blocked.err
    assert blocked.err.partition("error: ")[2].count("--allow-private") == 1
    missing = shoal("crawl", f"{site.url}moved", f"{site.url}gone?2", closed, *FAST)
    assert missing.code == 3, "of several causes the most frequent comes first"
    assert "nothing could be fetched: http_404 2, the server answered 404" in missing.err
    assert "; connect_refused, " in missing.err and "hint: check the address" in missing.err


def test_robots_txt_that_disallows_everything_is_said(shoal: Command, site: LoopbackSite) -> None:
    said = shoal("crawl", f"{site.url}private/1", f"{site.url}private/2", *FAST)
    assert said.code == 3
    assert f"nothing could be fetched: robots.txt disallows {site.url}private/1 and 1 more" in said.err
    assert "--no-robots" in said.err


def test_worker_processes_fetch_nothing(shell: Shell, site: LoopbackSite, closed: str) -> None:
    said = shell.run("crawl", closed, *FAST, "--workers", "2")
    assert said.code == 3 and "nothing could be fetched: connect_refused" in said.err, said
    said = shell.run("crawl", f"{site.url}private", *FAST, "--workers", "2")
    assert said.code == 3 and f"robots.txt disallows {site.url}private" in said.err, said


def test_a_run_says_it_too(shoal: Command, place: Path, site: LoopbackSite, closed: str) -> None:
    (place / "app.py").write_text(SCRAPERS)
    failed = shoal("run", "silent", closed, "--app", "app.py", "--allow-private")
    assert failed.code == 3 and "nothing could be fetched: connect_refused" in failed.err
    broken = shoal("run", "broken", site.url, "--app", "app.py", "--allow-private")
    assert broken.code == 3
    assert "nothing could be scraped: handler_error, ValueError: no price on this page" in broken.err
    dropped = shoal("run", "dropping", site.url, "--app", "app.py", "--allow-private")
    assert dropped.code == 0, "a page came"
    assert "no page was stored: 1 skipped" in dropped.err and "could be fetched" not in dropped.err


@pytest.mark.parametrize("how", ["for", "async for", "await", "run", "shoal.crawl"])
def test_python_raises_when_nothing_could_be_fetched(site: LoopbackSite, closed: str, how: str) -> None:
    app = Shoal(**QUICK)

    @app.scraper("any")
    async def any_page(page: Page) -> Any:
        yield {"title": page.title}

    async def iterated(*start: str) -> list[Any]:
        return [item async for item in app.crawl(*start)]

    def called(*start: str) -> Any:
        match how:
            case "for":
                return list(app.crawl(*start))
            case "shoal.crawl":
                return list(package.crawl(*start, **QUICK))
            case "async for":
                return asyncio.run(iterated(*start))
            case "await":
                return asyncio.run(_awaited(app.crawl(*start)))
            case _:
                return asyncio.run(app.run("any", start))

    with pytest.raises(NothingFetched) as caught:
        called(closed, f"{site.url}gone", f"{site.url}gone2/../gone?3")
    assert caught.value.error == "http_404"
    assert "http_404 2" in str(caught.value) and "connect_refused" in str(caught.value)
    assert caught.value.hint == "check the address" and caught.value.exit_code == 3
    with pytest.raises(NothingFetched, match=r"robots\.txt disallows") as caught:
        called(f"{site.url}private")
    assert caught.value.error == "robots"
    assert called(closed, site.url), "one page came"


async def _awaited(crawl: Any) -> Any:
    return await crawl


def test_python_does_not_raise_about_what_was_dropped(site: LoopbackSite, closed: str) -> None:
    app = Shoal(**QUICK)

    @app.scraper("any")
    def any_page(page: Page) -> Any:
        raise Drop("not wanted")

    assert list(app.crawl(site.url, scraper="any")) == []
    assert list(app.crawl(site.url, closed, scraper="any")) == []


# -- output that fails ---------------------------------------------------------------------


def test_a_crawl_that_fails_at_its_output_is_paused_and_can_be_resumed(shoal: Command, place: Path) -> None:
    (place / "file").write_text("x")
    delays = [20.0]  # the page comes later than the word that nothing can be written
    with LoopbackSite(lambda call: Reply(200, b"x", delay=delays[0])) as site:
        failed = shoal("crawl", site.url, *FAST, "--no-robots", "--out", "file/o.jsonl", "--json")
        assert failed.code == 2 and "cannot write file/o.jsonl" in failed.err
        (job,) = shoal("jobs", "--json").json
        assert job["state"] == "paused" and failed.json["status"] == "paused"
        assert f"{job['job_id']} is paused: the same command with --resume continues it" in failed.err
        delays[0] = 0.0
        resumed = shoal("crawl", site.url, *FAST, "--no-robots", "--out", "o.jsonl", "--resume", "--json")
    assert resumed.code == 0 and resumed.json["job"] == job["job_id"]
    assert len((place / "o.jsonl").read_text().splitlines()) == 1


def test_two_crawls_into_one_file(shell: Shell) -> None:
    with LoopbackSite(lambda call: Reply(200, b"x", delay=20.0)) as slow:
        one, two = (f"{slow.url}{number}" for number in (1, 2))
        first = shell.start("crawl", one, *FAST, "--out", "o.jsonl", "--no-robots")
        wait_until((shell.root / "o.jsonl.part").exists, "the first export")
        second = shell.run("crawl", two, *FAST, "--out", "o.jsonl", "--no-robots")
        assert second.code == 2 and "another process is exporting to o.jsonl" in second.err
        assert "Traceback" not in second.err
        states = {job.spec.start[0]: job.state for job in shell.jobs()}
        assert states == {one: JobState.RUNNING, two: JobState.PAUSED}
        first.kill()


def test_a_reader_that_goes_away_leaves_a_paused_job(shell: Shell) -> None:
    def linked(call: Call) -> Reply:
        links = "".join(f'<a href="/{number}">x</a>' for number in range(500))
        return Reply(200, links.encode(), delay=0.01)

    with LoopbackSite(linked) as site:
        words = [*SHOAL, "crawl", site.url, *FAST, "--no-robots"]
        with subprocess.Popen(
            words, cwd=shell.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as crawl:
            assert crawl.stdout is not None and crawl.stdout.readline().startswith("{")
            crawl.stdout.close()
            assert crawl.stderr is not None
            said = crawl.stderr.read()
        assert crawl.returncode == 0 and "Traceback" not in said
        (job,) = shell.jobs()
        assert job.state is JobState.PAUSED and job.counts.leased == 0
        assert f"{job.id} is paused" in said


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_behind_stdout_is_an_error_not_a_traceback(shell: Shell, site: LoopbackSite) -> None:
    with open("/dev/full", "wb") as full:
        said = shell.start("crawl", site.url, *FAST, out=full.fileno()).wait()
    assert said.code == 2 and "error: cannot write to stdout: No space left on device" in said.err, said
    assert "Traceback" not in said.err and shell.jobs()[0].state is not JobState.RUNNING


@pytest.mark.parametrize("retries", [0, 1])
def test_retries_are_the_visits_after_the_first(shoal: Command, retries: int) -> None:
    with LoopbackSite(lambda _call: Reply(500)) as failing:
        ended = shoal("crawl", failing.url, *FAST[:-1], str(retries), "--no-robots", "--json")
        assert ended.code == 3, ended.err
        assert len(failing.log()) == 1 + retries
