"""The frontier on Redis 7: shared by many machines, one script call per verb, time from the server.

How it stays fast and safe:

- Every verb is a call of a Lua script, which Redis runs alone: no locks, no half-done states. A
  large batch is cut into calls of about a millisecond, so that no other client waits long: at most 50
  leases in a claim or settle, 100 requests in an add. Each verdict is settled as a whole.
- The calls of one batch are pipelined: while the server runs one, the client encodes the next.
- A call is completed even if its caller is cancelled, so that each reply meets its own call. After a lost
  connection the client cannot know whether the call ran; tokens and keys make a repeated call harmless.
- Acknowledged work survives a killed server only with `appendonly yes`. With `everysec`, a power cut loses
  up to the last second. `info` reports the settings of the server.

How the package is laid out:

- `client` speaks to the server: connection, calls, scripts, errors, and the channel that wakes workers.
- `codec` turns requests, verdicts, leases and jobs into bytes and back, `rows` decodes stored lanes,
  lines, leases and letters. Neither speaks to the server.
- `names` knows the numbers of jobs and queues; `reads` reads the stored keys, page by page.
- `frontier`, `catalog` and `notes` implement the three ports, `recount` checks all invariants.
- `prelude.lua` begins with the map of all keys. With `hot.lua` it is the script of the worker's verbs,
  with `catalog.lua` that of all others.
"""

from __future__ import annotations

from shoal.frontier.redis.frontier import RedisFrontier, migrate

__all__ = ["RedisFrontier", "migrate"]
