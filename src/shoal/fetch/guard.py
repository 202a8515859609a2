"""The one egress guard: where this program may connect to, and how names become addresses.

A page, a redirect, a robots.txt or a webhook can name any host it likes, and a name can resolve
to anything. So every outgoing connection passes here twice: the resolver refuses a name before a
socket exists, and the fetcher asks again with the address that the socket will really use.

The answer is opaque on purpose: whoever submits URLs must not learn from our errors which
internal names exist.
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
    "the job decides: --allow-private when it is started on the command line, allow_private in a request"
    " to the API, or SHOAL_ALLOW_PRIVATE=1 where it is submitted"
)

# Ports that speak something else, where a request line could be read as a command: the list that
# browsers refuse (https://fetch.spec.whatwg.org/#port-blocking).
BAD_PORTS = frozenset((
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103,
    104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513,
    514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720,
    1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
))  # fmt: skip

# Written out and not left to `is_global`: up to Python 3.12.1 that calls multicast, 192.0.0.192
# and several IPv6 forms global, and the answer changes with the interpreter.
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
        "168.63.129.16/32",  # Azure's wire server: a public address that only answers inside
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
def blocked(address: str) -> str | None:
    """Why `address` (an IP literal) is not part of the public internet; None if it is.

    An IPv6 address that carries an IPv4 address (mapped, NAT64, 6to4, ISATAP) is judged by what it
    carries. Everything else outside 2000::/3 is blocked, which covers loopback, link-local,
    site-local fec0::/10, unique-local, multicast, the IPv4-compatible form and 64:ff9b:1::/48.
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
    """The addresses of this machine's interfaces, as far as the kernel tells; empty elsewhere.

    A public address of our own is as internal as 127.0.0.1: services that listen on every
    interface answer there too.
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
    """Says no. `allow` names exact `host:port` endpoints that are permitted although private."""

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
        """Whether this endpoint may be visited although it is private: by us, or by whoever asks."""
        if isinstance(private, bool) and (private or not self._allow):
            return private
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return endpoint in self._allow or (private is not False and endpoint in private)

    def refuses(self, address: str) -> str | None:
        """Why nobody may connect to `address`; None when it is public and not our own."""
        why = blocked(address)
        if why is not None:
            return why
        now = self._clock()
        if now >= self._own_until:
            # A laptop changes networks, so the list ages; reading it costs about 0.1 ms.
            self._own, self._own_until = self._read_own(), now + 10.0
        return "an address of this machine" if address in self._own else None


def refusal() -> FetchError:
    """The one answer for every blocked address, whatever the reason."""
    error = FetchError("egress_blocked", "this address is not public")
    error.hint = HINT
    return error


def bad_port(port: int) -> FetchError:
    error = FetchError("egress_blocked", f"port {port} belongs to another protocol")
    error.hint = HINT
    return error


def no_public_address(host: str, error: str) -> FetchError:
    """The one answer for a name that leads nowhere and for one that leads inside: who may not go inside must
    not learn which names exist there."""
    made = FetchError(error, f"{host} has no public address")
    made.hint = f"check the name; if it is on your own network: {HINT}"
    return made


class _Answer:
    """What a name resolved to: addresses, or the error to raise; and whether any is blocked. A name with a
    blocked address also has the class of error that names beside it have which do not exist (`beside`)."""

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
    """Names to checked addresses. Belongs to one event loop.

    `getaddrinfo` cannot be interrupted, so it runs on a few daemon threads of our own: a lookup
    that hangs costs one of them until the system gives up, but never the loop and never the exit
    of the program (an executor's threads are joined there).
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
        """The addresses of `host` if no lookup is needed; None if one is. Raises like `resolve`."""
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
        """At most MAX_ADDRESSES addresses of `host`, all of them permitted.

        Raises FetchError: dns_not_found, dns_failed, dns_timeout; egress_blocked for an address that is not
        public. A name with any such address (a mix is how rebinding looks) is as good as none.
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
        """`address` answered where others did not: try it first while the answer is fresh."""
        answer = self._answers.get(host)
        if answer is not None and address in answer.addresses and answer.addresses[0] != address:
            rest = tuple(other for other in answer.addresses if other != address)
            answer.addresses = (address, *rest)

    def close(self) -> None:
        """End the threads that are idle; one that hangs in a lookup ends with the lookup."""
        for _ in self._threads:
            self._work.put(None)
        self._threads.clear()

    def _judge(self, answer: _Answer, host: str, port: int, allow_private: Private) -> tuple[str, ...]:
        if self.guard.permits(host, port, allow_private):
            if answer.error:
                raise FetchError(answer.error, answer.message)
            return answer.addresses
        # Before the name: of a port that is refused anyway nobody learns anything.
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
                continue  # the loop is closed: nobody waits any more

    def _look_up(self, host: str) -> tuple[tuple[str, ...], str, str]:
        """Addresses, or the class of the failure and a sentence."""
        try:
            addresses = tuple(self._lookup(host))
        except socket.gaierror as failure:
            return (), _dns_class(failure), "the name does not resolve"
        except Exception as failure:  # a name that the resolver itself cannot digest
            return (), "dns_failed", f"the name cannot be looked up ({type(failure).__name__})"
        return (addresses, "", "") if addresses else ((), "dns_not_found", "the name has no address")

    def _finish(self, host: str, addresses: tuple[str, ...], error: str, message: str, beside: str) -> None:
        answer = self._keep(host, addresses, error, message)
        answer.beside = beside or answer.beside
        running = self._running.pop(host, None)
        if running is not None and not running.done():
            running.set_result(answer)

    def _keep(self, host: str, addresses: tuple[str, ...], error: str = "", message: str = "") -> _Answer:
        # All addresses are judged, also those beyond the ones we would try.
        private = any(self.guard.refuses(address) for address in addresses)
        last = self._answers.pop(host, None)
        if last is not None and last.addresses and last.addresses[0] in addresses:
            # Name servers rotate their answers, but pooled connections belong to one address:
            # staying with it keeps them useful.
            addresses = (last.addresses[0], *(one for one in addresses if one != last.addresses[0]))
        life = self._negative_ttl if error else self._ttl
        answer = _Answer(addresses[:MAX_ADDRESSES], private, self._clock() + life, error, message)
        self._answers[host] = answer
        while len(self._answers) > self._entries:
            del self._answers[next(iter(self._answers))]
        return answer


def _is_plain(host: str) -> bool:
    """Whether everybody knows where this leads: nothing is given away by saying so."""
    if ":" in host or host.rstrip(".").endswith("localhost"):
        return True
    try:
        socket.inet_aton(host)  # also in the forms that only a resolver understands, such as 127.1
    except OSError:
        return False
    return True


def _beside(host: str) -> str:
    """A name in the same place that does not exist. What becomes of it depends on the name servers: where
    they do not answer at all, nobody is told that a name does not exist."""
    _, dot, parent = host.partition(".")
    return f"{secrets.token_hex(8)}{dot}{parent}"


def system_lookup(host: str) -> list[str]:
    """The addresses that the system's resolver gives for `host`, without duplicates."""
    found: dict[str, None] = {}
    rows: list[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    for _family, _type, _proto, _name, place in rows:
        found[str(place[0])] = None
    return list(found)


def _dns_class(failure: socket.gaierror) -> str:
    missing = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)}
    return "dns_not_found" if failure.errno in missing else "dns_failed"
