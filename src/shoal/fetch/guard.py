"""The one egress guard: where this program may connect to, and how names become addresses.

A page, a redirect, a robots.txt or a webhook can name any host, and a name can resolve to any address. So
every outgoing connection is checked here twice: the resolver refuses a name before a socket exists, and the
fetcher checks the address that the socket will really use.

The errors are opaque on purpose: a person who submits URLs must not learn from them which internal names
exist.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any

from shoal.errors import FetchError
from shoal.model import Private

MAX_ADDRESSES = 8
HINT = (
    "to allow it for a job, submit the job with --allow-private on the command line, allow_private in a"
    " request to the API, or SHOAL_ALLOW_PRIVATE=1 in the environment"
)

# Ports of other protocols, which could read a request line as a command: the list that browsers refuse
# (https://fetch.spec.whatwg.org/#port-blocking).
BAD_PORTS = frozenset((
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103,
    104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513,
    514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720,
    1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
))  # fmt: skip

# Written out and not left to `is_global`: up to Python 3.12.1 that is true for multicast, 192.0.0.192 and
# several IPv6 forms, and it changes with the interpreter.
_BLOCKED_V4 = tuple(
    IPv4Network(net)
    for net in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata service of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # 192.0.0.192 is Oracle's metadata service
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",  # Azure's wire server: a public address that responds only inside
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_BLOCKED_V6 = (
    IPv6Network("2001::/23"),  # protocol assignments, Teredo among them
    IPv6Network("2001:db8::/32"),
    IPv6Network("3fff::/20"),
)
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)


@lru_cache(maxsize=4096)
def why_blocked(address: str) -> str | None:
    """Returns why `address` (an IP literal) is not part of the public internet; None if it is.

    An IPv6 address that contains an IPv4 address (mapped, NAT64, 6to4, ISATAP) is judged by that. Everything
    else outside 2000::/3 is blocked, which covers loopback, link-local, site-local fec0::/10, unique-local,
    multicast, the IPv4-compatible form and 64:ff9b:1::/48.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return "not an address"
    return _blocked_v4(ip) if isinstance(ip, IPv4Address) else _blocked_v6(ip)


def _blocked_v4(ip: IPv4Address) -> str | None:
    for net in _BLOCKED_V4:
        if ip in net:
            return f"in {net}"
    if not ip.is_global:
        return "not global"
    return None


