"""The Celery app, its tasks, and what lives in its processes.

Nothing heavy is imported here: whoever only sends tasks, or looks (`celery inspect`, Flower), needs
neither fetcher nor frontier.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
from celery import Celery, signals
from celery.concurrency import get_implementation
from celery.exceptions import Retry
from celery.utils.time import rate

from shoal.celery.config import PROCESS_RESULTS, SCRAPE_SITE, SCRAPE_URL, configuration
from shoal.celery.failure import ScrapeFailed
from shoal.dispatch.celery import VISIT, message_of
from shoal.errors import FrontierError, ShoalError, UsageError
from shoal.politeness.pacing import backoff
from shoal.settings import Settings, load

if TYPE_CHECKING:
    from shoal.app import Session
    from shoal.celery.pump_thread import PumpThread
    from shoal.celery.runtime import Runtime

T = TypeVar("T")

TIMEOUT = 300.0
"""Seconds that a public task may take, unless it asks for more."""
LONGEST_STAY = 60.0
"""Seconds that a visit may wait in its task, however few may begin."""


class Processes:
    """What lives in this process of a Celery worker: the main one has the pump, one that runs tasks a
    runtime. With the pools `solo` and `threads` that is the same one."""

    def __init__(self) -> None:
        self.tasks = 1
        """How many tasks run in one process at a time."""
        self.queues: tuple[str, ...] = ()
        self.stay = 0.0
        """Seconds that a visit may wait in its task for its host's next turn."""
        self._mutex = threading.Lock()
        self._runtime: tuple[int, Runtime] | None = None
        self.pump: PumpThread | None = None

    def runtime(self) -> Runtime:
        """Made when it is first asked for; after a fork, or when it ended, anew."""
        from shoal.celery.runtime import Runtime

        with self._mutex:
            if self._runtime is None or self._runtime[0] != os.getpid() or not self._runtime[1].alive:
                made = Runtime(celery_settings(), self.queues, tasks=self.tasks, stay=self.stay)
                made.start()
                self._runtime = (os.getpid(), made)
            return self._runtime[1]

    def forked(self) -> None:
        """Another thread of the parent may have held the mutex at that moment."""
        self._mutex = threading.Lock()
        self.pump = None

    def close(self) -> None:
        if self.pump is not None:
            self.pump.close()
            self.pump = None
        if self._runtime is not None and self._runtime[0] == os.getpid():
            self._runtime[1].close()
            self._runtime = None


def celery_settings() -> Settings:
    """The settings as Celery workers have them: with the frontier on the broker, if nobody said where."""
    settings = load()
    return settings.model_copy(update={"frontier": settings.celery_frontier})


def _configuration() -> dict[str, Any]:
    try:
        return configuration(load())
    except UsageError as error:
        # The `celery` command tells this one in a line, without a traceback.
        raise click.UsageError(f"{error}; {error.hint}" if error.hint else str(error)) from None


here = Processes()
app = Celery("shoal")
app.add_defaults(_configuration)


# -- tasks ----------------------------------------------------------------------------------


def _visit(task: Any, message: Any) -> dict[str, Any]:
    """Visit the leases of one message. The frontier has the results; this tells how it went."""
    from shoal.celery.tasks import document

    parcel = message_of(message)
    if parcel is None:
        raise ScrapeFailed("usage", "not a message of this release: upgrade the older side")
    runtime = here.runtime()
    ends = runtime.visit(parcel)
    told = [document(lease.request.url, end) for lease, end in zip(parcel.leases, ends, strict=True)]
    outcomes = {each["outcome"] for each in told}
    if outcomes <= {"dead", "retry"} and told:
        first = told[0]
        failed = ScrapeFailed(first["error"], first["message"], first["url"])
        if "retry" not in outcomes:
            raise failed
        # The frontier tries again when it is time, as another task. Nothing is sent here: this only
        # lets Celery and Flower call it what it is.
        raise Retry("the frontier tries it again", exc=failed)
    return {"worker_id": runtime.worker, "visits": told}


def _scrape_url(task: Any, url: str, config: Any = None, **options: Any) -> dict[str, Any]:
    """The item of one page. If there is none the task fails with ScrapeFailed; with `fail` false it
    answers `{"url", "error", "message"}` instead, so that a chord goes on without this page.

    Options are given by name, or together in `config`; a name wins."""
    from shoal.celery.tasks import scrape_page

    return _scraped(task, scrape_page, url, config, options)


def _scrape_site(task: Any, url: str, config: Any = None, **options: Any) -> dict[str, Any]:
    """Crawl a small site (100 pages, unless `max_pages` says otherwise) to its end, and sum up. Its
    items are in the job that the summary names. Options are given as to `scrape_url`."""
    from shoal.celery.tasks import scrape_whole

    return _scraped(task, scrape_whole, url, config, options)


