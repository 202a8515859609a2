"""Fetching: one request to one response, or a FetchError with a class."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from shoal.errors import FetchError
from shoal.model import Response


class NotSent(FetchError):
    """Its gate did not let the request out. That says nothing of the URL."""

    def __init__(self) -> None:
        super().__init__("deadline", "its turn was over before the request could leave")


class Gate(Protocol):
    """Asked by the fetcher, on its thread, whether a request may still go. Must not block or raise."""

    def begin(self) -> bool:
        """Before a connection is made or taken."""
        ...

    def send(self) -> bool:
        """As the request leaves. Asked again if the connection broke and it would be sent once more."""
        ...


class Limits(Struct, frozen=True):
    """What one fetch may cost. Seconds and decoded bytes."""

    dns: float = 5.0
    connect: float = 10.0
    first_byte: float = 20.0
    idle: float = 15.0
    total: float = 60.0
    min_rate: int = 1024
    """Bytes a second, averaged over `rate_window`; less is `slow_transfer`."""
    rate_window: float = 20.0
    body: int = 10 * 1024 * 1024
    header_bytes: int = 64 * 1024
    header_lines: int = 256


class Ask(Struct, frozen=True):
    """One hop to fetch. Redirects are answers like any other: the caller decides."""

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    allow_private: bool = False
    limits: Limits = Limits()
    gate: Gate | None = None


class Fetcher(Protocol):
    async def fetch(self, ask: Ask) -> Response:
        """Fetch one hop. Raises FetchError with one of `errors.CLASSES`, nothing else; NotSent only if
        the ask has a gate.

        Any HTTP status is a response. Cancelling the call ends the transfer.
        """
        ...

    async def close(self) -> None: ...