def _blocked_v6(ip: IPv6Address) -> str | None:
    if ip.ipv4_mapped is not None:
        return _blocked_v4(ip.ipv4_mapped)
    low = IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip in _NAT64:
        # Networks without IPv4 reach the public internet through this prefix, so it cannot be
        # refused as a whole.
        return _blocked_v4(low)
    if ip not in _GLOBAL_V6:
        return "not in 2000::/3"
    for net in _BLOCKED_V6:
        if ip in net:
            return f"in {net}"
    if ip in _SIX_TO_FOUR:
        return _blocked_v4(IPv4Address((int(ip) >> 80) & 0xFFFFFFFF))
    if (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP:
        return _blocked_v4(low)
    return None if ip.is_global else "not global"


def own_addresses() -> frozenset[str]:
    """Returns the addresses of this machine's interfaces, from /proc; nothing on systems without it.

    A public address of this machine is as internal as 127.0.0.1: services that listen on every interface can
    be reached there too.
    """
    found: set[str] = set()
    last = ""
    for line in _lines(Path("/proc/net/fib_trie")):
        word = line.rpartition("-- ")[2].strip() if "-- " in line else ""
        last = word or last
        if line.endswith("/32 host LOCAL"):
            found.add(last)
    for line in _lines(Path("/proc/net/if_inet6")):
        digits = line.partition(" ")[0]
        if len(digits) == 32:
            found.add(str(IPv6Address(int(digits, 16))))
    return frozenset(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


class Guard:
    """Decides which addresses may be connected to. `allow` has the `host:port` endpoints that are permitted
    although they are private."""

    def __init__(
        self,
        *,
        allow: Collection[str] = (),
        own: Callable[[], frozenset[str]] = own_addresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allow = frozenset(allow)
        self._read_own = own
        self._clock = clock
        self._own: frozenset[str] = frozenset()
        self._own_until = float("-inf")

    def permits(self, host: str, port: int, private: Private = False) -> bool:
        """Whether this endpoint may be visited although it is private: by `allow`, or by the job's
        `private`."""
        if isinstance(private, bool) and (private or not self._allow):
            return private
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return endpoint in self._allow or (private is not False and endpoint in private)

    def refuses(self, address: str) -> str | None:
        """Returns why `address` may not be connected to; None if it is public and not this machine's."""
        why = why_blocked(address)
        if why is not None:
            return why
        now = self._clock()
        if now >= self._own_until:
            # A laptop changes networks, so the list is read again; that takes about 0.1 ms.
            self._own, self._own_until = self._read_own(), now + 10.0
        return "an address of this machine" if address in self._own else None


def refusal() -> FetchError:
    """Returns the one error for every blocked address, whatever the reason."""
    error = FetchError("egress_blocked", "this address is not public")
    error.hint = HINT
    return error


def bad_port(port: int) -> FetchError:
    error = FetchError("egress_blocked", f"port {port} belongs to another protocol")
    error.hint = HINT
    return error


def no_public_address(host: str, error: str) -> FetchError:
    """Returns the one error for a name that does not exist and for a name of an internal host: a job that may
    not visit internal hosts must not learn which exist."""
    failure = FetchError(error, f"{host} has no public address")
    failure.hint = f"check the name; if the host is on your own network: {HINT}"
    return failure


class _Answer:
    """What a name resolved to: addresses, or the error to raise.

    `private`: any of the addresses is blocked. `beside`: the error class for a blocked address, which is that
    of a name next to it that does not exist.
    """

    __slots__ = ("addresses", "beside", "error", "message", "private", "until")

    def __init__(
        self, addresses: tuple[str, ...], private: bool, until: float, error: str = "", message: str = ""
    ) -> None:
        self.addresses = addresses
        self.private = private
        self.until = until
        self.error = error
        self.message = message
        self.beside = "dns_not_found"


class Resolver:
    """Resolves names to checked addresses. Belongs to one event loop.

    `getaddrinfo` cannot be interrupted, so it runs on a few daemon threads of its own: a lookup that hangs
    blocks one of them until the system gives up, but never the loop, and never the exit of the program (which
    would join the threads of an executor).
    """

    def __init__(
        self,
        guard: Guard,
        *,
        threads: int = 16,
        ttl: float = 60.0,
        negative_ttl: float = 15.0,
        entries: int = 4096,
        lookup: Callable[[str], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard = guard
        self._ttl = ttl
        self._negative_ttl = negative_ttl
        self._entries = entries
        self._lookup = lookup or system_lookup
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._running: dict[str, asyncio.Future[_Answer]] = {}
        self._work: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop] | None] = queue.SimpleQueue()
        self._limit = threads
        self._threads: list[threading.Thread] = []

    def known(self, host: str, port: int, allow_private: Private = False) -> tuple[str, ...] | None:
        """Returns the addresses of `host` if no lookup is needed, else None. Raises like `resolve`."""
        answer = self._answers.get(host)
        if answer is None or answer.until <= self._clock():
            try:
                ip_address(host)
            except ValueError:
                return None
            answer = self._keep(host, (host,))
        return self._judge(answer, host, port, allow_private)

    async def resolve(
        self, host: str, port: int, *, allow_private: Private = False, within: float = 5.0
    ) -> tuple[str, ...]:
        """Returns at most MAX_ADDRESSES addresses of `host`, all of them permitted.

        Raises FetchError: dns_not_found, dns_failed, dns_timeout; egress_blocked for an address that is not
        public. A name with any such address is treated as if it did not exist: a mix looks like DNS
        rebinding.
        """
        known = self.known(host, port, allow_private)
        if known is not None:
            return known
        running = self._running.get(host)
        if running is None:
            running = self._begin(host)
        done, _ = await asyncio.wait((running,), timeout=within)
        if not done:
            raise FetchError("dns_timeout", f"no answer from DNS within {within:g} s")
        return self._judge(running.result(), host, port, allow_private)

    def prefer(self, host: str, address: str) -> None:
        """Try `address` first while the DNS answer is fresh: it took a connection where others did not."""
        answer = self._answers.get(host)
        if answer is not None and address in answer.addresses and answer.addresses[0] != address:
            rest = tuple(other for other in answer.addresses if other != address)
            answer.addresses = (address, *rest)

    def close(self) -> None:
        """End the idle threads; a thread that hangs in a lookup ends with the lookup."""
        for _ in self._threads:
            self._work.put(None)
        self._threads.clear()

    def _judge(self, answer: _Answer, host: str, port: int, allow_private: Private) -> tuple[str, ...]:
        if self.guard.permits(host, port, allow_private):
            if answer.error:
                raise FetchError(answer.error, answer.message)
            return answer.addresses
        # Checked before the name: the error for a refused port reveals nothing about the name.
        if port in BAD_PORTS:
            raise bad_port(port)
        if answer.error:
            raise no_public_address(host, answer.error)
        if answer.private:
            raise refusal() if _is_plain(host) else no_public_address(host, answer.beside)
        return answer.addresses

    def _begin(self, host: str) -> asyncio.Future[_Answer]:
        loop = asyncio.get_running_loop()
        running: asyncio.Future[_Answer] = loop.create_future()
        self._running[host] = running
        if len(self._threads) < self._limit and len(self._running) > len(self._threads):
            thread = threading.Thread(target=self._serve, name="shoal-dns", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put((host, loop))
        return running

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            host, loop = work
            found = self._look_up(host)
            inside = not _is_plain(host) and any(self.guard.refuses(one) for one in found[0])
            beside = self._look_up(_beside(host))[1] if inside else ""
            try:
                loop.call_soon_threadsafe(self._finish, host, *found, beside)
            except RuntimeError:
                continue  # the loop is closed, so no task waits for the answer

    def _look_up(self, host: str) -> tuple[tuple[str, ...], str, str]:
        """Returns addresses, or else the error class and a sentence."""
        try:
            addresses = tuple(self._lookup(host))
        except socket.gaierror as failure:
            return (), _dns_class(failure), "the name does not resolve"
        except Exception as failure:  # a name that the resolver cannot process
            return (), "dns_failed", f"the name cannot be looked up ({type(failure).__name__})"
        return (addresses, "", "") if addresses else ((), "dns_not_found", "the name has no address")

    def _finish(self, host: str, addresses: tuple[str, ...], error: str, message: str, beside: str) -> None:
        answer = self._keep(host, addresses, error, message)
        answer.beside = beside or answer.beside
        running = self._running.pop(host, None)
        if running is not None and not running.done():
            running.set_result(answer)

    def _keep(self, host: str, addresses: tuple[str, ...], error: str = "", message: str = "") -> _Answer:
        # All addresses are judged, even those beyond MAX_ADDRESSES.
        private = any(self.guard.refuses(address) for address in addresses)
        last = self._answers.pop(host, None)
        if last is not None and last.addresses and last.addresses[0] in addresses:
            # Name servers rotate their answers, but pooled connections belong to one address: keeping
            # it first keeps them useful.
            addresses = (last.addresses[0], *(one for one in addresses if one != last.addresses[0]))
        life = self._negative_ttl if error else self._ttl
        answer = _Answer(addresses[:MAX_ADDRESSES], private, self._clock() + life, error, message)
        self._answers[host] = answer
        while len(self._answers) > self._entries:
            del self._answers[next(iter(self._answers))]
        return answer


def _is_plain(host: str) -> bool:
    """Whether the address of `host` is obvious: then an error about it reveals nothing."""
    if ":" in host or host.rstrip(".").endswith("localhost"):
        return True
    try:
        socket.inet_aton(host)  # accepts the forms that only a resolver understands too, such as 127.1
    except OSError:
        return False
    return True


def _beside(host: str) -> str:
    """Returns a name in the same domain that does not exist. Its error depends on the name servers: if they
    do not respond at all, the error must not say that a name does not exist."""
    _, dot, parent = host.partition(".")
    return f"{secrets.token_hex(8)}{dot}{parent}"


def system_lookup(host: str) -> list[str]:
    """Returns the addresses of `host` by the system's resolver, without duplicates."""
    found: dict[str, None] = {}
    rows: list[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    for _family, _type, _proto, _name, place in rows:
        found[str(place[0])] = None
    return list(found)


def _dns_class(failure: socket.gaierror) -> str:
    missing = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)}
    return "dns_not_found" if failure.errno in missing else "dns_failed"
