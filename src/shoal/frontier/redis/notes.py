"""The `Notes` port."""

from __future__ import annotations

import struct

from shoal.frontier.redis.client import Client
from shoal.frontier.rules import US, microseconds
from shoal.model import Note


class RedisNotes:
    """The notes of a frontier, on its server."""

    def __init__(self, client: Client) -> None:
        self._call = client.call

    async def get(self, shelf: str, name: str) -> bytes | None:
        value: bytes | None = await self._call("note_get", [], _shelf(shelf), _name(name))
        return value

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        await self._call("note_put", [_lasting(value, ttl)], _shelf(shelf), _name(name), value or b"")

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        values = [_lasting(value, ttl), known is None]
        place = (_shelf(shelf), _name(name))
        return bool(await self._call("note_swap", values, *place, value or b"", known or b""))

    async def scan(self, shelf: str) -> list[Note]:
        flat = await self._call("note_scan", [], _shelf(shelf))
        found = [
            Note(name.decode("utf-8", "surrogatepass"), raw[16:], struct.unpack_from("<d", raw)[0] / US)
            for name, raw in zip(flat[::2], flat[1::2], strict=True)
        ]
        return sorted(found, key=lambda note: note.name)

    async def now(self) -> float:
        moment: int = await self._call("now", [])
        return moment / US


def _lasting(value: bytes | None, ttl: float) -> int | bool:
    """Return the life of a note in microseconds; False removes it."""
    return False if value is None else max(0, microseconds(ttl))


def _shelf(shelf: str) -> bytes:
    """Encode a shelf without colons: a colon ends it in a key."""
    return _name(shelf.replace("%", "%25").replace(":", "%3A"))


def _name(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
