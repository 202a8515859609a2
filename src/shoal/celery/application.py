"""The Celery app, its tasks, and the parts of its processes.

Nothing heavy is imported here: programs that only send tasks or inspect them (`celery inspect`, Flower) need
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
"""Default time limit of a public task, in seconds."""
LONGEST_STAY = 60.0
"""Maximum seconds that a visit waits in its task, however low the rate limit."""


class Processes:
    """The parts of this process of a Celery worker: the main process has the pump, each process that runs
    tasks has a runtime. With the pools `solo` and `threads` one process has both."""

    def __init__(self) -> None:
        self.tasks = 1
        """Number of tasks that run in one process at a time."""
        self.queues: tuple[str, ...] = ()
        self.stay = 0.0
        """Seconds that a visit may wait in its task for its host's next turn."""
        self._mutex = threading.Lock()
        self._runtime: tuple[int, Runtime] | None = None
        self.pump: PumpThread | None = None

    def runtime(self) -> Runtime:
        """Returns the runtime, which is started on first use, and again after a fork or after it has
        ended."""
        from shoal.celery.runtime import Runtime

        with self._mutex:
            if self._runtime is None or self._runtime[0] != os.getpid() or not self._runtime[1].alive:
                runtime = Runtime(celery_settings(), self.queues, tasks=self.tasks, stay=self.stay)
                runtime.start()
                self._runtime = (os.getpid(), runtime)
            return self._runtime[1]

    def reset_after_fork(self) -> None:
        """Another thread of the parent may have held the mutex at the time of the fork."""
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
    """Returns the settings of Celery workers: the frontier is on the broker unless another is configured."""
    settings = load()
    return settings.model_copy(update={"frontier": settings.celery_frontier})


def _configuration() -> dict[str, Any]:
    try:
        return configuration(load())
    except UsageError as error:
        # The `celery` command prints this error in one line, without a traceback.
        raise click.UsageError(f"{error}; {error.hint}" if error.hint else str(error)) from None


here = Processes()
app = Celery("shoal")
app.add_defaults(_configuration)


# -- tasks ----------------------------------------------------------------------------------


def _visit(task: Any, message: Any) -> dict[str, Any]:
    """Visit the leases of one message. The results are in the frontier; returns how each visit ended."""
    from shoal.celery.tasks import document

    parcel = message_of(message)
    if parcel is None:
        raise ScrapeFailed("usage", "the message is of another release: upgrade the older side")
    runtime = here.runtime()
    ends = runtime.visit(parcel)
    visits = [document(lease.request.url, end) for lease, end in zip(parcel.leases, ends, strict=True)]
    outcomes = {each["outcome"] for each in visits}
    if outcomes <= {"dead", "retry"} and visits:
        first = visits[0]
        failed = ScrapeFailed(first["error"], first["message"], first["url"])
        if "retry" not in outcomes:
            raise failed
        # The frontier retries it in time, as another task. Nothing is sent here: this only makes Celery and
        # Flower show the task as a retry.
        raise Retry("the frontier will retry it", exc=failed)
    return {"worker_id": runtime.worker, "visits": visits}


def _scrape_url(task: Any, url: str, config: Any = None, **options: Any) -> dict[str, Any]:
    """Returns the item of one page. If there is none the task fails with ScrapeFailed; with `fail` false it
    returns `{"url", "error", "message"}` instead, so that a chord continues without this page.

    Options are given by name, or together in `config`; those given by name take precedence."""
    from shoal.celery.tasks import scrape_page

    return _scrape(task, scrape_page, url, config, options)


def _scrape_site(task: Any, url: str, config: Any = None, **options: Any) -> dict[str, Any]:
    """Crawl a small site (100 pages, unless `max_pages` says otherwise) to its end. Returns a summary, which
    names the job that has the items. Options are those of `scrape_url`."""
    from shoal.celery.tasks import scrape_whole

    return _scrape(task, scrape_whole, url, config, options)


