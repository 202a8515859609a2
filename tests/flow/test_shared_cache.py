"""Several processes, two jobs over the same pages within the time of the cache: each page is fetched once."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from tests.rig.command import Shell

PAGES = 12


@pytest.fixture(params=["redis", "postgres"])
def frontier(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def work(shell: Shell, site: LoopbackSite, frontier: str, job: str, *, cache: str = "60") -> None:
    words = ("--rate", "none", "--allow-private", "--frontier", frontier)
    added = shell.run("enqueue", job, *site.expected_urls(), *words, env={"SHOAL_CACHE": cache})
    assert added.code == 0, added.err
    worker = shell.run("worker", "--drain", "--frontier", frontier)
    assert worker.code == 0, worker.err
    results = shell.run("results", job, "--frontier", frontier)
    assert len(results.out.splitlines()) == PAGES, results.err


def test_each_page_is_fetched_once(shell: Shell, frontier: str) -> None:
    with LoopbackSite(generated_site(pages=PAGES, links=4, seed=2)) as site:
        work(shell, site, frontier, "one")
        work(shell, site, frontier, "two")
        hits = Counter(hit.path for hit in site.log())
        assert len(hits) == PAGES + 1, "the pages and robots.txt"
        assert set(hits.values()) == {1}
        work(shell, site, frontier, "three", cache="0")
        hits = Counter(hit.path for hit in site.log() if hit.path != "/robots.txt")
        assert set(hits.values()) == {2}, "a job without a cache fetches again"


def test_more_than_a_minute_lasts_from_crawl_to_crawl(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=PAGES, links=4, seed=2)) as site:

        def crawl(seconds: str) -> None:
            flags = ("--rate", "none", "--allow-private", "--cache", seconds)
            done = shell.run("crawl", site.url, *flags, "--out", "pages.jsonl")
            assert done.code == 0, done.err

        for _ in range(2):
            crawl("3600")
        hits = Counter(hit.path for hit in site.log() if hit.path != "/robots.txt")
        assert (len(hits), set(hits.values())) == (PAGES, {1})
        crawl("60")
        hits = Counter(hit.path for hit in site.log() if hit.path != "/robots.txt")
        assert set(hits.values()) == {2}, "a minute is for workers of several jobs, not for the next crawl"
