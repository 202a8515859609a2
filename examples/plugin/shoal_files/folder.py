"""A dispatch of your own: messages are files in a folder that several machines may share.

It keeps the contract of dispatches (`shoal.testing.dispatch.DispatchContract`), so pump and workers
can rely on it. A rename is what makes a message belong to one consumer; a lock on a file tells
whether that consumer still lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

import msgspec

from shoal.dispatch.port import Delivery, Depth, Dispatch, Message, decode_message, encode_message
from shoal.errors import DispatchError
from shoal.events import Watcher
from shoal.model import DeadLetter

TICK = 0.02
_numbers = count()


def open_folder(
    address: str, queues: Collection[str], *, prefetch: int, fast: Collection[str], watch: Watcher
) -> Dispatch:
    """What `--dispatch folder://path` opens."""
    return FolderDispatch(Path(address.partition("://")[2]), queues, prefetch=prefetch, fast=fast)


class FolderDispatch(Dispatch):
    def __init__(
        self,
        root: Path,
        queues: Collection[str] = (),
        *,
        prefetch: int = 10,
        fast: Collection[str] = (),
        ttls: Mapping[str, float] | None = None,
    ) -> None:
        self._root, self._prefetch, self._fast, self._ttls = root, prefetch, frozenset(fast), ttls or {}
        self._queues: tuple[str, ...] = ()
        self._mine = root / "held" / uuid4().hex
        self._mine.mkdir(parents=True)
        self.subscribe(queues)
        self._life = (self._mine / "alive").open("w")
        fcntl.flock(self._life, fcntl.LOCK_EX)  # the kernel gives it back when this process dies

    def subscribe(self, queues: Collection[str]) -> None:
        self._queues = tuple(dict.fromkeys([*self._queues, *queues]))
        (self._mine / "queues").write_text("\n".join(self._queues))

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            waits = min(message.ttl or 1e9, self._ttls.get(message.queue, 1e9))
            name = f"{time.time_ns():020}-{next(_numbers):06}-{time.time_ns() + int(waits * 1e9)}"
            self._write(self._folder(message.queue) / name, encode_message(message))
        return []

    async def receive(self, limit: int) -> list[Delivery]:
        (self._mine / "consuming").touch()
        while True:
            self._sweep()
            got: list[Delivery] = []
            for queue in self._queues:
                for path in sorted(self._folder(queue).iterdir()):
                    if len(got) < limit and len(list(self._mine.glob("*@*"))) < self._prefetch:
                        got += self._take(queue, path)
            if got:
                return got
            await asyncio.sleep(TICK)

    def _take(self, queue: str, path: Path) -> list[Delivery]:
        here = self._mine / f"{queue}@{path.name}"
        try:
            path.rename(here)
        except FileNotFoundError:
            return []  # somebody else was faster
        message = decode_message(here.read_bytes())
        if message is None:
            here.rename(self._folder("failed") / path.name)
            return []
        if queue in self._fast:
            here.unlink()
        return [Delivery(message, here, again=path.name.endswith("-again"))]

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            delivery.tag.unlink(missing_ok=True)

    async def receive_returned(self) -> list[Delivery]:
        while True:
            self._sweep()
            paths = sorted(self._folder("returned").iterdir())
            found = [(decode_message(path.read_bytes()), path) for path in paths]
            if found:
                return [Delivery(each, path, reason="expired") for each, path in found if each is not None]
            await asyncio.sleep(TICK)

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self._write(self._folder("failed") / uuid4().hex, msgspec.json.encode(letter))

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        self._sweep()
        lists = [(each.parent / "queues").read_text().split() for each in self._root.glob("held/*/consuming")]
        waiting = {queue: len(list(self._folder(queue).iterdir())) for queue in queues}
        return {queue: Depth(waiting[queue], sum(queue in each for each in lists)) for queue in queues}

    async def info(self) -> str:
        return f"files in {self._root}"

    async def close(self) -> None:
        """Letting go of the lock is enough: whoever sweeps next gives back what was held."""
        self._life.close()

    def _sweep(self) -> None:
        """What the dead held waits again; what waited too long goes to the pump."""
        for folder in (self._root / "held").iterdir():
            if folder != self._mine and self._is_dead(folder):
                for path in sorted(folder.glob("*@*")):
                    queue, _, name = path.name.partition("@")
                    with suppress(FileNotFoundError):
                        path.rename(self._folder(queue) / f"{name.removesuffix('-again')}-again")
                shutil.rmtree(folder, ignore_errors=True)
        for old in (self._root / "queues").glob("*/*-*-*"):
            if old.parent.name not in ("failed", "returned") and int(old.name.split("-")[2]) < time.time_ns():
                with suppress(FileNotFoundError):
                    old.rename(self._folder("returned") / old.name)

    def _is_dead(self, folder: Path) -> bool:
        # No file: it is just being made, or swept by another. Locked: it lives.
        with suppress(OSError), (folder / "alive").open() as life:
            fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _folder(self, queue: str) -> Path:
        folder = self._root / "queues" / queue
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, path: Path, body: bytes) -> None:
        """Whole or not at all: nobody reads half a message."""
        half = self._mine / f"half-{path.name}"
        try:
            half.write_bytes(body)
            half.rename(path)
        except OSError as error:
            raise DispatchError(f"cannot write {path}: {error}", hint="is the disk full?") from error
