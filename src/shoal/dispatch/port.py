"""Dispatch: how leases reach workers that do not claim for themselves.

A broker is not a frontier. It does not know which hosts are ready, which URLs are known and which are dead.
So the state stays in the frontier, and the broker carries leases. A *pump* claims them in transit and sends
them. A consumer receives, takes and visits them, and settles in the frontier before it acknowledges the
message. A message that is late, lost or delivered twice does no harm: its leases are fenced, and `take`
allows one visit.

What every dispatch promises:

- A message that `send` accepted is delivered to one consumer at a time, at least once, unless its ttl ends
  first; then `receive_returned` returns it.
- A message that a consumer received and did not finish is delivered again when that consumer is gone. This
  holds for reliable queues; a fast queue forgets a message as soon as it is delivered.
- `finish` has no effect on messages that are finished already, or that came over a connection that has been
  lost since.
- Every method raises DispatchError, and nothing else, if the broker cannot be reached. The next call connects
  again. DispatchRefused means that trying again will not help.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shoal.model import DeadLetter, Lease

MARK = "_celery"
"""The end of the names of workers that run in Celery."""
FORMAT = 1
"""The version of the message format. A consumer reports a message of any other version and does not visit its
URLs."""


class Message(Struct, frozen=True, omit_defaults=True):
    """Leases that travel together. Their `claimed_at` is set."""

    queue: str
    leases: tuple[Lease, ...]
    ttl: float | None = None
    """Seconds that it may wait in its queue. The queue's own limit holds too; the smaller wins."""
    priority: int = 5
    format: int = FORMAT


class Delivery(Struct, frozen=True):
    """A message that was delivered. `tag` is the broker's handle for it."""

    message: Message
    tag: Any = None
    again: bool = False
    """Whether it was delivered before, to a consumer that did not finish it."""
    reason: str = ""
    """Why it was returned: `expired`, or the broker's word for another reason that it was not finished."""


class Depth(Struct, frozen=True, omit_defaults=True):
    """One queue as the broker sees it."""

    waiting: int
    """Messages that no consumer has received yet."""
    consumers: int
    room: int | None = None
    """How many more messages it accepts; None means no limit."""
    drops_after: float | None = None
    """Seconds after which the broker drops a message that no consumer received, so that `receive_returned`
    does not return it; None if it drops none."""
    held: float = 0.0
    """Seconds for which a rate limit may make consumers hold back the messages that they received, and those
    that wait behind them."""


class Dispatch(Protocol):
    """A connection to a broker. The pump and each consumer have their own, often in different processes."""

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        """Send messages, and wait until the broker has confirmed them. Returns those that it did not confirm:
        the caller releases their leases. They may be delivered nevertheless."""
        ...

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages. Returns at least one and at most `limit`. The first call starts consuming. The
        number of received and unfinished messages never exceeds the prefetch."""
        ...

    def subscribe(self, queues: Collection[str]) -> None:
        """Receive from these queues too. This affects a `receive` that is already waiting."""
        ...

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages whose leases are settled."""
        ...

    async def receive_returned(self) -> list[Delivery]:
        """Wait for messages that expired or that the broker gave up delivering. Returns at least one; its
        `reason` says which. The caller must `finish` them too."""
        ...

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        """Publish requests that ended dead, where people who watch the broker can see them."""
        ...

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        """Return how full these queues are. Creates those that do not exist."""
        ...

    async def info(self) -> str:
        """Return the name and the version of the broker, for people."""
        ...

    async def close(self) -> None:
        """Close the connection. The broker delivers unfinished messages again, to another consumer."""
        ...


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


def encode_message(message: Message) -> bytes:
    """Encode a message as JSON, so that people can read it in the tools of their broker."""
    return _encode(message)


def decode_message(body: bytes) -> Message | None:
    """Decode a message. Returns None if the bytes are not a message, or one of another format version."""
    try:
        message = _decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    return message if message.format == FORMAT else None
