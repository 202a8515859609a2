"""A worker that cannot load what a job needs: the job's URLs are for others, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal import Shoal
from shoal.app import Session
from shoal.demo.site import LoopbackSite, generated_site
from shoal.engine import worker as engine
from shoal.errors import UsageError
from shoal.events import Event, Trouble, Visited
from shoal.model import JobSpec, JobState, Request
from shoal.settings import load

FAR = JobSpec(scraper="far", app="not/here.py", dedicated=True, gap=0.0, robots=False)
NEAR = """
from shoal import Shoal

app = Shoal()


@app.scraper("far")
def far(page):
    yield {"from": "FOLDER"}
"""


async def test_a_general_worker_leaves_it_to_others_and_asks_seldom() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        await session.frontier.open_job("far", FAR)
        await session.frontier.add([Request("http://a.test/", "far")])
        troubles: list[str] = []
        released: list[Visited] = []

        def watch(event: Event) -> None:
            if isinstance(event, Trouble):
                troubles.append(event.what)
            if isinstance(event, Visited):
                released.append(event)
                if len(released) == 4:
                    worker.stop()

        worker = session.worker(drain=False, watch=watch)
        began = time.monotonic()
        await worker.run()
        # Two claims until it knows, then a rest that doubles before each of the others.
        assert time.monotonic() - began >= 3 * engine.SHORT_REST
        assert [event.outcome for event in released] == ["release"] * 4
        assert len(troubles) == 1
        assert troubles[0].startswith("cannot load scraper 'far' of job 'far': no file 'not/here.py' (")
        assert troubles[0].endswith("; its URLs are left to other workers")
        view = await session.frontier.job("far")
        assert (view.counts.waiting, view.counts.dead, view.errors) == (1, 0, {})


async def test_it_begins_when_the_scraper_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOAD_AGAIN", 0.0)
    app = Shoal()
    with LoopbackSite(generated_site(pages=3, links=1)) as site:
        async with Session.opened(load(frontier="memory:"), app) as session:
            await session.frontier.open_job("far", replace(FAR, allow_private=(site.url.split("/")[2],)))
            await session.frontier.add([Request(site.url, "far")])

            def watch(event: Event) -> None:
                if isinstance(event, Trouble) and "far" not in app.scrapers:

                    @app.scraper("far")
                    def far(page: object) -> dict[str, int]:
                        return {"one": 1}

            await session.worker(watch=watch).run()
            view = await session.frontier.job("far")
            assert (view.state, view.counts.done, view.counts.dead) == (JobState.DONE, 1, 0)


async def test_a_worker_for_this_job_alone_ends_and_tells_why() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        await session.frontier.open_job("far", FAR)
        await session.frontier.add([Request(f"http://{name}.test/", "far") for name in "abc"])
        with pytest.raises(UsageError, match="cannot load scraper 'far' of job 'far'"):
            await session.worker(job="far").run()
        counts = (await session.frontier.job("far")).counts
        assert (counts.waiting, counts.leased, counts.dead) == (3, 0, 0)


async def test_a_scraper_is_loaded_once_for_all_its_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(
        "with open('loads', 'a') as told:\n    told.write('x')\nraise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    async with Session.opened(load(frontier="memory:", app="broken.py")) as session:
        await session.frontier.open_job("far", FAR)
        await session.frontier.add([Request(f"http://{name}.test/", "far") for name in "abcdef"])
        seen: list[Visited] = []

        def watch(event: Event) -> None:
            if isinstance(event, Visited):
                seen.append(event)
                if len(seen) == 12:
                    worker.stop()

        worker = session.worker(drain=False, watch=watch)
        async with asyncio.timeout(30):
            await worker.run()
    assert (tmp_path / "loads").read_text() == "x"


def test_what_a_worker_was_given_goes_before_what_the_job_says(tmp_path: Path) -> None:
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scrapers.py").write_text(NEAR.replace("FOLDER", folder))
    mine, theirs = (str(tmp_path / folder / "scrapers.py") for folder in ("mine", "theirs"))

    async def folder_of(own: str, job: str) -> str:
        async with Session.opened(load(frontier="memory:", app=own)) as session:
            scraper = session.scraper("far", job)
            assert scraper is not None
            given = list(scraper.handler_for("")(None))  # type: ignore[arg-type]
            return str(given[0]["from"])

    assert asyncio.run(folder_of(mine, theirs)) == "mine"
    assert asyncio.run(folder_of(mine, "nowhere.py")) == "mine"
    assert asyncio.run(folder_of("", theirs)) == "theirs"
