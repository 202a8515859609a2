"""A private Redis for tests and measurements: own port, own folder, gone with its owner.

    with redis_server() as url:
        frontier = await open_frontier(f"{url}?prefix=mine")

The system's own server is never touched.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

SETTINGS = (
    *("--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
    *("--maxmemory-policy", "noeviction", "--loglevel", "warning"),
)
_PR_SET_PDEATHSIG = 1


def available() -> bool:
    return shutil.which("redis-server") is not None


@contextmanager
def redis_server(*settings: str) -> Iterator[str]:
    """Start a server, give its address, end it. `settings` are further options of redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server is not installed")
    with TemporaryDirectory(prefix="shoal-redis-") as folder:
        # Another process may take the port between the look and the start: then try another.
        for _ in range(5):
            port = _free_port()
            process = subprocess.Popen(
                [program, "--port", str(port), "--dir", folder, *SETTINGS, *settings],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
            )
            if _answers(process, port):
                break
        else:
            raise RuntimeError("redis-server does not start")
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()  # nothing of it is wanted any more
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
