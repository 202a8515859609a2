"""The stores behind the contenders: private servers, the same settings for shoal and for its peers.

Redis: `appendonly yes`, `appendfsync everysec`. PostgreSQL: as `initdb` makes it, so `fsync`,
`full_page_writes` and `synchronous_commit` are on; `postgres-fast` has `synchronous_commit=off`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.rig.postgres_server import binaries, postgres_server
from tests.rig.redis_server import redis_server

SERVED = ("redis", "postgres", "postgres-fast")


def start(name: str, stack: ExitStack) -> str:
    """Start the server of this name; it ends with `stack`. Gives its address."""
    if name == "redis":
        return stack.enter_context(redis_server()).url
    options = ("synchronous_commit=off",) if name == "postgres-fast" else ()
    return stack.enter_context(postgres_server(durable=True, options=options))


def frontier(name: str, stack: ExitStack, folder: Path | str) -> str:
    """The address of a frontier, with FILE in it where a fresh name belongs."""
    if name == "memory":
        return "memory:"
    if name in SERVED:
        return f"{start(name, stack)}?{'prefix' if name == 'redis' else 'schema'}=FILE"
    return f"sqlite:///{folder}/FILE.db?synchronous={name.partition('-')[2]}"


def fresh(address: str, name: str) -> str:
    """A place of its own on that frontier: another file, prefix or schema."""
    return address.replace("FILE", name.replace("-", "_"))


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started within stays on that core, and so does all that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def versions() -> dict[str, str]:
    """What the servers call themselves."""
    programs = binaries()
    commands = {"Redis": ["redis-server", "--version"]}
    if programs is not None:
        commands["PostgreSQL"] = [str(programs / "postgres"), "--version"]
    told = {}
    for name, command in commands.items():
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        told[name] = next(word.removeprefix("v=") for word in words if word.removeprefix("v=")[:1].isdigit())
    return told
