"""Frontiers, dispatches and exporters of installed packages, by the names in their entry points."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Shoal
from shoal.demo.books import DemoSite, pages
from shoal.errors import BrokenPlugin, UsageError
from shoal.export.formats import exporter_for
from shoal.frontier.memory import MemoryFrontier
from shoal.registry import in_process, migrate, on_server, open_dispatch, open_frontier, place
from tests.rig.command import Shell
from tests.rig.plugin import describe, install, on_path

QUICK = ("--rate", "none", "--per-host", "8", "--allow-private")
JOURNAL = "journal://crawl.journal"


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with DemoSite() as site:
        yield site.url


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with on_path(install(tmp_path_factory.mktemp("site-packages"))):
        yield


@pytest.fixture
def shell(installed: None, tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as made:
        yield made


def stored(path: Path) -> list[dict[str, str]]:
    head, *lines = (line.split("\t") for line in path.read_text().splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


# -- the example package, by the command -------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--workers", "2"), ("--dispatch", "folder://messages")], ids=str)
def test_a_crawl_on_foreign_parts(shell: Shell, site: str, more: tuple[str, ...]) -> None:
    done = shell.run("crawl", site, "--frontier", JOURNAL, "--out", "pages.tsv", *QUICK, *more, "--json")
    assert done.code == 1, done.err  # the demo site has one missing page
    summary = done.json()
    assert (summary["status"], summary["items"]) == ("done", len(pages()))
    items = stored(shell.root / "pages.tsv")
    assert len({item["url"] for item in items}) == len(items) == len(pages())
    assert not (shell.root / ".shoal" / "shoal.db").exists(), "the built-in frontier was used"
    assert ((shell.root / "messages").exists()) is ("--dispatch" in more)
    status = shell.run("status", summary["job"], "--frontier", JOURNAL, "--json").json()
    assert status["state"] == "done", status
    exported = shell.run("export", summary["job"], "--to", "again.tsv", "--frontier", JOURNAL)
    assert exported.code == 0, exported.err
    assert sorted(stored(shell.root / "again.tsv"), key=str) == sorted(items, key=str)


def test_doctor_and_migrate_with_a_foreign_frontier(shell: Shell) -> None:
    """The journal's object has no attribute that they could look for; and doctor makes nothing."""
    unmade = shell.run("doctor", "--frontier", JOURNAL, "--json").json()
    assert not (shell.root / "crawl.journal").exists()
    assert [row["remark"] for row in unmade["checks"] if row["part"] == "frontier"] == [
        f"{JOURNAL}: none yet, the first crawl creates it"
    ]
    moved = shell.run("migrate", "--frontier", JOURNAL)
    assert moved.code == 0, moved.err
    assert "is up to date" in moved.err
    checked = shell.run("doctor", "--frontier", JOURNAL, "--dispatch", "folder://messages", "--json").json()
    states = {row["part"]: row["state"] for row in checked["checks"]}
    assert checked["ok"] is True, checked
    assert (states["frontier"], states["invariants"], states["dispatch"]) == ("ok", "ok", "ok")


def test_a_crawl_goes_on_from_a_journal_with_a_torn_end(shell: Shell, site: str) -> None:
    words = ("crawl", site, "--frontier", JOURNAL, "--out", "pages.tsv", *QUICK)
    assert shell.run(*words, "--max-pages", "5").code == 0
    with (shell.root / "crawl.journal").open("ab") as torn:
        torn.write(b'00000000 [1.0,"settle",')
    assert shell.run(*words, "--max-pages", "100", "--resume").code in (0, 1)
    items = stored(shell.root / "pages.tsv")
    assert len({item["url"] for item in items}) == len(items)


# -- any package -------------------------------------------------------------------------------

MODULE = """
from shoal.frontier.memory import MemoryFrontier
from shoal.registry import FrontierKind

async def open_shared(address, *, create):
    return MemoryFrontier()

ALONE = FrontierKind(open_shared, reach="process")
TEXT = "not callable"

class Spool:
    def __init__(self, out, job):
        self.out, self.job = out, job
"""


@pytest.fixture
def packages(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "strange_parts.py").write_text(MODULE)
    with on_path(tmp_path):
        yield tmp_path


def offer(folder: Path, group: str, package: str = "strange-parts", **points: str) -> None:
    describe(folder, package, "1.0", {f"shoal.{group}": points})


