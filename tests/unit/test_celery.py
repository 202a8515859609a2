"""The Celery app without a broker: how it is set, what it imports, what its messages are."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from celery import Celery

from shoal.celery.config import configuration, rate_limit_of, result_backend_of
from shoal.celery.failure import ScrapeFailed
from shoal.celery.tasks import Results, check_out
from shoal.dispatch.celery import TRAVEL, CeleryDispatch, message_of
from shoal.dispatch.port import Depth, Message
from shoal.errors import DispatchError
from shoal.model import Lease, Request
from shoal.settings import load

NAMES = ("BROKER_URL", "RESULT_BACKEND", "TASK_RATE_LIMIT", "TASK_MAX_RETRIES", "WORKER_CONCURRENCY")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_FRONTIER", raising=False)
    for name in NAMES:
        monkeypatch.delenv(f"CELERY_{name}", raising=False)


def test_the_settings_that_celery_users_know(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = configuration(load())
    assert usual["broker_url"] == "redis://localhost:6379/0"
    assert usual["result_backend"] == "redis://localhost:6379/1"
    assert usual["worker_concurrency"] == 2
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://:secret@queue:7000/4")
    monkeypatch.setenv("CELERY_WORKER_CONCURRENCY", "7")
    theirs = configuration(load())
    assert theirs["broker_url"] == "redis://:secret@queue:7000/4"
    assert theirs["result_backend"] == "redis://:secret@queue:7000/5"
    assert theirs["worker_concurrency"] == 7
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://results/9")
    assert configuration(load())["result_backend"] == "redis://results/9"


def test_json_only_late_acks_one_at_a_time() -> None:
    conf = configuration(load())
    assert conf["accept_content"] == conf["result_accept_content"] == ["json"]
    assert conf["task_acks_late"]
    assert conf["task_reject_on_worker_lost"]
    assert conf["worker_prefetch_multiplier"] == 1


@pytest.mark.parametrize(
    ("frontier", "broker", "found"),
    [
        ("", "redis://queue:7000/4?ssl_cert_reqs=none", "redis://queue:7000/4"),
        ("", "amqp://queue/", ""),
        ("sqlite:///x.db", "redis://queue/", "sqlite:///x.db"),
    ],
)
def test_where_the_frontier_is(frontier: str, broker: str, found: str) -> None:
    assert load(frontier=frontier or None, celery_broker_url=broker).celery_frontier == found


def test_a_broker_that_cannot_keep_results_sends_them_back() -> None:
    assert result_backend_of(load(celery_broker_url="amqp://queue/")) == "rpc://"


def test_visits_are_limited_only_when_somebody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rate_limit_of(load(), visits=False) == "10/m"
    assert rate_limit_of(load(), visits=True) is None
    monkeypatch.setenv("CELERY_TASK_RATE_LIMIT", "10/m")
    assert rate_limit_of(load(), visits=True) == "10/m"
    monkeypatch.setenv("CELERY_TASK_RATE_LIMIT", "none")
    assert rate_limit_of(load(), visits=False) is None


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


LIMITS = """
import json
from shoal.celery import app
names = ("visit", "scrape_url", "scrape_site", "process_results")
tasks = [app.tasks[f"shoal.{name}"] for name in names]
conf = app.conf
print(json.dumps([
    [[task.rate_limit, task.max_retries] for task in tasks],
    [conf.task_acks_late, conf.task_reject_on_worker_lost, conf.worker_prefetch_multiplier],
    [conf.accept_content, conf.worker_concurrency, conf.result_backend],
]))
"""


def test_whoever_imports_the_app_sees_its_limits() -> None:
    tasks, acks, more = msgspec.json.decode(python(LIMITS).stdout)
    # Visits have the pace of their hosts.
    assert tasks == [[None, 3], ["10/m", 3], ["10/m", 3], ["10/m", 3]]
    assert acks == [True, True, 1]
    assert more == [["json"], 2, "redis://localhost:6379/1"]
    asked = python(LIMITS, CELERY_TASK_RATE_LIMIT="5/s", CELERY_TASK_MAX_RETRIES="7").stdout
    assert msgspec.json.decode(asked)[0] == [["5/s", 7]] * 4


def test_who_only_sends_tasks_imports_neither_fetcher_nor_frontier() -> None:
    code = "import sys, shoal.celery; shoal.celery.app.finalize(); print(*sys.modules)"
    loaded = set(python(code).stdout.split())
    assert "shoal.celery.application" in loaded
    assert loaded & {"pycurl", "apsw", "turbohtml", "shoal.app", "celery.worker.consumer"} == set()


def test_the_command_line_needs_no_celery() -> None:
    loaded = set(python("import sys, shoal.app, shoal.cli; print(*sys.modules)").stdout.split())
    assert loaded & {"celery", "kombu"} == set()


def test_without_the_extra_there_is_a_hint() -> None:
    code = """
import sys
sys.modules["celery"] = None
try:
    import shoal.celery
except Exception as error:
    print(type(error).__name__, error.hint)
