"""What is needed of the system: nothing that only Linux has. Here it is taken away from Python's modules."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import tests.rig
from shoal.demo.site import Call, LoopbackSite, Reply, generated_site
from shoal.scrape.page import HEAVY_TAGS
from tests.rig.command import Shell, wait_until

ELSEWHERE = {"PYTHONPATH": str(Path(tests.rig.__file__).parent / "elsewhere")}
FAST = ["--allow-private", "--rate", "none", "--per-host", "8"]
ASK = """
import ctypes, os, pathlib, select, selectors, socket
there = [hasattr(os, "eventfd"), hasattr(select, "epoll"), hasattr(selectors, "EpollSelector"),
         hasattr(ctypes.CDLL(None), "prctl"), hasattr(socket, "TCP_INFO")]
try:
    there.append(bool(pathlib.Path("/proc/self/statm").read_text()))
except OSError:
    there.append(False)
print(any(there))
"""


def test_it_is_taken_away(shell: Shell) -> None:
    ended = shell.start("-c", ASK, env=ELSEWHERE, program=[sys.executable]).wait()
    assert (ended.code, ended.out.strip()) == (0, "False"), ended.err


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///crawl.db"])
def test_a_crawl(shell: Shell, frontier: str) -> None:
    with LoopbackSite(generated_site(pages=60, links=6)) as site:
        words = ["--out", "out.jsonl", "--frontier", frontier, "--json"]
        ended = shell.run("crawl", site.url, *FAST, *words, env=ELSEWHERE)
        assert ended.code == 0, ended.err
        assert ended.json()["pages"] == 60
        assert len((shell.root / "out.jsonl").read_text().splitlines()) == 60


def heavy(call: Call) -> Reply:
    if call.path == "/robots.txt":
        return Reply(404)
    if call.path == "/":
        return Reply(200, b"<a href=/1>x</a><a href=/2>x</a>")
    return Reply(200, b"<title>heavy</title>" + b"<p>x" * (HEAVY_TAGS + 1))


def test_worker_processes_and_pages_that_are_read_apart(shell: Shell) -> None:
    with LoopbackSite(heavy) as site:
        ended = shell.run("crawl", site.url, *FAST, "--workers", "2", "--out", "out.jsonl", env=ELSEWHERE)
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
        assert (shell.root / "out.jsonl").read_text().count('"title":"heavy"') == 2


def test_workers_end_with_their_parent(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=500, latency=0.2)) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--workers", "2", env=ELSEWHERE)
        wait_until(lambda: len(site.log()) > 5, "five pages")
        assert len(shell.alive()) >= 3
        os.kill(crawl.process.pid, signal.SIGKILL)
        wait_until(lambda: not shell.alive(), "the end of the workers")


def test_the_demo(shell: Shell) -> None:
    ended = shell.run("crawl", "--demo", "--json", env=ELSEWHERE)
    assert ended.json()["pages"] > 20, ended.err
