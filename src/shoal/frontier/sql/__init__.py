"""Everything that the two SQL frontiers share: all but the database itself.

- `statements`: each statement has a name, one text for SQLite and one for PostgreSQL.
- `tx`: one transaction. Rows are read once, changed in memory and written back once.
- `verbs`: add, take, settle, extend, pace, and the upkeep of a claim.
- `catalog`: jobs, items, dead letters and lanes, for people.

`sqlite/` and `postgres/` each bring a store (how a transaction begins and commits), a `Tx` that runs
statements, their own `claim` and `wait`, and a schema.

Rules for code in this package:

- A verb may run twice: PostgreSQL restarts it, alone, when it cannot run beside others. So a verb changes
  nothing but `tx`.
- SQLite runs a verb without ever suspending it. So a verb awaits only `tx`, and never iterates over a cursor:
  statements return lists.
- The only time is `tx.now`.
- A verb that needs several lanes loads them in one call: they are locked in the order of their ids, otherwise
  two transactions could wait for each other.
- Statements read and write. Decisions are made in `frontier/decisions.py`.
"""
