"""Enqueueing many URLs: a bar on a terminal, bounded memory, and Ctrl-C that spoils nothing."""

from __future__ import annotations

import gzip
import os
import pty
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig.command import Ended, Shell, wait_until

CHUNK = 20_000
"""What is added in one call."""
ALL = 2 * CHUNK

APP = """
from shoal import Shoal
app = Shoal()

@app.scraper("far", execution="distributed")
def far(page):
    yield {}
"""


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"http://a.test/%d\n" % number for number in range(first, first + count))


@pytest.fixture
def place(shell: Shell) -> Shell:
    (shell.root / "far.py").write_text(APP)
    return shell


def on_a_terminal(shell: Shell, *words: str) -> tuple[Ended, str]:
    """Run with a terminal for stderr. Answers how it ended and what the terminal showed."""
    mine, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "NO_COLOR"))}
    running = subprocess.Popen(
        [sys.executable, "-m", "shoal", *words],
        cwd=shell.root,
        env={**env, "TERM": "xterm", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            seen += os.read(mine, 65536)
    except OSError:  # that is how a terminal tells that nobody writes any more
        out = running.communicate(timeout=60)[0].decode()
    finally:
        running.kill()
        running.wait()
        os.close(mine)
    return Ended(running.returncode, out, seen.decode(errors="replace")), seen.decode(errors="replace")


SHOWN = re.compile(r"(\d+)%.{0,40}?([\d,]+) URLs {2}[\d,]+/s", re.DOTALL)
"""How far, how many, how fast."""


@pytest.mark.parametrize("command", [("enqueue", "big"), ("run", "far", "--app", "far.py")])
@pytest.mark.parametrize("name", ["urls.txt", "urls.csv.gz"])
def test_a_terminal_shows_a_bar(place: Shell, command: tuple[str, ...], name: str) -> None:
    # Names that do not pack well: Python reads up to 128 KiB of a packed file ahead.
    text = b"".join(b"http://a.test/%s\n" % random.randbytes(32).hex().encode() for _ in range(3 * CHUNK))
    (place.root / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    ended, seen = on_a_terminal(place, *command, "--urls-file", name)
    assert ended.code == 0, seen
    steps = [(int(percent), int(urls.replace(",", ""))) for percent, urls in SHOWN.findall(seen)]
    assert steps, seen
    for percent, urls in steps:
        # By bytes that were read: as far as the URLs are, give or take what is read ahead.
        assert abs(percent - 100 * urls / (3 * CHUNK)) < 10, steps


def test_no_bar_in_a_pipe_or_when_quiet(place: Shell) -> None:
    (place.root / "urls.txt").write_bytes(lines(CHUNK + 1))
    piped = place.run("enqueue", "big", "--urls-file", "urls.txt")
    assert piped.err == f"big: {CHUNK + 1:,} added, 0 already known, 0 refused, 0 invalid\n"
    ended, seen = on_a_terminal(place, "run", "far", "--app", "far.py", "--urls-file", "urls.txt", "--quiet")
    assert (ended.code, seen) == (0, "")
    assert ended.json()["enqueued"] == CHUNK + 1


@pytest.mark.parametrize("text", ["", "\n", "# nothing new\n"])
def test_nothing_to_enqueue_is_no_mistake(place: Shell, text: str) -> None:
    """`shoal discover … | shoal enqueue JOB`, on a day without news."""
    nothing = {"job": "news", "new": 0, "known": 0, "refused": 0, "bad": 0}
    (place.root / "empty.txt").write_text(text)
    for words in (("--urls-file", "empty.txt"), ("--urls-file", "-"), ("-",), ()):
        ended = piped(place, text, "enqueue", "news", *words, "--json")
        assert (ended.code, ended.json()) == (0, nothing), ended
    assert place.jobs() == [], "a job without URLs would never end"


def test_a_dash_is_stdin(place: Shell) -> None:
    ended = piped(place, "http://a.test/1\nhttp://a.test/2\n", "enqueue", "news", "-")
    assert (ended.code, ended.err) == (0, "news: 2 added, 0 already known, 0 refused, 0 invalid\n")
    ended = piped(place, "http://a.test/3\n", "enqueue", "news", "http://a.test/1", "-", "--json")
    assert (ended.code, ended.json()["new"], ended.json()["known"]) == (0, 1, 1)
    ended = piped(place, "", "enqueue", "news", "--bogus")
    assert (ended.code, "--bogus" in ended.err) == (2, True), ended


def piped(place: Shell, text: str, *words: str) -> Ended:
    words = (sys.executable, "-m", "shoal", *words)
    ran = subprocess.run(
        words, check=False, cwd=place.root, input=text, capture_output=True, text=True, timeout=60
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)


@contextmanager
def half_way(place: Shell, *words: str) -> Iterator[Path]:
    """A command is interrupted when it has stored a part of what a pipe holds; gives the file for the
    next one, with everything."""
    pipe = place.root / "pipe"
    os.mkfifo(pipe)
    running = place.start(*words, "--urls-file", "pipe")
    with pipe.open("wb") as source:
        source.write(lines(CHUNK + 500))  # the rest may be stored or not, as Ctrl-C finds it
        source.flush()
        wait_until(lambda: place.jobs() and place.jobs()[0].counts.added == CHUNK, "the first part")
        running.signal(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130, ended
    assert "interrupted; the URLs enqueued so far are kept" in ended.err and "Traceback" not in ended.err
    everything = place.root / "all.txt"
    everything.write_bytes(lines(ALL))
    yield everything


def test_enqueue_goes_on_after_ctrl_c(place: Shell) -> None:
    with half_way(place, "enqueue", "big") as everything:
        answer = place.run("enqueue", "big", "--urls-file", str(everything), "--json").json()
    assert answer["new"] + answer["known"] == ALL
    assert CHUNK <= answer["known"] < ALL
    assert place.job("big").counts.waiting == ALL
    assert place.check() == []


def test_a_run_goes_on_after_ctrl_c(place: Shell) -> None:
    words = ("run", "far", "--app", "far.py")
    with half_way(place, *words) as everything:
        ended = place.run(*words, "--urls-file", str(everything), "--resume")
    known = ALL - ended.json()["enqueued"]
    assert CHUNK <= known < ALL
    assert f"{known:,} URLs were already in run" in ended.err
    [job] = place.jobs()
    assert (job.id, job.counts.waiting) == (ended.json()["run_id"], ALL)


@pytest.mark.slow
@pytest.mark.parametrize("word", [("--urls-file", "-"), ("--urls-file=-",)])
@pytest.mark.parametrize("command", [("enqueue", "piped"), ("run", "far", "--app", "far.py")])
def test_urls_come_by_a_pipe(place: Shell, command: tuple[str, ...], word: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", *command, *word],
        cwd=place.root,
        input=lines(3),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    [job] = place.jobs()
    assert job.counts.added == 3


def test_memory_does_not_grow_with_the_file(place: Shell) -> None:
    peaks = []
    for count in (2 * CHUNK, 15 * CHUNK):
        (place.root / "urls.txt").write_bytes(lines(count))
        code = (
            # Not getrusage: its peak counts what the parent held when it forked.
            "from pathlib import Path; from shoal.__main__ import main\n"
            "try: main(['enqueue', 'big', '--urls-file', 'urls.txt'])\n"
            "finally: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=place.root, capture_output=True, timeout=100, check=True
        )
        peaks.append(int(ran.stdout) // 1024)
    assert peaks[1] < 200 and peaks[1] - peaks[0] < 60, peaks
