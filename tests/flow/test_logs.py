"""What workers log, and what whoever crawls from Python is told when the frontier fails."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.demo.site import Call, LoopbackSite, Reply, generated_site
from shoal.errors import FrontierFull, FrontierUnreachable
from shoal.registry import open_frontier
from tests.rig import redis_server as redis_rig
from tests.rig.command import Ended, Shell, wait_until
from tests.rig.disk import fill, small_disk
from tests.rig.redis_server import redis_server

FAST = ("--allow-private", "--rate", "none", "--per-host", "4", "--no-robots")
HERE: dict[str, Any] = {"allow_private": True, "rate": "none", "per_host": 8, "robots": False}
LINE = re.compile(
    r"\d\d:\d\d:\d\d (?P<level>INFO|WARNING) +worker (?P<worker>\S+_\d+_\d+): "
    r"(?P<verdict>done|retry|given up) (?P<url>http://\S+) (?P<status>\d{3}) (?P<ms>\d+) ms"
    r" attempt (?P<attempt>\d+)/(?P<attempts>\d+)(?P<why>: .*)?"
)
NUMBERS = range(20)
RECOVER, DEAD = (3, 7), 11


class Shaky:
    """Twenty pages: two of them fail once, one always."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, call: Call) -> Reply:
        number = int(call.bare.removeprefix("/p"))
        if number == DEAD or (number in RECOVER and call.bare not in self._failed):
            self._failed.add(call.bare)
            return Reply(500)
        return Reply(200, b"<p>here")


def worked(shell: Shell, *flags: str) -> tuple[Ended, str]:
    """A worker on those pages, and their address."""
    with LoopbackSite(Shaky()) as site:
        urls = [f"{site.url}p{number}" for number in NUMBERS]
        assert shell.run("enqueue", "some", *urls, *FAST).code == 0
        ended = shell.run("worker", "--drain", *flags)
    assert ended.code == 0, ended
    return ended, site.url


def expected(attempts: int) -> Counter[tuple[str, int, int]]:
    """Verdict, page and attempt of every visit."""
    failed = (*((n, 1) for n in RECOVER), *((DEAD, attempt) for attempt in range(1, attempts)))
    done = (("done", n, 2 if n in RECOVER else 1) for n in NUMBERS if n != DEAD)
    return Counter([*done, *(("retry", n, attempt) for n, attempt in failed), ("dead", DEAD, attempts)])


def test_a_line_for_each_visit_as_text(shell: Shell) -> None:
    ended, url = worked(shell)
    first, *lines, last = ended.err.splitlines()
    assert first.startswith("worker ") and last.startswith("worker ")
    found = [LINE.fullmatch(line) for line in lines]
    visits = [match for match in found if match is not None]
    assert len(visits) == len(lines), [line for line, match in zip(lines, found, strict=True) if not match]
    attempts = int(visits[0]["attempts"])
    assert {int(visit["attempts"]) for visit in visits} == {attempts}
    assert Counter(
        (
            visit["verdict"].replace("given up", "dead"),
            int(visit["url"].removeprefix(f"{url}p")),
            int(visit["attempt"]),
        )
        for visit in visits
    ) == expected(attempts)
    for visit in visits:
        why = visit["why"] or ""
        assert (visit["level"] == "WARNING") == (visit["verdict"] == "given up")
        assert visit["status"] == ("200" if visit["verdict"] == "done" else "500")
        if visit["verdict"] == "retry":
            assert re.fullmatch(r": http_500: the server answered 500; again in \d+\.\d s", why)
        else:
            assert why == ("" if visit["verdict"] == "done" else ": http_500: the server answered 500")
        assert f"worker {visit['worker']} on " in first


def test_a_line_for_each_visit_as_json(shell: Shell) -> None:
    ended, url = worked(shell, "--log-format", "json", "--log-level", "debug")
    lines = [json.loads(line) for line in ended.err.splitlines()]
    assert {line["logger"] for line in lines} >= {"shoal.worker", "shoal.cli"}
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    visits = [line for line in lines if line["logger"] == "shoal.worker"]
    ends = [line for line in visits if line["verdict"] != "begun"]
    attempts = ends[0]["max_attempts"]
    assert Counter(
        (line["verdict"], int(line["url"].removeprefix(f"{url}p")), line["attempt"]) for line in ends
    ) == expected(attempts)
    begun = Counter((line["url"], line["attempt"]) for line in visits if line["verdict"] == "begun")
    assert begun == Counter((line["url"], line["attempt"]) for line in ends), "each began, and ended"
    for line in ends:
        assert line["job"] == "some" and line["host"] == url.split("/")[2]
        assert line["max_attempts"] == attempts and line["ms"] >= 0
        assert line["level"] == ("warning" if line["verdict"] == "dead" else "info")
        if line["verdict"] == "done":
            assert line["status"] == 200 and "error" not in line
        else:
            assert (line["status"], line["error"]) == (500, "http_500")
            assert line["error_message"] == "the server answered 500"
        assert ("wait" in line) == (line["verdict"] == "retry")
    assert len({line["worker"] for line in visits}) == 1