def _scraped(
    task: Any,
    scrape: Callable[..., Coroutine[Any, Any, dict[str, Any]]],
    url: str,
    config: Any,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What a task that scrapes returns: what was scraped, or, with `fail` false, why there is nothing."""
    from shoal.celery.tasks import merged

    options, timeout, fail = merged(config, options, url, TIMEOUT)
    work = partial(scrape, url=url, job=_job(task), options=options, within=timeout, retries=_retries())
    try:
        return _done(task, work, url)
    except ScrapeFailed as failed:
        if fail:
            raise
        return failed.document


def _process_results(task: Any, results: Any, *, out: str | None = None) -> dict[str, Any]:
    """Count and merge what `scrape_url` and `scrape_site` brought: one result, a list, or lists of them.

    With `out`, all items go into that file, below the directory of the worker, those of whole sites
    included. Without it the answer has the pages in `results`.
    """
    from shoal.celery.tasks import Results, checked, export

    sorted_out = Results(results)
    if out is None:
        pages = list(sorted_out.items.values())
        return sorted_out.document | {"items": len(pages), "out": None, "results": pages}
    where = checked(out)
    work = partial(export, results=sorted_out, out=where, name=_job(task))
    return sorted_out.document | {"items": _done(task, work, ""), "out": where, "results": []}


def _done(task: Any, work: Callable[[Session], Coroutine[Any, Any, T]], url: str) -> T:
    """Do it in this process. A frontier that is away is asked again later, as a retry of the task."""
    try:
        return here.runtime().call(work)
    except FrontierError as error:
        raise task.retry(
            exc=ScrapeFailed("frontier", str(error), url),
            countdown=backoff(task.request.retries + 1, base=2.0, cap=60.0, jitter=0.5),
        ) from error
    except ShoalError as error:
        raise ScrapeFailed("internal", str(error), url) from error


def _job(task: Any) -> str:
    return f"task-{task.request.id}"


def _retries() -> int:
    return load().celery_task_max_retries


def _task(name: str, body: Callable[..., Any], *, visits: bool = False) -> Any:
    return app.task(
        body,
        name=name,
        bind=True,
        ignore_result=visits,
        # Told in one line: these are failures of pages, not of this program.
        throws=(ScrapeFailed,),
    )


visit = _task(VISIT, _visit, visits=True)
scrape_url = _task(SCRAPE_URL, _scrape_url)
scrape_site = _task(SCRAPE_SITE, _scrape_site)
process_results = _task(PROCESS_RESULTS, _process_results)


# -- processes ------------------------------------------------------------------------------


def _worker_init(sender: Any, **_: Any) -> None:
    """In the main process, before there are others."""
    # Imported once, before the fork: every child would pay for it.
    import shoal.celery.pump_thread
    import shoal.celery.runtime  # noqa: F401

    if level := load().log_level:
        # Celery formats the log, and its own level counts unless ours is set.
        logging.getLogger("shoal").setLevel(level.upper())
    pool = get_implementation(sender.pool_cls).__module__
    if pool.endswith(("gevent", "eventlet")):
        _refuse(f"the pool {pool.rpartition('.')[2]} cannot run visits; use prefork, threads or solo")
    here.queues = tuple(app.amqp.queues.consume_from)
    here.tasks = 1 if pool.endswith(("prefork", "solo")) else int(sender.concurrency)
    if per_second := rate(visit.rate_limit):
        # Who asks for robots.txt and gives the page back pays with two tokens for it. Until waiting in a
        # process makes all of them take longer than that, waiting is cheaper.
        here.stay = min(2 * int(sender.concurrency) / per_second, LONGEST_STAY)


def _refuse(why: str) -> None:
    # Celery logs what a signal's receiver raises, and goes on; only this ends it.
    sys.stderr.write(f"error: {why}\n")
    raise SystemExit(2)


def _worker_ready(sender: Any, **_: Any) -> None:
    from shoal.celery.pump_thread import PumpThread

    running = int(sender.pool.limit or sender.controller.concurrency)

    def seconds() -> float:
        """For which the limiter of this worker holds a visit back now: people change limits while it runs."""
        bucket = sender.task_buckets[VISIT]
        return 1.0 / bucket.fill_rate if bucket else 0.0

    here.pump = PumpThread(app, celery_settings(), dict.fromkeys(here.queues, running), seconds)
    here.pump.start()
    if here.tasks > 1:
        here.runtime()  # threads: nobody else says that this process runs tasks


def _process_init(**_: Any) -> None:
    """In each process that runs tasks (in the only one, with the pool `solo`)."""
    here.forked()
    here.runtime()


def _shutting_down(**_: Any) -> None:
    """The signal has come. Tasks that run may take a while; nothing more is claimed meanwhile."""
    if here.pump is not None:
        here.pump.end()


def _shutdown(**_: Any) -> None:
    here.close()


def _revoked(sender: Any, request: Any = None, expired: bool = False, **_: Any) -> None:
    message = message_of(request.args[0]) if sender.name == VISIT and request.args else None
    if message is not None and here.pump is not None:
        here.pump.revoked(message, expired=bool(expired))


signals.worker_init.connect(_worker_init)
signals.worker_ready.connect(_worker_ready)
signals.worker_process_init.connect(_process_init)
signals.worker_process_shutdown.connect(_shutdown)
signals.worker_shutting_down.connect(_shutting_down)
signals.worker_shutdown.connect(_shutdown)
signals.task_revoked.connect(_revoked)
