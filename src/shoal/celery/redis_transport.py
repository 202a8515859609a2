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

from shoal.celery.bad import KEPT, place_of, tell


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

    def _flaw_of(self, item: bytes) -> str:
        """Why kombu cannot take it for a message. Empty if it can."""
        try:
            payload = loads(bytes_to_str(item))
        except Exception as error:
            # Also RecursionError, and what the readers of kombu's own types raise.
            return f"not JSON: {error}"[:200]
        try:
            message = self.Message(payload, channel=self)  # type: ignore[attr-defined]
            info, tag = message.delivery_info, message.delivery_tag
            known = (info["exchange"], info["routing_key"], tag)
        except Exception as error:
            return f"not an envelope of kombu ({type(error).__name__})"
        if not all(isinstance(each, str) for each in known) or not tag:
            return "not an envelope of kombu"
        return ""

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
