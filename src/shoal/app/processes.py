"""Names of processes, and the leases that dead ones leave behind."""

from __future__ import annotations

import os
import socket
from itertools import count

from shoal.frontier.notes import Presence
from shoal.frontier.port import Backend, Catalog

_holders = count(1)


def process_name(pid: int | None = None) -> str:
    """Returns `host_pid`, so that the holder of a lease or lock can be found."""
    return f"{socket.gethostname()}_{pid or os.getpid()}"


def holder_name() -> str:
    """Returns `host_pid_n`: a new name for one of several holders in this process."""
    return f"{process_name()}_{next(_holders)}"


def process_gone(name: str) -> bool:
    """Whether `host_pid…` names a process of this machine that has ended."""
    here = f"{socket.gethostname()}_"
    return name.startswith(here) and not _alive(name.removeprefix(here).partition("_")[0])


async def evict_dead_workers(catalog: Catalog, job: str | None = None) -> int:
    """Releases the leases of dead workers of this machine at once, and returns how many. Workers of other
    machines may be alive: their leases expire by themselves."""
    holders = {lease.worker for lease in await catalog.leases(job=job)}
    dead = [name for name in holders if process_gone(name)]
    return await catalog.evict(dead) if dead else 0


async def process_died(frontier: Backend, pid: int) -> int:
    """Releases the leases of a worker process that was started here and crashed, without waiting for them to
    expire, and removes it from the list of workers. Returns how many leases it had."""
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
