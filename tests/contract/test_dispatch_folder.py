"""The dispatch of the example package keeps the contract of dispatches: yours can, too."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from shoal.dispatch.port import Dispatch
from shoal.testing.dispatch import SHORT, SHORT_TTL, DispatchContract, DispatchHarness
from tests.rig.plugin import EXAMPLE

sys.path.append(str(EXAMPLE))


class FolderHarness:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: list[Dispatch] = []

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        from shoal_files.folder import FolderDispatch

        ttls = {SHORT: SHORT_TTL}
        handle: Dispatch = FolderDispatch(self.root, queues, prefetch=prefetch, fast=fast, ttls=ttls)
        self.handles.append(handle)
        return handle

    async def cut(self, handle: Dispatch) -> None:
        await handle.close()

    async def failed_urls(self) -> list[str]:
        found: list[str] = []
        for path in (self.root / "queues" / "failed").glob("*"):
            found.append(msgspec.json.decode(path.read_bytes())["request"]["url"])
            path.unlink()
        return found

    async def rubbish(self, queue: str, body: bytes) -> None:
        (self.root / "queues" / queue / f"0-{uuid4().hex}-9999999999999").write_bytes(body)


class TestFolder(DispatchContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[DispatchHarness]:
        harness = FolderHarness(tmp_path)
        yield harness
        for handle in harness.handles:
            await handle.close()
