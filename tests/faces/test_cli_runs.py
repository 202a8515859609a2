"""Runs of named scrapers as people begin, resume and mistype them, and as Python begins many at once."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import Shoal as Application
from shoal.app import holder_name, process_gone, process_name
from shoal.demo.site import LoopbackSite, generated_site
from shoal.errors import UsageError
from shoal.model import Job
from shoal.registry import open_frontier
from tests.rig.command import Ran

APP = """
from shoal import Shoal

app = Shoal()


@app.scraper("list", start=["http://start.test/"], execution="distributed")
def list_(page):
    yield {}


@app.scraper("nostart", execution="distributed")
def nostart(page):
    yield {}


@app.scraper("here", retries=2, lease=90, queue="mine", priority=7, per_host=4, rate="none")
def here(page):
    yield {}
"""


Shoal = Callable[..., Ran]


@pytest.fixture(autouse=True)
def scrapers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_APP", "scrapers.py")
    (place / "scrapers.py").write_text(APP)
    (place / "urls.txt").write_text("http://a.test/1\nhttp://a.test/2\n")


def jobs(where: str = "") -> dict[str, Job]:
    async def ask() -> list[Job]:
        frontier = await open_frontier(where)
        try:
            return await frontier.jobs(limit=1000)
        finally:
            await frontier.close()

    return {job.id: job for job in asyncio.run(ask())}


def application() -> Application:
    app = Application(allow_private=True, no_robots=True)

    @app.scraper("many", execution="distributed")
    def many(page: Any) -> Any:
        yield {}

    @app.scraper("one", rate="none")
    def one(page: Any) -> Any:
        yield {"url": page.url}

    return app


# -- names and locks ----------------------------------------------------------------------


def test_runs_that_begin_together_get_names_of_their_own(place: Path) -> None:
    app = application()

    async def begin() -> list[dict[str, Any]]:
        return await asyncio.gather(*(app.submit("many", [f"http://a.test/{n}"]) for n in range(4)))

    begun = asyncio.run(begin())
    assert [answer["enqueued"] for answer in begun] == [1] * 4
    assert len({answer["run_id"] for answer in begun}) == 4
    assert {name: job.counts.added for name, job in jobs().items()} == {
        answer["run_id"]: 1 for answer in begun
    }


def test_single_runs_of_one_process_do_not_overlap(place: Path) -> None:
    app = application()
    with LoopbackSite(generated_site(pages=3, links=1)) as site:

        async def begin() -> list[Any]:
            runs = (app.run("one", [f"{site.url}slow/1"], run_id=name) for name in "AB")
            return list(await asyncio.gather(*runs, return_exceptions=True))

        ended = asyncio.run(begin())
        refused = [each for each in ended if isinstance(each, UsageError)]
        assert len(refused) == 1 and "is already running, as" in str(refused[0]), ended
        assert len(jobs()) == 1
        asyncio.run(app.run("one", [site.url], run_id="C"))


def test_a_holder_that_died_is_recognised(place: Path) -> None:
    assert holder_name() != holder_name()
    assert not process_gone(holder_name())
    assert process_gone(f"{process_name(2**22 + 1)}_1")


def test_the_worker_command_can_be_pasted(shoal: Shoal) -> None:
    command = shoal("run", "list", "--run-id", "spring sale").json["worker_command"]
    words = ["shoal", "worker", "--scraper", "list", "--run-id", "spring sale", "--batch-size", "50"]
    assert shlex.split(command) == words


# -- going on -----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--resume",), ("--urls-file", "urls.txt")])
def test_a_cancelled_run_takes_nothing(shoal: Shoal, more: tuple[str, ...]) -> None:
    shoal("run", "list", "--run-id", "X", "--urls-file", "urls.txt")
    shoal("cancel", "X")
    ran = shoal("run", "list", "--run-id", "X", *more)
    assert (ran.code, ran.out) == (2, ""), ran
    assert "error: run X is cancelled\n hint: " in ran.err
    assert jobs()["X"].counts.refused == 0


def test_resume_adds_only_what_is_given(shoal: Shoal) -> None:
    shoal("run", "list", "--run-id", "X", "--urls-file", "urls.txt")
    assert shoal("run", "list", "--resume").json == {
        "status": "queued",
        "run_id": "X",
        "enqueued": 0,
        "worker_command": "shoal worker --scraper list --run-id X --batch-size 50",
    }
    assert jobs()["X"].counts.added == 2
    assert shoal("run", "list", "http://a.test/3", "--resume").json["enqueued"] == 1
    # A scraper without a start has runs to go on with too.
    shoal("run", "nostart", "--run-id", "Y", "--urls-file", "urls.txt")
    assert shoal("run", "nostart", "--resume").json["run_id"] == "Y"


def test_resume_lets_a_paused_run_go_on(shoal: Shoal) -> None:
    shoal("run", "list", "--run-id", "X", "--urls-file", "urls.txt")
    shoal("pause", "X")
    assert shoal("run", "list", "--resume").code == 0
    assert jobs()["X"].state.value == "running"


def test_resume_of_a_run_that_is_not_there(shoal: Shoal) -> None:
    ran = shoal("run", "list", "--resume", "--run-id", "spring")
    assert (ran.code, "'list' has no runs yet" in ran.err) == (2, True), ran
    shoal("run", "list", "--run-id", "spring")
    shoal("run", "nostart", "--run-id", "other", "--urls-file", "urls.txt")
    ran = shoal("run", "list", "--resume", "--run-id", "sprnig")
    assert (ran.code, ran.out) == (2, ""), ran
    assert "error: no run 'sprnig' to resume\n hint: its runs are spring;" in ran.err
    assert set(jobs()) == {"spring", "other"}


# -- nothing to visit ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_an_empty_list_of_urls_is_refused(shoal: Shoal, place: Path, text: str) -> None:
    (place / "empty.txt").write_text(text)
    ran = shoal("run", "list", "--urls-file", "empty.txt", "--run-id", "empty")
    assert (ran.code, ran.out, "error: no URL to fetch\n" in ran.err) == (2, "", True), ran
    assert jobs() == {}
    with pytest.raises(UsageError, match="no URL to fetch"):
        asyncio.run(application().submit("many", []))
    assert jobs() == {}


def test_a_run_of_bad_urls_ends(shoal: Shoal, place: Path) -> None:
    (place / "bad.txt").write_text("ftp://a.test/\nno url\n")
    assert shoal("run", "list", "--urls-file", "bad.txt", "--run-id", "bad").code == 0
    view = jobs()["bad"]
    assert (view.state.value, view.counts.dead) == ("done", 2)


def test_a_run_that_was_interrupted_before_it_had_a_url(shoal: Shoal) -> None:
    shoal("run", "list", "--run-id", "X", "--urls-file", "urls.txt")
    spec = jobs()["X"].spec

    async def begin() -> None:
        frontier = await open_frontier()
        await frontier.open_job("Z", spec)
        await frontier.close()

    asyncio.run(begin())
    ran = shoal("run", "list", "--resume")
    assert (ran.code, "run Z was interrupted before URLs were added" in ran.err) == (2, True), ran
    assert shoal("run", "list", "--resume", "--urls-file", "urls.txt").json["enqueued"] == 2


def test_a_distributed_run_has_no_file_of_its_own(shoal: Shoal, place: Path) -> None:
    ran = shoal("run", "list", "--run-id", "R", "--out", "x.jsonl")
    assert (ran.code, ran.json["run_id"]) == (0, "R")
    assert "when the run is done: shoal export R --to x.jsonl" in ran.err
    assert not (place / "x.jsonl").exists()


def test_a_single_run_tells_its_id(shoal: Shoal) -> None:
    with LoopbackSite(generated_site(pages=1)) as site:
        ran = shoal(
            "run", "here", min(site.expected_urls()), "--allow-private", "--no-robots", "--json", "-q"
        )
    assert ran.code == 0, ran
    told = ran.json
    assert told["run_id"] == told["job"] == next(iter(jobs()))


def test_scrapers_tell_all_their_options(shoal: Shoal) -> None:
    known = {each["name"]: each for each in shoal("scrapers", "--json").json}
    wanted = {"retries": 2, "lease": 90, "queue": "mine", "priority": 7, "per_host": 4, "fetcher": "http"}
    assert known["here"].items() >= wanted.items()


def test_the_queues_of_a_status_look_the_same_everywhere(shoal: Shoal) -> None:
    """Redis and memory remember queues that are empty now, SQL does not."""
    from shoal.cli.jobs import _queues

    shoal("run", "list", "--run-id", "one")
    shoal("cancel", "one")
    assert shoal("status", "one", "--json").json["queues"] == {
        "scraping": {"waiting": 0, "delayed": 0, "leased": 0}
    }
    empty = {"waiting": 0, "delayed": 0, "leased": 0}
    found = {"other": empty, "busy": empty | {"leased": 1}}
    assert _queues(jobs()["one"], found) == {"scraping": empty, "busy": empty | {"leased": 1}}
