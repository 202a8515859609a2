"""Which backend keeps which chapter of its contract: told by the run itself.

`make matrix` runs the contract suites with SHOAL_MATRIX=docs/reference/backends.md; the page is
written only if every backend was really examined.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

HEAD = """<!-- Made by `make matrix` from a run of the contract suites. -->

# Which backend keeps which promise

Each row is a chapter of a contract suite in `shoal.testing`, each column a backend on a real, private server.
A cell shows how many tests passed; anything else is in words.
"""
TITLES = {
    "frontier": "## Frontiers",
    "dispatch": "## Dispatches",
}
MACHINE = "State machine against the memory frontier"


def pytest_configure(config: pytest.Config) -> None:
    where = os.environ.get("SHOAL_MATRIX")
    if where and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Matrix(Path(where)), "matrix")


@pytest.fixture(autouse=True)
def chapter(request: pytest.FixtureRequest, record_property: object) -> None:
    """The class that a test was written in; xdist carries it to where the page is made."""
    if callable(record_property) and request.function is not None:
        record_property("chapter", request.function.__qualname__.partition(".")[0])


class Matrix:
    def __init__(self, where: Path) -> None:
        self._where = where
        self._cells: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = re.search(r"::Test([A-Z][a-z]+)(Machine)?(?:::|$)", report.nodeid)
        named = dict(report.user_properties).get("chapter", "")
        if found is None:
            return
        backend, chapter = found[1], str(named)
        if "Machine" in report.nodeid:
            chapter = MACHINE
        elif not chapter or chapter.startswith("Test"):
            return
        kind = "dispatch" if chapter == "DispatchContract" else "frontier"
        self._cells[kind, chapter, backend][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.testsfailed:
            return
        lines = [HEAD]
        for kind, title in TITLES.items():
            mine = {key[1:]: cell for key, cell in self._cells.items() if key[0] == kind}
            backends = sorted({backend for _, backend in mine}, key=_order)
            if not backends:
                continue
            lines += [title, ""]
            lines.append(f"| chapter | {' | '.join(backends)} |")
            lines.append("|---" * (len(backends) + 1) + "|")
            for chapter in sorted({chapter for chapter, _ in mine}, key=lambda name: (name == MACHINE, name)):
                cells = (_told(mine.get((chapter, backend))) for backend in backends)
                lines.append(f"| {_words(chapter)} | {' | '.join(cells)} |")
            lines.append("")
        self._where.write_text("\n".join(lines), encoding="utf-8")


def _order(backend: str) -> tuple[int, str]:
    usual = ["Memory", "Sqlite", "Redis", "Postgres", "Local", "Rabbitmq"]
    return (usual.index(backend) if backend in usual else len(usual), backend)


def _told(cell: Counter[str] | None) -> str:
    if not cell:
        return "–"
    return ", ".join(str(n) if outcome == "passed" else f"{n} {outcome}" for outcome, n in cell.items())


def _words(chapter: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", chapter).capitalize()
