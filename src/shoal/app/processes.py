"""Names of processes, and what they leave behind when they die."""

from __future__ import annotations

import os
import socket
from itertools import count

from shoal.frontier.notes import Presence
from shoal.frontier.port import Backend, Catalog

_holders = count(1)


def process_name(pid: int | None = None) -> str:
    """`host_pid`: tells where to look for whoever holds something."""
    return f"{socket.gethostname()}_{pid or os.getpid()}"


def holder_name() -> str:
    """`host_pid_n`: one of several in this process that hold something, each by itself."""
    return f"{process_name()}_{next(_holders)}"


def process_gone(name: str) -> bool:
    """Whether `host_pid…` names a process of this machine that no longer lives."""
    here = f"{socket.gethostname()}_"
    return name.startswith(here) and not _alive(name.removeprefix(here).partition("_")[0])


async def evict_dead_workers(catalog: Catalog, job: str | None = None) -> int:
    """Take back at once what workers of this machine held that no longer live. Those of
    other machines may live: their leases run out by themselves."""
    holders = {lease.worker for lease in await catalog.leases(job=job)}
    dead = [name for name in holders if process_gone(name)]
    return await catalog.evict(dead) if dead else 0


async def process_died(frontier: Backend, pid: int) -> int:
    """A worker process that was started here ended without a word: take back what it held now,
    not when its leases end, and look for it no longer."""
    prefix = f"{process_name(pid)}_"
    holders = {lease.worker for lease in await frontier.leases()}
    dead = [name for name in holders if name.startswith(prefix)]
    freed = await frontier.evict(dead) if dead else 0
    presence = Presence(frontier.notes)
    for present in await presence.workers():
        if present.heartbeat.worker.startswith(prefix):
            await presence.leave(present.heartbeat.worker)
    return freed


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
