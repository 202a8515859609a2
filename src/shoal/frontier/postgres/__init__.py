"""The frontier on a PostgreSQL server: many machines, one truth.

How it stays safe:

- Every verb is one transaction on one pooled connection, and begins with an advisory lock of its
  schema. Claims, settles, adds and extends share it as long as they only move requests between lines
  that exist: what they touch they lock row by row, always in the order leases, keys, lanes,
  counters, and a claim passes over lanes that somebody else holds. Everything else takes the lock
  alone: new hosts and lines, jobs with page budgets, what is due or ran out, "all is done", and whatever
  people do. There writers take turns as on the embedded frontier. A verb that finds it cannot share
  begins again, alone.
- Settles of one job take turns at its counters until they are committed: that is the price of an
  item log without holes. Readers never wait.
- A stopped worker (SIGSTOP) cannot hold the others for ever: the server ends a transaction that
  stands idle for `IDLE_LIMIT` seconds.
- `settle` and `add` are durable when they return, as far as the server's own `fsync` and
  `synchronous_commit` allow (`info` tells). An empty claim is not worth a flush; one that
  hands something out is, or a crash of the server would hand it out twice, with the same tokens.
- Time is the server's: workers' clocks do not matter.
- Batches travel as arrays, so a verb costs a handful of round trips whatever its size. Claims and
  settles in their common case cost one: a function in `schema.sql` does them, or leaves everything as it
  was, and the Python does it step by step.

`store` is the server and its transactions, `tx` runs statements, `frontier` claims, waits and has the fast
paths. Everything else is shared with SQLite, in `frontier/sql`.
"""

from __future__ import annotations

from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.postgres.store import migrate

__all__ = ["PostgresFrontier", "migrate"]
