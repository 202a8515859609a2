"""Numbered migrations, written in the `.sql` file beside their backend."""

from __future__ import annotations

import re
from importlib.resources import files

from shoal.errors import FrontierError

_MARK = re.compile(r"^-- migration (\d+):.*$", re.MULTILINE)


def migrations(file: str) -> list[tuple[int, str]]:
    """The migrations of `file` in order: (number, SQL). Numbers run 1, 2, 3… without a hole."""
    text = files("shoal.frontier").joinpath(file).read_text("utf-8")
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = [(int(mark[1]), text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    assert [number for number, _ in found] == list(range(1, len(found) + 1)), f"{file}: numbers have a hole"
    return found


def pending(file: str, version: int, where: str) -> list[tuple[int, str]]:
    """What remains to be done at `version`. Refuses a store made by a newer release."""
    steps = migrations(file)
    if version > len(steps):
        raise FrontierError(
            f"{where} has schema {version}, this release knows {len(steps)}",
            hint="upgrade shoal, or use another --frontier",
        )
    return steps[version:]
