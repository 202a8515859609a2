"""`shoal init`: creates a small project. Its files work as they are, without internet."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from shoal.calling import command, nearby
from shoal.cli.common import OK
from shoal.cli.options import Json
from shoal.cli.output import emit, say
from shoal.errors import UsageError

SCRAPERS = '''\
"""The scrapers of this project: `shoal scrapers` lists them, `shoal run NAME` runs one."""

from shoal import Page, Shoal

app = Shoal()


# Name your own site with start=["https://…"], or on the command line: `shoal run books URL`.
# To share a run among many workers, add execution="distributed".
@app.scraper("books", scope="host", rate="1/s")
async def books(page: Page):
    """A page with a list: follow the links to books, and to more lists."""
    for request in page.follow_all("ul.shelf a", label="book"):
        yield request
    for request in page.follow_all("a[href*='/catalogue/']"):
        yield request


@books.handler("book")
async def book(page: Page):
    """A page about one book: yield an item."""
    yield {
        "title": page.text("article h1"),
        "author": page.text(".author"),
        "price": page.text("article .price"),
        "url": page.url,
    }
'''

TESTS = '''\
"""Run with `pytest`. A small site on loopback stands in for the real one: no internet is needed."""

from scrapers import app

from shoal.testing import Call, LoopbackSite, Reply

PAGES = {
    "/": """
        <ul class="shelf"><li><a href="/books/salt">Salt</a></li><li><a href="/books/sand">Sand</a></li></ul>
    """,
    "/books/salt": """
        <article><h1>Salt</h1><p class="author">Ada Shore</p><p class="price">9.50</p></article>
    """,
    "/books/sand": """
        <article><h1>Sand</h1><p class="author">Ben Dune</p><p class="price">12.00</p></article>
    """,
}


def respond(call: Call) -> Reply:
    html = PAGES.get(call.bare)
    return Reply(404) if html is None else Reply(200, html.encode())


def test_books_are_found():
    with LoopbackSite(respond) as site:
        # Loopback is blocked unless allow_private is set. `memory:` leaves no file behind.
        crawl = app.crawl(site.url, scraper="books", frontier="memory:", allow_private=True, rate="none")
        items = sorted(crawl, key=lambda item: item["title"])
        assert items == [
            {"title": "Salt", "author": "Ada Shore", "price": "9.50", "url": f"{site.url}books/salt"},
            {"title": "Sand", "author": "Ben Dune", "price": "12.00", "url": f"{site.url}books/sand"},
        ]
'''

SETTINGS = """\
# Settings of this project. Flags and SHOAL_… environment variables win over them.
# All of them: docs/reference/settings.md; most are flags too: `shoal crawl --help`.

app = "scrapers.py"

# Speed and limits.
# rate = "1/s"            # maximum rate per host; a scraper's own rate wins
# concurrency = 16        # pages that one worker fetches at a time
# workers = 4             # worker processes of `shoal up` and `shoal crawl`
# retries = 2             # how many times a failed URL is retried
# timeout = 60            # maximum number of seconds for one fetch

# The User-Agent header. Say how you can be reached.
# user_agent = "my-project (+https://my.site/contact)"

# Where URLs and results are stored. Default: .shoal/shoal.db, for one machine.
# frontier = "redis://queue.internal:6379/0"
"""

README = """\
# Scrapers

```console
$ python -m pytest              # tests the scrapers on a small loopback site; needs `pip install pytest`
$ shoal run books --demo        # runs one on the demo site that comes with shoal
$ shoal scrapers                # lists the scrapers
```

On a real site:

```console
$ shoal shell https://your.site/                  # try selectors
$ shoal run books https://your.site/ --out books.jsonl
```

`scrapers.py` holds the scrapers, `shoal.toml` the settings, `.shoal/` the state of all runs.
"""

IGNORED = """\
.shoal/
*.jsonl
*.part
__pycache__/
.pytest_cache/
.venv/
"""

FILES = {
    "scrapers.py": SCRAPERS,
    "test_scrapers.py": TESTS,
    "shoal.toml": SETTINGS,
    "README.md": README,
    ".gitignore": IGNORED,
}


def init(directory: Path = Path(), /, *, json: Json = False) -> int:
    """Create a project: a scraper, its test, settings, a README.

    Nothing is overwritten: if one of the files exists, none is written.

    Parameters
    ----------
    directory
        Directory to write to (default: the current one); created if it does not exist.
    """
    taken = [name for name in FILES if (directory / name).exists()]
    if taken:
        there = "exists" if len(taken) == 1 else "exist"
        raise UsageError(
            f"{' and '.join(taken)} already {there} in {_named(directory)}",
            hint="nothing was written; choose another directory: `shoal init DIR`",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            # "x": a file that appeared since the check above is not overwritten.
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(
            f"cannot write to {_named(directory)}: {error.strerror or error}", hint="choose another directory"
        ) from None
    if json:
        emit({"directory": str(directory), "files": list(FILES)})
        return OK
    say(f"{_named(directory)}: {', '.join(FILES)}")
    there = "" if directory == Path() else f"cd {shlex.quote(str(directory))} && "
    python = _after_cd(shlex.quote(nearby(sys.executable)), directory)
    needed = "" if find_spec("pytest") else f"{python} -m pip install pytest && "
    say(f"try it:  {there}{_after_cd(command(), directory)} run books --demo")
    say(f"test it: {there}{needed}{python} -m pytest")
    return OK


def _after_cd(words: str, directory: Path) -> str:
    """Returns a command as it must be typed in the directory: a relative path would lead elsewhere."""
    program, *rest = shlex.split(words)
    if directory != Path() and "/" in program:
        program = str(Path(program).absolute())
    return shlex.join([program, *rest])


def _named(directory: Path) -> str:
    return "this directory" if directory == Path() else str(directory)
