"""The frontier on a PostgreSQL server, shared by many machines.

How it stays safe:

- Every verb is one transaction on one pooled connection, and begins with an advisory lock on its
  schema. Claims, settles, adds and extends share this lock as long as they only move requests between
  existing lines. They lock the rows they touch one by one, always in the order leases, keys, lanes,
  counters, and a claim skips lanes that another transaction holds. Everything else takes the lock
  alone: new hosts and lines, jobs with page budgets, upkeep of due and expired requests, the result "all
  is done", and the catalog's changes. Then writers take turns, as on the embedded frontier. A verb that
  finds that it cannot share is restarted, alone.
- Settles of one job take turns at its counters until each is committed: that is the price of an item log
  without gaps. Readers never wait.
- A stopped worker (SIGSTOP) cannot block the others for ever: the server ends a transaction that is
  idle for `IDLE_LIMIT` seconds.
- `settle` and `add` are durable when they return, as far as the server's own `fsync` and
  `synchronous_commit` allow (`info` reports them). An empty claim needs no flush. A claim that
  hands something out does: otherwise the server could hand it out again after a crash, with the same tokens.
- Time is the server's; the clocks of workers do not matter.
- Batches travel as arrays, so a verb costs a handful of round trips whatever its size. Claims and
  settles in their common case cost one: a function in `schema.sql` does all of it, or
  changes nothing, and then the Python code does it step by step.

`store` has the connections and transactions, `tx` runs statements, `frontier` claims, waits and has the
fast paths. Everything else is shared with SQLite, in `frontier/sql`.
"""

from __future__ import annotations

from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.postgres.store import migrate

__all__ = ["PostgresFrontier", "migrate"]
