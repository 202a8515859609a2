"""A page that takes its worker down: three times is enough, and nobody else suffers for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.frontier.port import Backend
from shoal.model import DeadLetter, Job, JobSpec, JobState, Request, Selection
from tests.rig.command import Shell

SCRAPERS = """
import os
from shoal import Page, Shoal

app = Shoal()

@app.scraper("fragile")
async def fragile(page: Page):
    if page.url.endswith("/page/5"):
        os._exit(77)
    yield {"url": page.url}
"""


async def _open(frontier: Backend, app: Path, urls: list[str], width: int) -> Job:
    spec = JobSpec(
        scraper="fragile",
        app=str(app),
        gap=0.0,
        width=width,
        robots=False,
        allow_private=True,
        dedicated=True,
    )
    job = await frontier.open_job("fragile", spec)
    await frontier.add([Request(url, job.id) for url in urls])
    return job


async def _dead(frontier: Backend) -> list[DeadLetter]:
    return await frontier.dead(Selection(job="fragile"))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_page_that_kills_workers_ends_dead(shell: Shell, concurrency: int) -> None:
    app = shell.root / "scrapers.py"
    app.write_text(SCRAPERS)
    with LoopbackSite(generated_site(pages=30, links=3)) as site:
        wanted = sorted(site.expected_urls())
        [deadly] = [url for url in wanted if url.endswith("/page/5")]
        shell.ask(lambda frontier: _open(frontier, app, wanted, concurrency))
        words = ["worker", "--job", "fragile", "--drain", "--lease", "1", "--concurrency", str(concurrency)]
        codes: list[int] = []
        while not codes or codes[-1] != 0:
            ended = shell.run(*words)
            assert ended.code in (0, 77), ended.err
            codes.append(ended.code)
            assert len(codes) <= 4, codes
        assert codes == [77, 77, 77, 0]
        [letter] = shell.ask(_dead)
        assert (letter.request.url, letter.failure.error) == (deadly, "worker_crashed")
        job = shell.job("fragile")
        assert (job.state, job.errors) == (JobState.DONE, {"worker_crashed": 1})
        assert Counter(item["url"] for item in shell.items("fragile")) == Counter(set(wanted) - {deadly})
        assert shell.check() == []
