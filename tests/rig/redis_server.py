"""A private Redis for tests and measurements: own port, own folder, gone with its owner.

    with redis_server() as server:
        frontier = await open_frontier(f"{server.url}?prefix=mine")

The system's own server is never touched.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from tests.rig.ports import free_port

SETTINGS = (
    *("--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
    *("--maxmemory-policy", "noeviction", "--loglevel", "warning"),
)
_PR_SET_PDEATHSIG = 1


def available() -> bool:
    return shutil.which("redis-server") is not None


class RedisServer:
    """A server that can be killed and started again, on the same port and with the same files."""

    def __init__(self, folder: str, settings: Sequence[str] = ()) -> None:
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        if not self._start():
            raise RuntimeError("redis-server does not start")

    def start_somewhere(self) -> None:
        """The first start: another process may take the port between the look and the start."""
        for _ in range(5):
            if self._start():
                return
            self.port = free_port()
        raise RuntimeError("redis-server does not start")

    def kill(self) -> None:
        """SIGKILL: what it acknowledged must be in its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> bool:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not installed")
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), "--dir", self._folder, *SETTINGS, *self._settings],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
        )
        return _answers(self._process, self.port)


@contextmanager
def redis_server(*settings: str) -> Iterator[RedisServer]:
    """Start a server, end it. `settings` are further options of redis-server."""
    with TemporaryDirectory(prefix="shoal-redis-", ignore_cleanup_errors=True) as folder:
        server = RedisServer(folder, settings)
        server.start_somewhere()
        try:
            yield server
        finally:
            server.kill()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + 10.0
    while process.poll() is None and time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                # With a password it says NOAUTH; it is there all the same.
                if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return True
        except OSError:
            pass
        time.sleep(0.01)
    process.kill()
    process.wait()
    return False


def _die_with_parent() -> None:
    """Linux: a killed test run leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
