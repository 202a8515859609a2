"""What all commands share: a session, signals, and errors as one line and an exit code.

Data goes to stdout, messages to stderr. Exit codes: 0 done, 1 some URLs failed for good, 2 bad usage,
3 nothing could be fetched, 4 a needed server is unreachable, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from shoal.cli.output import logged, say
from shoal.errors import INTERRUPTED, ShoalError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from shoal.app import Application, Session
    from shoal.settings import Settings

OK, SOME_DEAD, USAGE, NOTHING, UNREACHABLE = 0, 1, 2, 3, 4
PATIENT = 2
"""Interrupts that are handled: the first finishes, the second stops at once. The next one kills."""


class Signals:
    """SIGINT and SIGTERM call `handler` while the body runs. `code` is the exit code of a command that
    runs until it is stopped: 130 after Ctrl-C, 0 after SIGTERM, which is its normal end. A third Ctrl-C
    raises KeyboardInterrupt at once: the handler waits for something that does not come."""

    def __init__(self, handler: Callable[[], object]) -> None:
        import asyncio

        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._interrupts = 0
        self.code = OK

    def __enter__(self) -> Signals:
        for number, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, OK)):
            self._loop.add_signal_handler(number, self._on_signal, code)
        return self

    def _on_signal(self, code: int) -> None:
        self.code = code
        self._interrupts += code == INTERRUPTED
        if self._interrupts > PATIENT:
            raise KeyboardInterrupt  # leaves the loop, which cancels its tasks
        self._handler()

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


def app_of(settings: Settings) -> Application | None:
    """Returns the application that the settings name, for a session to adopt; None if they name none.
    Loaded before anything is opened: an error in it must appear at once, not with the first job that needs
    it. Raises UsageError."""
    from shoal.app import load_app

    return load_app(settings.app) if settings.app else None


def open_session(*, create: bool = True, **given: Any) -> AbstractAsyncContextManager[Session]:
    """Opens a session with these settings; None leaves a setting to the environment and the files.
    Commands that only read pass `create=False`: reading must leave neither a file nor tables behind."""
    from shoal.app import Session

    return Session.opened(shared(**given), create=create)


def shared(*, quiet: bool = False, logs: str = "error", **given: Any) -> Settings:
    """Returns the settings of a command that shares a frontier with other processes. If only a broker of
    Celery workers is named, the frontier is the one that those workers use, and a message says so. Sets up
    logging, by default from the level `logs`."""
    from shoal.registry import place
    from shoal.settings import load

    settings = logging_as(logs, load(**given), quiet=quiet)
    if settings.frontier or not settings.celery_named or not settings.celery_frontier:
        return settings
    if not quiet:
        where = place(settings.celery_frontier)
        say(f"frontier: {where}, as for Celery workers (CELERY_BROKER_URL is set); --frontier overrides it")
    return settings.model_copy(update={"frontier": settings.celery_frontier})


def logging_as(usual: str, settings: Settings, *, quiet: bool = False) -> Settings:
    """Set up logging from the settings. The default level is `usual`, or error if quiet. Returns the settings
    with the level."""
    from shoal.logs import set_up

    level = settings.log_level or ("error" if quiet else usual)
    set_up(level, settings.log_format)
    return settings.model_copy(update={"log_level": level})


@asynccontextmanager
async def working_session(
    settings: Settings, *, patient: bool = True, quiet: bool = False
) -> AsyncIterator[Session]:
    """Opens a session for a command that works on jobs. With `patient`, it waits for a server that is still
    starting. It prints what that server may lose, while this can still be changed; a command that another
    one has started leaves that to it."""
    from shoal.app import Session
    from shoal.cli.variables import PARENT
    from shoal.registry import on_server

    async with Session.opened(settings, tell=say if patient else None) as session:
        started_by_us = os.environ.get(PARENT) == str(os.getppid())
        if not quiet and not started_by_us and on_server(settings.frontier):
            for warning in (await session.frontier.info()).warnings:
                say(f"not durable: {warning}")
        yield session


def settle_in() -> None:
    """Tunes the garbage collector for a process that crawls. It makes many short-lived objects and hardly
    any cycle, so a collection for every 700 of them is wasted (measured: 5 to 10 % of the CPU)."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def run(work: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Runs a command's async body. Returns its exit code."""
    import asyncio  # not at the top: it would add a tenth to the time of `shoal --help`

    return asyncio.run(work()) or OK


def fail(error: ShoalError) -> int:
    """Prints an error as one line and a hint. Returns its exit code."""
    if logged(str(error), error=True, hint=error.hint):
        return error.exit_code
    say(f"error: {error}")
    if error.hint:
        say(f" hint: {error.hint}")
    return error.exit_code
