"""Hints work as they are typed."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shoal.calling import install
from shoal.errors import MissingExtra
from tests.rig.command import SHOAL, Shell

SCRIPT = Path(sys.executable).with_name("shoal")


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    with Shell(tmp_path) as made:
        yield made


def hint_of(shell: Shell, program: tuple[str, ...], path: str = "/usr/bin:/bin") -> str:
    ended = shell.start("status", "nope", program=program, env={"PATH": path}).wait()
    assert ended.code == 2
    return ended.err.splitlines()[1].removeprefix(" hint: ")


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command `shoal` is not installed beside this Python")
def test_a_command_is_told_as_it_was_called(shell: Shell) -> None:
    rest = " jobs` lists the jobs of this frontier"
    (shell.root / "my bin").mkdir()
    (shell.root / "my bin" / "shoal").symlink_to(SCRIPT)
    assert hint_of(shell, (str(SCRIPT),)) == f"`{SCRIPT}{rest}"
    assert hint_of(shell, ("my bin/shoal",)) == f"`'my bin/shoal'{rest}"
    assert hint_of(shell, SHOAL) == f"`shoal{rest}"
    assert hint_of(shell, (str(SCRIPT),), str(SCRIPT.parent)) == f"`shoal{rest}", "it is on the path"


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command `shoal` is not installed beside this Python")
def test_the_summary_tells_commands_that_work(shell: Shell) -> None:
    program, env = (str(SCRIPT),), {"PATH": "/usr/bin:/bin"}
    crawl = shell.start("crawl", "--demo", "--json", program=program, env=env).wait()
    (line,) = [line for line in crawl.err.splitlines() if line.startswith("results")]
    assert line.split(maxsplit=1)[1] == f"{SCRIPT} results {crawl.json()['job']}"
    assert f"({SCRIPT} dead list --job" in crawl.err


class Installed:
    def __init__(self, told: str | None) -> None:
        self._told = told

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._told


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (None, "install 'shoal[parquet]'"),
        ('{"url": "file:///PLACE", "dir_info": {"editable": true}}', "install -e '.[parquet]'"),
        ('{"url": "file:///PLACE", "dir_info": {}}', "install '.[parquet]'"),
        ('{"url": "file:///else/w%20here", "dir_info": {}}', "install '/else/w here[parquet]'"),
        ('{"url": "https://host.test/shoal.whl", "archive_info": {}}', "install 'shoal[parquet]'"),
        ("noise", "install 'shoal[parquet]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_rest_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = Installed(told.replace("/PLACE", str(tmp_path)) if told else told)
    monkeypatch.setattr(metadata, "distribution", lambda _: answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install("parquet") == f"{sys.executable} -m pip {words}"
    assert MissingExtra("writing Parquet", "parquet").hint == install("parquet")


def test_pip_is_called_by_its_name_where_that_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(json.dumps({})))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install("redis") == "pip install 'shoal[redis]'"
