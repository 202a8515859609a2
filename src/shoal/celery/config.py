"""Celery's configuration, made from shoal's settings."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from kombu import Queue

from shoal.dispatch.celery import VISIT
from shoal.model import DEFAULT_QUEUE
from shoal.settings import Settings

QUEUES = (DEFAULT_QUEUE, "business", "rag")
"""Queues that `celery worker` consumes without -Q."""
SCRAPE_URL, SCRAPE_SITE, PROCESS_RESULTS = "shoal.scrape_url", "shoal.scrape_site", "shoal.process_results"
TASKS = (VISIT, SCRAPE_URL, SCRAPE_SITE, PROCESS_RESULTS)
LONGEST = 1500
"""Maximum time limit of a public task, in seconds."""
UNSEEN = LONGEST + 300
"""Redis gives a message to another worker if it is not acknowledged after this many seconds. It must be
longer than any task, or a running task is started a second time."""


def result_backend_of(settings: Settings) -> str:
    if settings.celery_result_backend:
        return settings.celery_result_backend
    parts = urlsplit(settings.celery_broker_url)
    if parts.scheme not in ("redis", "rediss"):
        return "rpc://"
    number = parts.path.strip("/")
    return parts._replace(path=f"/{int(number) + 1 if number.isdecimal() else 1}").geturl()


def rate_limit_of(settings: Settings, *, visits: bool) -> str | None:
    """Returns the rate limit of a task. Visits follow the pace of their hosts; they are limited only if the
    setting is given."""
    if visits and "celery_task_rate_limit" not in settings.model_fields_set:
        return None
    limit = settings.celery_task_rate_limit
    return None if limit == "none" else limit


def configuration(settings: Settings) -> dict[str, Any]:
    """Returns the configuration of the Celery app."""
    return {
        "broker_url": settings.celery_broker_url,
        "result_backend": result_backend_of(settings),
        "worker_concurrency": settings.celery_worker_concurrency,
        # Annotations are on the tasks in every process: programs that send them see the limits too.
        "task_annotations": {name: _limits(settings, visits=name == VISIT) for name in TASKS},
        # JSON only: what is unpickled is executed.
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        # A task is acknowledged when it has ended, and given to another process if its own died.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_soft_shutdown_timeout": 10.0,
        # Flower sees what is sent, started and ended.
        "worker_send_task_events": True,
        "task_send_sent_event": True,
        "task_track_started": True,
        "task_default_queue": DEFAULT_QUEUE,
        "task_queues": [Queue(name, routing_key=name) for name in QUEUES],
        "task_queue_max_priority": 9,
        "task_default_priority": 5,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": 100,
        "visibility_timeout": UNSEEN,
        "broker_transport_options": _transport_options(settings),
        "result_backend_transport_options": {"visibility_timeout": UNSEEN},
        "result_expires": 24 * 3600,
        "worker_eta_task_limit": 1000,
    }


def _limits(settings: Settings, *, visits: bool) -> dict[str, Any]:
    return {
        "rate_limit": rate_limit_of(settings, visits=visits),
        "max_retries": settings.celery_task_max_retries,
    }


def _transport_options(settings: Settings) -> dict[str, Any]:
    if settings.celery_broker_url.startswith(("redis", "rediss", "sentinel")):
        return {"visibility_timeout": UNSEEN, "socket_keepalive": True}
    # Without confirms RabbitMQ may lose a message unnoticed.
    return {"confirm_publish": True} if settings.celery_broker_url.startswith(("amqp", "pyamqp")) else {}
