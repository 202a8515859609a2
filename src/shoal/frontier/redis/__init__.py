"""The frontier on Redis 7: many machines, one script call per verb, time from the server.

How it stays fast and safe:

- Every verb is a call of a Lua script, which Redis runs alone: no locks, no half-done states. A
  large batch is several calls of about a millisecond, so that nobody else waits long: at most 50
  leases in a claim or settle, 100 requests in an add. Each verdict is settled whole.
- Calls of one batch are sent together and answered in order: while the server runs one, the
  client already packs the next.
- A call goes on when its caller is cancelled: a reply must never meet the wrong question. After
  a cut cable nobody knows whether the call happened; tokens and keys make asking again harmless.
- What is acknowledged survives a killed server only with `appendonly yes`, and a power cut only
  up to the last second with `everysec`. `remarks` says what the server is set to.

How the package is laid out:

- `client` speaks to the server: connection, calls, scripts, errors, and the channel that wakes sleepers.
- `codec` turns requests, verdicts, leases and jobs into bytes and back, `rows` reads what is stored of lanes,
  lines, leases and letters. Neither asks anybody.
- `names` knows the numbers of jobs and queues; `reads` goes through what is stored, page by page.
- `frontier` has the verbs of the worker, `catalog` what people ask, `notes` small shared facts,
  `recount` the check of all invariants.
- `prelude.lua` begins with the map of all keys. With `hot.lua` it is the script of the worker's verbs,
  with `catalog.lua` that of all others.
"""

from __future__ import annotations

from shoal.frontier.redis.frontier import RedisFrontier, migrate

__all__ = ["RedisFrontier", "migrate"]
