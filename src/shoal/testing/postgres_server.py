"""A private PostgreSQL server for tests and measurements: made anew, gone afterwards.

    with postgres_server() as address:
        frontier = await PostgresFrontier.open(f"{address}?schema=mine")

It listens on a free loopback port, trusts everybody there, and lives in a folder of its own; a server
of the machine is never touched. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT = 30.0


def binaries() -> Path | None:
    """The folder of the newest installed server's programs; None without one."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda folder: int(folder.parent.name))
    on_path = shutil.which("postgres")
    return Path(on_path).resolve().parent if on_path and shutil.which("initdb") else None


class PostgresServer:
    """A server that can be killed and started again, on the same port and with the same files."""

    def __init__(self, folder: Path, options: tuple[str, ...], password: str) -> None:
        programs = binaries()
        if programs is None:
            raise FileNotFoundError("PostgreSQL's server programs are not installed")
        self._programs = programs
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._as_user: list[str] = []
        self.port = free_port()
        secret = f":{password}" if password else ""
        self.address = f"postgresql://postgres{secret}@127.0.0.1:{self.port}/postgres"
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            shutil.chown(folder, "nobody", "nogroup")
            self._as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        initdb = [*self._as_user, str(programs / "initdb"), "-D", str(folder / "data"), "-U", "postgres"]
        initdb += ["--no-sync", "-E", "UTF8", "--locale=C"]
        if password:
            (folder / "password").write_text(password)
            (folder / "password").chmod(0o644)  # the folder itself is closed to others
            initdb += ["-A", "scram-sha-256", "--pwfile", str(folder / "password")]
        else:
            initdb += ["-A", "trust"]
        made = subprocess.run(initdb, capture_output=True, check=False)
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr.decode(errors='replace')}")

    def start(self) -> None:
        """Start, and wait until it answers. Right after a kill its children may still be ending: then
        it refuses at first."""
        end = time.monotonic() + START_LIMIT
        while not self._start(end):
            if time.monotonic() > end:
                log = (self._folder / "log").read_text(errors="replace")
                raise RuntimeError(f"PostgreSQL did not start: {log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as an administrator would: who is connected is cut off."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL: what it acknowledged must be in its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, end: float) -> bool:
        command = [*(self._as_user or ["setpriv"]), "--pdeathsig=SIGQUIT", str(self._programs / "postgres")]
        command += ["-D", str(self._folder / "data"), "-p", str(self.port), "-k", str(self._folder)]
        for setting in self._options:
            command += ["-c", setting]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        ask = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while process.poll() is None:
            if subprocess.run(ask, check=False).returncode == 0:
                self._process = process
                return True
            if time.monotonic() > end:
                process.kill()
                process.wait()
            time.sleep(0.05)
        return False


@contextmanager
def postgres_process(
    *, durable: bool = False, options: tuple[str, ...] = (), password: str = ""
) -> Iterator[PostgresServer]:
    """Run a server that can be killed and started again. Without `durable` it does not flush to disk:
    faster, and a test does not cut the power. With a `password` it asks for it."""
    settings = ("listen_addresses=127.0.0.1", "max_connections=200", *options)
    if not durable:
        settings += ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        server = PostgresServer(folder, settings, password)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_server(*, durable: bool = False, options: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server; gives its address."""
    with postgres_process(durable=durable, options=options) as server:
        yield server.address


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
