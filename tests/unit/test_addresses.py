"""Addresses: no password is ever shown, and what cannot be read is refused with the way out."""

from __future__ import annotations

import pytest

from shoal.addresses import clear, lower_scheme, shown, without_password
from shoal.errors import BadUrl, DispatchRefused, FrontierUnreachable, UsageError
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
    ("redis://u:topsecret@[::1]:6379/0", "redis://u:***@[::1]:6379/0"),
    ("redis://:topsecret@[fe80::1%25eth0]/0", "redis://:***@[fe80::1%25eth0]/0"),
    ("redis://u:top%40secret%3A%2F@h", "redis://u:***@h"),
    ("redis://a%40b:topsecret@h", "redis://a%40b:***@h"),
    ("redis://u%3Atopsecret@h", "redis://u:***@h"),
    ("redis://u:@h", "redis://u:***@h"),
    ("redis://h/0?p%61ssword=topsecret", "redis://h/0?p%61ssword=***"),
    ("redis://h/0?password=top#secret", "redis://h/0?password=***"),
    ("redis://h/0?password=top;secret&prefix=a", "redis://h/0?password=***&prefix=a"),
    ("redis://h/0?prefix=a;password=topsecret", "redis://h/0?prefix=a;password=***"),
    ("redis://h/0?password=top&prefix=a&token=secret", "redis://h/0?password=***&prefix=a&token=***"),
    ("redis://h/0?password=top=secret", "redis://h/0?password=***"),
    ("redis://h/0?auth_token=topsecret#prefix=a", "redis://h/0?auth_token=***"),
    (
        "postgresql://u:topsecret@/x?host=/run&sslpassword=secret",
        "postgresql://u:***@/x?host=/run&sslpassword=***",
    ),
    ("postgresql://u:topsecret@%2Frun%2Fpg/x", "postgresql://u:***@%2Frun%2Fpg/x"),
    ("amqps://u:topsecret@h/%2F?heartbeat=15", "amqps://u:***@h/%2F?heartbeat=15"),
    ("redis+socket:///run/r.sock?password=topsecret", "redis+socket:///run/r.sock?password=***"),
    ("sentinel://:topsecret@a:1,b:2/0", "sentinel://:***@a:1,b:2/0"),
    ("s3://bucket?access_key=topsecret&region=x", "s3://bucket?access_key=***&region=x"),
    ("redis://u@h", "redis://u@h"),
    ("postgresql:///x?host=/run", "postgresql:///x?host=/run"),
    ("sqlite:////home/a@b/x.db", "sqlite:////home/a@b/x.db"),
    ("a@b/x.db", "a@b/x.db"),
    ("memory:", "memory:"),
    ("", ""),
]
SEVERAL = [
    ("sentinel://:topsecret@a:1;sentinel://u:secret@[::1]:2", "sentinel://:***@a:1;sentinel://u:***@[::1]:2"),
    ("amqp://u:topsecret@a//;amqp://u:secret@b//?x=1", "amqp://u:***@a//;amqp://u:***@b//?x=1"),
    ("redis://a:1;redis://b:2", "redis://a:1;redis://b:2"),
    # Of these nobody can tell where a password ends: nothing before the last `@` is shown.
    ("redis://u:top;secret@h", "redis://u:***@h"),
    ("redis://u:top;x://secret@h", "redis://***@h"),
    ("redis://u:top;redis://secret@h", "redis://***@h"),
    ("amqp://u:top/secret@a;amqp://u:secret@b", "amqp://***@b"),
    ("redis://:topsecret@a:1,:secret@b:2", "redis://***@b:2"),
    ("redis://h/0?next=redis://u:topsecret@h", "redis://***@h"),
    ("transport://key:top/secret@", "transport://***@"),
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


@pytest.mark.parametrize(("address", "seen"), SHOWN + SEVERAL + UNCLEAR)
def test_what_people_see(address: str, seen: str) -> None:
    assert shown(address) == seen
    assert "secret" not in seen


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
    assert clear(address)


@pytest.mark.parametrize(
    "address", ["postgres+asyncpg://u:topsecret@h/x", "MYSQL://u:topsecret@h/x", "postgresql:topsecret"]
)
async def test_a_scheme_that_nobody_knows(address: str) -> None:
    with pytest.raises(UsageError, match="unsupported frontier address") as told:
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
    with pytest.raises(UsageError, match="the database must be a number"):
        await open_frontier("REDIS://h/abc")


def test_a_broker_address_that_cannot_be_read() -> None:
    with pytest.raises(UsageError) as told:
        open_dispatch("amqp://u:top/secret@h/")
    assert "secret" not in str(told.value) and "percent-encode" in told.value.hint


@pytest.mark.parametrize(
    "address", ["amqp://u:topsecret@/", "amqp://u:topsecret@h:99999/", "redis://u:topsecret@h/"]
)
def test_an_address_that_is_no_rabbitmq(address: str) -> None:
    from shoal.dispatch.rabbitmq import Address

    with pytest.raises(DispatchRefused, match=r"u:\*\*\*@") as told:
        Address(address)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "broker",
    [
        "redis://:topsecret@127.0.0.1:1/0",
        "amqp://u:topsecret@127.0.0.1:1//",
        "redis://:topsecret@127.0.0.1:1/0;redis://:secret@127.0.0.1:1/1",
    ],
)
async def test_a_broker_of_celery_that_does_not_answer(broker: str) -> None:
    from celery import Celery

    from shoal.dispatch.celery import CeleryDispatch
    from shoal.errors import DispatchError

    dispatch = CeleryDispatch(Celery("unreachable", broker=broker))
    try:
        with pytest.raises(DispatchError) as told:
            await dispatch.depths(["scraping"])
    finally:
        await dispatch.close()
    assert shown(broker) in str(told.value)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "address",
    [
        "redis://u:topsecret@127.0.0.1:1/0?prefix=a",
        "postgresql://u:topsecret@127.0.0.1:1/x?schema=a",
        "postgresql://127.0.0.1:1/x?user=u&password=topsecret",
    ],
)
async def test_a_frontier_that_does_not_answer(address: str) -> None:
    with pytest.raises(FrontierUnreachable) as told:
        await open_frontier(address)
    assert shown(address) in str(told.value) and told.value.server == shown(address)
    assert "secret" not in str(told.value) + told.value.hint


