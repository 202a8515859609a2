"""The webhook of a job: one signed message that says that it has ended.

    X-Shoal-Event: job.finished
    X-Shoal-Delivery: the job's id, the same in every attempt
    X-Shoal-Timestamp: seconds since 1970
    X-Shoal-Signature: sha256=HMAC-SHA256(secret, timestamp + "." + body), in hex

A receiver checks the signature, refuses timestamps that are too old, and accepts each delivery id once.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from shoal.errors import FetchError
from shoal.fetch.port import Ask, Fetcher, Limits
from shoal.model import Private

EVENT = "job.finished"
LIMITS = Limits(connect=5.0, first_byte=30.0, idle=30.0, total=30.0, rate_window=30.0, body=64 * 1024)
"""Long: giving up on a receiver that is still processing the message would send it again."""


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Returns the signature, which a receiver computes too to verify the sender."""
    data = timestamp.encode() + b"." + body
    return "sha256=" + hmac.new(secret.encode(), data, sha256).hexdigest()


async def deliver(
    fetcher: Fetcher,
    url: str,
    secret: str,
    body: bytes,
    *,
    delivery: str,
    now: float,
    allow_private: Private = False,
) -> None:
    """Send the message once. Any status but 2xx is a failure. So is a redirect: only the caller who submitted
    the job may name a receiver. Raises FetchError."""
    timestamp = str(int(now))
    headers = (
        ("Content-Type", "application/json"),
        ("X-Shoal-Event", EVENT),
        ("X-Shoal-Delivery", delivery),
        ("X-Shoal-Timestamp", timestamp),
        ("X-Shoal-Signature", signature(secret, timestamp, body)),
    )
    response = await fetcher.fetch(Ask(url, "POST", headers, body, allow_private, LIMITS))
    if not 200 <= response.status < 300:
        raise FetchError("http_other", f"the receiver returned {response.status}")