@pytest.mark.parametrize("flags", [("--log-level", "error"), ("--quiet",)])
def test_what_is_below_the_level_is_not_logged(shell: Shell, flags: tuple[str, ...]) -> None:
    ended, _ = worked(shell, *flags)
    assert "attempt" not in ended.err


def test_a_variable_says_it_too_and_a_flag_wins(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=3)) as site:
        env = {"SHOAL_LOG_LEVEL": "info", "SHOAL_LOG_FORMAT": "json"}
        told = shell.run("crawl", site.url, *FAST, "--out", "a.jsonl", env=env).err
        assert sum(json.loads(line).get("verdict") == "done" for line in told.splitlines()) == 3
        told = shell.run("crawl", site.url, *FAST, "--out", "b.jsonl", "--log-level", "warning", env=env).err
        assert [line for line in told.splitlines() if "verdict" in json.loads(line)] == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_several_workers_arrive_whole_and_name_theirs(shell: Shell, form: str) -> None:
    with LoopbackSite(generated_site(pages=60, latency=0.1)) as site:
        ended = shell.run(
            *("crawl", site.url, *FAST, "--out", "o.jsonl", "--workers", "2", "--concurrency", "1"),
            *("--log-level", "info", "--log-format", form),
        )
    assert ended.code == 0, ended
    if form == "json":
        visits = [line for line in map(json.loads, ended.err.splitlines()) if "verdict" in line]
        names, urls = {line["worker"] for line in visits}, [line["url"] for line in visits]
    else:
        found = [match for line in ended.err.splitlines() if (match := LINE.fullmatch(line))]
        names, urls = {match["worker"] for match in found}, [match["url"] for match in found]
    assert set(urls) == set(site.expected_urls())
    assert len(names) == 2


def test_control_characters_do_not_break_a_line(shell: Shell) -> None:
    (shell.root / "app.py").write_text(
        "from shoal import Shoal\n\napp = Shoal()\n\n\n@app.scraper('bad', retries=0)\n"
        "def bad(page):\n    raise ValueError('one\\ntwo\\x1b[31m\\u2028')\n"
    )
    with LoopbackSite(generated_site(pages=1)) as site:
        words = (
            "run",
            "bad",
            f"{site.url}?a=%0a%1b",
            "--app",
            "app.py",
            *FAST[:1],
            "--no-robots",
            "--out",
            "o.jsonl",
        )
        text = shell.run(*words, env={"SHOAL_RATE": "none"}).err
        as_json = shell.run(*words, "--log-format", "json", env={"SHOAL_RATE": "none"}).err
    (line,) = [line for line in text.splitlines() if "given up" in line]
    assert line.endswith("handler_error: ValueError: one two\ufffd[31m\ufffd")
    assert "\x1b" not in as_json
    assert [each for each in map(json.loads, as_json.splitlines()) if each.get("verdict") == "dead"]


