"""Fetching: one request to one response, or a FetchError with a class."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from shoal.errors import FetchError, UsageError
from shoal.model import Private, Response


class NotSent(FetchError):
    """Its gate did not let the request out. That says nothing of the URL."""

    def __init__(self) -> None:
        super().__init__("deadline", "its turn was over before the request could leave")


class Unwanted(FetchError):
    """The answer is of a kind that nobody asked for. Its body was not read."""

    def __init__(self, kind: str) -> None:
        super().__init__("invalid_content", f"{kind[:80]} is nothing to read")


_NOT_TEXT = re.compile(
    r"(?:video|audio|font|image(?!/svg\+xml))/"
    r"|application/(?:octet-stream|zip|gzip|x-[a-z0-9-]*(?:zip|tar|compressed|rar|font)\b|java-archive"
    r"|vnd\.(?:rar|android\.package-archive|ms-fontobject|debian\.binary-package|apple\.installer\+xml)"
    r"|x-(?:iso9660-image|apple-diskimage|msdownload|debian-package|rpm|shockwave-flash|xz)|wasm|ogg|mp4)\b",
    re.IGNORECASE,
)


def is_readable(content_type: str) -> bool:
    """False for kinds without text in them: films, sound, pictures, fonts, archives, programs."""
    return _NOT_TEXT.match(content_type) is None


OURS = frozenset((
    "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that describe the connection or the coding, which are the fetcher's to choose: a set copied from a
browser would otherwise ask for encodings we do not speak or desynchronise the connection."""


def check_headers(headers: Iterable[str]) -> None:
    """Raises UsageError about a header that would not be sent."""
    for name in headers:
        if name.lower() in OURS:
            raise UsageError(
                f"the header {name} cannot be set: it belongs to the connection",
                hint="leave it out; to ask a server by another name, give that name in the URL",
            )


class Gate(Protocol):
    """Asked by the fetcher, on its thread, whether a request may still go. Must not block or raise."""

    def begin(self) -> bool:
        """Before a connection is made or taken."""
        ...

    def send(self) -> bool:
        """As the request leaves. Asked again if the connection broke and it would be sent once more."""
        ...

    def room(self, size: int) -> bool:
        """Before so many bytes of the answer are kept, unless they are few, and before it is decoded. Asked
        again a little later if not; until then no more is read."""
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
    cut: bool = False
    """A larger body is cut there; otherwise it is `body_too_large`."""
    header_bytes: int = 64 * 1024
    header_lines: int = 256

    @property
    def wire(self) -> int:
        """Bytes that an answer may take on its way, with everything around its body."""
        return self.body + self.body // 4 + 1024 * 1024


class Ask(Struct, frozen=True):
    """One hop to fetch. Redirects are answers like any other: the caller decides."""

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    allow_private: Private = False
    limits: Limits = Limits()
    gate: Gate | None = None
    text: bool = False
    """Only what can be read is wanted (`is_readable`); another kind is Unwanted as soon as its head tells."""


class Fetcher(Protocol):
    async def fetch(self, ask: Ask) -> Response:
        """Fetch one hop. Raises FetchError with one of `errors.CLASSES`, nothing else; NotSent only if
        the ask has a gate, Unwanted only if it asks for text.

        Any HTTP status is a response. Cancelling the call ends the transfer.
        """
        ...

    async def close(self) -> None: ...
