"""Dispatch: how leases reach workers when they do not claim for themselves.

A broker is not a frontier. It cannot say which host is ready, what is known, what is dead. So the
truth stays in the frontier, and a broker carries leases: a *pump* claims them in transit and sends
them, a consumer receives, takes and visits them, and settles in the frontier before it tells the
broker that the message is finished. A message that is late, lost or comes twice is harmless: its
leases are fenced, and `take` lets one visit be made.

What every dispatch promises:

- What `send` took is delivered to one consumer at a time, at least once, unless its time runs out
  first; then it comes back by `returned`.
- What a consumer received and did not finish is delivered again when that consumer is gone (only
  from queues that are reliable; a fast one forgets a message when it is handed out).
- `finish` is harmless for what is finished, or was received over a connection that has broken since.
- Everything raises DispatchError, and nothing else, when the broker cannot be talked to. Calling
  again connects again. DispatchRefused says that this will not help.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shoal.model import DeadLetter, Lease

MARK = "_celery"
"""Ends the names of workers that live in Celery."""
FORMAT = 1
"""Of messages. A consumer that meets another one says so and leaves the message alone."""


class Message(Struct, frozen=True, omit_defaults=True):
    """Leases that travel together. `leases` tell in `since` when they were claimed."""

    queue: str
    leases: tuple[Lease, ...]
    ttl: float | None = None
    """Seconds that it may wait in its queue; the queue's own limit counts too, the smaller wins."""
    priority: int = 5
    format: int = FORMAT


class Delivery(Struct, frozen=True):
    """A message that arrived. `tag` is the broker's own handle."""

    message: Message
    tag: Any = None
    again: bool = False
    """It was delivered before, to somebody who did not finish it."""
    reason: str = ""
    """Why it came back: `expired`, or another word of the broker for "nobody finished it"."""


class Depth(Struct, frozen=True, omit_defaults=True):
    """One queue as the broker sees it."""

    waiting: int
    """Messages that nobody has received yet."""
    consumers: int
    room: int | None = None
    """How many more it takes; None: as many as come."""
    drops_after: float | None = None
    """Seconds after which a message is gone that nobody received, and does not come back by `returned`;
    None: none is."""
    held: float = 0.0
    """Seconds for which consumers may hold back what they received, and what waits behind it: they have
    a rate limit."""


class Dispatch(Protocol):
    """Pump and consumers hold one each; they may be in different processes."""

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        """Hand over. Returns when the broker is responsible for them; answers those that it did
        not take. They may arrive all the same: the caller gives their leases back."""
        ...

    async def receive(self, limit: int) -> list[Delivery]:
        """At least one message, when there is one; at most `limit`. Begins to consume with the
        first call. Not more than the prefetch is ever received and not finished."""
        ...

    def subscribe(self, queues: Collection[str]) -> None:
        """Receive from these as well. A `receive` under way begins with it."""
        ...

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """Their leases are settled: the broker may forget them."""
        ...

    async def returned(self) -> list[Delivery]:
        """At least one message whose time ran out, or that the broker gave up delivering, when there
        is one. `reason` tells which. Finish them as well."""
        ...

    async def failed(self, letters: Sequence[DeadLetter]) -> None:
        """Tell the broker of requests that ended dead, where people who watch it look."""
        ...

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        """How full these queues are. Makes those that do not exist."""
        ...

    async def about(self) -> str:
        """What it is and which version, for people."""
        ...

    async def close(self) -> None:
        """What was received and not finished is delivered again, to somebody else."""
        ...


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


def packed(message: Message) -> bytes:
    """A message on the wire: JSON, so that people can read it in their broker's own tools."""
    return _encode(message)


def unpacked(body: bytes) -> Message | None:
    """None if these bytes are no message of ours, or of a release that speaks otherwise."""
    try:
        message = _decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    return message if message.format == FORMAT else None
