"""The embedded frontier: one SQLite file, several worker processes, nothing lost.

How it stays fast and safe:

- Every verb is one transaction that never suspends (`SqliteStore.write`), so the event loop is the
  group committer: a writer thread was measured to cost more CPU than it saves.
- Processes take turns by a file lock around the transaction. SQLite's own busy handler is a
  race that starves; the lock is fair. A process stopped (SIGSTOP) while it holds the lock
  holds everybody: that is the price of one file.
- Checkpoints run in a thread (PASSIVE): in line they would stall a settle by 60 to 130 ms.
- `settle` and `add` are durable when they return (`synchronous=FULL`). A claim is not worth an
  fsync of its own: after a power cut the request simply still waits.
- A batch of keys goes to SQLite as one array (carray): ten times cheaper than row by row.

`store` is the file and its transactions, `tx` runs statements, `frontier` claims and waits. Everything else
is shared with PostgreSQL, in `frontier/sql`.
"""

from __future__ import annotations

from pathlib import Path

from shoal.frontier.sqlite.frontier import SqliteFrontier
from shoal.frontier.sqlite.store import schema_of


async def migrate(path: Path) -> tuple[int, int]:
    """Bring the file up to this release, as opening it does. Returns its schema before and after; 0
    means that there was none."""
    before = schema_of(path)
    await (await SqliteFrontier.open(path)).close()
    return before, schema_of(path)


__all__ = ["SqliteFrontier", "migrate"]
