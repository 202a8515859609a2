"""`shoal schedule` as people use it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.rig.command import Ran, Shell, wait_until

Shoal = Callable[..., Ran]
URL = "http://example.com/"
APP = """
from shoal import Page, Shoal

app = Shoal()


@app.scraper("books", start=["http://books.test/"], rate="2/s", scope="page")
async def books(page: Page):
    yield {"url": page.url}


@app.scraper("startless")
async def startless(page: Page):
    yield {"url": page.url}
"""


def test_add_list_pause_resume_remove(shoal: Shoal) -> None:
    assert "no schedules yet" in shoal("schedule").err
    words = ("--cron", "0 6 * * MON-FRI", "--timezone", "Europe/Berlin", "--depth", "1", "--rate", "2/s")
    ended = shoal("schedule", "add", "news", URL, *words, "--priority", "7", "--queue", "rag")
    assert (ended.code, ended.out) == (0, "")
    assert re.search(
        r"news: 0 6 \* \* MON-FRI Europe/Berlin, next \d{4}-\d\d-\d\d 06:00\+0[12]:00 \(in ", ended.err
    ), "as the clocks there show it"
    [told] = shoal("schedule", "list", "--json").json
    assert (told["cron"], told["timezone"], told["start"]) == ("0 6 * * MON-FRI", "Europe/Berlin", [URL])
    assert (told["depth"], told["priority"], told["queue"], told["fired"]) == (1, 7, "rag", 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT0[45]:00:00Z", told["next_at"]), "with its zone"
    assert datetime.fromisoformat(told["created_at"]).tzinfo is not None
    table = shoal("schedule").out
    assert "news" in table
    assert "0 6 * * MON-FRI Europe/Berlin" in table
    assert shoal("schedule", "pause", "news", "--json").json["next_at"] is None
    assert "paused" in shoal("schedule").out
    assert shoal("schedule", "resume", "news", "--json").json["next_at"] == told["next_at"]
    assert shoal("schedule", "remove", "news", "--json").json == {"removed": "news"}
    assert shoal("schedule", "list", "--json").json == []


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (("a", URL), "a schedule needs a cron expression or an interval", "--cron"),
        (("a", URL, "--cron", "* 25 * * *"), "the hour is wrong", "0 6 * * MON-FRI"),
        (
            ("a", URL, "--cron", "0 6 * * *", "--timezone", "Mars/Base"),
            "no time zone 'Mars/Base'",
            "Europe/Berlin",
        ),
        (("a", URL, "--every", "soon"), "bad interval 'soon'", "15m"),
        (("a", URL, "--every", "1h", "--cron", "0 6 * * *"), "exclude each other", "one of them"),
        (("a", URL, "--every", "1h", "--catch-up"), "requires overlap allow", "skipped"),
        (("a b", URL, "--every", "1h"), "bad name 'a b'", "letters"),
        (("a", "--every", "1h"), "no URL to start from", "scraper"),
        (("a", "example", "--every", "1h"), "bad URL 'example'", "http://"),
        (("a", "--every", "1h", "--scraper", "nope"), "no scraper 'nope'", "--app"),
        (
            ("a", "--every", "1h", "--scraper", "startless", "--app", "app.py"),
            "no URL to start from",
            "start=",
        ),
        (("a", URL, "--every", "1h", "--queue", "failed_urls"), "failed_urls", ""),
        (("a", URL, "--every", "1h", "--include", "re:("), "re:(", ""),
        (("a", URL, "--every", "1h", "--frontier", "memory:"), "ends with this command", "--frontier"),
        (("taken", URL, "--every", "1h"), "schedule 'taken' exists already", "--replace"),
    ],
    ids=lambda value: " ".join(value[1:])[:50] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_told(
    shoal: Shoal, place: Path, words: tuple[str, ...], told: str, hint: str
) -> None:
    (place / "app.py").write_text(APP)
    assert shoal("schedule", "add", "taken", URL, "--every", "1h").code == 0
    ended = shoal("schedule", "add", *words)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err
    assert hint in ended.err
    assert [each["name"] for each in shoal("schedule", "list", "--json").json] == ["taken"]


@pytest.mark.parametrize("verb", ["remove", "pause", "resume", "run"])
def test_an_unknown_name_is_told(shoal: Shoal, verb: str) -> None:
    shoal("schedule", "add", "news", URL, "--every", "1h")
    ended = shoal("schedule", verb, "old")
    assert (ended.code, "no schedule 'old'" in ended.err, "schedule list" in ended.err) == (2, True, True)


def test_replace(shoal: Shoal) -> None:
    shoal("schedule", "add", "news", URL, "--every", "1h")
    assert shoal("schedule", "add", "news", URL + "2", "--every", "2h", "--replace").code == 0
    [told] = shoal("schedule", "list", "--json").json
    assert (told["every"], told["start"]) == ("2h", [URL + "2"])


def test_run_by_name_prints_the_job(shoal: Shoal) -> None:
    shoal("schedule", "add", "news", URL, "--every", "1d", "--header", "Authorization: planted-secret")
    ended = shoal("schedule", "run", "news")
    job = ended.out.strip()
    assert (ended.code, job.startswith("news-2")) == (0, True)
    assert shoal("status", job, "--json").json["counts"]["added"] == 1
    told = shoal("schedule", "run", "news", "--json").json
    assert told["schedule"] == "news"
    listed = shoal("schedule", "list", "--json")
    assert (listed.json[0]["last_job"], listed.json[0]["fired"]) == (told["job"], 2)
    assert listed.json[0]["has_headers"] is True
    assert "planted-secret" not in listed.out + listed.err + shoal("schedule").out
    assert shoal("schedule", "run", "news", "--once").code == 2


def test_run_once_fires_what_is_due_and_ends(shoal: Shoal, place: Path) -> None:
    (place / "app.py").write_text(APP)
    assert shoal("schedule", "run", "--once") == (0, "", "")
    shoal("schedule", "add", "later", URL, "--every", "1d")
    shoal("schedule", "add", "books", "--scraper", "books", "--app", "app.py", "--every", "1s")
    said: list[Ran] = []

    def fired() -> bool:
        said.append(shoal("schedule", "run", "--once", "--app", "app.py"))
        return bool(said[-1].out)

    wait_until(fired, "a second to pass")
    [job] = said[-1].out.split()
    assert job.startswith("books-2")
    assert shoal("status", job, "--json").json["start"] == ["http://books.test/"]
    [books, later] = shoal("schedule", "list", "--json").json
    assert (books["fired"], books["start"], books["scraper"]) == (1, [], "books")
    assert (later["fired"], later["last_job"]) == (0, None)


def test_run_once_tells_what_cannot_fire(shoal: Shoal, place: Path) -> None:
    (place / "app.py").write_text(APP)
    shoal("schedule", "add", "books", "--scraper", "books", "--app", "app.py", "--every", "1s")
    (place / "app.py").unlink()
    said: list[Ran] = []

    def failed() -> bool:
        said.append(shoal("schedule", "run", "--once"))
        return said[-1].code != 0

    wait_until(failed, "a second to pass")
    assert said[-1].code == 2
    assert "schedule books cannot fire: cannot load scraper 'books'" in said[-1].err
    assert "books cannot fire" in shoal("schedule").err
    assert shoal("jobs", "--json").json == []


def test_run_stays_until_it_is_stopped(shell: Shell) -> None:
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        running = shell.start("schedule", "run")
        wait_until(lambda r=running: "Ctrl-C stops" in r.err or r.over, "it to look")  # type: ignore[misc]
        assert shell.run("schedule", "add", f"s{code}", URL, "--every", "1s").code == 0
        wait_until(lambda r=running, c=code: f"s{c}-2" in r.out, "a firing")  # type: ignore[misc]
        running.signal(number)
        ended = running.wait()
        assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err


def test_a_schedule_that_nobody_fires_is_told(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shoal schedule run" in shoal("schedule", "add", "news", URL, "--every", "1s").err
    assert "some are late" not in shoal("schedule").err
    monkeypatch.setattr("shoal.cli.schedule.LATE", -10.0)
    assert "some are late: schedules fire only while `shoal serve`" in shoal("schedule").err


def test_a_variable_chooses_nothing_here(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_EVERY", "1s")
    monkeypatch.setenv("SHOAL_REPLACE", "1")
    assert "needs a cron expression or an interval" in shoal("schedule", "add", "news", URL).err
