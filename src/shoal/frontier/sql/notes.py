"""The `Notes` port over any `Store`."""

from __future__ import annotations

from shoal.frontier.rules import US, microseconds
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql.tx import Store, Tx
from shoal.model import Note

SWEEP = 10 * US
"""Time between two removals of expired notes. Pages are noted all the time, and each search costs."""


class SqlNotes:
    """The notes of a frontier, in its own tables."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._swept = 0

    async def get(self, shelf: str, name: str) -> bytes | None:
        return await self._store.read(lambda tx: _get(tx, shelf, name))

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        async def work(tx: Tx) -> None:
            if not 0 <= tx.now - self._swept < SWEEP:
                self._swept = tx.now
                await tx.run(sql.SWEEP_NOTES, tx.now)
            if value is None:
                await tx.run(sql.DROP_NOTE, shelf, name)
            else:
                await tx.run(sql.PUT_NOTE, shelf, name, tx.now, tx.now + microseconds(ttl), value)

        await self._store.write(work, together=True)

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        async def work(tx: Tx) -> bool:
            until = tx.now + microseconds(ttl)
            if value is None and known is None:
                return await _get(tx, shelf, name) is None
            if value is None:
                done = await tx.value(sql.REMOVE_NOTE, shelf, name, tx.now, known)
            elif known is None:
                done = await tx.value(sql.MAKE_NOTE, shelf, name, tx.now, until, value)
            else:
                done = await tx.value(sql.CHANGE_NOTE, shelf, name, tx.now, until, value, known)
            return done is not None

        return await self._store.write(work, durable=True, together=True)

    async def scan(self, shelf: str) -> list[Note]:
        async def work(tx: Tx) -> list[Note]:
            rows = await tx.run(sql.NOTES, shelf, tx.now)
            return [Note(name, value, at / US) for name, value, at in rows]

        return await self._store.read(work)

    async def now(self) -> float:
        async def work(tx: Tx) -> float:
            return tx.now / US

        return await self._store.read(work)


async def _get(tx: Tx, shelf: str, name: str) -> bytes | None:
    value: bytes | None = await tx.value(sql.NOTE, shelf, name, tx.now)
    return value
