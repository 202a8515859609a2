"""A private PostgreSQL server for tests and measurements: made anew, gone afterwards.

    with postgres_server() as address:
        frontier = await PostgresFrontier.open(f"{address}?schema=mine")

It listens on a free loopback port, trusts everybody there, and lives in a folder of its own; a server
of the machine is never touched. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.rig.ports import free_port

START_LIMIT = 60.0
UNSYNCED = ("fsync=off", "full_page_writes=off")
"""A cut of the power would harm such a server. Killed, it loses nothing all the same."""


def binaries() -> Path | None:
    """The folder of the newest installed server's programs; None without one."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda folder: int(folder.parent.name))
    on_path = shutil.which("postgres")
    return Path(on_path).resolve().parent if on_path and shutil.which("initdb") else None


_template: Path | None = None
"""Where the files of a new server are kept; without, each server makes its own."""


def copies_from(template: Path) -> None:
    """Make later servers from copies of these files. `initdb` runs once, for the first server: a copy takes a
    tenth of the time."""
    global _template  # noqa: PLW0603 - a setting of the whole process
    _template = template


class PostgresServer:
    """A server that can be killed and started again, on the same port and with the same files."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        password: str = "",
        *,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """`inside` is a command in front of the server's own, such as `ip netns exec NAME`; `host` is
        its address there."""
        programs = binaries()
        if programs is None:
            raise FileNotFoundError("PostgreSQL's server programs are not installed")
        self._programs = programs
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._as_user: list[str] = []
        self._host = host
        self._inside = inside
        # Ports inside a network of its own are all free.
        self.port = 5432 if inside else free_port()
        secret = f":{password}" if password else ""
        self.address = f"postgresql://postgres{secret}@{host}:{self.port}/postgres"
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            shutil.chown(folder, "nobody", "nogroup")
            self._as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        if _template is None:
            self._initdb()
        else:
            self._copy(_template)
        if password:
            self._protect(password)
        if inside:
            (folder / "data/pg_hba.conf").write_text("host all all 0.0.0.0/0 trust\n")

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
        """SIGKILL to all of it: the processes of one server are one crash. What it acknowledged must be
        in its files."""
        if self._process is None:
            return
        for pid in [self._process.pid, *self.children()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def children(self) -> list[int]:
        """Its processes beside the first."""
        if self._process is None:
            return []
        parent = self._process.pid
        with suppress(OSError):
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            return [int(pid) for pid in text.split()]
        return []

    def _initdb(self) -> None:
        command = [*self._as_user, str(self._programs / "initdb"), "-D", str(self._folder / "data")]
        command += ["-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C", "-A", "trust"]
        made = subprocess.run(command, capture_output=True, check=False)
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr.decode(errors='replace')}")

    def _copy(self, template: Path) -> None:
        """The files of a new server, copied from the template; the first one here makes the template."""
        template.parent.mkdir(exist_ok=True, parents=True)
        with template.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not template.exists():
                self._initdb()
                unfinished = template.with_suffix(".part")
                subprocess.run(["cp", "-a", self._folder / "data", unfinished], check=True)
                unfinished.rename(template)
                return
        subprocess.run(["cp", "-a", template, self._folder / "data"], check=True)

    def _protect(self, password: str) -> None:
        """Require the password from now on."""
        command = [*self._as_user, str(self._programs / "postgres"), "--single"]
        command += ["-D", str(self._folder / "data"), "postgres"]
        order = f"ALTER ROLE postgres PASSWORD '{password}'\n".encode()
        subprocess.run(command, input=order, capture_output=True, check=True)
        rules = "local all all scram-sha-256\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (self._folder / "data/pg_hba.conf").write_text(rules)

    def _start(self, end: float) -> bool:
        command = [*self._inside, *(self._as_user or ["setpriv"]), "--pdeathsig=SIGQUIT"]
        command += [str(self._programs / "postgres"), "-c", f"listen_addresses={self._host}"]
        command += ["-D", str(self._folder / "data"), "-p", str(self.port), "-k", str(self._folder)]
        for setting in self._options:
            command += ["-c", setting]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        ask = [*self._inside, str(self._programs / "pg_isready"), "-q"]
        ask += ["-h", self._host, "-p", str(self.port)]
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
    *,
    durable: bool = False,
    options: tuple[str, ...] = (),
    password: str = "",
    host: str = "127.0.0.1",
    inside: Sequence[str] = (),
) -> Iterator[PostgresServer]:
    """Run a server that can be killed and started again. Without `durable` it does not flush to disk:
    faster, and a test does not cut the power. With a `password` it asks for it. `host` and `inside`: see
    `PostgresServer`."""
    settings = ("max_connections=200", *options)
    if not durable:
        settings += (*UNSYNCED, "synchronous_commit=off")
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        server = PostgresServer(folder, settings, password, host=host, inside=inside)
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
