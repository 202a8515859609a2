"""What every command shares: options, a session, errors as one line and an exit code.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 some URLs ended dead, 2 bad usage,
3 nothing could be fetched, 4 a needed server is unreachable, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from shoal.errors import INTERRUPTED, ShoalError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from rich.console import Console

    from shoal.app import Session
    from shoal.settings import Settings

OK, SOME_DEAD, USAGE, NOTHING, UNREACHABLE = 0, 1, 2, 3, 4
PATIENT = 2
"""Interrupts that ask: finish, then stop at once. The next one does not ask."""

Frontier = Annotated[
    str | None,
    Parameter(
        env_var="SHOAL_FRONTIER",
        help="Where requests wait: sqlite:///path, redis://host, postgresql://host/database or memory:.",
    ),
]
Dispatch = Annotated[
    str | None,
    Parameter(env_var="SHOAL_DISPATCH", help="How leases reach workers: amqp://host; without it they claim."),
]


def _file_or_stdin(_type: object, value: str | None) -> None:
    if value is not None and value.startswith("-") and value != "-":
        raise ValueError(f"{value} is an option; a file, or - for stdin, comes first")


UrlsFile = Annotated[str | None, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
"""`-` is stdin, which cyclopts would take for an option."""
Count = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
"""A number of things. Refused where it is typed: 0 must not pass for "not given", and the error names the
flag, not the setting behind it."""
Visits = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=2000))]
Workers = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=256))]
Seconds = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]
UrlOrStdin = Annotated[str, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
Many = Annotated[list[str] | None, Parameter(negative=())]
Flag = Annotated[bool, Parameter(negative=())]
Switch = Annotated[bool | None, Parameter(negative=())]
"""A flag that is a setting too: not said, the settings decide."""
Json = Annotated[bool, Parameter(negative=(), help="Machine-readable output.")]


class Signals:
    """SIGINT and SIGTERM call `handler` while the body runs. `code` is what a command that runs until
    it is stopped exits with: a Ctrl-C interrupts it, SIGTERM is how it is meant to end. Who presses Ctrl-C
    a third time waits for something that does not come, and is let go at once."""

    def __init__(self, handler: Callable[[], object]) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._interrupts = 0
        self.code = OK

    def __enter__(self) -> Signals:
        for number, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, OK)):
            self._loop.add_signal_handler(number, self._called, code)
        return self

    def _called(self, code: int) -> None:
        self.code = code
        self._interrupts += code == INTERRUPTED
        if self._interrupts > PATIENT:
            raise KeyboardInterrupt  # out of the loop: what runs is cancelled
        self._handler()

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


def open_session(*, create: bool = True, **given: Any) -> AbstractAsyncContextManager[Session]:
    """A session with these settings; None leaves a setting to the environment and the files.
    Commands that only ask pass `create=False`: asking must leave neither a file nor tables behind."""
    from shoal.app import Session
    from shoal.settings import load

    return Session.opened(load(**given), create=create)


@asynccontextmanager
async def working_session(
    settings: Settings, *, allow: tuple[str, ...] = (), patient: bool = True, quiet: bool = False
) -> AsyncIterator[Session]:
    """A session for a command that works. It waits for a server that is still starting (`patient`),
    and says aloud what that server may lose: whoever starts it can still change that. Where one command
    starts others, it is the one that says so."""
    from shoal.app import Session
    from shoal.cli.variables import PARENT
    from shoal.registry import on_server

    async with Session.opened(settings, allow=allow, tell=say if patient else None) as session:
        started_by_us = os.environ.get(PARENT) == str(os.getppid())
        if not quiet and not started_by_us and on_server(settings.frontier):
            for remark in await session.frontier.remarks():
                say(f"not durable: {remark}")
        yield session


def settle_in() -> None:
    """For a process that crawls: it makes many short-lived objects and hardly a cycle, so the
    collector need not look at everything every 700 of them (measured: 5 to 10 % of the CPU)."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def run(work: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a command's async body. Answers its exit code."""
    return asyncio.run(work()) or OK


def talk() -> Console:
    """The console for people: stderr, colours only on a terminal, NO_COLOR respected."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def table_console() -> Console:
    """The console for tables that are the answer: stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def say(text: str) -> None:
    """One line to people. No markup: text may come from the web."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def emit(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, ensure_ascii=False, default=str), flush=True)  # noqa: T201


def printable(text: str) -> str:
    """Text from the web without what could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def fail(error: ShoalError) -> int:
    """Tell an error as one line and a hint. Answers the exit code."""
    say(f"error: {error}")
    if error.hint:
        say(f" hint: {error.hint}")
    return error.exit_code
