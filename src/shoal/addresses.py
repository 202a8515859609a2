"""Addresses of servers: what people may see of one, and whether it can be read at all.

A password that was not percent-encoded makes an address ambiguous: nobody can tell where it ends. Such
an address is refused, and what is shown of it begins after its last `@`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from urllib.parse import urlsplit

from shoal.errors import UsageError

HINT = (
    "write scheme://user:password@host:port/name; percent-encode the password:"
    " / is %2F, @ is %40, : is %3A, # is %23, ? is %3F"
)

_SECRET = re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)
_SERVER = re.compile(r"(rediss?|postgres(ql)?|amqps?):", re.IGNORECASE)
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")


def lower_scheme(address: str) -> str:
    """The address with its scheme in small letters: `REDIS://host` is `redis://host`. A path stays."""
    scheme, mark, rest = address.partition(":")
    if not mark or not (rest.startswith("//") or scheme.lower() in ("memory", "redis")):
        return address
    return f"{scheme.lower()}:{rest}"


def shown(address: str) -> str:
    """An address as people may see it: without its password."""
    scheme, mark, rest = address.partition("://")
    if not mark and _SERVER.match(address):
        scheme, _, rest = address.partition(":")
        return f"{scheme}:{rest.rpartition('@')[2]}"
    if not mark or scheme.lower() == "sqlite":
        return address  # a file
    return _SECRET.sub(r"\1***", f"{scheme}://{_open_part(address, rest)}")


def readable(address: str) -> None:
    """Raise UsageError about an address whose parts cannot be told apart."""
    if _clear(address):
        return
    raise UsageError(f"cannot read the address {shown(address)}", hint=HINT)


async def listens(host: str, port: int) -> bool:
    """Whether anything takes connections there: then a server that does not answer is another one."""
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError, OverflowError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


def _open_part(address: str, rest: str) -> str:
    """What may be seen of what follows the scheme."""
    if not _clear(address):
        _, mark, after = rest.rpartition("@")
        # Without an `@` a name before a colon may still have a password behind it.
        return f"***@{after}" if mark else f"{after.partition(':')[0]}:***"
    user, _, host = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    return f"{name}:***@{host}" if colon else rest


def _clear(address: str) -> bool:
    """Whether there is one way to read it: at most one `@`, before hosts that look like hosts."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return False
    if address.count("@") > ("@" in netloc):
        return False
    hosts = netloc.rpartition("@")[2]
    return all(_HOST.fullmatch(host) for host in hosts.split(","))
