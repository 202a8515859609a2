"""`shoal shell`: a page and Python on it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.demo.books import DemoSite
from tests.rig.command import Shell


@pytest.fixture(scope="module")
def site() -> Iterator[DemoSite]:
    with DemoSite() as served:
        yield served


def piped(root: Path, url: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", "shell", url, "--allow-private"],
        cwd=root,
        input=text,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_code_from_the_command_line(shell: Shell, site: DemoSite) -> None:
    code = "page.title\nresponse.status\nlen(css('ul.shelf a')) > 2\nxpath('//title')[0].text\nlinks()[0]"
    ended = shell.run("shell", site.url, "--allow-private", "-c", code)
    assert ended.code == 0, ended
    assert [eval(line) for line in ended.out.splitlines()] == [
        "Tidepool Books",
        200,
        True,
        "Tidepool Books",
        site.url,
    ]
    assert list(shell.root.glob(".shoal")) == [], "it leaves nothing behind"


def test_code_from_stdin_reads_like_a_script(tmp_path: Path, site: DemoSite) -> None:
    text = "for number in range(2):\n    number\nprint(page.url)\npage.title\n"
    ran = piped(tmp_path, site.url, text)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["0", "1", site.url, "'Tidepool Books'"]


def test_another_page_takes_its_place(shell: Shell, site: DemoSite) -> None:
    code = "fetch(css('ul.shelf a')[0])\npage.text('article h1')\nfetch('/news/').url\nresponse.url"
    ended = shell.run("shell", site.url, "--allow-private", "-c", code)
    lines = ended.out.splitlines()
    assert lines[0].startswith("<Page 200 ") and "Island" in lines[1]
    assert lines[2:] == [repr(f"{site.url}news/")] * 2


def test_view_shows_the_main_text(shell: Shell, site: DemoSite) -> None:
    out = shell.run("shell", site.url, "--allow-private", "-c", "view()").out
    assert out.startswith("# Books that smell faintly of the sea")


def test_await(shell: Shell, site: DemoSite) -> None:
    code = "import asyncio\nx = await asyncio.sleep(0, 5)\nx\nasync def f():\n    fetch('/')\nawait f()"
    ended = shell.run("shell", site.url, "--allow-private", "-c", code)
    assert (ended.code, ended.out) == (1, "5\n")
    assert "cannot be called from async code" in ended.err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1/0", "ZeroDivisionError"),
        ("x = (", "SyntaxError"),
        ("css('[[')", "error: bad CSS selector"),
        ("fetch('http://127.0.0.1:1/')", "error:"),
        ("fetch('ftp://a.test/')", "error:"),
    ],
)
def test_code_that_fails(shell: Shell, site: DemoSite, code: str, said: str) -> None:
    ended = shell.run("shell", site.url, "--allow-private", "-c", f"{code}\nprint('not reached')")
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
    assert "shoal/cli" not in ended.err, "only the frames of the person's own code"


def test_guard_and_robots_hold(shell: Shell, site: DemoSite) -> None:
    blocked = shell.run("shell", site.url, "-c", "page")
    assert blocked.code == 3 and "egress_blocked" in blocked.err
    assert shell.run("shell", "no-url", "-c", "page").code == 2


def test_a_page_that_is_not_there_can_be_looked_at(shell: Shell, site: DemoSite) -> None:
    ended = shell.run("shell", f"{site.url}nothing", "--allow-private", "-c", "page.status")
    assert (ended.code, ended.out) == (0, "404\n")
    assert "answered 404" in ended.err


def test_the_prompt(tmp_path: Path, site: DemoSite) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "shoal", "shell", site.url, "--allow-private"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> bytes:
        """Everything up to this. What comes after it is kept for the next time: a prompt that was
        seen before is not the one that we wait for."""
        nonlocal seen
        while text not in seen:
            seen += os.read(mine, 4096)
        before, _, seen = seen.partition(text)
        return before

    try:
        greeting = until(b">>> ")
        assert b"Tidepool Books" in greeting and b"fetch(url)" in greeting
        os.write(mine, b"40 + len([page])\n")
        until(b"41\r\n>>> ")
        os.write(mine, b"1/0\n")
        until(b"ZeroDivisionError")
        until(b">>> ")
        os.write(mine, b"\x04")
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait()
        os.close(mine)
