"""Addresses: no password is ever shown, and what cannot be read is refused with the way out."""

from __future__ import annotations

import pytest

from shoal.addresses import lower_scheme, readable, shown
from shoal.errors import FrontierUnreachable, UsageError
from shoal.registry import _read, broker_place, migrate, on_server, open_dispatch, open_frontier, place

SHOWN = [
    ("postgres+asyncpg://u:topsecret@127.0.0.1/x", "postgres+asyncpg://u:***@127.0.0.1/x"),
    ("redis://:topsecret@h:6379/0?prefix=a", "redis://:***@h:6379/0?prefix=a"),
    ("postgresql://u:top:secret@h/x", "postgresql://u:***@h/x"),
    ("postgresql://u:topsecret@h1:1,h2:2/x", "postgresql://u:***@h1:1,h2:2/x"),
    ("postgresql://h/x?user=u&password=topsecret&schema=a", "postgresql://h/x?user=u&password=***&schema=a"),
    ("redis://h/0?PASSWORD=topsecret", "redis://h/0?PASSWORD=***"),
    ("rediss://h/0?ssl_password=topsecret", "rediss://h/0?ssl_password=***"),
    ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
    ("redis://u@h", "redis://u@h"),
    ("postgresql:///x?host=/run", "postgresql:///x?host=/run"),
    ("sqlite:////home/a@b/x.db", "sqlite:////home/a@b/x.db"),
    ("a@b/x.db", "a@b/x.db"),
    ("memory:", "memory:"),
    ("", ""),
]
UNCLEAR = [
    ("postgresql://u:top/secret@h/x", "postgresql://***@h/x"),
    ("postgresql://u:top@secret@h/x", "postgresql://***@h/x"),
    ("postgresql://u:top?secret@h/x", "postgresql://***@h/x"),
    ("postgresql://u:top#secret@h/x", "postgresql://***@h/x"),
    ("postgresql://[u:topsecret@h/x", "postgresql://***@h/x"),
    ("redis://:12/topsecret@h/0", "redis://***@h/0"),
    ("redis://:topsecret", "redis://:***"),
    ("redis:topsecret@h", "redis:h"),
    ("postgresql://h:port/x", "postgresql://h:***"),
]


@pytest.mark.parametrize(("address", "seen"), SHOWN + UNCLEAR)
def test_what_people_see(address: str, seen: str) -> None:
    assert shown(address) == seen


@pytest.mark.parametrize(("address", "seen"), UNCLEAR)
async def test_an_address_that_cannot_be_read(address: str, seen: str) -> None:
    for use in (open_frontier, migrate):
        with pytest.raises(UsageError) as told:
            await use(address)
        assert seen in str(told.value)
        assert "percent-encode" in told.value.hint
        assert "secret" not in str(told.value) + told.value.hint


@pytest.mark.parametrize(
    "address", [address for address, _ in SHOWN if "://" in address and "@b" not in address]
)
def test_an_address_that_can_be_read(address: str) -> None:
    readable(address)


@pytest.mark.parametrize(
    "address", ["postgres+asyncpg://u:topsecret@h/x", "MYSQL://u:topsecret@h/x", "postgresql:topsecret"]
)
async def test_a_scheme_that_nobody_knows(address: str) -> None:
    with pytest.raises(UsageError, match="no frontier for") as told:
        await open_frontier(address)
    for known in ("sqlite:", "memory:", "redis:", "postgresql:"):
        assert known in told.value.hint
    if "@" in address:
        assert "topsecret" not in str(told.value)


async def test_schemes_in_any_case() -> None:
    assert lower_scheme("REDIS://Host/0") == "redis://Host/0"
    assert lower_scheme("Some/Path.db") == "Some/Path.db"
    assert on_server("PostgreSQL://h/x")
    await (await open_frontier("MEMORY:")).close()
    # Known, and then found wrong.
    with pytest.raises(UsageError, match="a database of Redis is a number"):
        await open_frontier("REDIS://h/abc")


