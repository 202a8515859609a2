"""Addresses of servers: what people may see of one. No other module hides a password.

A password that was not percent-encoded makes an address ambiguous: nobody can tell where it ends. Such
an address is refused (`clear`), and what is shown of it begins after its last `@`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from urllib.parse import unquote, urlsplit

HINT = (
    "write scheme://user:password@host:port/name; percent-encode the password:"
    " / is %2F, @ is %40, : is %3A, # is %23, ? is %3F"
)

_OPTION = re.compile(r"[?&;#]([^=?&;#]+)=")
_SECRET = re.compile(r"pass|pwd|secret|token|credential|signature|(api|access|account)_?key", re.IGNORECASE)
_SERVER = re.compile(r"(rediss?|postgres(ql)?|amqps?):", re.IGNORECASE)
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_PLAIN_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]+)?")
_COLON = re.compile(r":|%3a", re.IGNORECASE)
_HEAD = re.compile(r"\s*(?:[a-zA-Z][a-zA-Z0-9+.-]*:)?[/\\]*")


def lower_scheme(address: str) -> str:
    """The address with its scheme in small letters: `REDIS://host` is `redis://host`. A path stays."""
    scheme, mark, rest = address.partition(":")
    if not mark or not (rest.startswith("//") or scheme.lower() in ("memory", "redis")):
        return address
    return f"{scheme.lower()}:{rest}"


def shown(address: str) -> str:
    """The address of a server as people may see it: without its password.

    Celery takes several with `;` between them; each is shown.
    """
    scheme, mark, rest = address.partition("://")
    if not mark and _SERVER.match(address):
        scheme, _, rest = address.partition(":")
        return f"{scheme}:{rest.rpartition('@')[2]}"
    if not mark or scheme.lower() == "sqlite":
        return address  # a file
    several = address.split(f";{scheme}://")
    if len(several) > 1:
        # Only where each can be read: otherwise the `;` may belong to a password.
        each = [several[0], *(f"{scheme}://{one}" for one in several[1:])]
        if all(map(clear, each)):
            return ";".join(map(shown, each))
    return _without_secrets(f"{scheme}://{_open_part(address, rest)}")


def clear(address: str) -> bool:
    """Whether there is one way to read it: at most one `@`, before hosts that look like hosts."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return False
    if address.count("@") > ("@" in netloc):
        return False
    hosts = netloc.rpartition("@")[2]
    return all(_HOST.fullmatch(host) for host in hosts.split(","))


def without_password(text: str) -> str:
    """A URL or a host that somebody gave us to visit, without the user's password, also if it is no URL
    at all. Unlike in the address of a server, an `@` in its path or query is ordinary."""
    if "@" not in text:
        return text
    head = _HEAD.match(text)
    start = head.end() if head else 0
    end = start + len(re.split(r"[/\\?#]", text[start:], maxsplit=1)[0])
    at = text.rfind("@", start, end)
    if at < 0 and not _PLAIN_HOST.fullmatch(text[start:end]):
        # A password with a / in it, or the like: what follows the name is no port.
        at = text.rfind("@")
    if at < 0:
        return text
    name, colon, _ = text[start:at].partition(":")
    return f"{text[:start]}{name + ':' if colon else ''}***{text[at:]}"


async def listens(host: str, port: int) -> bool:
    """Whether anything takes connections there: then a server that does not answer is another one."""
    import asyncio  # not for those who only read addresses: `shoal --help` is one of them

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
    if not clear(address):
        _, mark, after = rest.rpartition("@")
        # Without an `@` a name before a colon may still have a password behind it.
        return f"***@{after}" if mark else f"{after.partition(':')[0]}:***"
    user, _, host = rest.rpartition("@")
    # Some encode the colon too. No library reads a password there, but it was meant as one.
    name, *password = _COLON.split(user, maxsplit=1)
    return f"{name}:***@{host}" if password else rest


def _without_secrets(text: str) -> str:
    """Values of options that hold a password or a token become `***`. Libraries decode the names of
    options, so `p%61ssword` is one. A value ends at `&`: any other mark may belong to it."""
    seen, end = "", 0
    for option in _OPTION.finditer(text):
        if option.start() >= end and _SECRET.search(unquote(option[1])):
            seen += f"{text[end : option.end()]}***"
            end = text.find("&", option.end())
            end = len(text) if end < 0 else end
    return seen + text[end:]