@pytest.mark.parametrize("path", ["/abc", "/0/1", "/-1", "/1a"])
async def test_a_redis_database_is_a_number(path: str) -> None:
    with pytest.raises(UsageError, match="the database must be a number"):
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("http://user:top-secret@example.com/x", "http://user:***@example.com/x"),
        ("http://user:top@secret@example.com/", "http://user:***@example.com/"),
        ("ftp://user:top/secret@example.com/", "ftp://user:***@example.com/"),
        ("http://user:top#secret?@example.com/", "http://user:***@example.com/"),
        ("http://user:/top-secret@example.com/", "http://user:***@example.com/"),
        ("http:user:top-secret@example.com", "http:user:***@example.com"),
        ("http:\\\\user:top-secret@example.com\\", "http:\\\\user:***@example.com\\"),
        ("//user:top-secret@example.com", "//user:***@example.com"),
        ("user:top-secret@example.com", "user:***@example.com"),
        ("https://top-secret@example.com/", "https://***@example.com/"),
        (" http://user:top-secret@example.com/a@b", " http://user:***@example.com/a@b"),
        ("http://example.com/@user", "http://example.com/@user"),
        ("http://example.com:8080/@user:x", "http://example.com:8080/@user:x"),
        ("http://[::1]:8080/@user:x", "http://[::1]:8080/@user:x"),
        ("http://example.com/?to=a@b.example:1", "http://example.com/?to=a@b.example:1"),
        ("example.com:8080", "example.com:8080"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_password(given: str, told: str) -> None:
    assert without_password(given) == told
    assert "secret" not in str(BadUrl(given, "url_invalid", "it does not parse"))