async def test_a_function_is_enough_and_counts_as_shared(packages: Path) -> None:
    offer(packages, "frontiers", mine="strange_parts:open_shared")
    assert type(await open_frontier("mine://user:secret@host/x")) is MemoryFrontier
    assert on_server("MINE://host")
    assert not in_process("mine://host")
    assert place("mine://user:secret@host/x") == "mine://user:***@host/x"
    assert await migrate("mine://host") == (0, 0)


async def test_a_frontier_may_say_that_it_lives_in_one_process(packages: Path) -> None:
    offer(packages, "frontiers", alone="strange_parts:ALONE")
    assert in_process("alone://x")
    with Shell(packages) as shell:
        done = shell.run("crawl", "http://a.example/", "--frontier", "alone://x", "--workers", "2")
    assert done.code == 2
    assert "worker processes cannot share" in done.err


async def test_python_takes_such_addresses_too(packages: Path, site: str) -> None:
    offer(packages, "frontiers", alone="strange_parts:ALONE")
    settings: dict[str, Any] = {"rate": "none", "allow_private": True, "max_pages": 2}
    assert (await Shoal(frontier="alone://x", **settings).crawl(site)).items == 2


def test_an_exporter_by_scheme_and_by_a_double_ending(packages: Path) -> None:
    offer(packages, "exporters", spool="strange_parts:Spool", **{"warc.gz": "strange_parts:Spool"})
    assert vars(exporter_for("spool://here/x", "job")) == {"out": "spool://here/x", "job": "job"}
    assert vars(exporter_for("pages.2026.warc.gz", "job"))["out"] == "pages.2026.warc.gz"


@pytest.mark.parametrize(
    ("group", "name", "use"),
    [
        ("frontiers", "alone", lambda: in_process("nosuch://x")),
        ("dispatches", "pigeon", lambda: open_dispatch("nosuch://x")),
        ("exporters", "spool", lambda: exporter_for("x.nosuch", "")),
        ("exporters", "spool", lambda: exporter_for("nosuch://x", "")),
    ],
)
def test_what_is_unknown_is_told_with_what_there_is(packages: Path, group: str, name: str, use: Any) -> None:
    offer(packages, group, **{name: "strange_parts:ALONE"})
    with pytest.raises(UsageError, match="nosuch") as told:
        use()
    assert f"{name} (strange-parts)" in told.value.hint
    assert f"entry point group shoal.{group}" in told.value.hint


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("strange_parts:nothing", "has no attribute 'nothing'"),
        ("strange_parts:TEXT", "'not callable' cannot be called"),
    ],
)
@pytest.mark.parametrize(
    ("group", "use"),
    [
        ("frontiers", lambda: in_process("x://x")),
        ("dispatches", lambda: open_dispatch("x://x")),
        ("exporters", lambda: exporter_for("y.x", "")),
    ],
)
def test_a_broken_package_is_named(packages: Path, group: str, use: Any, value: str, why: str) -> None:
    offer(packages, group, x=value)
    with pytest.raises(BrokenPlugin, match="the package strange-parts is broken") as told:
        use()
    assert why in str(told.value)
    assert "strange-parts" in told.value.hint


def test_two_packages_with_one_name_are_refused(packages: Path) -> None:
    offer(packages, "exporters", x="strange_parts:Spool")
    offer(packages, "exporters", "other-parts", x="strange_parts:Spool")
    with pytest.raises(UsageError, match=r"several packages offer 'x'.*other-parts, strange-parts"):
        exporter_for("y.x", "")


async def test_a_built_in_name_cannot_be_taken_over(packages: Path, tmp_path: Path) -> None:
    offer(packages, "frontiers", sqlite="strange_parts:open_shared")
    frontier = await open_frontier(f"sqlite:///{tmp_path}/x.db")
    assert type(frontier) is not MemoryFrontier
    await frontier.close()


async def test_entry_points_are_read_for_unknown_names_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(**_: object) -> None:
        raise AssertionError("looked through all installed packages")

    monkeypatch.setattr(importlib.metadata, "entry_points", never)
    await (await open_frontier(str(tmp_path / "x.db"))).close()
    for address in ("", "memory:", "redis://h", "postgresql://h/d"):
        on_server(address)
    exporter_for("x.jsonl", "")
    open_dispatch("amqp://h")
    with pytest.raises(AssertionError):
        in_process("nosuch://x")
