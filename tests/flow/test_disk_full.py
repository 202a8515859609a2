"""No space left: said in one line with the way out, and nothing is lost."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.model import JobState
from tests.rig.command import Shell, read_lines, wait_until
from tests.rig.disk import fill, small_disk

FAST = ["--allow-private", "--rate", "none", "--per-host", "8", "--no-robots"]
SHORT = {"SHOAL_LEASE": "2"}
"""On a full disk nothing can be handed back: what was under way comes back when its lease ends."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Ask for it before the shell, so that nobody uses it when it goes."""
    with small_disk(tmp_path / "disk") as place:
        yield place


@pytest.mark.parametrize("to_file", [True, False])
def test_frontier_on_a_full_disk(disk: Path, shell: Shell, to_file: bool) -> None:
    ballast = fill(disk, 600_000)
    db = disk / "shoal.db"
    with LoopbackSite(generated_site(pages=200, size=4000, latency=0.02)) as site:
        words = [
            "crawl",
            site.url,
            *FAST,
            "--frontier",
            str(db),
            *(["--out", "out.jsonl"] if to_file else []),
        ]
        crawl = shell.start(*words, env=SHORT)
        wait_until(lambda: crawl.over or "no space left" in crawl.err, "the disk to be full")
        # It either waits for space, telling so, or has ended. Then two interrupts end it at once.
        for _ in range(2):
            crawl.signal(signal.SIGINT)
            wait_until(lambda: crawl.over or "stopping" in crawl.err, "the interrupt")
        ended = crawl.wait(10)
        assert ended.code in (4, 130), ended
        assert f"no space left for {db}" in ended.err
        assert "Traceback" not in ended.err
        assert "hint: free some space" in ended.err or "resume" in ended.err
        ballast.unlink()
        again = shell.run(*words, "--resume", env=SHORT)
        assert again.code == 0, again.err
        [job] = shell.ask(lambda frontier: frontier.jobs(), db)
        assert job.state is JobState.DONE
        lines = (shell.root / "out.jsonl").read_bytes() if to_file else again.out.encode()
        items = [msgspec.json.decode(line) for line in lines.splitlines()]
        assert Counter(item["url"] for item in items) == Counter(site.expected_urls())
        assert job.counts.items == len(site.expected_urls())
        assert shell.ask(lambda frontier: frontier.check(), db) == []


def test_frontier_that_gets_space_again_goes_on_by_itself(disk: Path, shell: Shell) -> None:
    ballast = fill(disk, 600_000)
    db = disk / "shoal.db"
    with LoopbackSite(generated_site(pages=200, size=4000, latency=0.02)) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--frontier", str(db), "--json")
        wait_until(lambda: "no space left" in crawl.err, "the disk to be full")
        assert not crawl.over
        ballast.unlink()
        ended = crawl.wait()
        assert ended.code == 0, ended.err
        assert ended.json()["items"] == len(site.expected_urls())
        assert shell.ask(lambda frontier: frontier.check(), db) == []


def test_export_on_a_full_disk(disk: Path, shell: Shell) -> None:
    ballast = fill(disk, 100_000)
    out = disk / "out.jsonl"
    with LoopbackSite(generated_site(pages=100, size=4000, latency=0.02)) as site:
        words = ["crawl", site.url, *FAST, "--out", str(out)]
        ended = shell.run(*words)
        assert ended.code not in (0, 130), ended
        assert f"cannot write {out}: No space left on device" in ended.err
        assert "hint: free some space" in ended.err
        assert "Traceback" not in ended.err
        assert not out.exists()
        [job] = shell.jobs()
        assert job.counts.leased == 0
        assert len(shell.items(job.id)) == job.counts.done
        # The way out that the hint names, from where it stopped.
        ballast.unlink()
        again = shell.run(*words, "--resume")
        assert again.code == 0, again.err
        expected = Counter(site.expected_urls())
        assert Counter(item["url"] for item in read_lines(out)) == expected
        # And another: the frontier has everything.
        export = shell.run("export", job.id, "--to", "later.jsonl")
        assert export.code == 0, export.err
        assert Counter(item["url"] for item in read_lines(shell.root / "later.jsonl")) == expected
        assert shell.check() == []
