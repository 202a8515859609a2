"""How a crawl ends early, and who may share a frontier with whom."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import msgspec
import pytest

from shoal.demo.site import Call, LoopbackSite, Reply, generated_site
from shoal.model import JobState
from tests.rig.command import Shell, wait_until

FAST = ["--allow-private", "--rate", "none", "--per-host", "8", "--no-robots"]


def test_one_interrupt_finishes_what_is_under_way(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=120, links=6, latency=0.1)) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--out", "out.jsonl")
        wait_until(lambda: len(site.log()) > 10, "ten pages")
        crawl.signal(signal.SIGINT)
        ended = crawl.wait()
        assert ended.code == 130, ended.err
        assert "resume" in ended.err
        assert "Traceback" not in ended.err
        [job] = shell.jobs()
        # Every visit that began was finished and stored, none is held by anybody.
        assert job.counts.leased == 0
        assert job.counts.done == len(site.log()) == len(shell.items(job.id))
        again = shell.run("crawl", site.url, *FAST, "--out", "out.jsonl", "--resume")
        assert again.code == 0, again.err
        assert Counter(item["url"] for item in shell.items(job.id)) == Counter(site.expected_urls())
        assert Counter(hit.url for hit in site.log()) == Counter(site.expected_urls())
        assert shell.check() == []


class SlowOnce:
    """The start page is quick; the first visit of every other page hangs, later ones do not."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, call: Call) -> Reply:
        if call.path == "/":
            links = "".join(f"<a href='/slow-{number}'>x</a>" for number in range(6))
            return Reply(200, f"<title>start</title>{links}".encode())
        first = call.path not in self.seen
        self.seen.add(call.path)
        return Reply(200, b"<title>slow</title>", delay=60.0 if first else 0.0)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_two_interrupts_end_at_once_and_hand_back(shell: Shell, workers: str) -> None:
    respond = SlowOnce()
    with LoopbackSite(respond) as site:
        words = ["crawl", site.url, *FAST, "--workers", workers]
        crawl = shell.start(*words)
        wait_until(lambda: len(respond.seen) == 6, "six slow fetches")
        crawl.signal(signal.SIGINT)
        wait_until(lambda: "stopping" in crawl.err, "the first interrupt")
        assert not crawl.over
        began = time.monotonic()
        crawl.signal(signal.SIGINT)
        ended = crawl.wait()
        assert ended.code == 130, ended.err
        assert time.monotonic() - began < 3.0
        assert "Traceback" not in ended.err
        [job] = shell.jobs()
        assert (job.counts.leased, job.counts.waiting) == (0, 6)
        # The lease is a minute: had it been kept, this would take as long.
        began = time.monotonic()
        again = shell.run(*words, "--resume")
        assert again.code == 0, again.err
        assert time.monotonic() - began < 20.0
        assert len(shell.items(job.id)) == 7
        assert shell.check() == []


def test_who_goes_on_wants_what_was_asked_for_before(shell: Shell) -> None:
    """`--resume` alone: the same pages at the same pace; what is given with it counts from now on."""
    with LoopbackSite(generated_site(pages=60, links=6, latency=0.05)) as site:
        words = [*FAST, "--exclude", "*/page/1*", "--fields", "title", "--max-pages", "50"]
        crawl = shell.start("crawl", site.url, *words)
        wait_until(lambda: len(site.log()) > 5, "five pages")
        crawl.signal(signal.SIGINT)
        assert crawl.wait().code == 130
        [job] = shell.jobs()
        again = shell.run("crawl", site.url, "--resume", "--per-host", "4", "--json")
        assert again.code == 0, again.err
        [later] = shell.jobs()
        assert later.spec == msgspec.structs.replace(job.spec, width=4)
        assert not any("/page/1" in hit.url for hit in site.log())
        # Its speed is that of the pages it brought itself.
        told = again.json()
        assert told["pages_per_second"] * told["seconds"] < told["pages"]


