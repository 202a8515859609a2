"""What people see on a terminal, and what a pipe gets."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply, generated_site
from tests.rig.command import Ran, Running, Shell, wait_until

Shoal = Callable[..., Ran]

SPAWN = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-m", "shoal", *sys.argv[1:]])))
"""
TERMINAL = (sys.executable, "-c", SPAWN)
"""The command with a terminal for all it says; what that shows is on stdout."""
WIDE = {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
FAST = ("--allow-private", "--rate", "none", "--no-robots")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_terminal(shell: Shell, *words: str) -> Running:
    return shell.start(*words, program=TERMINAL, env=WIDE)


def line_before(shown: str, text: str) -> str:
    """What stands in the line where `text` begins, before it."""
    before = shown[: shown.index(text)]
    return ESCAPES.sub("", re.split(r"[\r\n]|\x1b\[2K", before)[-1])


def test_a_worker_shows_what_it_does(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=6, latency=0.3)) as site:
        urls = (f"{site.url}nowhere", *site.expected_urls())
        assert shell.run("enqueue", "some", *urls, *FAST).code == 0
        ended = on_terminal(shell, "worker", "--drain").wait()
    assert ended.code == 0, ended
    assert re.search(r"[1-9] done  [\d.]+/s  \d running", ended.out), ended.out
    assert "errors: http_404 1" in ended.out and f"{site.url}" in ended.out
    last = ESCAPES.sub("", ended.out).splitlines()[-1]
    assert last.startswith("worker ") and "done 6" in last, "the last word stands alone"


def test_a_worker_in_a_pipe_says_what_it_said(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=3)) as site:
        assert shell.run("enqueue", "some", *site.expected_urls(), *FAST).code == 0
        ended = shell.run("worker", "--drain")
    first, *visits, last = ended.err.splitlines()
    assert (first.split(" ")[0], last.split(" ")[0]) == ("worker", "worker"), ended.err
    assert [" INFO    worker " in line for line in visits] == [True] * 3, "the log, and no live line"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_log_of_a_crawl_does_not_run_into_its_live_line(shell: Shell, workers: str) -> None:
    with LoopbackSite(generated_site(pages=12, errors=0.5, latency=0.3)) as site:
        ended = on_terminal(shell, "crawl", site.url, *FAST, "--workers", workers, "--out", "o.jsonl").wait()
        failed = [url for url, status in site.expected().items() if status != 200]
    assert ended.code == 1, ended
    assert " running " in ended.out, "the live line"
    assert failed and ended.out.count(": given up http://") == len(failed)
    for url in failed:
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d WARNING worker \S+: ", line_before(ended.out, f"given up {url} 404")
        )


def test_what_the_processes_of_up_say_does_not_run_into_its_live_line(shell: Shell) -> None:
    up = on_terminal(shell, "up", "--workers", "1", "--port", "0")
    wait_until(lambda: "token: " in up.out, "the service")
    wait_until(lambda: "visits/s" in up.out.partition("token: ")[2], "the live line below it")
    (pid,) = [
        each
        for each in shell.alive()
        if b"\0up\0" in (words := Path(f"/proc/{each}/cmdline").read_bytes()) and b"-m\0shoal\0" in words
    ]
    os.kill(pid, signal.SIGTERM)
    ended = up.wait()
    assert ended.code == 0 and "Traceback" not in ended.out
    assert line_before(ended.out, "http://127.0.0.1:") == ""
    assert line_before(ended.out, "token: ") == ""
    assert line_before(ended.out, "stopping: ") == ""


def test_what_a_supervised_process_says_last_is_heard(shell: Shell) -> None:
    """An application that is broken only for the workers: their message must not get lost."""
    (shell.root / "app.py").write_text(
        "import os\nfrom shoal import Shoal\napp = Shoal()\nassert 'SHOAL_PARENT_PID' not in os.environ\n"
    )
    up = on_terminal(shell, "up", "--workers", "1", "--no-api", "--app", "app.py").wait()
    assert up.code == 2
    assert "error: cannot load 'app.py': AssertionError" in up.out
    assert line_before(up.out, "error: cannot load") == ""


@pytest.mark.parametrize("words", [("jobs",), ("status", "some"), ("lanes",), ("dead", "list"), ("workers",)])
def test_lines_of_a_pipe_do_not_end_in_blanks(shoal: Shoal, words: tuple[str, ...]) -> None:
    assert shoal("enqueue", "some", "http://127.0.0.1:9/", "no url").code == 0
    assert shoal("enqueue", "a-longer-name", "http://127.0.0.1:9/").code == 0
    out = shoal(*words).out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_the_summary_of_a_crawl_does_not_either(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=2)) as site:
        said = shell.run("crawl", site.url, *FAST, "--out", "o.jsonl").err
    assert "results  o.jsonl\n" in said
    assert [line for line in said.splitlines() if line != line.rstrip()] == []


def test_pages_are_counted_alike_everywhere(shoal: Shoal) -> None:
    """Redirects, and what robots.txt disallows, are no pages."""

    def pages(call: Call) -> Reply:
        if call.bare == "/robots.txt":
            return Reply(200, b"User-agent: *\nDisallow: /private\n", type="text/plain")
        if call.bare == "/":
            return Reply(200, b'<a href="/private">x</a><a href="/moved">x</a><a href="/gone">x</a>')
        if call.bare == "/moved":
            return Reply(302, headers=(("Location", "/there"),))
        return Reply(404 if call.bare == "/gone" else 200, b"there")

    with LoopbackSite(pages) as site:
        crawl = shoal("crawl", site.url, "--allow-private", "--rate", "none", "--json")
    assert crawl.json["pages"] == 2
    assert "pages    2 in " in crawl.err
    assert " 2/3 " in shoal("jobs").out, "two pages, and one that failed"
    assert "2 of 3 pages, 1 dead, 2 items" in shoal("watch", crawl.json["job"]).err


def test_the_rate_after_a_resume_is_that_of_the_rest(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=60, latency=0.05)) as site:
        crawl = shell.start("crawl", site.url, *FAST, "--out", "o.jsonl")
        wait_until(lambda: len(site.log()) > 20, "some pages")
        crawl.signal(signal.SIGINT)
        assert crawl.wait().code == 130
        first = shell.jobs()[0].counts.done
        rest = shell.run("crawl", site.url, *FAST, "--out", "o.jsonl", "--resume", "--json")
    told = rest.json()
    assert told["pages"] == 60
    assert abs(told["pages_per_second"] * told["seconds"] - (60 - first)) < 1
    assert f"pages    60, {60 - first} of them now in " in rest.err
