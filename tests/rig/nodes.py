"""Several machines on one: network namespaces on a bridge, without a way out.

    with World(nodes=3) as world:
        shell.start("worker", …, program=world.on(1, SHOAL))
        world.unplug(1)

The bridge lives in a namespace of its own, the hub, where servers listen on `world.address`. Nodes reach the
hub and each other, nothing else. Needs root and `ip`; see `possible`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self


def possible() -> bool:
    """Whether this process may make namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"shoal-{secrets.token_hex(3)}"
    if _ip("netns", "add", name, check=False):
        return False
    _ip("netns", "del", name)
    return True


class World:
    """A hub and `nodes` nodes, numbered from 1."""

    network = "10.77.0"

    def __init__(self, nodes: int, hosts: int = 1) -> None:
        """`hosts` is how many addresses the hub has: sites on each are hosts of their own."""
        self._mark = secrets.token_hex(3)
        self._nodes = nodes
        self._hosts = hosts
        self._made: list[str] = []
        self.address = f"{self.network}.1"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """The command, on a node; 0 is the hub."""
        return ["ip", "netns", "exec", self._name(node), *command]

    def unplug(self, node: int) -> None:
        """Its cable is out: nobody hears of it any more, not even that it is gone."""
        _ip("-n", self._name(0), "link", "set", f"v{node}", "down")

    def _make(self) -> None:
        hub = self._name(0)
        self._add(hub)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        for host in range(1, self._hosts + 1):
            _ip("-n", hub, "addr", "add", f"{self.network}.{host}/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for node in range(1, self._nodes + 1):
            name = self._name(node)
            self._add(name)
            _ip("-n", hub, "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"v{node}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.network}.{200 + node}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in reversed(self._made):
            with suppress(RuntimeError):
                _ip("netns", "del", name)
        self._made.clear()

    def _name(self, node: int) -> str:
        return f"shoal-{self._mark}-{node}"


def _ip(*words: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *words], capture_output=True, check=False)
    if done.returncode and check:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
    return done.returncode