"""
    done = python(code)
    told = done.stdout.strip()
    assert told.startswith("MissingExtra ") and "pip install" in told and "[celery]" in told, done.stderr


def test_a_bad_setting_is_one_line() -> None:
    command = "import sys; sys.argv = ['celery', '-A', 'shoal.celery', 'worker']\n"
    done = python(f"{command}from celery.__main__ import main; main()", CELERY_TASK_RATE_LIMIT="ten a minute")
    assert done.returncode == 2
    assert "celery_task_rate_limit = 'ten a minute'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_that_cannot_work_is_refused() -> None:
    code = """
from types import SimpleNamespace
from shoal.celery.application import _worker_init
pool = type("TaskPool", (), {"__module__": "celery.concurrency.gevent"})
_worker_init(SimpleNamespace(pool_cls=pool, concurrency=2))
"""
    done = python(code)
    assert done.returncode == 2
    assert done.stderr == "error: the pool gevent cannot run visits; use prefork, threads or solo\n"


def test_a_message_survives_the_way_through_json() -> None:
    request = Request("https://a.example/", "job", method="POST", body=b"\xff\0", data={"n": 1})
    message = Message("scraping", (Lease(7, request, "a.example", 1.5, 0.5),), ttl=60.0, priority=9)
    travelled = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(message)))
    assert message_of(travelled) == message
    assert message_of(travelled | {"format": 99}) is None
    rubbish: list[object] = [None, [], {"queue": "x"}, {"queue": "x", "leases": [1]}]
    assert [message_of(each) for each in rubbish] == [None] * 4


async def test_what_was_received_and_never_taken_is_missed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease(7, Request("https://a.example/", "job"), "a.example", 1.5, 0.5)
    app = Celery(broker="memory://", set_as_current=False)
    dispatch = CeleryDispatch(app)
    try:
        assert await dispatch.send([Message("url_queue_ttl", (lease,))]) == []
        assert (await dispatch.depths(["url_queue_ttl"]))["url_queue_ttl"].waiting == 1
        monkeypatch.setattr("shoal.dispatch.celery.MISSED", 0.0)
        assert dispatch.missing() == [], "it waits, nobody has received it"
        with app.connection_for_read() as connection:
            received = connection.SimpleQueue("scraping").get(block=False)
        [[message], _, _] = received.payload
        assert message_of(message) == Message("url_queue_ttl", (lease,))
        assert (await dispatch.depths(["url_queue_ttl"]))["url_queue_ttl"].waiting == 0
        assert dispatch.missing() == [lease]
        assert dispatch.missing() == []
    finally:
        await dispatch.close()


async def test_what_a_rate_limit_holds_back_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease(7, Request("https://a.example/", "job"), "a.example", 1.5, 0.5)
    app = Celery(broker="memory://", set_as_current=False)
    seconds = 6.0

    async def consumers() -> dict[str, int]:
        return {"limited": 2}

    dispatch = CeleryDispatch(app, consumers, lambda: seconds)
    monkeypatch.setattr("shoal.dispatch.celery.MISSED", 0.0)
    try:
        assert await dispatch.depths(["limited"]) == {"limited": Depth(0, 2, held=24.0)}
        assert await dispatch.send([Message("limited", (lease,))]) == []
        with app.connection_for_read() as connection:
            received = connection.SimpleQueue("limited").get(block=False)
        # As long as it may be held back it is not too old either.
        expires = datetime.fromisoformat(received.headers["expires"])
        assert 120 < (expires - datetime.now(UTC)).total_seconds() <= TRAVEL + 24.0
        await dispatch.depths(["limited"])
        assert dispatch.missing() == []
        seconds = 0.0
        await dispatch.depths(["limited"])
        assert dispatch.missing() == [lease]
    finally:
        await dispatch.close()


async def test_a_broker_that_is_away_is_a_dispatch_error() -> None:
    dispatch = CeleryDispatch(Celery(broker="redis://:secret@127.0.0.1:1/0", set_as_current=False))
    try:
        with pytest.raises(DispatchError, match="does not answer") as told:
            await dispatch.depths(["scraping"])
        assert "secret" not in str(told.value)
        with pytest.raises(DispatchError, match="received by Celery workers"):
            await dispatch.receive(1)
    finally:
        await dispatch.close()


def test_a_failure_crosses_processes() -> None:
    failed = ScrapeFailed("http_404", "the server answered 404", "https://a.example/")
    again = pickle.loads(pickle.dumps(failed))
    assert (again.error, again.message, again.url) == (failed.error, failed.message, failed.url)
    assert str(again) == "http_404: the server answered 404 https://a.example/"


def test_results_are_counted_and_merged() -> None:
    page: dict[str, Any] = {"url": "https://a.example/", "worker_id": "one"}
    failure = {"url": "https://a.example/b", "error": "http_404", "message": ""}
    site = {"job": "task-1", "pages": 5, "dead": 1, "worker_id": "two"}
    results = Results([page, dict(page), failure, [site, None]])
    assert results.document == {
        "total": 9,
        "success": 6,
        "failed": 3,
        "workers_used": 2,
        "jobs": ["task-1"],
        "failures": [failure, {"error": "usage", "message": "not the result of a task: 'None'"}],
    }


@pytest.mark.parametrize("out", ["/etc/x.csv", "../x.csv", "a/../../x.csv", "x.exe", ""])
def test_files_stay_below_the_workers_directory(out: str) -> None:
    with pytest.raises(ScrapeFailed):
        check_out(out)
    assert check_out("below/x.csv") == "below/x.csv"
