"""Numbered migrations, written in the `.sql` file beside their backend.

    -- migration 7: lanes by region
    -- migration 8 (compatible): a column that the release before does not look at

A store remembers its version and the oldest release that may still use it. A migration marked
`(compatible)` lets the release just before it go on, so that workers can be replaced one by one; any
other one shuts older releases out.
"""

from __future__ import annotations

import re
from importlib.resources import files

from shoal.errors import FrontierError

_MARK = re.compile(r"^-- migration (\d+)( \(compatible\))?:.*$", re.MULTILINE)


def migrations(file: str) -> list[tuple[int, str]]:
    """The migrations of `file` in order: (number, SQL). Numbers run 1, 2, 3… without a hole."""
    text = source(file)
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = [(int(mark[1]), text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    assert [number for number, _ in found] == list(range(1, len(found) + 1)), f"{file}: numbers have a hole"
    return found


def oldest_after(file: str, version: int) -> int:
    """The oldest release, by the last migration it knows, that may use a store at `version`."""
    marks = [mark for mark in _MARK.finditer(source(file)) if int(mark[1]) == version]
    return version - 1 if marks and marks[0][2] else version


def pending(file: str, version: int, where: str, *, oldest: int | None = None) -> list[tuple[int, str]]:
    """What remains to be done at `version`. Refuses a store made by a newer release, unless it says
    (`oldest`) that this one may still use it."""
    steps = migrations(file)
    if version > len(steps) and (oldest is None or oldest > len(steps)):
        raise FrontierError(
            f"{where} has schema {version}, this release knows {len(steps)}",
            hint="upgrade shoal, or begin anew with another --frontier; what versions before 0.1.0 made"
            " is not read",
        )
    return steps[version:]


def source(file: str) -> str:
    """The text of a backend's `.sql` file."""
    return files("shoal.frontier").joinpath(file).read_text("utf-8")