# -- from Python ----------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as place:
        yield place


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_full_disk_is_logged_and_then_raised(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(disk, 600_000)
    db = disk / "shoal.db"
    items: list[dict[str, Any]] = []
    with LoopbackSite(generated_site(pages=200, size=4000, latency=0.02)) as site:
        crawl = shoal.crawl(site.url, frontier=str(db), give_up_after=1, **HERE)
        with pytest.raises(FrontierFull) as raised:
            items.extend(crawl)
    assert raised.value.exit_code == 4 and f"no space left for {db}" in str(raised.value)
    said = errors_in(caplog)
    assert said[0].startswith(f"Attempt 1 failed: no space left for {db}") and "; again in " in said[0]
    assert sum(line.endswith("; given up after 1 s") for line in said) == 1
    assert {each.name for each in caplog.records if each.levelno >= logging.ERROR} == {"shoal.frontier"}
    assert items, "what was stored before came"


async def stored(address: str) -> list[str]:
    """The URLs of the items of the one job there, whose frontier is whole."""
    frontier = await open_frontier(address)
    try:
        assert await frontier.check() == []
        [job] = await frontier.jobs()
        assert job.counts.leased + job.counts.waiting + job.counts.delayed, "there is more to do"
        return [json.loads(item.body)["url"] for item in await frontier.items(job.id)]
    finally:
        await frontier.close()


@pytest.mark.skipif(not redis_rig.available(), reason="redis-server is not installed")
def test_a_redis_that_goes_is_logged_and_then_raised(caplog: pytest.LogCaptureFixture) -> None:
    items: list[dict[str, Any]] = []
    with redis_server() as server, LoopbackSite(generated_site(pages=200, latency=0.05)) as site:
        crawl = shoal.crawl(site.url, frontier=server.url, give_up_after=1, **HERE)
        with pytest.raises(FrontierUnreachable) as raised:
            for item in crawl:
                items.append(item)
                if len(items) == 20:
                    server.kill()
                    gone = time.monotonic()
        assert time.monotonic() - gone >= 1
        assert len(site.log()) < 200
        server.start()
        kept = asyncio.run(stored(server.url))
    assert server.url in str(raised.value)
    assert {item["url"] for item in items} <= set(kept), "what came is stored"
    assert len(kept) == len(set(kept))
    said = errors_in(caplog)
    assert said[0].startswith(f"Attempt 1 failed: {server.url}")
    assert sum(line.endswith("; given up after 1 s") for line in said) == 1


@pytest.mark.skipif(not redis_rig.available(), reason="redis-server is not installed")
def test_a_command_ends_with_4_when_it_has_waited_long_enough(shell: Shell) -> None:
    secured = redis_server("--requirepass", "geheim")
    with secured as server, LoopbackSite(generated_site(pages=200, latency=0.05)) as site:
        words = ("crawl", site.url, *FAST, "--frontier", server.url.replace("://", "://:geheim@"))
        crawl = shell.start(*words, env={"SHOAL_GIVE_UP_AFTER": "1", "SHOAL_LEASE": "2"})
        wait_until(lambda: len(site.log()) > 20, "some visits")
        server.kill()
        ended = crawl.wait()
        assert ended.code == 4, ended
        assert "; given up after 1 s" in ended.err and "Traceback" not in ended.err
        assert f"error: redis://:***@127.0.0.1:{server.port}/0 does not answer" in ended.err
        assert "geheim" not in ended.err
        server.start()
        again = shell.run(*words, "--resume", env={"SHOAL_LEASE": "2"})
        assert again.code == 0, again
        urls = Counter(json.loads(line)["url"] for line in again.out.splitlines())
        assert urls == Counter(site.expected_urls())


@pytest.mark.skipif(not redis_rig.available(), reason="redis-server is not installed")
def test_a_worker_waits_for_ever_unless_told(shell: Shell) -> None:
    with redis_server() as server, LoopbackSite(generated_site(pages=40, latency=0.2)) as site:
        shell.run("enqueue", "some", *site.expected_urls(), *FAST, "--frontier", server.url)
        bound = shell.start("worker", "--frontier", server.url, env={"SHOAL_GIVE_UP_AFTER": "0.5"})
        free = shell.start("worker", "--frontier", server.url)
        wait_until(lambda: len(site.log()) > 4, "some visits")
        server.kill()
        assert bound.wait().code == 4
        wait_until(lambda: "Attempt 8 failed" in free.err, "it to go on")
        assert not free.over
        server.start()
        wait_until(lambda: "Connected to" in free.err, "the connection")
        free.signal(signal.SIGTERM)
        assert free.wait().code == 0


def test_an_unconfigured_program_is_told_on_stderr(shell: Shell) -> None:
    (shell.root / "script.py").write_text(
        "import sys, shoal\n"
        "for item in shoal.crawl(sys.argv[1], allow_private=True, rate='none', robots=False,\n"
        "                        frontier='memory:'):\n"
        "    print(item['url'])\n"
    )
    with LoopbackSite(
        lambda call: Reply(200, b"<a href=/gone>x") if call.bare == "/" else Reply(404)
    ) as site:
        ran = shell.start("script.py", site.url, program=(sys.executable,)).wait()
    assert (ran.code, ran.out) == (0, f"{site.url}\n")
    assert re.fullmatch(
        rf"given up {site.url}gone 404 \d+ ms attempt 1/\d+: http_404: the server answered 404\n", ran.err
    )
