"""What tests of the commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.__main__ import main
from tests.rig.command import Ran, Shell

Shoal = Callable[..., Ran]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """The command in an empty directory. Whatever it started is gone after the test."""
    with Shell(tmp_path) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own to stand in; nobody's settings reach it."""
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shoal(place: Path, capsys: pytest.CaptureFixture[str]) -> Shoal:
    """The command in this process, in `place`."""

    def call(*words: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        told = capsys.readouterr()
        return Ran(int(ended.value.code or 0), told.out, told.err)

    return call
