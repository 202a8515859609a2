"""The examples run as they are and print what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.demo.books import BOOKS, pages

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, folder: Path) -> list[str]:
    """The lines that an example prints, run in an empty folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "bookshop.py",
        "client.py",
        "crawl_site.py",
        "custom_items.py",
        "celery_pages.py",  # in test_celery.py
        "celery_site.py",  # in test_celery.py
        "hooks.py",
        "resume.py",
        "work_table.py",  # in test_work_table.py, on every frontier
    }


def test_crawl_site_sees_every_page(tmp_path: Path) -> None:
    *lines, last = run("crawl_site.py", tmp_path)
    assert last == f"{len(pages())} pages"
    assert all(line.startswith("200  http://127.0.0.1:") for line in lines)


def test_bookshop_finds_every_book(tmp_path: Path) -> None:
    *lines, last = run("bookshop.py", tmp_path)
    assert sorted(lines) == sorted(
        f"€ {book.price:>5}".rjust(8) + f"  {book.title}, by {book.author}" for book in BOOKS
    )
    assert last.startswith(f"{len(BOOKS)} books on ")


def test_hooks_change_and_drop_items(tmp_path: Path) -> None:
    cheap = [book for book in BOOKS if float(book.price) <= 12]
    assert 0 < len(cheap) < len(BOOKS)
    expected = sorted(f"{float(book.price):6.2f}  {book.title}" for book in cheap)
    assert sorted(run("hooks.py", tmp_path)) == expected


def test_client_speaks_to_a_service(tmp_path: Path) -> None:
    first, second, *results = run("client.py", tmp_path)
    assert first == f"SUCCESS: {len(pages())} pages, 1 failed"
    assert second.startswith(f"{len(pages())} items, the first is ")
    assert [line.split() for line in results] == [
        ["success", "/"],
        ["success", "about"],
        ["failed", "missing"],
    ]


def test_custom_items_are_typed(tmp_path: Path) -> None:
    (line,) = run("custom_items.py", tmp_path)
    items = [json.loads(row) for row in (tmp_path / "shop.jsonl").read_text().splitlines()]
    assert line.startswith(f"{len(items)} items in shop.jsonl (done,")
    assert {"title": "Salt and Parallel", "price": "16.00", "kind": "book"} in items
    assert {"title": "Spring hours", "day": "2024-03-01", "kind": "story"} in items


@pytest.mark.slow
def test_a_killed_crawl_goes_on_and_stores_everything_once(tmp_path: Path) -> None:
    lines = run("resume.py", tmp_path)
    assert lines[0].startswith("killed after ")
    count = len(pages())
    assert lines[-1] == f"{count} items, {count} different, 0 missing"