def test_a_broker_address_that_cannot_be_read() -> None:
    with pytest.raises(UsageError) as told:
        open_dispatch("amqp://u:top/secret@h/")
    assert "secret" not in str(told.value) and "percent-encode" in told.value.hint


@pytest.mark.parametrize("path", ["/abc", "/0/1", "/-1", "/1a"])
async def test_a_redis_database_is_a_number(path: str) -> None:
    with pytest.raises(UsageError, match="a database of Redis is a number"):
        await open_frontier(f"redis://127.0.0.1:1{path}")


@pytest.mark.parametrize(("variable", "value"), [("REDIS_DB", "x"), ("REDIS_PORT", "x"), ("REDIS_DB", "-1")])
async def test_numbers_of_redis_in_the_environment(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=variable):
        await open_frontier("redis://")


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:topsecret@127.0.0.1:1/x?sslmode=bogus",
        "postgresql://u:topsecret@127.0.0.1:99999999/x",
    ],
)
async def test_a_postgresql_address_that_its_library_refuses(address: str) -> None:
    with pytest.raises(UsageError, match="cannot read the address") as told:
        await open_frontier(address)
    assert told.value.exit_code == 2
    assert "topsecret" not in str(told.value) + told.value.hint


REDIS = {"REDIS_HOST": "far.test", "REDIS_PORT": "6380", "REDIS_DB": "3", "REDIS_PASSWORD": "top/secret"}


@pytest.mark.parametrize(
    ("address", "really"),
    [
        ("redis://", "redis://:top%2Fsecret@far.test:6380/3"),
        ("redis:", "redis://:top%2Fsecret@far.test:6380/3"),
        ("rediss://", "rediss://:top%2Fsecret@far.test:6380/3"),
        ("redis://?prefix=abc", "redis://:top%2Fsecret@far.test:6380/3?prefix=abc"),
        ("redis:///2", "redis://:top%2Fsecret@far.test:6380/2"),
        ("redis:///2?prefix=abc", "redis://:top%2Fsecret@far.test:6380/2?prefix=abc"),
        ("redis://:other@/2", "redis://:other@far.test:6380/2"),
        ("redis://:7000", "redis://:top%2Fsecret@far.test:7000/3"),
        ("redis://near.test", "redis://near.test"),
        ("redis://near.test/1?prefix=abc", "redis://near.test/1?prefix=abc"),
    ],
)
def test_what_a_redis_address_leaves_out(address: str, really: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in REDIS.items():
        monkeypatch.setenv(name, value)
    assert _read(address)[0] == really
    assert place(address) == shown(really)
    assert "secret" not in place(address)


def test_empty_variables_of_other_systems_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HOST", "PORT", "USER", "PASSWORD", "VHOST")
    for name in (*REDIS, *(f"RABBITMQ_{name}" for name in names)):
        monkeypatch.setenv(name, "")
    assert _read("redis://")[0] == "redis://localhost:6379/0"
    assert broker_place("amqp://") == "amqp://guest:***@localhost:5672/%2F"


def test_a_host_of_ipv6_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_HOST", "RABBITMQ_HOST"):
        monkeypatch.setenv(name, "::1")
    assert place("redis:///0") == "redis://[::1]:6379/0"
    assert "@[::1]:5672/" in broker_place("amqp://")


async def test_errors_name_the_server_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_HOST", "127.0.0.1")
    monkeypatch.setenv("REDIS_PORT", "1")
    with pytest.raises(FrontierUnreachable) as told:
        await open_frontier("redis:///2")
    assert str(told.value).startswith("redis://127.0.0.1:1/2 "), "and no prefix that nobody wrote"
    with pytest.raises(FrontierUnreachable, match=r"redis://127\.0\.0\.1:1/2\?prefix=abc "):
        await open_frontier("redis:///2?prefix=abc")
