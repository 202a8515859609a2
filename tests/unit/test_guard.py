"""The guard: what is public, what is not, and that a refusal costs no packet."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence

import pytest

from shoal.errors import FetchError
from shoal.fetch.guard import MAX_ADDRESSES, Guard, Resolver, own_addresses, why_blocked

BLOCKED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::8.8.8.8",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe",
    "64:ff9b::7f00:1", "64:ff9b:1::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "3fff::1", "2002:7f00:1::", "2002:a9fe:a9fe::",
    "2002:c0a8:101::1", "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:7f00:1", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "feff::1", "ff02::1", "ff0e::1", "4000::1",
    "localhost", "2130706433",
]  # fmt: skip

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1",
    "192.0.1.1", "198.17.0.1", "198.20.0.1", "168.63.129.15", "223.255.255.255", "2606:4700::1111",
    "2a00:1450:4001::8a", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1",
]  # fmt: skip


@pytest.mark.parametrize("address", BLOCKED)
def test_blocks(address: str) -> None:
    assert why_blocked(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_lets_pass(address: str) -> None:
    assert why_blocked(address) is None


def test_own_addresses_are_blocked_even_if_public() -> None:
    guard = Guard(own=lambda: frozenset({"93.184.216.34"}))
    assert guard.refuses("93.184.216.34")
    assert guard.refuses("93.184.216.35") is None


def test_own_addresses_are_read_again_after_a_while() -> None:
    now = 0.0
    mine = frozenset({"93.184.216.34"})
    guard = Guard(own=lambda: mine, clock=lambda: now)
    assert guard.refuses("93.184.216.34")
    mine = frozenset()
    assert guard.refuses("93.184.216.34")
    now = 11.0
    assert guard.refuses("93.184.216.34") is None


def test_lists_the_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in own_addresses()


def test_allow_list_is_exact() -> None:
    guard = Guard(allow={"127.0.0.1:8000", "[::1]:8000"})
    assert guard.permits("127.0.0.1", 8000)
    assert guard.permits("::1", 8000)
    assert not guard.permits("127.0.0.1", 8001)
    assert not guard.permits("127.0.0.2", 8000)


class Names:
    """A name server that answers from a table and counts."""

    def __init__(self, **table: Sequence[str]) -> None:
        self.table = table
        self.asked: list[str] = []

    def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.table:
            raise socket.gaierror(socket.EAI_NONAME, "no")
        return self.table[host]


def resolver(names: Callable[[str], Sequence[str]]) -> Resolver:
    return Resolver(Guard(own=frozenset), lookup=names)


async def refused(made: Resolver, host: str, port: int = 80, allow_private: bool = False) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await made.resolve(host, port, allow_private=allow_private)
    return caught.value


async def test_resolves_once_and_remembers() -> None:
    names = Names(site=["93.184.216.34", "93.184.216.35"])
    made = resolver(names)
    assert made.known("site", 80) is None
    assert await made.resolve("site", 80) == ("93.184.216.34", "93.184.216.35")
    assert made.known("site", 443) == ("93.184.216.34", "93.184.216.35")
    assert names.asked == ["site"]
    made.close()


async def test_concurrent_lookups_are_one() -> None:
    names = Names(site=["93.184.216.34"])
    made = resolver(names)
    await asyncio.gather(*(made.resolve("site", 80) for _ in range(50)))
    assert names.asked == ["site"]
    made.close()


async def test_a_name_with_one_private_address_is_blocked() -> None:
    made = resolver(Names(mixed=["93.184.216.34", "10.0.0.1"]))
    error = await refused(made, "mixed")
    assert error.error == "dns_not_found"
    for face in ("--allow-private", "allow_private in a request to the API", "SHOAL_ALLOW_PRIVATE"):
        assert face in error.hint
        assert face not in error.message  # or it is told twice
    made.close()


async def test_the_refusal_tells_nothing() -> None:
    made = resolver(Names(a=["10.0.0.1"], b=["169.254.169.254"]))
    assert (await refused(made, "127.0.0.1")).message == (await refused(made, "169.254.169.254")).message
    assert (await refused(made, "a")).message == (await refused(made, "b")).message.replace("b ", "a ", 1)
    made.close()


@pytest.mark.parametrize("failure", [socket.EAI_NONAME, socket.EAI_AGAIN], ids=["not found", "no answer"])
async def test_nobody_learns_which_names_exist_inside(failure: int) -> None:
    """Whatever the name servers say of names that do not exist: those that lead inside are told alike."""

    def lookup(host: str) -> list[str]:
        if host == "inside.example":
            return ["10.0.0.1"]
        raise socket.gaierror(failure, "no")

    made = resolver(lookup)
    for port in (80, 8080, 22):
        there = await refused(made, "inside.example", port)
        nowhere = await refused(made, "nobody.example", port)
        assert there.error == nowhere.error
        assert there.message == nowhere.message.replace("nobody", "inside")
        assert there.hint == nowhere.hint
    # Who may go there is told.
    assert await made.resolve("inside.example", 80, allow_private=True) == ("10.0.0.1",)
    with pytest.raises(FetchError) as caught:
        await made.resolve("nobody.example", 80, allow_private=True)
    assert caught.value.message == "the name does not resolve"
    made.close()


async def test_localhost_is_no_secret() -> None:
    made = resolver(lambda _host: ["127.0.0.1"])
    for name in ("localhost", "api.localhost", "localhost."):
        assert (await refused(made, name)).error == "egress_blocked"
    made.close()


async def test_private_beyond_the_first_addresses_counts() -> None:
    many = [f"93.184.216.{n}" for n in range(1, 31)]
    made = resolver(Names(many=many, hidden=[*many, "127.0.0.1"]))
    assert len(await made.resolve("many", 80)) == MAX_ADDRESSES
    assert (await refused(made, "hidden")).error == "dns_not_found"
    made.close()


async def test_literals_need_no_lookup() -> None:
    names = Names()
    made = resolver(names)
    assert made.known("93.184.216.34", 80) == ("93.184.216.34",)
    assert (await refused(made, "127.0.0.1")).error == "egress_blocked"
    assert (await refused(made, "::1")).error == "egress_blocked"
    assert made.known("127.0.0.1", 80, True) == ("127.0.0.1",)
    assert names.asked == []
    made.close()


@pytest.mark.parametrize("port", [22, 25, 110, 6667])
async def test_ports_of_other_protocols_are_blocked(port: int) -> None:
    made = resolver(Names())
    assert (await refused(made, "93.184.216.34", port)).error == "egress_blocked"
    assert made.known("93.184.216.34", port, True) == ("93.184.216.34",)
    made.close()


async def test_classes_of_failures() -> None:
    def lookup(host: str) -> list[str]:
        if host == "again":
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        if host == "odd":
            raise UnicodeError("label too long")
        if host == "nothing":
            return []
        raise socket.gaierror(socket.EAI_NONAME, "no")

    made = Resolver(Guard(own=frozenset), lookup=lookup)
    assert (await refused(made, "again")).error == "dns_failed"
    assert (await refused(made, "odd")).error == "dns_failed"
    assert (await refused(made, "nothing")).error == "dns_not_found"
    assert (await refused(made, "missing")).error == "dns_not_found"
    made.close()


async def test_failures_are_remembered_for_a_shorter_time() -> None:
    now = 0.0
    names = Names(site=["93.184.216.34"])
    made = Resolver(Guard(own=frozenset), lookup=names, ttl=60, negative_ttl=15, clock=lambda: now)
    await made.resolve("site", 80)
    for _ in range(3):
        assert (await refused(made, "missing")).error == "dns_not_found"
    assert names.asked == ["site", "missing"]
    now = 16.0
    await refused(made, "missing")
    await made.resolve("site", 80)
    assert names.asked == ["site", "missing", "missing"]
    now = 61.0
    await made.resolve("site", 80)
    assert names.asked[-1] == "site"
    made.close()


async def test_a_hanging_lookup_times_out_and_blocks_nobody_else() -> None:
    free = threading.Event()

    def lookup(host: str) -> list[str]:
        if host == "hangs":
            free.wait(20)
        return ["93.184.216.34"]

    made = Resolver(Guard(own=frozenset), lookup=lookup, threads=2)
    with pytest.raises(FetchError) as caught:
        await made.resolve("hangs", 80, within=0.05)
    assert caught.value.error == "dns_timeout"
    assert await made.resolve("site", 80) == ("93.184.216.34",)
    free.set()
    assert await made.resolve("hangs", 80) == ("93.184.216.34",)
    made.close()


async def test_memory_is_bounded() -> None:
    made = Resolver(Guard(own=frozenset), entries=10)
    for n in range(1, 200):
        made.known(f"93.184.216.{n}", 80)
    assert len(made._answers) == 10
    made.close()


async def test_stays_with_the_address_that_connections_use() -> None:
    now = 0.0
    names = Names(site=["93.184.216.1", "93.184.216.2"])
    made = Resolver(Guard(own=frozenset), lookup=names, clock=lambda: now)
    await made.resolve("site", 80)
    names.table["site"] = ["93.184.216.2", "93.184.216.1"]
    now = 100.0
    assert (await made.resolve("site", 80))[0] == "93.184.216.1"
    made.prefer("site", "93.184.216.2")
    assert (await made.resolve("site", 80))[0] == "93.184.216.2"
    made.close()


async def test_rebinding_is_judged_again() -> None:
    now = 0.0
    names = Names(site=["93.184.216.34"])
    made = Resolver(Guard(own=frozenset), lookup=names, clock=lambda: now)
    await made.resolve("site", 80)
    names.table["site"] = ["127.0.0.1"]
    now = 61.0
    assert (await refused(made, "site")).error == "dns_not_found"
    made.close()