def test_terminated_worker_exits_with_0(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=200, latency=0.1)) as site:
        wanted = sorted(site.expected_urls())
        assert shell.run("enqueue", "some", *wanted, *FAST).code == 0
        worker = shell.start("worker")
        wait_until(lambda: len(site.log()) > 5, "five pages")
        worker.signal(signal.SIGTERM)
        ended = worker.wait()
        assert ended.code == 0, ended.err
        assert "stopping" in ended.err
        counts = shell.job("some").counts
        assert counts.leased == 0
        assert counts.done == counts.items == len(site.log())
        assert shell.check() == []


def test_interrupt_while_starting(shell: Shell) -> None:
    """However early it comes: the code says so, and no traceback is shown."""
    # Enough pages that the crawl cannot be over first, however late a busy machine delivers it.
    with LoopbackSite(generated_site(pages=3000, latency=0.5)) as site:
        for number in range(4):
            db = shell.root / f"{number}.db"
            crawl = shell.start("crawl", site.url, *FAST, "--frontier", str(db))
            wait_until(db.exists, "the frontier")
            time.sleep(0.02 * number)  # not to wait for something: to come at another moment
            crawl.signal(signal.SIGINT)
            ended = crawl.wait()
            assert ended.code == 130, ended
            assert "Traceback" not in ended.err, ended
            assert shell.ask(lambda frontier: frontier.check(), db) == []


def test_items_go_to_stdout(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=30)) as site:
        ended = shell.run("crawl", site.url, *FAST)
        assert ended.code == 0, ended.err
        items = [msgspec.json.decode(line) for line in ended.out.splitlines()]
        assert Counter(item["url"] for item in items) == Counter(site.expected_urls())
        assert "pages" in ended.err


def test_items_come_while_the_crawl_runs(shell: Shell) -> None:
    """Whoever reads our stdout gets an item when there is one, not when a buffer is full."""
    respond = SlowOnce()
    with LoopbackSite(respond) as site:
        reader, writer = os.pipe()
        crawl = shell.start("crawl", site.url, *FAST, "--fields", "title", out=writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as lines:
            assert msgspec.json.decode(lines.readline())["title"] == "start"
            assert not crawl.over
            crawl.signal(signal.SIGINT)
            wait_until(lambda: "stopping" in crawl.err, "the first interrupt")
            crawl.signal(signal.SIGINT)
            assert crawl.wait().code == 130


@pytest.mark.parametrize("workers", ["1", "2"])
def test_closed_pipe_ends_the_crawl_cleanly(shell: Shell, workers: str) -> None:
    with LoopbackSite(generated_site(pages=2000, latency=0.05, size=3000)) as site:
        reader, writer = os.pipe()
        crawl = shell.start("crawl", site.url, *FAST, "--workers", workers, out=writer)
        os.close(writer)
        head = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.readline()"],
            stdin=reader,
            stdout=subprocess.DEVNULL,
        )
        os.close(reader)
        assert head.wait(60) == 0
        ended = crawl.wait()
        assert ended.code == 0, ended
        assert "Traceback" not in ended.err
        # It stopped: nobody wants the rest.
        [job] = shell.jobs()
        assert job.state is JobState.PAUSED
        assert job.counts.leased == 0
        assert job.counts.done < 2000
        wait_until(lambda: not shell.alive(), "the workers' end", 10)
        assert shell.check() == []


def test_two_crawls_on_one_frontier_keep_apart(shell: Shell) -> None:
    with (
        LoopbackSite(generated_site(pages=80, seed=1, latency=0.02)) as one,
        LoopbackSite(generated_site(pages=80, seed=2, latency=0.02)) as two,
    ):
        crawls = [
            shell.start("crawl", site.url, *FAST, "--out", f"{number}.jsonl", "--json")
            for number, site in enumerate((one, two))
        ]
        ends = [crawl.wait() for crawl in crawls]
        for ended, site in zip(ends, (one, two), strict=True):
            assert ended.code == 0, ended.err
            job = ended.json()["job"]
            assert Counter(item["url"] for item in shell.items(job)) == Counter(site.expected_urls())
            assert Counter(hit.url for hit in site.log()) == Counter(site.expected_urls())
            # Each did its own visits: one process, one user agent, and its own count of pages.
            shown = re.search(r"^pages\s+(\d+) in", ended.err, re.MULTILINE)
            assert shown is not None and int(shown[1]) == len(site.expected_urls())
        assert shell.check() == []
