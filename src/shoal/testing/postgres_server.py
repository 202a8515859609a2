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


@contextmanager
def postgres_server(*, durable: bool = False, options: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server; gives its address. Without `durable` it does not flush to disk: faster, and a
    test does not cut the power."""
    programs = binaries()
    if programs is None:
        raise FileNotFoundError("PostgreSQL's server programs are not installed")
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        shutil.chown(folder, "nobody", "nogroup")
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    data = folder / "data"
    initdb = [*as_user, str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust"]
    initdb += ["--no-sync", "-E", "UTF8", "--locale=C"]
    made = subprocess.run(initdb, capture_output=True, check=False)
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stderr.decode(errors='replace')}")
    port = _free_port()
    settings = ["listen_addresses=127.0.0.1", "max_connections=200", *options]
    if not durable:
        settings += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
    command = [*(as_user or ["setpriv"]), "--pdeathsig=SIGQUIT", str(programs / "postgres")]
    command += ["-D", str(data), "-p", str(port), "-k", str(folder)]
    for setting in settings:
        command += ["-c", setting]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_until_ready(server, programs, port, folder)
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(server: subprocess.Popen[bytes], programs: Path, port: int, folder: Path) -> None:
    end = time.monotonic() + START_LIMIT
    ask = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ask, check=False).returncode:
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"PostgreSQL did not start: {(folder / 'log').read_text(errors='replace')}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