def _scrape(
    task: Any,
    scrape: Callable[..., Coroutine[Any, Any, dict[str, Any]]],
    url: str,
    config: Any,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Returns the result of `scrape`, or, with `fail` false, why there is none."""
    from shoal.celery.tasks import parse_options

    options, timeout, fail = parse_options(config, options, url, TIMEOUT)
    work = partial(scrape, url=url, job=_job(task), options=options, within=timeout, retries=_retries())
    try:
        return _run(task, work, url)
    except ScrapeFailed as failed:
        if fail:
            raise
        return failed.document


def _process_results(task: Any, results: Any, *, out: str | None = None) -> dict[str, Any]:
    """Count and merge results of `scrape_url` and `scrape_site`: one result, a list, or lists of them.

    With `out`, all items go into that file below the worker's directory, including those of whole sites.
    Without it, the pages are returned in `results`.
    """
    from shoal.celery.tasks import Results, check_out, export

    merged = Results(results)
    if out is None:
        pages = list(merged.items.values())
        return merged.document | {"items": len(pages), "out": None, "results": pages}
    file = check_out(out)
    work = partial(export, results=merged, out=file, name=_job(task))
    return merged.document | {"items": _run(task, work, ""), "out": file, "results": []}


def _run(task: Any, work: Callable[[Session], Coroutine[Any, Any, T]], url: str) -> T:
    """Run `work` in this process. If the frontier is unreachable, the task is retried later."""
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
        # Logged in one line: these are failures of pages, not of this program.
        throws=(ScrapeFailed,),
    )


visit = _task(VISIT, _visit, visits=True)
scrape_url = _task(SCRAPE_URL, _scrape_url)
scrape_site = _task(SCRAPE_SITE, _scrape_site)
process_results = _task(PROCESS_RESULTS, _process_results)


# -- processes ------------------------------------------------------------------------------


def _worker_init(sender: Any, **_: Any) -> None:
    """In the main process, before it forks others."""
    # Imported once, before the fork: otherwise every child would pay for it.
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
        # A task that fetches robots.txt and then gives the page back costs two tokens of the rate limit.
        # Waiting for the host inside the task is cheaper, until it delays all tasks by more than that.
        here.stay = min(2 * int(sender.concurrency) / per_second, LONGEST_STAY)


def _refuse(why: str) -> None:
    # Celery logs errors of signal receivers and continues; only SystemExit ends it.
    sys.stderr.write(f"error: {why}\n")
    raise SystemExit(2)


def _worker_ready(sender: Any, **_: Any) -> None:
    from shoal.celery.pump_thread import PumpThread

    running = int(sender.pool.limit or sender.controller.concurrency)

    def seconds() -> float:
        """Returns how long this worker's rate limit delays each visit now: it can be changed while it
        runs."""
        bucket = sender.task_buckets[VISIT]
        return 1.0 / bucket.fill_rate if bucket else 0.0

    here.pump = PumpThread(app, celery_settings(), dict.fromkeys(here.queues, running), seconds)
    here.pump.start()
    if here.tasks > 1:
        here.runtime()  # with threads there is no other signal that this process runs tasks


def _process_init(**_: Any) -> None:
    """In each process that runs tasks (with the pool `solo`, in the only one)."""
    here.reset_after_fork()
    here.runtime()


def _shutting_down(**_: Any) -> None:
    """The worker has received a signal to stop. Running tasks may take a while; nothing more is claimed."""
    if here.pump is not None:
        here.pump.end()


def _shutdown(**_: Any) -> None:
    here.close()


def _revoked(sender: Any, request: Any = None, expired: bool = False, **_: Any) -> None:
    message = message_of(request.args[0]) if sender.name == VISIT and request.args else None
    if message is not None and here.pump is not None:
        here.pump.give_back(message, expired=bool(expired))


signals.worker_init.connect(_worker_init)
signals.worker_ready.connect(_worker_ready)
signals.worker_process_init.connect(_process_init)
signals.worker_process_shutdown.connect(_shutdown)
signals.worker_shutting_down.connect(_shutting_down)
signals.worker_shutdown.connect(_shutdown)
signals.task_revoked.connect(_revoked)
