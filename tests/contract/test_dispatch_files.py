"""The dispatch in examples/ passes the contract of dispatches: somebody else's broker can, too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import msgspec
import pytest

from shoal.dispatch.port import Dispatch
from shoal.testing.dispatch import SHORT, SHORT_TTL, DispatchContract, DispatchHarness

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "file_dispatch.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("file_dispatch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class FileHarness:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: list[Dispatch] = []
        self._make = loaded().FileDispatch

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        ttls = {SHORT: SHORT_TTL}
        handle: Dispatch = self._make(self.root, queues, prefetch=prefetch, fast=fast, ttls=ttls)
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


class TestFiles(DispatchContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[DispatchHarness]:
        (tmp_path / "held").mkdir()
        harness = FileHarness(tmp_path)
        yield harness
        for handle in harness.handles:
            await handle.close()
