"""The receiving side of a worker: a message is looked at before Celery takes it for a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kombu
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.utils.json import dumps

from shoal.celery.bad import BAD, KEPT, brief, logger, place_of, tell


class Consumer(CeleryConsumer):  # type: ignore[misc]
    """Puts aside what Celery can make no task of, on any broker."""

    def create_task_handler(self, *given: Any, **more: Any) -> Callable[[Any], Any]:
        taken: Callable[[Any], Any] = super().create_task_handler(*given, **more)

        def on_task_received(message: Any) -> Any:
            why = flaw_of(message)
            if why:
                return self._put_aside(message, why)
            try:
                return taken(message)
            except self.connection_errors:
                raise
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                if message.acknowledged:
                    raise
                return self._put_aside(message, brief(error))

        return on_task_received

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        if message.channel is not self.task_consumer.channel:
            # A command for all workers (`celery control`). Each got its copy, and none is to be kept.
            logger.error("%s among the commands: %s; it is dropped", BAD, brief(exc))
            message.ack()
            return
        self._put_aside(message, brief(exc))

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._put_aside(message, "not a task")

    def on_invalid_task(self, body: Any, message: Any, exc: BaseException) -> None:
        self._put_aside(message, brief(exc))

    def _put_aside(self, message: Any, why: str) -> None:
        """First kept, then rejected: between the two it may be there twice, but never nowhere."""
        queue = self._queue_of(message)
        try:
            self._keep(queue, message, why)
            kept = True
        except Exception as error:
            # Each transport has its own errors. Whatever it was: this message must not come back. Not the
            # error's text: Redis' client tells in it what was to be written.
            logger.warning("%s cannot be written: %s", place_of(queue), type(error).__name__)
            kept = False
        tell(queue, why, kept=kept)
        message.reject_log_error(logger, self.connection_errors)

    def _queue_of(self, message: Any) -> str:
        """Where it came from. What it says of itself counts only if we consume that."""
        consumed = [str(queue.name) for queue in self.task_consumer.queues]
        said = (message.delivery_info or {}).get("routing_key")
        return str(said) if said in consumed else consumed[0]

    def _keep(self, queue: str, message: Any, why: str) -> None:
        keep = getattr(message.channel, "keep_bad", None)
        if keep is not None:
            keep(queue, dumps(message._raw))
            return
        place = kombu.Queue(place_of(queue), durable=True, queue_arguments={"x-max-length": KEPT})
        headers = {**(message.headers or {}), "x-shoal-error": f"{BAD}: {why}"}
        if not message.errors:
            headers.pop("compression", None)  # it was unpacked on its way in
        with self.app.producer_or_acquire() as producer:
            producer.publish(
                message.body or b"",
                exchange="",
                routing_key=place.name,
                declare=[place],
                headers=headers,
                content_type=message.content_type or "application/data",
                content_encoding=message.content_encoding or "binary",
                retry=False,
            )


def flaw_of(message: Any) -> str:
    """Why Celery could make no task of this message. Empty if it can."""
    headers = message.headers
    if not isinstance(headers, dict):
        return "its headers are no object"
    if message.accept is not None and message.content_type not in message.accept:
        return f"its content type is {str(message.content_type)[:100]!r}; only JSON is read"
    try:
        body = message.decode()
    except Exception as error:
        # Codecs raise what they like, and a deep nesting RecursionError.
        return brief(error)
    if "task" not in headers:
        headers = body  # the older protocol has all of it in the body
    elif isinstance(body, dict):
        headers = {**headers, **body}
    elif not _is_call(body):
        return "its body is not [args, kwargs, options]"
    if not isinstance(headers, dict) or not isinstance(headers.get("task"), str):
        return "it names no task"
    if not isinstance(headers.get("id"), str):
        return "its task has no id"
    if not _is_limit(headers.get("timelimit")):
        return "its time limit is not two numbers"
    return ""


def _is_call(body: Any) -> bool:
    if not isinstance(body, list | tuple) or len(body) != 3:
        return False
    args, kwargs, options = body
    return isinstance(args, list | tuple) and isinstance(kwargs, dict) and isinstance(options, dict | None)


def _is_limit(given: Any) -> bool:
    if not given:
        return True
    return (
        isinstance(given, list | tuple)
        and len(given) == 2
        and all(each is None or isinstance(each, int | float) for each in given)
    )
