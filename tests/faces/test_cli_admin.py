"""The commands that look after jobs, dead letters, lanes and the machine, as people run them."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.model import Dead, Done, Failure, JobSpec, Pace, Request, Retry
from shoal.politeness.robots import Robots
from shoal.registry import open_frontier
from tests.rig.command import Ran
from tests.rig.redis_server import RedisServer, redis_server

Shoal = Callable[..., Ran]
pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def filled(place: Path) -> None:
    """`shop`: two pages with an item each, two dead, one to be tried again. `slow`: three wait."""

    async def fill() -> None:
        frontier = await open_frontier()
        await frontier.open_job("shop", JobSpec(start=("http://shop.test/",), gap=0.0, width=10))
        await frontier.add([Request(f"http://shop.test/{n}", "shop") for n in range(5)])
        claim = await frontier.claim(5, worker="w1", lease_seconds=60.0)
        by_path = {lease.request.url[-1]: lease for lease in claim.leases}
        await frontier.settle(
            [
                Done(by_path["0"], [b'{"n":0,"t":"caf\xc3\xa9 [red]"}']),
                Done(by_path["1"], [b'{"n":1}']),
                Dead(by_path["2"], Failure("http_404", "gone")),
                Dead(by_path["3"], Failure("connect_timeout", "10 s")),
                Retry(by_path["4"], 3600.0, Failure("http_503", "busy")),
            ]
        )
        await frontier.open_job("slow", JobSpec(start=("http://slow.test/",), gap=60.0))
        await frontier.add([Request(f"http://slow.test/{n}", "slow") for n in range(3)])
        rules = Robots.parse(b"User-agent: *\nDisallow: /private\n", 200)
        await frontier.notes.put("robots", "http://shop.test", rules.dump(), 3600.0)
        await frontier.close()

    asyncio.run(fill())


def paced(lane: str, pace: Pace) -> None:
    async def change() -> None:
        frontier = await open_frontier()
        await frontier.pace(lane, pace)
        await frontier.close()

    asyncio.run(change())


# -- jobs ----------------------------------------------------------------------------------


def test_jobs_are_listed_newest_first(shoal: Shoal, filled: None) -> None:
    ran = shoal("jobs")
    assert ran.code == 0
    rows = ran.out.splitlines()
    assert rows[0].split() == ["job", "state", "pages", "dead", "items", "created", "duration"]
    assert [row.split()[0] for row in rows[1:]] == ["slow", "shop"]
    assert rows[2].split()[:5] == ["shop", "running", "2/5", "2", "2"]


def test_the_limit_of_jobs_is_told(shoal: Shoal, filled: None) -> None:
    ran = shoal("jobs", "--limit", "1")
    assert len(ran.out.splitlines()) == 2
    assert "show more with --limit" in ran.err
    assert [job["job_id"] for job in shoal("jobs", "--json", "--limit", "1").json] == ["slow"]


def test_no_jobs(shoal: Shoal) -> None:
    ran = shoal("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert "no jobs yet" in ran.err
    assert shoal("jobs", "--json").json == []


def test_status_counts_as_runs_do(shoal: Shoal, filled: None) -> None:
    told = shoal("status", "shop", "--json").json
    words = ("job_id", "state", "pending", "claimed", "completed", "failed", "remaining")
    assert [told[word] for word in words] == ["shop", "running", 1, 0, 2, 2, 1]
    counts = told["counts"]
    assert counts["delayed"] == 1 and counts["retried"] == 1 and counts["items"] == 2
    assert told["errors"] == {"http_404": 1, "connect_timeout": 1, "http_503": 1}
    assert told["eta_seconds"] >= 0
    assert told["queues"]["scraping"] == {"waiting": 3, "delayed": 1, "leased": 0}


def test_status_for_people(shoal: Shoal, filled: None) -> None:
    out = shoal("status", "shop").out
    for part in ("1 (1 delayed)", "http_404 1", "shoal dead list --job shop", "about"):
        assert part in out


def test_a_limit_that_held_a_job_back_is_told(shoal: Shoal) -> None:
    async def fill() -> None:
        frontier = await open_frontier()
        await frontier.open_job("small", JobSpec(start=("http://a.test/",), max_pages=2))
        await frontier.add([Request(f"http://a.test/{n}", "small") for n in range(5)])
        await frontier.close()

    asyncio.run(fill())
    assert "--max-pages raises it" in shoal("status", "small").out
    assert len(shoal("status", "small", "--json").json["ended_by"]) == 1
    assert "but reached the page limit" in shoal("explain", "http://a.test/4").out


def test_switching_a_job_twice_changes_nothing(shoal: Shoal, filled: None) -> None:
    assert shoal("pause", "slow").err == "slow is now paused\n"
    assert shoal("pause", "slow").err == "slow is already paused\n"
    assert shoal("resume", "slow", "--json").json["changed"] is True
    assert shoal("resume", "slow").err == "slow is already running\n"
    assert shoal("cancel", "slow").err == "slow is now cancelled, 3 URLs dropped\n"
    assert shoal("cancel", "slow").err == "slow is already cancelled\n"
    for words in (("resume", "slow"), ("resume", "slow", "--json")):
        ran = shoal(*words)
        assert (ran.code, ran.out, "error: job slow is cancelled\n" in ran.err) == (2, "", True), ran


def test_watch_tells_how_a_job_ended(shoal: Shoal, filled: None) -> None:
    shoal("cancel", "slow")
    ran = shoal("watch", "slow", "--json")
    assert ran.code == 0 and ran.json["counts"]["cancelled"] == 3
    shoal("cancel", "shop")
    ran = shoal("watch", "shop")
    assert ran.code == 1
    assert "shop is cancelled: 2 of 5 pages, 2 dead, 2 items" in ran.err


def test_ctrl_c_leaves_the_watched_job_alone(shoal: Shoal, filled: None) -> None:
    watching = subprocess.Popen([sys.executable, "-m", "shoal", "watch", "slow"], stderr=subprocess.PIPE)
    time.sleep(1.0)
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=10)
    assert (watching.returncode, err) == (130, b"")
    assert shoal("status", "slow", "--json").json["state"] == "running"


# -- items ---------------------------------------------------------------------------------


def test_results_are_the_bodies_as_they_are(shoal: Shoal, filled: None) -> None:
    ran = shoal("results", "shop")
    assert ran.out == '{"n":0,"t":"café [red]"}\n{"n":1}\n'
    assert shoal("results", "shop", "--limit", "1").out == '{"n":0,"t":"café [red]"}\n'
    assert shoal("results", "shop", "--after", "1").out == '{"n":1}\n'
    assert shoal("results", "slow").out == ""


def test_results_follow_until_the_job_ends(shoal: Shoal, filled: None) -> None:
    async def store_one_more() -> None:
        frontier = await open_frontier()
        claim = await frontier.claim(9, worker="w2", lease_seconds=60.0)
        done = [Done(lease, [b'{"n":2}']) for lease in claim.leases if lease.request.job == "shop"]
        assert (await frontier.settle(done)).lost == []
        await frontier.close()

    command = [sys.executable, "-m", "shoal", "results", "shop", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        # Line by line only: communicate() would pass over what readline has buffered.
        assert [json.loads(following.stdout.readline())["n"] for _ in range(2)] == [0, 1]
        shoal("dead", "retry", "--error", "http_404")
        asyncio.run(store_one_more())
        assert following.stdout.readline() == b'{"n":2}\n'
        assert following.poll() is None
        shoal("cancel", "shop")
        assert following.stdout.readline() == b""
        assert following.wait(10) == 0


def test_a_reader_that_has_enough_is_no_error(filled: None) -> None:
    line = f"{sys.executable} -m shoal results shop | head -c 0; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, timeout=20, check=False)
    assert (ran.stdout, ran.stderr) == (b"0\n", b"")


def test_export_says_how_many_and_that_more_will_come(shoal: Shoal, filled: None, place: Path) -> None:
    ran = shoal("export", "shop", "--to", "out.csv")
    assert ran.code == 0
    assert ran.err.splitlines()[0] == "2 items written to out.csv"
    assert "shop is running" in ran.err
    written = (place / "out.csv").read_text("utf-8-sig").splitlines()
    assert [row["n"] for row in csv.DictReader(written)] == ["0", "1"]
    assert shoal("export", "shop", "--to", "again.jsonl", "--json").json["items"] == 2
    assert (place / "again.jsonl").read_text("utf-8") == '{"n":0,"t":"café [red]"}\n{"n":1}\n'


# -- dead letters --------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("dead",), ("dead", "list")])
def test_dead_letters_are_grouped(shoal: Shoal, filled: None, words: tuple[str, ...]) -> None:
    ran = shoal(*words)
    assert ran.code == 0
    assert "2 dead letters" in ran.err
    rows = [row.split() for row in ran.out.splitlines()[1:]]
    assert ["shop.test", "http_404", "1", "http://shop.test/2"] in rows
    groups = shoal(*words, "--json", "--error", "http_404").json
    assert groups == [{"host": "shop.test", "error": "http_404", "count": 1, "example": "http://shop.test/2"}]


def test_single_dead_letters(shoal: Shoal, filled: None) -> None:
    letters = shoal("dead", "--urls", "--json", "--host", "http://shop.test/any").json
    assert [letter["error"] for letter in letters] == ["http_404", "connect_timeout"]
    first = letters[0]
    assert [
        letter["id"] for letter in shoal("dead", "--urls", "--json", "--after", str(first["id"])).json
    ] == [letters[1]["id"]]
    assert shoal("dead", "show", str(first["id"]), "--json").json == [first]
    assert shoal("dead", "show", "http://shop.test/2", "--json").json == [first]
    assert "shoal dead retry --id" in shoal("dead", "show", "http://shop.test/2").out
    assert "--after" in shoal("dead", "--urls", "--limit", "1").err


def test_a_bad_url_is_a_dead_letter_that_can_be_shown(shoal: Shoal) -> None:
    assert shoal("enqueue", "bulk", "no url at all").code == 0
    assert shoal("dead", "show", "no url at all", "--json").json[0]["error"] == "url_invalid"
    assert len(shoal("dead", "list", "--host", "", "--json").json) == 1


def test_retry_and_purge_want_to_know_which(shoal: Shoal, filled: None) -> None:
    for verb in ("retry", "purge"):
        ran = shoal("dead", verb)
        assert ran.code == 2 and "--all" in ran.err
        assert shoal("dead", verb, "--all", "--job", "shop").code == 2
    assert len(shoal("dead", "--json").json) == 2


def test_retry(shoal: Shoal, filled: None) -> None:
    assert shoal("dead", "retry", "--error", "http_404", "--reset-attempts", "--json").json == {"retried": 1}
    assert shoal("status", "shop", "--json").json["pending"] == 2
    assert "1 are back in the queue" in shoal("dead", "retry", "--all").err
    assert "nothing to retry" in shoal("dead", "retry", "--all").err


def test_purge(shoal: Shoal, filled: None) -> None:
    number = str(shoal("dead", "--urls", "--json").json[0]["id"])
    assert shoal("dead", "purge", "--id", number, "--json").json == {"purged": 1}
    assert "1 dead letters deleted" in shoal("dead", "purge", "--all").err
    assert shoal("status", "shop", "--json").json["failed"] == 2


# -- lanes ---------------------------------------------------------------------------------


def test_lanes_are_listed(shoal: Shoal, filled: None) -> None:
    rows = [row.split() for row in shoal("lanes").out.splitlines()]
    assert rows[0][:5] == ["host", "rate", "concurrency", "active", "waiting"]
    assert rows[1][:6] == ["slow.test", "1/m", "1", "0", "3", "now"]
    assert [lane["host"] for lane in shoal("lanes", "--json", "--limit", "1").json] == ["slow.test"]


def test_a_pace_is_pinned_and_unpinned(shoal: Shoal, filled: None) -> None:
    ran = shoal("lanes", "set", "Slow.test", "--rate", "30/m", "--concurrency", "4", "--burst", "2")
    assert (ran.code, ran.err) == (0, "slow.test: rate 30/m, 4 at a time, bursts of 2, pinned\n")
    lane = shoal("lanes", "--json").json[0]
    assert (lane["rate"], lane["concurrency"], lane["burst"], lane["pinned"]) == ("30/m", 4, 2, True)
    assert shoal("lanes", "unset", "slow.test", "--json").json["pinned"] is False


def test_what_is_left_out_for_a_new_host_is_as_for_a_new_job(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = shoal("lanes", "set", "new.test", "--concurrency", "3")
    assert ran.err.splitlines()[0] == "new.test: rate 1/s, 3 at a time, pinned"
    monkeypatch.setenv("SHOAL_RATE", "30/m")
    monkeypatch.setenv("SHOAL_PER_HOST", "2")
    # A pause makes a lane as well.
    assert shoal("lanes", "pause", "held.test", "--json").json["rate"] == "30/m"
    assert shoal("lanes", "set", "held.test", "--burst", "5", "--json").json["concurrency"] == 2
    assert shoal("lanes", "set", "held.test").code == 2


@pytest.mark.parametrize("words", [("set", "--rate", "1/s"), ("pause",)], ids=" ".join)
def test_a_host_that_nobody_visits_is_told(shoal: Shoal, words: tuple[str, ...]) -> None:
    """With its port forgotten, a pace would be pinned that holds for nothing."""
    assert shoal("enqueue", "some", "http://shop.test:8080/", "http://www.other.test/").code == 0
    verb, *rest = words
    said = shoal("lanes", verb, "shop.test", *rest).err
    assert "note: this frontier has no URL of this host; did you mean shop.test:8080?\n" in said
    again = shoal("lanes", verb, "shop.test", *rest, "--json")
    assert (
        "none of its URLs is waiting; did you mean shop.test:8080?" in again.err
        and again.json["host"] == "shop.test"
    )
    assert "did you mean www.other.test?" in shoal("lanes", verb, "other.test", *rest).err
    assert shoal("lanes", verb, "new.test", *rest).err.endswith(
        "note: this frontier has no URL of this host\n"
    )
    assert "note" not in shoal("lanes", verb, "shop.test:8080", *rest).err


def test_a_host_is_paused_and_resumed(shoal: Shoal, filled: None) -> None:
    assert shoal("lanes", "pause", "slow.test", "--json").json["paused"] is True
    assert "its host is paused" in shoal("explain", "http://slow.test/0").out
    paced("slow.test", Pace(blocked=900.0))
    assert "15 min" in shoal("lanes").out
    lane = shoal("lanes", "resume", "http://slow.test/", "--json").json
    assert (lane["paused"], lane["blocked_until"]) == (False, None)


# -- explain -------------------------------------------------------------------------------


def explained(shoal: Shoal, url: str, *more: str) -> dict[str, Any]:
    answers = shoal("explain", url, "--json", *more).json["jobs"]
    assert len(answers) == 1
    answer: dict[str, Any] = answers[0]
    return answer


def test_explain_each_state(shoal: Shoal, filled: None) -> None:
    assert explained(shoal, "http://shop.test/0")["state"] == "done"
    dead = explained(shoal, "http://shop.test/2")
    assert (dead["state"], dead["error"], dead["message"]) == ("dead", "http_404", "gone")
    delayed = explained(shoal, "http://shop.test/4")
    assert delayed["state"] == "delayed" and delayed["attempts"] == 1
    assert "failed 1 of 3 times" in delayed["why"]
    waiting = explained(shoal, "http://slow.test/2")
    assert (waiting["state"], waiting["ahead"]) == ("waiting", 2)
    assert "2 requests of this job are before it" in waiting["why"]
    assert "check that a worker is running" in explained(shoal, "http://slow.test/0")["why"]
    shoal("pause", "slow")
    assert "the job is paused" in explained(shoal, "http://slow.test/2")["why"]


def test_explain_does_not_call_a_purged_one_visited(shoal: Shoal, filled: None) -> None:
    assert explained(shoal, "http://shop.test/0")["why"] == "it was visited"
    assert shoal("dead", "purge", "--job", "shop", "--error", "http_404").code == 0
    told = "it was visited, or it failed for good and its dead letter was purged"
    assert explained(shoal, "http://shop.test/2")["why"] == told
    assert "404" not in shoal("explain", "http://shop.test/2").out
    # Whether this one was visited nobody can say any more.
    assert explained(shoal, "http://shop.test/0")["why"] == told
    assert explained(shoal, "http://shop.test/3")["error"] == "connect_timeout"

    async def lose() -> None:
        frontier = await open_frontier()
        await frontier.open_job("lost", JobSpec(queue="lost"))
        await frontier.add([Request("http://lost.test/", "lost", queue="lost")])
        claim = await frontier.claim(1, worker="w1", lease_seconds=60.0, queues=["lost"])
        await frontier.settle([Dead(lease, Failure("http_404", "gone")) for lease in claim.leases])
        await frontier.close()

    asyncio.run(lose())
    shoal("dead", "purge", "--job", "lost")
    assert explained(shoal, "http://lost.test/")["why"] == "it failed for good and its dead letter was purged"


def test_explain_a_leased_one(shoal: Shoal) -> None:
    async def fill() -> None:
        frontier = await open_frontier()
        await frontier.open_job("j", JobSpec(start=("http://a.test/",)))
        await frontier.add([Request("http://a.test/", "j"), Request("http://a.test/2", "j")])
        await frontier.claim(1, worker="host_1_1", lease_seconds=60.0)
        await frontier.close()

    asyncio.run(fill())
    answer = explained(shoal, "http://a.test/")
    assert (answer["state"], answer["worker"]) == ("leased", "host_1_1")
    assert "worker" in shoal("explain", "http://a.test/").out
    assert "its host is at its limit: 1 of 1" in explained(shoal, "http://a.test/2")["why"]


def test_explain_what_nobody_knows(shoal: Shoal, filled: None) -> None:
    told = shoal("explain", "http://else.test/", "--json").json
    assert told["known"] is False
    assert [answer["job"] for answer in told["jobs"]] == ["slow", "shop"]
    assert all("outside the job's scope" in answer["why"] for answer in told["jobs"])
    answer = explained(shoal, "http://shop.test/new", "--job", "shop")
    assert "no page that it has visited so far links to it" in answer["why"]


def test_explain_knows_robots_from_the_notes_alone(shoal: Shoal, filled: None) -> None:
    assert "disallowed by `Disallow: /private`" in shoal("explain", "http://shop.test/private/x").out
    assert "not known yet" in shoal("explain", "http://slow.test/0").out


def test_explain_without_jobs(shoal: Shoal) -> None:
    assert "this frontier has no jobs" in shoal("explain", "http://a.test/").out


# -- the machine ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "new.db", "sqlite:///deep/er/new.db"])
def test_doctor_makes_no_frontier(shoal: Shoal, place: Path, where: str) -> None:
    ran = shoal("doctor", "--json", *(("--frontier", where) if where else ()))
    assert (ran.code, ran.json["ok"]) == (0, True)
    (row,) = [row for row in ran.json["checks"] if row["part"] == "frontier"]
    assert row["state"] == "note"
    assert row["remark"].endswith(": none yet, the first crawl creates it")
    assert list(place.iterdir()) == []


def test_doctor_asks_the_broker_and_makes_no_frontier(
    shoal: Shoal, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DISPATCH", "amqp://127.0.0.1:1")
    ran = shoal("doctor", "--json", "--frontier", "new.db")
    assert ran.code == 4
    rows = {row["part"]: row["state"] for row in ran.json["checks"]}
    assert (rows["frontier"], rows["dispatch"]) == ("note", "bad")
    assert list(place.iterdir()) == []


def test_doctor_is_content_with_a_fresh_frontier(shoal: Shoal) -> None:
    shoal("migrate")
    ran = shoal("doctor", "--json")
    assert (ran.code, ran.json["ok"]) == (0, True)
    rows = {row["part"]: row for row in ran.json["checks"]}
    for part in ("sqlite", "libcurl", "turbohtml", "frontier", "durable", "schema", "invariants", "disk"):
        assert rows[part]["state"] == "ok", rows[part]
    assert "WAL-reset" in rows["sqlite"]["remark"]
    assert "[redis]" in rows["redis"]["remark"] or rows["redis"]["remark"].startswith("installed")


def test_doctor_tells_what_is_not_durable(shoal: Shoal) -> None:
    out = shoal("doctor", "--frontier", "memory:").out
    assert "lost when the process ends" in out
    shoal("migrate", "--frontier", "sqlite:///n.db")
    out = shoal("doctor", "--frontier", "sqlite:///n.db?synchronous=normal", "--quick").out
    assert "a power cut may undo" in out and "(--quick)" in out


def test_doctor_tells_of_a_server_that_is_named_and_not_used(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_HOST", "127.0.0.1")
    ran = shoal("doctor", "--json")
    assert ran.code == 0
    told = [row for row in ran.json["checks"] if row["remark"].startswith("REDIS_HOST is set")]
    assert [(row["state"], row["hint"]) for row in told] == [("note", "use Redis with --frontier redis://")]
    assert shoal("doctor", "--frontier", "sqlite:///x.db").err.count("REDIS_HOST") == 0, "somebody chose it"
    monkeypatch.setenv("REDIS_HOST", "")
    assert "REDIS_HOST is set" not in shoal("doctor", "--json").out


@pytest.mark.parametrize(
    "command", [("jobs",), ("doctor",), ("dead", "list"), ("enqueue", "j", "http://a.test/")]
)
def test_a_named_celery_broker_is_where_commands_look(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://:topsecret@127.0.0.1:1/4")
    ran = shoal(*command)
    assert ran.code == 4, "nobody listens there"
    assert "topsecret" not in ran.err + ran.out
    assert ran.err.startswith("frontier: redis://") and "CELERY_BROKER_URL" in ran.err.splitlines()[0]
    for words in (("--frontier", "sqlite:///x.db"), ()):
        monkeypatch.setenv("SHOAL_FRONTIER", "" if words else "sqlite:///x.db")
        ran = shoal(*command, *words)
        assert "CELERY_BROKER_URL" not in ran.err and ran.code in (0, 2), "somebody chose it"


def test_what_is_done_here_stays_here_whatever_broker_is_named(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")
    ran = shoal("crawl", "--demo", "--max-pages", "1", "--rate", "none", "--json")
    assert (ran.code, ran.json["pages"]) == (0, 1), ran.err


def test_doctor_tells_server_schema_and_what_mends_each_remark(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch, shared_redis: RedisServer
) -> None:
    monkeypatch.setenv("REDIS_HOST", "127.0.0.1")
    monkeypatch.setenv("REDIS_PORT", str(shared_redis.port))
    ran = shoal("doctor", "--json", "--frontier", "redis://?prefix=abc")
    rows = {row["part"]: row for row in ran.json["checks"]}
    where = f"redis://127.0.0.1:{shared_redis.port}/0?prefix=abc is open, Redis "
    assert rows["frontier"]["remark"].startswith(where)
    assert rows["schema"]["remark"] == "1 of 1"
    assert "power cut may lose the last second" in rows["durable"]["remark"]
    assert "appendfsync always" in rows["durable"]["hint"]
    with redis_server("--appendonly", "no") as server:
        monkeypatch.setenv("REDIS_PORT", str(server.port))
        told = shoal("doctor", "--frontier", "redis://")
        assert "durable: `redis-cli CONFIG SET appendonly yes`" in told.err


def test_doctor_names_the_sources_of_settings_and_no_values(
    shoal: Shoal, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "shoal.toml").write_text('rate = "2/s"\n')
    (place / "pyproject.toml").write_text("[tool.shoal]\nretries = 2\n")
    monkeypatch.setenv("SHOAL_USER_AGENT", "secret-agent")
    out = shoal("doctor").out
    assert "shoal.toml, [tool.shoal] in pyproject.toml, SHOAL_USER_AGENT" in out
    assert "secret-agent" not in out


def test_doctor_loads_the_app(shoal: Shoal, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "mine_ok.py").write_text(
        "from shoal import Shoal\napp = Shoal()\n@app.scraper('books', start=['http://b.test/'])\n"
        "async def books(page):\n    yield {}\n"
    )
    monkeypatch.setenv("SHOAL_APP", "mine_ok.py")
    assert "mine_ok.py: books" in shoal("doctor").out
    (place / "mine_bad.py").write_text("1/0\n")
    monkeypatch.setenv("SHOAL_APP", "mine_bad.py")
    ran = shoal("doctor")
    assert ran.code == 2
    assert "ZeroDivisionError" in ran.out


def test_doctor_finds_an_invariant_that_does_not_hold(shoal: Shoal, filled: None, place: Path) -> None:
    import apsw

    db = apsw.Connection(str(place / ".shoal/shoal.db"))
    db.execute("UPDATE job SET items=7 WHERE name='shop'")
    db.close()
    ran = shoal("doctor")
    assert ran.code == 4
    assert "job shop counts 7 items, its log has 2" in ran.out
    assert "something needs attention" in ran.err
    assert shoal("doctor", "--quick").code == 0


def test_bench_measures_every_part_and_leaves_nothing(shoal: Shoal, place: Path) -> None:
    ran = shoal("bench", "--seconds", "0.1", "--json")
    assert ran.code == 0
    assert len(ran.json) == 8
    assert all(row["number"] > 0 and row["per_second"] > 0 for row in ran.json)
    assert list(place.iterdir()) == []
