"""Fetching: one request to one response, or a FetchError with a class."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from shoal.errors import FetchError, UsageError
from shoal.model import Private, Response


class NotSent(FetchError):
    """The gate did not let the request leave. The URL is not to blame."""

    def __init__(self) -> None:
        super().__init__("deadline", "its turn was over before the request could leave")


class Unwanted(FetchError):
    """The answer is of a content type that was not asked for. Its body was not read."""

    def __init__(self, kind: str) -> None:
        super().__init__("invalid_content", f"{kind[:80]} holds no text")


_NOT_TEXT = re.compile(
    r"(?:video|audio|font|image(?!/svg\+xml))/"
    r"|application/(?:octet-stream|zip|gzip|x-[a-z0-9-]*(?:zip|tar|compressed|rar|font)\b|java-archive"
    r"|vnd\.(?:rar|android\.package-archive|ms-fontobject|debian\.binary-package|apple\.installer\+xml)"
    r"|x-(?:iso9660-image|apple-diskimage|msdownload|debian-package|rpm|shockwave-flash|xz)|wasm|ogg|mp4)\b",
    re.IGNORECASE,
)


def is_readable(content_type: str) -> bool:
    """Whether a content type may hold text. Video, audio, images, fonts, archives and programs do not."""
    return _NOT_TEXT.match(content_type) is None


OURS = frozenset((
    "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that describe the connection or the coding. The fetcher chooses them: a set copied from a browser
would otherwise ask for encodings that we cannot decode, or desynchronise the connection."""


def check_headers(headers: Iterable[str]) -> None:
    """Raises UsageError about a header that would not be sent."""
    for name in headers:
        if name.lower() in OURS:
            raise UsageError(
                f"the header {name} cannot be set: it belongs to the connection",
                hint="leave it out; to ask a server by another name, give that name in the URL",
            )


class Gate(Protocol):
    """Decides whether a request may still leave. The fetcher calls it on its thread: it must not block or
    raise."""

    def may_connect(self) -> bool:
        """Called before a connection is made or reused."""
        ...

    def may_send(self) -> bool:
        """Called as the request leaves, and again if the connection broke and the request is sent once
        more."""
        ...

    def has_room(self, size: int) -> bool:
        """Called before this many bytes of the answer are kept, unless they are few, and before it is
        decoded. If it returns False, no more is read, and it is called again a little later."""
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
    """A body larger than `body` is cut there; otherwise it is the error `body_too_large`."""
    header_bytes: int = 64 * 1024
    header_lines: int = 256

    @property
    def wire(self) -> int:
        """Bytes that an answer may take on the wire, everything around its body included."""
        return self.body + self.body // 4 + 1024 * 1024


class Ask(Struct, frozen=True):
    """One request to fetch. A redirect is a response like any other: the caller decides."""

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    allow_private: Private = False
    limits: Limits = Limits()
    gate: Gate | None = None
    text: bool = False
    """Fetch only what `is_readable`. Anything else raises Unwanted as soon as its head has arrived."""


class Fetcher(Protocol):
    async def fetch(self, ask: Ask) -> Response:
        """Fetch one hop. Raises FetchError with one of `errors.CLASSES`, nothing else; NotSent only if
        the ask has a gate, Unwanted only if it asks for text.

        Any HTTP status is a response. Cancelling the call ends the transfer.
        """
        ...

    async def close(self) -> None: ...
