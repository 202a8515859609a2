"""Numbered migrations, written in the `.sql` file beside their backend.

    -- migration 7: lanes by region
    -- migration 8 (compatible): a column that the previous release ignores

A store remembers its version and the oldest release that may still use it. A migration marked
`(compatible)` lets the previous release keep working, so that workers can be replaced one by one; any
other migration locks older releases out.
"""

from __future__ import annotations

import re
from importlib.resources import files

from shoal.errors import FrontierError

_MARK = re.compile(r"^-- migration (\d+)( \(compatible\))?:.*$", re.MULTILINE)


def migrations(file: str) -> list[tuple[int, str]]:
    """Return the migrations of `file` in order: (number, SQL). Numbers run 1, 2, 3… without a gap."""
    text = source(file)
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = [(int(mark[1]), text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]
    assert [number for number, _ in found] == list(range(1, len(found) + 1)), f"{file}: numbers have a gap"
    return found


def oldest_after(file: str, version: int) -> int:
    """Return the oldest release that may use a store at `version`, as the last migration it knows."""
    marks = [mark for mark in _MARK.finditer(source(file)) if int(mark[1]) == version]
    return version - 1 if marks and marks[0][2] else version


def pending(file: str, version: int, where: str, *, oldest: int | None = None) -> list[tuple[int, str]]:
    """Return the migrations that a store at `version` still needs. Refuses a store of a newer release,
    unless the store allows this one (`oldest`)."""
    steps = migrations(file)
    if version > len(steps) and (oldest is None or oldest > len(steps)):
        raise FrontierError(
            f"{where} has schema {version}, but this release only knows schemas up to {len(steps)}",
            hint="upgrade shoal, or start with a new --frontier; stores made by versions before 0.1.0"
            " cannot be read",
        )
    return steps[version:]


def source(file: str) -> str:
    """Return the text of a backend's `.sql` file."""
    return files("shoal.frontier").joinpath(file).read_text("utf-8")
