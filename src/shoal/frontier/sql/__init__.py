"""What the two SQL frontiers share: everything but the database.

- `statements`: each statement has a name, and a text for SQLite and for PostgreSQL.
- `tx`: one transaction. Rows are read once, changed in memory and written back once.
- `verbs`: add, take, settle, extend, pace, and the upkeep of a claim.
- `catalog`: what people ask.

`sqlite/` and `postgres/` each bring a store (how a transaction begins and commits), a `Tx` that runs
statements, their own `claim` and `wait`, and a schema.

Rules for code in this package:

- A verb may run twice: PostgreSQL begins again, alone, when it cannot share. So it changes nothing but `tx`.
- SQLite runs a verb without ever suspending it. So a verb awaits `tx` only, and never loops over a cursor:
  statements return lists.
- The only time is `tx.now`. Lanes are loaded in one call where several are needed: they are locked in the
  order of their ids, or two transactions would wait for each other.
- Statements read and write. Decisions are in `frontier/decisions.py`.
"""
