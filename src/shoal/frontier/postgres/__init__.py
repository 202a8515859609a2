"""The frontier on a PostgreSQL server: many machines, one truth.

How it stays safe:

- Every verb is one transaction on one pooled connection. All writers of a frontier take turns: a
  transaction begins with one advisory lock per schema, so what was proved for the embedded frontier
  holds here as well. The price: writes of one frontier do not run side by side, and a durable
  commit is waited for by the next writer. Readers never wait.
- A stopped worker (SIGSTOP) cannot hold the others for ever: the server ends a transaction that
  stands idle for `IDLE_LIMIT` seconds.
- `settle` and `add` are durable when they return, as far as the server's own `fsync` and
  `synchronous_commit` allow (`remarks` tells). A claim is not worth a flush of its own.
- Time is the server's: workers' clocks do not matter.
- Batches travel as arrays, so a verb costs a handful of round trips whatever its size.

The class is made in four steps, each a file: `store` (connections and transactions), `rows` (lanes, lines
and jobs), `verbs` (the hot path) and `people` (everything that is asked by hand).
"""

from __future__ import annotations

from shoal.frontier.postgres.people import PostgresFrontier

__all__ = ["PostgresFrontier"]
