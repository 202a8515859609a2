"""The embedded frontier: one SQLite file, several worker processes, nothing lost.

How it stays fast and safe:

- Every verb is one transaction that never suspends (`SqliteStore.write`). There is no writer thread: it was
  measured to cost more CPU than it saves.
- Processes take turns by a file lock around the transaction. The lock is fair, while SQLite's own busy
  handler is a race in which a process can starve. A process that is stopped (SIGSTOP) while it holds the
  lock blocks all others: that is the price of one file.
- Checkpoints run in a thread (PASSIVE): inside a settle they would delay it by 60 to 130 ms.
- `settle` and `add` are durable when they return (`synchronous=FULL`). A claim does not
  need an fsync of its own: after a power cut the request is still waiting.
- A batch of keys goes to SQLite as one array (carray), which is ten times cheaper than row by row.

`store` is the file and its transactions, `tx` runs statements, `frontier` claims and waits. Everything else
is shared with PostgreSQL, in `frontier/sql`.
"""

from __future__ import annotations

from pathlib import Path

from shoal.frontier.sqlite.frontier import SqliteFrontier
from shoal.frontier.sqlite.store import schema_of


async def migrate(path: Path) -> tuple[int, int]:
    """Migrate the file to this release, as opening it does. Returns its schema before and after; 0 means
    that there was none."""
    before = schema_of(path)
    await (await SqliteFrontier.open(path)).close()
    return before, schema_of(path)


__all__ = ["SqliteFrontier", "migrate"]
