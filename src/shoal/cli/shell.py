"""`shoal shell`: a Python prompt on one page."""

from __future__ import annotations

import ast
import asyncio
import code
import inspect
import sys
import threading
import types
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from shoal.cli.common import NOTHING, OK
from shoal.cli.options import (
    AllowPrivate,
    Header,
    NoRobots,
    Timeout,
    UserAgent,
    headers_of,
)
from shoal.cli.output import say
from shoal.errors import FetchError, ShoalError, UsageError
from shoal.printing import printable

if TYPE_CHECKING:
    from shoal.app import Session
    from shoal.scrape.page import Element, Page
    from shoal.settings import Settings

T = TypeVar("T")

FAILED = 1
"""Exit code if the given code raised."""

HELP = """\
page       the page: page.title, page.text("h1"), page.markdown(), page.follow_all("a")…
response   the server's response: status, headers, body, seconds
css(s)     elements that match a CSS selector;  xpath(s)  the same with XPath
links()    canonical URLs of all links, each once
view()     the main text of the page
fetch(url) replace the page with another: a URL, a link of this page, or an element with one

`await` works at the prompt. Ctrl-D exits."""


def shell(
    url: str,
    *,
    command: Annotated[str | None, Parameter(name=["--command", "-c"])] = None,
    timeout: Timeout = None,
    user_agent: UserAgent = None,
    header: Header = None,
    no_robots: NoRobots = None,
    allow_private: AllowPrivate = None,
) -> int:
    """Fetch one page and open a Python prompt on it.

    Redirects are followed. The prompt has `page`, `response`, `css(…)`, `xpath(…)`, `links()`, `view()` and
    `fetch(url)`. Code can also come from -c or from stdin: the value of each expression is printed, and the
    exit code is 1 if the code raises.

    Parameters
    ----------
    url
        The URL of the page.
    command
        Run this code instead of opening a prompt.
    """
    from shoal.settings import load

    settings = load(
        timeout=timeout,
        user_agent=user_agent,
        headers=headers_of(header),
        no_robots=no_robots,
        allow_private=allow_private,
        frontier="memory:",
    )
    with _Fetching(settings) as fetching:
        try:
            page = fetching.scrape(url)
        except FetchError as error:
            say(f"error: {url}: {error.error}: {error.message}")
            if error.hint:
                say(f" hint: {error.hint}")
            return NOTHING
        if page.status >= 400:
            say(f"{page.url}: the server answered {page.status}")
        prompt = Prompt(page, fetching)
        if command is not None:
            return prompt.run(command)
        if not sys.stdin.isatty():
            return prompt.run(sys.stdin.read())
        prompt.interact(banner=f"{_summary(page)}\n\n{HELP}", exitmsg="")
        return OK


class _Fetching:
    """A session on its own thread: it continues to run while the prompt blocks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-shell", daemon=True)

    def __enter__(self) -> _Fetching:
        from shoal.app import Session

        self._thread.start()
        self._opened = Session.opened(self._settings)
        self._session: Session = self.wait(self._opened.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self._opened.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work on the loop's thread and returns its result. Ctrl-C cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("fetch() cannot be called from async code", hint="call it at the prompt")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def scrape(self, url: str) -> Page:
        return self.wait(self._session.scrape(url))


class Prompt(code.InteractiveConsole):
    """A Python prompt with a page in it."""

    def __init__(self, page: Page, fetching: _Fetching) -> None:
        self._fetching = fetching
        self._raised = False
        super().__init__(
            {
                "__name__": "__console__",
                "css": self._css,
                "xpath": self._xpath,
                "links": self._links,
                "view": self._view,
                "fetch": self._fetch,
            }
        )
        self.compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._show(page)

    @property
    def page(self) -> Page:
        """The current value of `page`, which may have been reassigned at the prompt."""
        page: Page = self.locals["page"]
        return page

    def run(self, text: str) -> int:
        """Runs code that was given in one piece. Returns the exit code."""
        try:
            statements = ast.parse(text, "<shell>").body
        except SyntaxError:
            self.showsyntaxerror("<shell>")
            return FAILED
        for statement in statements:
            # One statement at a time, as at the prompt, so that values of expressions are printed.
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            self.runcode(compile(ast.Interactive([statement]), "<shell>", "single", flags=flags))
            if self._raised:
                return FAILED
        return OK

    def runcode(self, code: types.CodeType) -> None:
        try:
            answer = types.FunctionType(code, self.locals)()
            if inspect.iscoroutine(answer):
                self._fetching.wait(answer)
        except (SystemExit, KeyboardInterrupt):
            raise
        except ShoalError as error:
            # Our own errors need no traceback: a bad selector, a failed fetch.
            self._raised = True
            say(f"error: {error}")
            if error.hint:
                say(f" hint: {error.hint}")
        except BaseException:
            self._raised = True
            self.showtraceback()

    def interact(self, banner: str | None = None, exitmsg: str | None = None) -> None:
        with _line_editing(self.locals):
            super().interact(banner, exitmsg)

    def _show(self, page: Page) -> None:
        self.locals["page"] = page
        self.locals["response"] = page.response

    def _css(self, selector: str) -> list[Element]:
        return self.page.css(selector)

    def _xpath(self, expression: str) -> list[Any]:
        return self.page.xpath(expression)

    def _links(self) -> list[str]:
        return self.page.links()

    def _fetch(self, url: str | Element) -> Page:
        page = self._fetching.scrape(self.page.follow(url).url)
        self._show(page)
        return page

    def _view(self) -> None:
        print(printable(self.page.markdown()))  # noqa: T201


def _summary(page: Page) -> str:
    size = f"{len(page.body):,} bytes"
    return printable(f"{page.status} {page.url}\n{page.title or 'no title'}, {page.content_type}, {size}")


@contextmanager
def _line_editing(names: Any) -> Iterator[None]:
    """Arrow keys, history and completion, where Python has readline."""
    try:
        import readline
        import rlcompleter
    except ImportError:
        yield
        return
    before = readline.get_completer()
    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
