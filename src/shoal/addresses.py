"""Addresses of servers, and how to print them. No other module hides passwords.

A password that is not percent-encoded makes an address ambiguous: it is unclear where the password ends. Such
an address is refused (`clear`), and only the part after its last `@` is printed.
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
    """Returns the address with its scheme in lower case: `redis://host` for `REDIS://host`. A path stays."""
    scheme, mark, rest = address.partition(":")
    if not mark or not (rest.startswith("//") or scheme.lower() in ("memory", "redis")):
        return address
    return f"{scheme.lower()}:{rest}"


def shown(address: str) -> str:
    """Returns the address of a server for printing: without its password.

    Celery accepts several addresses with `;` between them; all are printed.
    """
    scheme, mark, rest = address.partition("://")
    if not mark and _SERVER.match(address):
        scheme, _, rest = address.partition(":")
        return f"{scheme}:{rest.rpartition('@')[2]}"
    if not mark or scheme.lower() == "sqlite":
        return address  # a file
    several = address.split(f";{scheme}://")
    if len(several) > 1:
        # Only if each is unambiguous: otherwise the `;` may belong to a password.
        each = [several[0], *(f"{scheme}://{one}" for one in several[1:])]
        if all(map(clear, each)):
            return ";".join(map(shown, each))
    return _without_secrets(f"{scheme}://{_open_part(address, rest)}")


def clear(address: str) -> bool:
    """Whether the address is unambiguous: at most one `@`, followed by valid hosts."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return False
    if address.count("@") > ("@" in netloc):
        return False
    hosts = netloc.rpartition("@")[2]
    return all(_HOST.fullmatch(host) for host in hosts.split(","))


def without_password(text: str) -> str:
    """Returns a URL or host that was given to visit without the user's password, even if it is not a URL at
    all. Unlike in the address of a server, an `@` in the path or query is ordinary."""
    if "@" not in text:
        return text
    head = _HEAD.match(text)
    start = head.end() if head else 0
    end = start + len(re.split(r"[/\\?#]", text[start:], maxsplit=1)[0])
    at = text.rfind("@", start, end)
    if at < 0 and not _PLAIN_HOST.fullmatch(text[start:end]):
        # A password with a / in it, or the like: the text after the name is not a port.
        at = text.rfind("@")
    if at < 0:
        return text
    name, colon, _ = text[start:at].partition(":")
    return f"{text[:start]}{name + ':' if colon else ''}***{text[at:]}"


async def listens(host: str, port: int) -> bool:
    """Whether the port accepts connections. If so, a server that does not respond is of another kind."""
    import asyncio  # not at the top: `shoal --help` imports this module and needs no loop

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
    """Returns the part after the scheme for printing."""
    if not clear(address):
        _, mark, after = rest.rpartition("@")
        # Even without an `@`, a password may follow a name and a colon.
        return f"***@{after}" if mark else f"{after.partition(':')[0]}:***"
    user, _, host = rest.rpartition("@")
    # Some users encode the colon too. No library reads a password there, but it was meant as one.
    name, *password = _COLON.split(user, maxsplit=1)
    return f"{name}:***@{host}" if password else rest


def _without_secrets(text: str) -> str:
    """Replaces the values of options that hold a password or a token with `***`. Libraries decode the names
    of options, so `p%61ssword` is one. A value ends at `&`: any other character may belong to it."""
    seen, end = "", 0
    for option in _OPTION.finditer(text):
        if option.start() >= end and _SECRET.search(unquote(option[1])):
            seen += f"{text[end : option.end()]}***"
            end = text.find("&", option.end())
            end = len(text) if end < 0 else end
    return seen + text[end:]
