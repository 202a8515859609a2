"""kombu's Redis transport, for queues into which somebody put what is no message.

kombu takes an item off the list and reads it in one go; if it cannot, the error ends the worker and the
item is lost. Here the reply to BRPOP is looked at first. What kombu could not read is put aside, and the
poll seems to have brought nothing: the next one follows at once. All else is kombu's own: priorities,
acknowledgements, the visibility timeout.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from shoal.celery.bad import BAD, KEPT, logger, place_of, tell

NO_MESSAGE = "not a message of kombu"


class Careful:
    """Mixed into kombu's channels."""

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous)  # type: ignore[misc]
        if asynchronous:  # the one that waits for messages
            client.parse_response = self._looked_at(client.parse_response)
        return client

    def _looked_at(self, parse: Any) -> Any:
        def parse_response(connection: Any, command: str, **options: Any) -> Any:
            reply = parse(connection, command, **options)
            if command != "BRPOP" or not reply:
                return reply
            key, item = reply
            why = self._flaw_of(item)
            if not why:
                return reply
            self._put_aside(bytes_to_str(key).rsplit(self.sep, 1)[0], item, why)  # type: ignore[attr-defined]
            return None

        return parse_response

    def _handle_message(self, client: Any, reply: Any) -> Any:
        """Commands and events: they are for whoever listens now, so there is nothing to keep."""
        told = super()._handle_message(client, reply)  # type: ignore[misc]
        if bytes_to_str(told["type"]).endswith("message") and told["data"]:
            _, why = self._read(told["data"])
            if why:
                logger.error("%s in %s: %s; it is dropped", BAD, bytes_to_str(told["channel"]), why)
                told["data"] = b""
        return told

    def _flaw_of(self, item: bytes) -> str:
        """Why kombu cannot take it for a message of a queue. Empty if it can."""
        payload, why = self._read(item)
        if why:
            return why
        # To be acknowledged it must have a tag, and to be given back a way to its queue.
        properties = payload["properties"]
        info = properties.get("delivery_info")
        if not isinstance(info, dict):
            return f"{NO_MESSAGE} (no delivery_info)"
        known = (properties["delivery_tag"], info.get("exchange"), info.get("routing_key"))
        if not all(isinstance(each, str) for each in known) or not known[0]:
            return f"{NO_MESSAGE} (no delivery_tag, exchange or routing_key)"
        return ""

    def _read(self, item: bytes) -> tuple[Any, str]:
        """Its content, and why it is no message; one of the two is empty."""
        try:
            payload = loads(bytes_to_str(item))
        except Exception as error:
            # Also RecursionError, and what the readers of kombu's own types raise.
            return None, f"not JSON: {error}"[:200]
        try:
            self.Message(payload, channel=self)  # type: ignore[attr-defined]
        except Exception as error:
            return None, f"{NO_MESSAGE} ({type(error).__name__})"
        return payload, ""

    def _put_aside(self, queue: str, item: bytes, why: str) -> None:
        try:
            self.keep_bad(queue, item)
            kept = True
        except (*self.connection_errors, self.ResponseError):  # type: ignore[attr-defined]
            kept = False
        tell(queue, why, kept=kept)

    def keep_bad(self, queue: str, item: bytes | str) -> None:
        with self.conn_or_acquire() as client, client.pipeline() as pipe:  # type: ignore[attr-defined]
            pipe.lpush(place_of(queue), item).ltrim(place_of(queue), 0, KEPT - 1).execute()


class Channel(Careful, redis.Channel):  # type: ignore[misc]
    pass


class SentinelChannel(Careful, redis.SentinelChannel):  # type: ignore[misc]
    pass


class Transport(redis.Transport):  # type: ignore[misc]
    Channel = Channel


class SentinelTransport(redis.SentinelTransport):  # type: ignore[misc]
    Channel = SentinelChannel


TRANSPORTS = {redis.Transport: Transport, redis.SentinelTransport: SentinelTransport}
