"""`shoal init`: what it writes works as it is, and nothing is overwritten."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.demo.books import BOOKS, DemoSite
from tests.rig.command import Shell

SCRIPT = Path(sys.executable).with_name("shoal")
FILES = ["scrapers.py", "test_scrapers.py", "shoal.toml", "README.md", ".gitignore"]


@pytest.fixture
def project(shell: Shell) -> Shell:
    """A shell in a project that was just begun."""
    ended = shell.run("init", "--json")
    assert ended.code == 0, ended
    assert ended.json() == {"directory": ".", "files": FILES}
    assert all((shell.root / name).is_file() for name in FILES)
    return shell


def test_its_test_passes_with_plain_pytest(project: Shell) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "PYTEST_"))}
    # Plain: none of the plugins that this project uses for its own tests.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        command,
        cwd=project.root,
        env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command `shoal` is not installed beside this Python")
def test_what_it_says_works_as_it_is_typed(shell: Shell) -> None:
    (shell.root / "shoal").symlink_to(SCRIPT)
    init = shell.start("init", "some where", program=("./shoal",), env={"PATH": "/usr/bin:/bin"})
    said = init.wait().err.splitlines()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "PYTEST_"))}
    for label, expected in (("try it: ", "items"), ("test it: ", "1 passed")):
        (line,) = [line.removeprefix(label) for line in said if line.startswith(label)]
        ran = subprocess.run(
            ["sh", "-c", line],
            cwd=shell.root,
            env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode in (0, 1) and expected in ran.stdout + ran.stderr, (line, ran)


def test_its_scraper_is_found_without_a_flag(project: Shell) -> None:
    [only] = project.run("scrapers", "--json").json()
    assert (only["name"], only["execution"], only["labels"]) == ("books", "single", ["book"])


def test_it_runs_on_the_demo_site(project: Shell) -> None:
    ended = project.run("run", "books", "--demo", "--json")
    assert ended.code == 0, ended
    assert ended.json()["items"] == len(BOOKS)


def test_single_or_distributed_is_one_word(project: Shell) -> None:
    with DemoSite() as site:
        words = ("run", "books", site.url, "--allow-private", "--no-robots", "--out", "books.jsonl")
        here = project.run(*words, "--json", env={"SHOAL_RATE": "none", "SHOAL_PER_HOST": "8"})
        assert here.code == 0, here
        path = project.root / "scrapers.py"
        path.write_text(path.read_text().replace('rate="1/s"', 'rate="1/s", execution="distributed"'))
        away = project.run(*words, env={"SHOAL_RATE": "none", "SHOAL_PER_HOST": "8"})
        answer = away.json()
        assert (away.code, answer["status"], answer["enqueued"]) == (0, "queued", 1), away
        worker = project.run(*shlex.split(answer["worker_command"])[1:])
        assert worker.code == 0, worker
        single = [item["url"] for item in project.items(here.json()["job"])]
        assert sorted(single) == sorted(item["url"] for item in project.items(answer["run_id"]))
        assert len(single) == len(BOOKS)
        assert project.run("run", "books", "--demo").code == 2, "workers would not find the demo site"


def test_urls_come_from_one_place(project: Shell) -> None:
    assert project.run("run", "books", "http://a.test/", "--demo").code == 2
    assert project.run("run", "books", "http://a.test/", "--urls-file", "x").code == 2
    no_start = project.run("run", "books")
    assert (no_start.code, "shoal run books URL" in no_start.err) == (2, True)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(shell: Shell, name: str) -> None:
    place = shell.root / "mine"
    place.mkdir()
    (place / name).write_text("mine")
    ended = shell.run("init", "mine")
    assert ended.code == 2, ended
    assert name in ended.err and "hint" in ended.err
    assert {path.name: path.read_text() for path in place.iterdir()} == {name: "mine"}


def test_a_directory_is_made(shell: Shell) -> None:
    ended = shell.run("init", "some/where")
    assert (ended.code, ended.out) == (0, "")
    assert "cd some/where && shoal run books --demo" in ended.err
    assert sorted(path.name for path in (shell.root / "some/where").iterdir()) == sorted(FILES)


def test_a_place_that_cannot_be(shell: Shell) -> None:
    (shell.root / "file").write_text("")
    ended = shell.run("init", "file/x")
    assert (ended.code, "Traceback" in ended.err) == (2, False), ended
    assert shell.run("init", "/proc/nothing").code == 2


def test_its_settings_can_be_read(project: Shell) -> None:
    """Each that is commented out is one that exists."""
    import tomllib

    from shoal.settings import Settings

    text = (project.root / "shoal.toml").read_text()
    on = "\n".join(line.removeprefix("# ") if " = " in line else "" for line in text.splitlines())
    settings = tomllib.loads(on)
    assert settings["app"] == "scrapers.py" and len(settings) > 5
    assert set(settings) <= set(Settings.model_fields)
